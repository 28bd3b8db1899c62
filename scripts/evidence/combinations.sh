#!/usr/bin/env bash
# The claim "features hold beside each other": rows that hold every legal pair of values of schedule, placement, layouts, family, loss,
# replay, dtype, end and what follows. Resumable; writes docs/results/combinations.json.   scripts/evidence/combinations.sh [--for SECONDS]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
python scripts/evidence/combinations.py --work runs/combinations --out docs/results/combinations.json "$@"
