#!/usr/bin/env bash
# The claim "ready first nobody waits at a border": ten steps with rewards of 0 to 2 seconds, and what updates waited for.
# Writes docs/results/slow_rewards.json.   scripts/evidence/slow_rewards.sh RUN_DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
export HF_HUB_OFFLINE=1
run=${1:?a folder for the run}
python scripts/evidence/stamp.py --clean
[ -d tiny-world/model ] || python scripts/make_tiny_world.py --out tiny-world --seed 0
settings=(
    reward.custom_reward_function.path=scripts/evidence/slow_reward.py reward.num_workers=8
    trainer.schedule=bounded trainer.max_staleness=2 trainer.partial_rollouts=true trainer.order=ready_first
    trainer.total_training_steps=10 trainer.save_freq=4 trainer.val_before_train=false trainer.test_freq=-1
    data.train_batch_size=8 actor.ppo_mini_batch_size=4 rollout.max_num_seqs=8
)
mrl train parallel_configs/tiny-moe/cpu.yaml --run-dir "$run" "${settings[@]/#/--set=}"
python scripts/evidence/slow_reward.py "$run"
