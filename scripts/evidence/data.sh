#!/usr/bin/env bash
# The claim "memory stays flat for a file of 2 million rows": scripts/bench/data.py on this machine.
# Writes docs/results/data.json.   scripts/evidence/data.sh [further arguments of scripts/bench/data.py]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
found=$(python scripts/bench/data.py --json "$@")
python - docs/results/data.json "$(git rev-parse HEAD)" "$found" <<'PY'
import json, sys
path, commit, found = sys.argv[1:]
facts = {"commit": commit, "command": "scripts/evidence/data.sh"}
with open(path, "w") as file:
    json.dump(facts | json.loads(found), file, indent=2)
    file.write("\n")
PY
cat docs/results/data.json
