#!/usr/bin/env bash
# The claim "nobody has to touch a run whose engines, ranks and driver are killed again and again: it ends with the bits of
# the one that was left alone". Writes docs/results/random_kills.json.   scripts/evidence/random_kills.sh [arguments of random_kills.py]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
[ -d tiny-world ] || python scripts/make_tiny_world.py --out tiny-world --seed 0
python scripts/evidence/random_kills.py --world tiny-world --work runs/kills --out docs/results/random_kills.json "$@"
