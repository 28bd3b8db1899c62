#!/usr/bin/env bash
# The claim "each recipe learns, and random rewards teach nothing": GSPO, GRPO, DAPO, PPO, and random rewards without
# and with a critic, from the same start.
# Writes docs/results/algorithms.json and docs/results/algorithms.png.   scripts/evidence/algorithms.sh [run directory]
# SEEDS, STEPS and OUT make it shorter and write elsewhere: SEEDS=0 STEPS=3 OUT=/tmp/out scripts/evidence/algorithms.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1
runs=${1:-runs/algorithms-$(date +%Y%m%d-%H%M%S)}
seeds=${SEEDS:-0 1 2}
random=reward.custom_reward_function.path=scripts/evidence/random_reward.py
python scripts/make_tiny_world.py --out tiny-world --seed 0

train() { # name, seed, further arguments
    mrl train parallel_configs/tiny-moe/cpu.yaml --run-dir "$runs/$1-$2" --set trainer.seed="$2" \
        ${STEPS:+--set trainer.total_training_steps="$STEPS"} "${@:3}"
}

for seed in $seeds; do
    train gspo "$seed" # the preset's own recipe, with its band for answers of three tokens
    train grpo "$seed" --recipe grpo
    train dapo "$seed" --recipe dapo
    train ppo "$seed" --recipe ppo
    train control "$seed" --set "$random"
    train control_ppo "$seed" --recipe ppo --set "$random"
done
python scripts/evidence/learning_curves.py "$runs" --name algorithms --out "${OUT:-docs/results}"
