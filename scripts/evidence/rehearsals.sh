#!/usr/bin/env bash
# The claim "every preset and every source rehearses": each in small on this machine, two to five minutes each, resumable one by one.
# Writes docs/results/rehearsals.json and a line in each preset.   scripts/evidence/rehearsals.sh [NAME ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
python scripts/make_tiny_world.py --out tiny-world --seed 0
python scripts/make_long_world.py --out long-world --seed 0
python scripts/make_tool_world.py --out tool-world --seed 0
exec python scripts/evidence/rehearsals.py "$@"
