#!/usr/bin/env bash
# The claim "it learns on responses of 320 tokens": GSPO on the long world by its preset, and a control with random rewards from the same start.
# Writes docs/results/long_world.json and docs/results/long_world.png.   scripts/evidence/long_world.sh RUN_DIRECTORY
# What is done is kept: a second call with the same folder goes on. SEEDS and STEPS change what is run: SEEDS="0 1" STEPS=40 ...
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1
runs=${1:?a folder for the runs}
[ -d long-world/model ] || python scripts/make_long_world.py --out long-world --seed 0

train() { # name, seed, further settings
    [ ! -e "$runs/$1-$2.done" ] || return 0
    mrl train parallel_configs/long-moe/cpu.yaml --run-dir "$runs/$1-$2" --set trainer.seed="$2" --set trainer.save_freq=10 \
        --set trainer.resume_mode=auto --set trainer.total_training_steps="${STEPS:-30}" "${@:3}"
    touch "$runs/$1-$2.done"
}

for seed in ${SEEDS:-0}; do
    train gspo "$seed"
    train control "$seed" --set reward.custom_reward_function.path=scripts/evidence/random_reward.py
done
python scripts/evidence/learning_curves.py "$runs" --name long_world --title "Tiny Qwen3-MoE, GSPO on responses of 320 tokens"
