#!/usr/bin/env bash
# The ladder of checks on this machine: scripts/hardware/run.sh [cuda|npu|cpu] [CHECK ...] [--fast] [--out FILE]
# One JSON line a check; ends with 1 where one failed. Without a name: what the machine shows. Ten minutes with one device.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
device=${1:-}
case "$device" in
    cuda | npu | cpu) shift ;;
    *) device=$(python -c 'from mrl.platforms.inventory import detect_kind; print(detect_kind())') ;;
esac
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec python scripts/hardware/ladder.py "$device" "$@"
