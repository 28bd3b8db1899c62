#!/usr/bin/env bash
# The claim "nobody has to touch a run whose engines, ranks and driver are killed again and again: it ends with the bits of
# the one that was left alone". Writes docs/results/random_kills.json.   scripts/evidence/random_kills.sh [arguments of random_kills.py]
set -euo pipefail
source "$(dirname "$0")/tiny_world.sh"
python scripts/evidence/random_kills.py --world tiny-world --work runs/kills --out docs/results/random_kills.json "$@"
