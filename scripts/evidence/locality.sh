#!/usr/bin/env bash
# The claim "a colocated sync takes what lies on its device and its node": scripts/bench/locality.py, no device needed.
# Writes docs/results/locality.json.   scripts/evidence/locality.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python scripts/evidence/stamp.py --clean
python scripts/bench/locality.py --json | python scripts/evidence/stamp.py docs/results/locality.json scripts/evidence/locality.sh
cat docs/results/locality.json
