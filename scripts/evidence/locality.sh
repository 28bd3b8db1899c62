#!/usr/bin/env bash
# The claim "a colocated sync takes what lies on its device and its node": scripts/bench/locality.py, no device needed.
# Writes docs/results/locality.json.   scripts/evidence/locality.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
found=$(python scripts/bench/locality.py --json)
python - docs/results/locality.json "$(git rev-parse HEAD)" "$found" <<'PY'
import json, sys
path, commit, found = sys.argv[1:]
with open(path, "w") as file:
    json.dump({"commit": commit, "command": "scripts/evidence/locality.sh"} | json.loads(found), file, indent=2)
    file.write("\n")
PY
cat docs/results/locality.json
