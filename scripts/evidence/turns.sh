#!/usr/bin/env bash
# The claim "who rests holds next to nothing, and a process takes the memory that the plan gives it": ranks and engines that take turns, with
# models of 0.4 and 0.8 GB, asked in every phase of two steps. Writes docs/results/turns.json.   scripts/evidence/turns.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 TURNS_ROWS=${TURNS_ROWS:-$(mktemp -d)}
status=0
python -m pytest tests/real/test_wide_turns.py -q --override-ini addopts= || status=$?
python scripts/evidence/turns.py "$TURNS_ROWS" docs/results/turns.json "$status"
exit "$status"
