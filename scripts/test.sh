#!/usr/bin/env bash
# From a fresh clone: installs, then runs the tests. `scripts/test.sh unit` runs only those that start nothing (a minute or two),
# `scripts/test.sh docs` builds the site of docs/ and fails for a link that leads nowhere, `scripts/test.sh browser` runs those
# that look at pages in Debian's chromium, and are skipped where it or its driver is not installed, `scripts/test.sh long` those
# that `all` leaves out, `scripts/test.sh long:sync` one piece of them (`long:list` names the pieces, each of 20 minutes at most;
# results are stored in docs/results/long_tests.json, and `long` goes on where it was stopped). Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/install.sh cpu
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE  # containers tend to set it, and each of some thousand processes would compile mrl again

# with MRL_REPORTS, an absolute folder, each tier leaves its report there (scripts/evidence/tiers.py)
report() { [ -z "${MRL_REPORTS:-}" ] || echo "--junitxml=$MRL_REPORTS/$1.xml"; }
unit() { python -m pytest tests/unit tests/outside -n 2 --dist worksteal $(report unit) "$@"; }
docs() { bash scripts/docs.sh build; }
browser() { python -m pytest tests/browser -rs $(report browser) "$@"; }
# two rows of files that start Ray and engines (tests/real/conftest.py) and all others beside them: mostly they wait for each other
real() { python -m pytest tests/real -m "not long" -n 2 $(report real) "$@"; }
long() { python scripts/long_tests.py "$@"; }

case "${1:-all}" in
    unit) shift; unit "$@" ;;
    docs) docs ;;
    browser) shift; browser "$@" ;;
    real) shift; real "$@" ;;
    long) shift; long --resume -- "$@" ;;
    long:list) long --list ;;
    long:*) piece=${1#long:}; shift; long "$piece" -- "$@" ;;
    all) ruff check . && ruff format --check . && docs && unit && browser && real ;;
    *) echo "usage: scripts/test.sh [all|unit|docs|browser|real|long|long:PIECE|long:list] [pytest arguments]" >&2; exit 2 ;;
esac
