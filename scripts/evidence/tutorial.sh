#!/usr/bin/env bash
# The claims "the quickstart takes ... minutes" and "each command of the tutorial runs as written". Writes docs/results/tutorial.json.
#   scripts/evidence/tutorial.sh [--work FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
python3 scripts/evidence/stamp.py --clean
python3 scripts/evidence/tutorial.py "$@"
