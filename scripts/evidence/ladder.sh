#!/usr/bin/env bash
# The claim "the ladder of checks for a machine with devices holds on the CPU": scripts/hardware/run.sh cpu.
# Writes docs/results/hardware/cpu.jsonl, what made it in its first line.   scripts/evidence/ladder.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo '{}' | python scripts/evidence/stamp.py "$folder/stamp.json" scripts/evidence/ladder.sh
python -c 'import json, sys; print(json.dumps(json.load(sys.stdin)))' < "$folder/stamp.json" > "$folder/lines.jsonl"
bash scripts/hardware/run.sh cpu --out "$folder/lines.jsonl"
mv "$folder/lines.jsonl" docs/results/hardware/cpu.jsonl
