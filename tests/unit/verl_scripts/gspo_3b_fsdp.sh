#!/usr/bin/env bash
# Settings of source 004, cases 1, 3 and 4 (Qwen2.5-3B, FSDP with sequences over four devices), in a script of our own.
set -x
export NNODES=1
MODEL_PATH=XX/Qwen25-3B-Instruct
engine=vllm
mode=async
if [ "$engine" = "vllm" ]; then
  export VLLM_USE_V1=1
  raw_chat="True"
fi
low=0.0003  # see the paper
SFT=$(basename $MODEL_PATH)
exp="gspo-epslow-${low}-${SFT}-RL"
prompt=$((1024*2))
response=$((1024*8))
sp=4
offload=true
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    data.train_files="['xx/train.parquet']" \
    data.val_files="['xx/test.parquet']" \
    data.return_raw_chat=${raw_chat} \
    data.train_batch_size=512 \
    data.max_prompt_length=${prompt} \
    data.max_response_length=${response} \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.actor.clip_ratio_low=${low} \
    actor_rollout_ref.actor.clip_ratio_high=0.0004 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((prompt + response)*1)) \
    actor_rollout_ref.rollout.name=${engine} \
    actor_rollout_ref.rollout.mode=${mode} \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \
    actor_rollout_ref.actor.loss_agg_mode="seq-mean-token-mean" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp} \
    actor_rollout_ref.actor.entropy_checkpointing=true \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    trainer.logger='["console"]' \
    trainer.experiment_name="${exp}" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.test_freq=10 \
    trainer.total_training_steps=500 \
    trainer.use_legacy_worker_impl=disable \
    trainer.device=npu \
    "$@"
