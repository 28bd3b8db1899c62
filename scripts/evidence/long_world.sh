#!/usr/bin/env bash
# The claim "it learns on responses of 320 tokens": GSPO on the long world by its preset, and a control with random rewards from the same start.
# Writes docs/results/long_world.json and docs/results/long_world.png.   scripts/evidence/long_world.sh RUN_DIRECTORY
# What moves the model where rewards are random: three seeds, each also with a quarter of the learning rate and with the ordinary clip, 20 steps.
# Writes docs/results/long_control.json and its picture.                 scripts/evidence/long_world.sh RUN_DIRECTORY controls
# What is done is kept: a second call with the same folder goes on. SEEDS and STEPS change what is run: SEEDS="0 1" STEPS=40 ...
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1
runs=${1:?a folder for the runs}
[ -d long-world/model ] || python scripts/make_long_world.py --out long-world --seed 0

train() { # name, seed, steps, further settings
    [ ! -e "$runs/$1-$2.done" ] || return 0
    mrl train parallel_configs/long-moe/cpu.yaml --run-dir "$runs/$1-$2" --set trainer.seed="$2" --set trainer.save_freq=10 \
        --set trainer.resume_mode=auto --set trainer.total_training_steps="${STEPS:-$3}" "${@:4}"
    touch "$runs/$1-$2.done"
}

random=(--set reward.custom_reward_function.path=scripts/evidence/random_reward.py)
if [ "${2:-}" = controls ]; then
    runs=$runs/controls
    for seed in ${SEEDS:-0 1 2}; do
        train control "$seed" 20 "${random[@]}"
        train control_quarter_rate "$seed" 20 "${random[@]}" --set actor.optim.lr=2.5e-5
        train control_vanilla "$seed" 20 "${random[@]}" --set algorithm.policy_loss.loss_mode=vanilla \
            --set algorithm.policy_loss.clip_ratio_low=0.2 --set algorithm.policy_loss.clip_ratio_high=0.2
    done
    exec python scripts/evidence/learning_curves.py "$runs" --name long_control --title "Random rewards for responses of 320 tokens" \
        --command "scripts/evidence/long_world.sh RUN_DIRECTORY controls"
fi
for seed in ${SEEDS:-0}; do
    train gspo "$seed" 30
    train control "$seed" 30 "${random[@]}"
done
python scripts/evidence/learning_curves.py "$runs" --name long_world --title "Tiny Qwen3-MoE, GSPO on responses of 320 tokens"
