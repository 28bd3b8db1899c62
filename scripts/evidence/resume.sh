#!/usr/bin/env bash
# The claim "a run killed at any point, a save included, goes on as if nothing had been": 16 kills of ranks alone, 4 of the whole loop.
# Writes docs/results/resume_loop.json.   scripts/evidence/resume.sh [further arguments of resume.py]
# Shorter: scripts/evidence/resume.sh --kills 2 --loop-kills 0
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
python scripts/make_tiny_world.py --out tiny-world --seed 0
python scripts/evidence/resume.py --world tiny-world --work "runs/resume-$(date +%Y%m%d-%H%M%S)" --out docs/results/resume_loop.json "$@"
