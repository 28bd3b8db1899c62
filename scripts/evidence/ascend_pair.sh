#!/usr/bin/env bash
# The claim "the Ascend row's pair of torch and transformers runs on CPU": makes an environment with that row of setup.py but for the packages of
# the device, runs the tests of ranks that need no engine there and writes docs/results/ascend_pair.json.   scripts/evidence/ascend_pair.sh [ENVIRONMENT]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${1:-$root/.venv-ascend}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$root"
python3 scripts/evidence/stamp.py --clean
complete=$venv/.complete-$(sha256sum setup.py | cut -c1-16)
if [ ! -e "$complete" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    pip="$venv/bin/python -m pip --disable-pip-version-check -q"
    $pip install setuptools
    "$venv/bin/python" - >"$work/requirements.txt" <<'PY'
import runpy

import setuptools

OF_THE_DEVICE = ("torch-npu", "vllm-ascend", "triton-ascend")


def told(install_requires: list[str], extras_require: dict[str, list[str]], **_: object) -> None:
    row = [wanted for wanted in extras_require["npu"] if not wanted.startswith(OF_THE_DEVICE)]
    tools = [wanted for wanted in extras_require["dev"] if wanted.startswith("pytest")]
    print(*install_requires, *row, *tools, "einops==0.8.2", sep="\n")  # the last comes with vLLM elsewhere


setuptools.setup = told
runpy.run_path("setup.py")
PY
    $pip install -r "$work/requirements.txt"
    $pip install --no-deps -e "$root"
    touch "$complete"
fi
status=0
"$venv/bin/python" -m pytest -q --junitxml "$work/junit.xml" -n 2 --dist loadfile -m "not long" tests/real/test_parity.py tests/real/test_routes.py \
    tests/real/test_policies.py tests/real/test_checkpoint.py || status=$?
"$venv/bin/python" - "$work/junit.xml" docs/results/ascend_pair.json <<'PY'
import importlib.metadata as meta, json, sys
import xml.etree.ElementTree as tree
from collections import Counter
sys.path.append("scripts/evidence")
from stamp import facts
suite = tree.parse(sys.argv[1]).find(".//testsuite")
cases = Counter(case.get("classname").split(".")[-1] for case in suite.iter("testcase") if case.find("skipped") is None)
found = facts("scripts/evidence/ascend_pair.sh") | {
    "versions": {name: meta.version(name) for name in ("torch", "transformers", "megatron-core", "mbridge")},
    "cases": dict(cases),
    "tests": sum(cases.values()),
    "failed": int(suite.get("failures")) + int(suite.get("errors")),
    "skipped": int(suite.get("skipped")),
    "seconds": round(float(suite.get("time"))),
}
json.dump(found, open(sys.argv[2], "w"), indent=1)
print(json.dumps(found["versions"] | {"tests": found["tests"], "failed": found["failed"]}))
PY
exit "$status"
