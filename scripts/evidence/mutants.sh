#!/usr/bin/env bash
# The claim "a mistake in the code is seen by its unit tests": mutants of our own, each put into a copy of the tree, and the unit tests that
# import the changed module run until one fails. Resumable. Writes docs/results/mutants.json.   scripts/evidence/mutants.sh [WORD ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
python scripts/evidence/mutants.py "$@"
