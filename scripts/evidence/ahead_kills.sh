#!/usr/bin/env bash
# The claim "generation ahead of training, killed at any moment and resumed, goes on as if nothing had been".
# Writes docs/results/ahead_kills.json.   scripts/evidence/ahead_kills.sh [further arguments of ahead_kills.py]
set -euo pipefail
source "$(dirname "$0")/tiny_world.sh"
python scripts/evidence/ahead_kills.py --world tiny-world --work runs/ahead-kills --out docs/results/ahead_kills.json "$@"
