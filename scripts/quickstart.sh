#!/usr/bin/env bash
# From a fresh clone to a trained model on a CPU: installs, makes the tiny world, trains, prints held-out exact match before and after.
#   bash scripts/quickstart.sh [run directory] [further arguments of `mrl train`]
set -euo pipefail
cd "$(dirname "$0")/.."
began=$(date +%s)
source scripts/install.sh cpu
export HF_HUB_OFFLINE=1
run_dir=${1:-runs/quickstart-$(date +%Y%m%d-%H%M%S)}
python scripts/make_tiny_world.py --out tiny-world --seed 0
mrl train parallel_configs/tiny-moe/cpu.yaml --run-dir "$run_dir" "${@:2}"
python scripts/summary.py "$run_dir" --seconds $(($(date +%s) - began))
