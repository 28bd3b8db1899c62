#!/usr/bin/env bash
# The claims "every request of an engine is the stored row up to there" and "the tool world and a game are learnt by their turns, and by
# nothing else". Writes docs/results/trajectories.json, a piece at a time.   scripts/evidence/trajectories.sh [--only NAME ...] [--list]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
python scripts/evidence/trajectories.py --work runs/trajectories --out docs/results/trajectories.json "$@"
