#!/usr/bin/env bash
# The style of verl's newer examples: defaults, arrays, a case, and a launcher chosen by a condition.
set -xeuo pipefail
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-30B-A3B-Base}
LOSS_MODE=${LOSS_MODE:-gspo}
case $LOSS_MODE in
    gspo)     LOW=3e-4; HIGH=4e-4; AGG=seq-mean-token-mean ;;
    vanilla)  LOW=0.2; HIGH=0.28; AGG=token-mean ;;
    *) echo "Unknown LOSS_MODE: $LOSS_MODE"; exit 1 ;;
esac
tokens=${TOKENS:-30720}
train_file=${TRAIN_FILE:-$HOME/data/train.parquet}
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="['$train_file']"
    data.train_batch_size=256  # prompts
    data.max_prompt_length=2048
    data.max_response_length=8192
)
ACTOR=(
    actor_rollout_ref.actor.policy_loss.loss_mode=$LOSS_MODE
    actor_rollout_ref.actor.loss_agg_mode=$AGG
    actor_rollout_ref.actor.clip_ratio_low=${CLIP_LOW:-$LOW}
    actor_rollout_ref.actor.clip_ratio_high=${CLIP_HIGH:-$HIGH}
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${tokens}
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=4
)
ACTOR+=(actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.megatron.optimizer_offload=True)
LAUNCH=(python3)
if [ "${VERL_USE_UV:-1}" != 0 ]; then
    uv sync --extra vllm --extra megatron --frozen
    LAUNCH=(uv run --frozen --no-sync python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    "${ACTOR[@]}" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.n=16 \
    model_engine=megatron \
    "$@"
