#!/usr/bin/env bash
# The claim "it learns from responses of older weights too": GSPO on the tiny MoE at staleness 0, 2 and 4, without and with rollout correction.
# Writes docs/results/staleness.json and docs/results/staleness.png.   scripts/evidence/staleness.sh RUN_DIRECTORY
# What is done is kept: a second call with the same folder goes on. SEEDS and STEPS make it shorter: SEEDS="0" STEPS=3 ...
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1
runs=${1:?a folder for the runs}
[ -d tiny-world/model ] || python scripts/make_tiny_world.py --out tiny-world --seed 0

for seed in ${SEEDS:-0 1}; do
    for staleness in 0 2 4; do
        for correction in "" " corrected"; do
            run="$runs/S=$staleness$correction-$seed"
            [ ! -e "$run.done" ] || continue
            settings=(trainer.seed="$seed" trainer.total_training_steps="${STEPS:-40}" trainer.test_freq=10 trainer.resume_mode=auto)
            [ "$staleness" = 0 ] || settings+=(trainer.schedule=bounded trainer.max_staleness="$staleness")
            [ -z "$correction" ] || settings+=("algorithm.rollout_correction={level: token, mode: truncate, high: 2}")
            mrl train parallel_configs/tiny-moe/cpu.yaml --run-dir "$run" "${settings[@]/#/--set=}"
            touch "$run.done"
        done
    done
done
python scripts/evidence/learning_curves.py "$runs" --name staleness --title "Tiny Qwen3-MoE, GSPO on responses of older weights"
