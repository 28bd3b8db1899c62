#!/usr/bin/env bash
# The claim "random rewards teach it nothing" on the long world, and what moves the model where they do: the control of long_world.sh with several seeds,
# with a quarter of the learning rate, and with the ordinary clip in place of GSPO's. Writes docs/results/long_control.json and its picture.
#   scripts/evidence/long_control.sh RUN_DIRECTORY        what is done is kept: a second call with the same folder goes on
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
        --set trainer.resume_mode=auto \
        --set reward.custom_reward_function.path=scripts/evidence/random_reward.py "${@:3}"
    touch "$runs/$1-$2.done"
}

train control 0
train control_quarter_rate 0 --set actor.optim.lr=2.5e-5
train control 1
train control 2
train control_vanilla 0 --set algorithm.policy_loss.loss_mode=vanilla --set algorithm.policy_loss.clip_ratio_low=0.2 \
    --set algorithm.policy_loss.clip_ratio_high=0.2
python scripts/evidence/learning_curves.py "$runs" --name long_control --title "Tiny Qwen3-MoE, random rewards for responses of 320 tokens"
