#!/usr/bin/env bash
# The claim "every preset and every source rehearses": each in small on this machine, two to five minutes each, resumable one by one.
# Writes docs/results/rehearsals.json, the table of docs/evidence.md and a line in each preset.   scripts/evidence/rehearsals.sh [NAME ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/rehearsals.py "$@"
