#!/usr/bin/env bash
# From a fresh clone: installs, then runs the tests. `scripts/test.sh changed` runs the unit tests that what differs from
# `main` concerns (`changed COMMIT`: from COMMIT; scripts/changed_tests.py says which), `scripts/test.sh unit` all that start
# nothing, `scripts/test.sh docs` builds the site of docs/ and fails for a link that leads nowhere, `scripts/test.sh browser`
# runs those that look at pages in Debian's chromium, and are skipped where it or its driver is not installed, and
# `scripts/test.sh long` those that `all` leaves out, and tests/proofs (`scripts/test.sh long tests/real/test_sync.py` those
# of a file). Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-all}" in
    all | changed | unit | docs | browser | real | long) ;;
    *) echo "usage: scripts/test.sh [all|changed|unit|docs|browser|real|long] [pytest arguments]" >&2; exit 2 ;;
esac
source scripts/install.sh cpu
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE  # containers tend to set it, and each of some thousand processes would compile mrl again

# with MRL_REPORTS, an absolute folder, each tier leaves its report there
report() { [ -z "${MRL_REPORTS:-}" ] || echo "--junitxml=$MRL_REPORTS/$1.xml"; }
# three at once on two cores: some wait for a deadline or a process
light() { python -m pytest -p no:logging -m "not long" -n 3 --dist worksteal "$@"; }
unit() { light tests/unit tests/outside $(report unit) "$@"; }
changed() {
    local since=main files
    case "${1:-}" in "" | -*) ;; *) since=$1; shift ;; esac
    files=$(python scripts/changed_tests.py "$since")
    [ -z "$files" ] || light $files "$@"
}
docs() { bash scripts/docs.sh build; }
browser() { python -m pytest tests/browser -rs $(report browser) "$@"; }
# two rows of files that start Ray and engines (tests/real/conftest.py) and all others beside them: mostly they wait for each other
real() { python -m pytest tests/real -m "not long" -n 2 $(report real) "$@"; }
long() {
    if [ -e "${1:-}" ]; then python -m pytest -m long "$@"; return; fi
    python -m pytest tests/unit -m long $(report long_unit) "$@"
    python -m pytest tests/real -m long $(report long) "$@"
    python -m pytest tests/proofs -m long $(report long_proofs) "$@"
}

case "${1:-all}" in
    all) ruff check . && ruff format --check . && docs && unit && browser && real ;;
    *) "$@" ;;
esac
