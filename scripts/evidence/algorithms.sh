#!/usr/bin/env bash
# The claim "each recipe learns, and random rewards teach nothing", from one start: GSPO, GRPO and DAPO without a critic, PPO with one.
# Writes docs/results/algorithms.json and .png (plain), and critic.json and .png (critic).
#   scripts/evidence/algorithms.sh [run directory [plain | critic]]
# SEEDS, STEPS and OUT make it shorter and write elsewhere: SEEDS=0 STEPS=3 OUT=/tmp/out scripts/evidence/algorithms.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1
runs=${1:-runs/algorithms-$(date +%Y%m%d-%H%M%S)}
parts=${2:-plain critic}
seeds=${SEEDS:-0 1 2}
random=reward.custom_reward_function.path=scripts/evidence/random_reward.py
python scripts/make_tiny_world.py --out tiny-world --seed 0

train() { # name, seed, further arguments
    mrl train parallel_configs/tiny-moe/cpu.yaml --run-dir "$runs/$part/$1-$2" --set trainer.seed="$2" \
        ${STEPS:+--set trainer.total_training_steps="$STEPS"} "${@:3}"
}

plain() { # seed
    train gspo "$1" # the preset's own recipe, with its band for answers of three tokens
    train grpo "$1" --recipe grpo
    train dapo "$1" --recipe dapo
    train control "$1" --set "$random"
}

critic() { # seed
    train ppo "$1" --recipe ppo
    train control_ppo "$1" --recipe ppo --set "$random"
}

declare -A names=([plain]=algorithms [critic]=critic)
for part in $parts; do
    for seed in $seeds; do
        "$part" "$seed"
    done
    python scripts/evidence/learning_curves.py "$runs/$part" --name "${names[$part]}" --command "scripts/evidence/algorithms.sh RUNS $part" \
        --out "${OUT:-docs/results}"
done
