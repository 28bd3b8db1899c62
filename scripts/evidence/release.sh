#!/usr/bin/env bash
# Makes the rows of docs/evidence.md anew at this commit, in at most two hours of two quiet cores, and the page of them. Rows of
# other machines stay as they are; what there was no time for is left out, and the page names it.
#   scripts/evidence/release.sh [KEY ...]     with keys: these rows alone, others stay
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
[ -d tiny-world ] || python scripts/make_tiny_world.py --out tiny-world --seed 0
code=0
python scripts/evidence/release.py "$@" || code=$?
[ $code -gt 1 ] || python scripts/generate_docs.py
exit $code
