#!/usr/bin/env bash
# The claim "without replay the experts drift within a step, more with a larger learning rate; with it they do not and the routers still learn".
# Writes docs/results/routing.json.   scripts/evidence/routing.sh [further arguments of routing.py]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
python scripts/make_tiny_world.py --out tiny-world --seed 0
python scripts/evidence/routing.py --world tiny-world --out docs/results/routing.json "$@"
