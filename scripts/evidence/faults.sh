#!/usr/bin/env bash
# The claim "a run does without a lost engine or rank until it is back, and is bit for bit the one that nobody disturbed".
# Writes docs/results/faults.json.   scripts/evidence/faults.sh [further arguments of faults.py]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
[ -d tiny-world ] || python scripts/make_tiny_world.py --out tiny-world --seed 0
python scripts/evidence/faults.py --world tiny-world --work runs/faults --out docs/results/faults.json "$@"
