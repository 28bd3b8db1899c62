#!/usr/bin/env bash
# The claim "it learns": the quickstart from a fresh clone, a control with random rewards, one picture of both.
# Writes docs/results/learning.json, docs/results/learning.png and both metrics.jsonl.   scripts/evidence/learning.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone -q "$root" "$work/mrl"
cd "$work/mrl"
commit=$(git rev-parse HEAD)
quick=$(bash scripts/quickstart.sh runs/quickstart | tail -n 1)
echo "quickstart: $quick"
source scripts/install.sh cpu
mrl train parallel_configs/tiny-moe/cpu.yaml --run-dir runs/control \
    --set reward.custom_reward_function.path=scripts/evidence/random_reward.py
control=$(python scripts/summary.py runs/control | tail -n 1)
echo "control: $control"
results=$root/docs/results
mkdir -p "$results"
for run in quickstart control; do cp "runs/$run/metrics.jsonl" "$results/learning-$run.jsonl"; done
python scripts/plot_rewards.py runs/quickstart runs/control -o "$results/learning.png" --title "Tiny Qwen3-MoE, GSPO, two CPU cores"
python - "$results/learning.json" "$commit" "$quick" "$control" <<'PY'
import json, sys
path, commit, quick, control = sys.argv[1:]
quick, control = json.loads(quick), json.loads(control)
facts = {
    "commit": commit, "command": "scripts/evidence/learning.sh", "quickstart": quick, "control": control,
    "gain_points": round(100 * (quick["after"] - quick["before"]), 1),
    "control_change_points": round(100 * (control["after"] - control["before"]), 1),
    "goals": {"gain_points": ">= 40", "control_change_points": "within 6", "seconds_from_fresh_clone": "<= 900"},
}
json.dump(facts, open(path, "w"), indent=2)
print(json.dumps(facts))
missed = facts["gain_points"] < 40 or abs(facts["control_change_points"]) > 6 or quick["seconds"] > 900
sys.exit("a goal was missed" if missed else 0)
PY
