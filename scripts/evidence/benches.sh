#!/usr/bin/env bash
# What README says of single parts, in one place: scripts/bench/{plan,packing,logprob,verifier,convert}.py on this machine, one after the other.
# Writes docs/results/benches.json.   scripts/evidence/benches.sh [names; all without them, others keep what the file holds of them]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=docs/results/benches.json
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(plan packing logprob verifier convert)
for one in "${names[@]}"; do
    found=$(python "scripts/bench/$one.py" --json)
    python - "$out" "$one" "$(git rev-parse HEAD)" "$found" <<'PY'
import json, os, sys
from pathlib import Path

path, name, commit, found = sys.argv[1:]
held = json.loads(Path(path).read_text()) if Path(path).exists() else {}
facts = {"commit": commit, "command": f"scripts/evidence/benches.sh {name}", "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[1]}
Path(path).write_text(json.dumps(held | {name: facts | json.loads(found)}, indent=1) + "\n")
PY
done
