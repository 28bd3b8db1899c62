#!/usr/bin/env bash
# The claim "no preset's predicted step is above 1.10 times the best that the planner finds, or its header says why".
# Writes docs/results/presets.json.   scripts/evidence/presets.sh [PRESET ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
PYTHONPATH=. python scripts/evidence/presets.py "$@"
