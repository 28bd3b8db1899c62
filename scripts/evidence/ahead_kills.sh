#!/usr/bin/env bash
# The claim "generation ahead of training, killed at any moment and resumed, goes on as if nothing had been".
# Writes docs/results/ahead_kills.json.   scripts/evidence/ahead_kills.sh [further arguments of ahead_kills.py]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
[ -d tiny-world ] || python scripts/make_tiny_world.py --out tiny-world --seed 0
python scripts/evidence/ahead_kills.py --world tiny-world --work runs/ahead-kills --out docs/results/ahead_kills.json "$@"
