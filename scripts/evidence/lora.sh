#!/usr/bin/env bash
# The claim "adapters learn as much as is asked, hold what is planned, resume to the bit, and their sync costs little more": beside full
# training.
# Writes docs/results/lora.json and docs/results/lora.png.   scripts/evidence/lora.sh [run directory]
# SEEDS, STEPS, REPEAT and OUT make it shorter and write elsewhere: SEEDS=0 STEPS=3 REPEAT=1 OUT=/tmp/out scripts/evidence/lora.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
runs=${1:-runs/lora-$(date +%Y%m%d-%H%M%S)}
seeds=${SEEDS:-0 1 2}
python scripts/make_tiny_world.py --out tiny-world --seed 0
adapters=(--set actor.lora.rank=8 --set actor.lora.alpha=16 --set actor.optim.lr=1e-3)

train() { # folder, preset, further arguments
    mrl train "parallel_configs/tiny-moe/$2.yaml" --run-dir "$runs/$1" "${@:3}"
}

for seed in $seeds; do
    steps=(--set "trainer.seed=$seed" ${STEPS:+--set trainer.total_training_steps="$STEPS"})
    train "learning/full-$seed" cpu "${steps[@]}"
    train "learning/lora-$seed" cpu "${steps[@]}" "${adapters[@]}"
done
# where actor and engine take turns, ranks say how many bytes left their devices
short=(--set trainer.total_training_steps=2 --set trainer.save_freq=2 --set trainer.test_freq=-1)
train memory/full cpu-colocated "${short[@]}"
train memory/lora cpu-colocated "${short[@]}" "${adapters[@]}"
# twenty steps, saved in the middle and gone on from there by new processes; its answer says whether a bit differs
mrl verify parallel_configs/tiny-moe/cpu.yaml --resume --steps "${STEPS:-10}" --json --set "trainer.run_dir=$runs/resumed" \
    "${adapters[@]}" >"$runs/resumed.json" || [ -s "$runs/resumed.json" ]
python scripts/evidence/lora.py "$runs" --repeat "${REPEAT:-9}" --out "${OUT:-docs/results}"
