#!/usr/bin/env bash
# Settings of source 004, case 2 (Megatron, Ray job, two nodes by default), in a script of our own.
name=GSPO-30B
adv=grpo
low=3e-4
high=4e-4
prompt=$((1024*2))
response=$((1024*8))
agg="token-mean"  # what the source says
mode=gspo
NNODES=${NNODES:-2}
PER_NODE=${PER_NODE:-8}
MODEL_PATH=xx/weight/Qwen3_30B/Qwen3_30B
TRAIN=xx/dapo-math-17k.parquet
TEST="['$TRAIN']"
tokens=$(((prompt + response)*1))
offload=True
gen_tp=4
gen_dp=8
# gen_ep=4
tp=4; pp=4; EP=8; ETP=1
cd /opt/verl
ray job submit --runtime-env="verl/trainer/mc2_env.yaml" \
    -- python3 -m verl.trainer.main_ppo \
    --config-path=config \
    --config-name='ppo_megatron_trainer.yaml' \
    data.train_files="${TRAIN}" data.val_files="${TEST}" data.prompt_key=prompt data.return_raw_chat=True \
    data.truncation='left' data.max_prompt_length=${prompt} data.max_response_length=${response} data.train_batch_size=32 \
    actor_rollout_ref.rollout.n=2 \
    actor_rollout_ref.actor.policy_loss.loss_mode=${mode} \
    algorithm.adv_estimator=${adv} algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0 \
    actor_rollout_ref.actor.clip_ratio_low=${low} actor_rollout_ref.actor.clip_ratio_high=${high} \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${tokens} \
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=${tokens} \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=${tokens} \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.optim.clip_grad=1.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.loss_agg_mode=${agg} \
    actor_rollout_ref.actor.megatron.param_offload=${offload} \
    actor_rollout_ref.actor.megatron.optimizer_offload=${offload} \
    actor_rollout_ref.actor.megatron.grad_offload=${offload} \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${pp} \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${tp} \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=$EP \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=$ETP \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 actor_rollout_ref.rollout.enable_chunked_prefill=True \
    actor_rollout_ref.rollout.max_num_batched_tokens=$((prompt + response)) \
    actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.n=1 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=sync actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${gen_tp} actor_rollout_ref.rollout.data_parallel_size=${gen_dp} \
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=${pp} \
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=${tp} \
    actor_rollout_ref.ref.megatron.expert_model_parallel_size=$EP \
    actor_rollout_ref.ref.megatron.expert_tensor_parallel_size=$ETP \
    actor_rollout_ref.ref.megatron.param_offload=${offload} \
    actor_rollout_ref.actor.megatron.use_mbridge=True \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=$((1024*4)) \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.log=False \
    +reward_model.reward_kwargs.max_resp_len=${response} \
    trainer.logger="console" trainer.project_name="DAPO" trainer.experiment_name="${name}-tp${gen_tp}-ep${gen_ep}" \
    trainer.n_gpus_per_node="${PER_NODE}" trainer.nnodes="${NNODES}" \
    trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1 \
    trainer.total_epochs=10 trainer.total_training_steps=300 \
    trainer.default_local_dir="$DATA_ROOT/checkpoint/${name}" trainer.resume_mode=auto trainer.log_val_generations=10 \
    trainer.device="npu" "$@"
