#!/usr/bin/env bash
# The claim "a run under faults of every kind spends half of its time on steps, and holds no more of the machine at its end".
# Writes docs/results/soak.json.   scripts/evidence/soak.sh [arguments of soak.py]
set -euo pipefail
source "$(dirname "$0")/tiny_world.sh"
python scripts/evidence/soak.py --world tiny-world --work runs/soak --out docs/results/soak.json "$@"
