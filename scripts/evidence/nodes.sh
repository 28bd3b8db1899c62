#!/usr/bin/env bash
# The claim "several nodes give the bits of one, and what goes wrong between nodes is told": whole runs over namespaces of this machine.
# Writes docs/results/nodes.json, part by part. Needs root.   scripts/evidence/nodes.sh [parts; all without them]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(one two four before submit own lost replaced version closed)
for part in "${parts[@]}"; do
    python scripts/evidence/nodes.py "$part" --work "${WORK:-runs/nodes}" --json docs/results/nodes.json
done
