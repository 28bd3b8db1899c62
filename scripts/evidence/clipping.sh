#!/usr/bin/env bash
# The claim "GSPO clips far more tokens than GRPO on the same data": both fractions on the same log-ratios, after real updates.
# Writes docs/results/clipping.json and docs/results/clipping.png.   scripts/evidence/clipping.sh [further arguments of clipping.py]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1
python scripts/evidence/clipping.py --world long-world "$@"
