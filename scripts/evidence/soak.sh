#!/usr/bin/env bash
# The claim "a run under faults of every kind spends half of its time on steps, and holds no more of the machine at its end".
# Writes docs/results/soak.json.   scripts/evidence/soak.sh [arguments of soak.py]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
[ -d tiny-world ] || python scripts/make_tiny_world.py --out tiny-world --seed 0
python scripts/evidence/soak.py --world tiny-world --work runs/soak --out docs/results/soak.json "$@"
