#!/usr/bin/env bash
# Does the Ascend row's pair of torch and transformers run on CPU? Makes an environment with that row of setup.py but for the packages of the
# device, and runs the tests of ranks that need no engine there.   scripts/evidence/ascend_pair.sh [ENVIRONMENT]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${1:-$root/.venv-ascend}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$root"
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
"$venv/bin/python" -m pytest -q -n 2 --dist loadfile -m "not long" tests/real/test_parity.py tests/real/test_routes.py \
    tests/real/test_policies.py tests/real/test_checkpoint.py
