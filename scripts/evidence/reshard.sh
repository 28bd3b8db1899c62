#!/usr/bin/env bash
# The claim "a weight sync costs a fraction of an export, and little memory": scripts/bench/reshard.py on this machine, beside the sync of an earlier
# commit, the last before copies and digests were changed for speed, in the same rounds. Writes docs/results/reshard.json.   scripts/evidence/reshard.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python scripts/evidence/stamp.py --clean
python scripts/bench/reshard.py --before ddb6a8de --json | python scripts/evidence/stamp.py docs/results/reshard.json scripts/evidence/reshard.sh
cat docs/results/reshard.json
