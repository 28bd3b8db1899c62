#!/usr/bin/env bash
# The claim "a colocated run that is killed in the middle of any hand-over goes on as if nothing had been".
# Writes docs/results/colocated.json.   scripts/evidence/colocated.sh [further arguments of colocated.py]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
python scripts/make_tiny_world.py --out tiny-world --seed 0
python scripts/evidence/colocated.py --world tiny-world --work "runs/colocated-$(date +%Y%m%d-%H%M%S)" --out docs/results/colocated.json "$@"
