#!/usr/bin/env bash
# What a machine without a network needs for a piece of the ladder, in parts of at most 60 MiB: mrl's own files, and wheels
# of what the piece needs beside torch (pins.py), for the Python of that machine.
#
#   [PYTHON_VERSION=3.12] scripts/hardware/pack.sh [A|B|C] [FOLDER]     makes FOLDER/mrl-A.part-00 ... (default: A, here)
# There, with all parts in one folder, one line:
#   cat mrl-A.part-* | tar xz && mrl-hardware/scripts/hardware/unpacked.sh cuda --piece A --out A.jsonl
#
# B's wheel of Transformer Engine has the libraries; the part that binds it to torch is compiled there (unpacked.sh). C has
# of vLLM's wheel what a Hopper device needs, without libraries for others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
piece=${1:-A}
out=$(realpath -m "${2:-.}")
part=$((60 * 1024 * 1024))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
folder=$work/mrl-hardware
mkdir -p "$folder/wheels" "$out"
git ls-files mrl scripts parallel_configs launch setup.py pyproject.toml tests/unit/{nccl_like,reshard_world,small_model,sync_simulation}.py |
    tar cf - -T - | tar xf - -C "$folder"
git rev-parse HEAD >"$folder/COMMIT"
(cd "$folder" && python setup.py -q egg_info) # vLLM finds mrl's part of its workers by this
pip=(python -m pip --disable-pip-version-check -q download --no-deps --only-binary=:all:)
there=()
if [ -n "${PYTHON_VERSION:-}" ]; then
    there=(--python-version "$PYTHON_VERSION" --implementation cp)
    for glibc in 2_35 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5; do there+=(--platform "manylinux_${glibc}_x86_64"); done
    there+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
fi
python scripts/hardware/pins.py "$piece" >"$work/pins.txt"
"${pip[@]}" "${there[@]}" -d "$folder/wheels" -r "$work/pins.txt"
for wheel in $(python -c "import sys; sys.path.insert(0, 'scripts/hardware'); import pins; print(*pins.FOR_DEVICES['$piece'])"); do
    "${pip[@]}" "${there[@]}" -d "$work/large" "$wheel"
done
if [ "$piece" = C ]; then
    python scripts/hardware/hopper_subset.py "$work"/large/vllm-*.whl "$folder/wheels"
else
    mv "$work"/large/*.whl "$folder/wheels"
fi
if [ "$piece" = B ]; then
    # its setup.py, which pip asks for the name, reads torch's CUDA, and this machine's torch may have none
    mkdir "$work/site"
    echo 'import torch; torch.version.cuda = torch.version.cuda or "13.0"' >"$work/site/sitecustomize.py"
    PYTHONPATH="$work/site" python -m pip --disable-pip-version-check -q download --no-deps --no-binary=:all: \
        --no-build-isolation -d "$folder/sources" transformer-engine-torch==2.11.0
fi
rm -f "$out/mrl-$piece".part-*
tar czf - -C "$work" mrl-hardware | split -b "$part" -d - "$out/mrl-$piece.part-"
echo "$out: $(cat "$out/mrl-$piece".part-* | wc -c) bytes in $(find "$out" -name "mrl-$piece.part-*" | wc -l) parts, $(find "$folder/wheels" -name '*.whl' | wc -l) wheels"
