#!/usr/bin/env bash
# The claim "a trained teacher teaches faster than rewards": GSPO from the tiny world's start, then its last checkpoint distilled into that
# same start by each loss, with the same learning rate, for each seed.
# Writes docs/results/distillation.json and .png.   scripts/evidence/distillation.sh [run directory]
# SEEDS, STEPS, FREQ and OUT make it shorter and write elsewhere: SEEDS=0 STEPS=5 FREQ=5 OUT=/tmp/out scripts/evidence/distillation.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1
runs=${1:-runs/distillation-$(date +%Y%m%d-%H%M%S)}
seeds=${SEEDS:-0 1 2}
steps=${STEPS:-60}
python scripts/make_tiny_world.py --out tiny-world --seed 0

train() { # name, seed, further arguments
    mrl train parallel_configs/tiny-moe/cpu.yaml --run-dir "$runs/$1-$2" --set trainer.seed="$2" \
        --set trainer.total_training_steps="$steps" --set trainer.test_freq="${FREQ:-5}" --set trainer.save_freq="$steps" "${@:3}"
}

for seed in $seeds; do
    train gspo "$seed"
    mrl convert megatron-to-hf "$runs/gspo-$seed" -o "$runs/teacher/$seed"
    # the teacher lies otherwise than the student: two stages where that has two tensor ranks
    taught=(--recipe distillation --set distillation.teacher_model.model_path="$runs/teacher/$seed"
        --set 'distillation.teacher_model.layout={tensor_model_parallel_size: 1, expert_model_parallel_size: 1, pipeline_model_parallel_size: 2}')
    loss=distillation.distillation_loss
    train k1 "$seed" "${taught[@]}"
    train reverse_kl_topk "$seed" "${taught[@]}" --set "$loss.loss_mode=reverse_kl_topk" --set "$loss.use_policy_gradient=false"
done
python scripts/evidence/distillation.py "$runs" --out "${OUT:-docs/results}"
