#!/usr/bin/env bash
# The claim "the first hour of somebody who comes from verl: every step, and every mistake told in two seconds". An empty HOME, a working
# directory of its own, ports of its own. Writes docs/results/first_hour.json; python scripts/generate_docs.py takes its figures into the tutorial.
#   scripts/evidence/first_hour.sh [--work FOLDER] [--part steps|mistakes] [--skip STEP ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
python scripts/evidence/stamp.py --clean
python scripts/evidence/first_hour.py "$@"
