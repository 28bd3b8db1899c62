#!/usr/bin/env bash
# The claim "a weight sync between nodes takes what its bytes take, and no byte more than planned crosses": over links shaped by tc.
# Writes docs/results/slow_links.json. Needs root.   scripts/evidence/slow_links.sh [cases; all without them]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
python scripts/evidence/slow_links.py "$@" --json docs/results/slow_links.json
python scripts/evidence/schedules.py --json docs/results/slow_links.json
