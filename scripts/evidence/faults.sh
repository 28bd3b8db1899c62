#!/usr/bin/env bash
# The claim "a run does without a lost engine or rank until it is back, and is bit for bit the one that nobody disturbed".
# Writes docs/results/faults.json.   scripts/evidence/faults.sh [further arguments of faults.py]
set -euo pipefail
source "$(dirname "$0")/tiny_world.sh"
python scripts/evidence/faults.py --world tiny-world --work runs/faults --out docs/results/faults.json "$@"
