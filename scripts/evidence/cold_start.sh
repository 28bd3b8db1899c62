#!/usr/bin/env bash
# The claim about seconds from `mrl train` to the first answer and the first step: scripts/bench/cold_start.py on this machine,
# beside the last commit whose engines all read the checkpoint, in turn.
# Writes docs/results/cold_start.json.   scripts/evidence/cold_start.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python scripts/evidence/stamp.py --clean
python scripts/bench/cold_start.py --before caf61e9f --rounds 3 --json |
    python scripts/evidence/stamp.py docs/results/cold_start.json scripts/evidence/cold_start.sh
cat docs/results/cold_start.json
