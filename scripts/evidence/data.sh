#!/usr/bin/env bash
# The claim "memory stays flat for a file of 2 million rows": scripts/bench/data.py on this machine.
# Writes docs/results/data.json.   scripts/evidence/data.sh [further arguments of scripts/bench/data.py]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
python scripts/bench/data.py --json "$@" | python scripts/evidence/stamp.py docs/results/data.json scripts/evidence/data.sh
cat docs/results/data.json
