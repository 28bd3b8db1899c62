#!/usr/bin/env bash
# The claim "strangers' agents train unmodified": one that knows the `openai` package alone, and an environment of `verifiers`, in a virtual
# environment of its own, over the chat endpoint. Writes docs/results/agents.json.   scripts/evidence/agents.sh [arguments of agents.py]
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
verifiers=${MRL_VERIFIERS_VENV:-.venv-verifiers}
[ -x "$verifiers/bin/python" ] || python -m venv "$verifiers"
"$verifiers/bin/python" -m pip --disable-pip-version-check -q install verifiers==0.4.0
[ -d tool-world ] || python scripts/make_tool_world.py --out tool-world --seed 0
python scripts/evidence/agents.py --world tool-world --verifiers "$verifiers/bin/python" --work runs/agents --out docs/results/agents.json "$@"
