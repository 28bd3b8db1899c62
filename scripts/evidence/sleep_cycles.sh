#!/usr/bin/env bash
# The claim "an engine gives its memory away while it sleeps, and sleeping leaves nothing behind": 50 cycles of sleep, wake and sync of a tiny
# model, and three of models of 0.4 and 0.8 GB. Writes docs/results/sleep_cycles.json.   scripts/evidence/sleep_cycles.sh
# SLEEP_CYCLES=10 makes it shorter.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 SLEEP_CYCLES=${SLEEP_CYCLES:-50} SLEEP_ROWS=${SLEEP_ROWS:-$(mktemp -d)}
status=0
python -m pytest tests/real/test_engine_sleep.py -q -k "cycle_after or wide or tensors_take" --override-ini addopts= || status=$?
python scripts/evidence/sleep_cycles.py "$SLEEP_ROWS" docs/results/sleep_cycles.json "$status"
exit "$status"
