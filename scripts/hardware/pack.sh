#!/usr/bin/env bash
# What a machine without a network needs for the ladder, in one archive of at most 60 MB: mrl's own files, and wheels of
# megatron-core, mbridge and what these need beside torch (pins.py), for this machine's Python.
#
#   scripts/hardware/pack.sh [FILE]     makes it (default: mrl-hardware.tar.gz)
#   there:  tar xzf mrl-hardware.tar.gz && mrl-hardware/scripts/hardware/unpacked.sh [cuda|npu|cpu] [CHECK ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$(realpath -m "${1:-mrl-hardware.tar.gz}")
limit=$((60 * 1000 * 1000))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
folder=$work/mrl-hardware
mkdir -p "$folder/wheels"
git ls-files mrl scripts parallel_configs launch setup.py pyproject.toml | tar cf - -T - | tar xf - -C "$folder"
python scripts/hardware/pins.py >"$work/pins.txt"
python -m pip --disable-pip-version-check -q download --no-deps --only-binary=:all: -d "$folder/wheels" -r "$work/pins.txt"
tar czf "$out" -C "$work" mrl-hardware
size=$(stat -c %s "$out")
[ "$size" -le "$limit" ] || { echo "$out: $size bytes, more than $limit" >&2; exit 1; }
echo "$out: $size bytes, $(find "$folder/wheels" -name '*.whl' | wc -l) wheels"
