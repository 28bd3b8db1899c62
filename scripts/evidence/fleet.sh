#!/usr/bin/env bash
# The claim "no group is lost or trained on twice, no token is staler than max_staleness, nothing waits for ever": 10,000 random schedules
# on a simulated fleet. Also what each schedule is predicted to be worth. Writes docs/results/fleet.json.   scripts/evidence/fleet.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python scripts/evidence/stamp.py --clean
python scripts/evidence/fleet.py --json docs/results/fleet.json "$@"
