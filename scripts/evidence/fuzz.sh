#!/usr/bin/env bash
# The claim "whatever is made of a file that is read, it is one of mrl's own errors or an answer, within two seconds".
# Writes docs/results/fuzz.json.   scripts/evidence/fuzz.sh [--cases N]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export OMP_NUM_THREADS=1
result=$(python scripts/evidence/fuzz.py "$@")
python scripts/evidence/stamp.py docs/results/fuzz.json "scripts/evidence/fuzz.sh${*:+ $*}" <<<"$result"
