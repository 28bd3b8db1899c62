#!/usr/bin/env bash
# From a fresh clone: installs, then runs the tests. `scripts/test.sh unit` runs only those that start nothing (two minutes at most),
# `scripts/test.sh long` those that `all` leaves out; further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/install.sh cpu
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

unit() { python -m pytest tests/unit -n 2 "$@"; }
real() { python -m pytest tests/real -m "not long" "$@"; }
long() { python -m pytest tests/real -m long "$@"; }

case "${1:-all}" in
    unit) shift; unit "$@" ;;
    real) shift; real "$@" ;;
    long) shift; long "$@" ;;
    all) ruff check . && ruff format --check . && unit && real ;;
    *) echo "usage: scripts/test.sh [all|unit|real|long] [pytest arguments]" >&2; exit 2 ;;
esac
