#!/usr/bin/env bash
# The claim "a weight sync costs a fraction of an export, and little memory": scripts/bench/reshard.py on this machine.
# Writes docs/results/reshard.json.   scripts/evidence/reshard.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
found=$(python scripts/bench/reshard.py --json)
python - docs/results/reshard.json "$(git rev-parse HEAD)" "$found" <<'PY'
import json, os, sys
path, commit, found = sys.argv[1:]
facts = {"commit": commit, "command": "scripts/evidence/reshard.sh", "cpus": len(os.sched_getaffinity(0))}
with open(path, "w") as file:
    json.dump(facts | json.loads(found), file, indent=2)
    file.write("\n")
PY
cat docs/results/reshard.json
