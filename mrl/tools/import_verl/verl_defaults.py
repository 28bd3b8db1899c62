"""verl's defaults: its key -> the value that it has where a script sets nothing.

They come from verl/trainer/config and the configurations of the trainers that generate ahead. verl's null stands as the
value that it means. The table has keys whose default is written to a configuration, or decides what another key means.
All others are None to `VerlSettings.value`.
"""

from typing import Any

from mrl.tools.import_verl.keys import MEGATRON, A, R

ALL_CHECKPOINTS = 1_000_000  # more than any run writes

VERL_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    "data.drop_duplicates": False,  # mrl's key; verl trains on all rows
    A + "ppo_mini_batch_size": 256,
    A + "use_dynamic_bsz": False,
    A + "ppo_max_token_len_per_gpu": 16384,
    A + "optim.weight_decay": 0.01,
    A + "optim.betas": [0.9, 0.999],
    A + "optim.lr_warmup_steps": -1,
    A + "kl_loss_coef": 0.001,
    A + "policy_loss.loss_mode": "vanilla",
    A + "loss_agg_mode": "token-mean",
    A + "clip_ratio_low": 0.2,
    A + "clip_ratio_high": 0.2,
    A + "clip_ratio_c": 3.0,
    **{
        f"{MEGATRON}{name}_parallel_size": 1
        for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model")
    },
    R + "n": 1,
    R + "tensor_model_parallel_size": 2,
    R + "data_parallel_size": 1,
    R + "gpu_memory_utilization": 0.5,
    R + "enable_chunked_prefill": True,
    R + "val_kwargs.temperature": 0.0,
    "rollout.nnodes": 0,
    "algorithm.adv_estimator": "gae",
    "algorithm.filter_groups.enable": False,
    "algorithm.rollout_correction.bypass_mode": False,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.resume_mode": "auto",
    "trainer.max_actor_ckpt_to_keep": ALL_CHECKPOINTS,
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1,
}
# Keys that are null in verl's files, where null says nothing, and whose field here takes no null.
SAY_NOTHING = frozenset(
    (
        A + "ppo_micro_batch_size_per_gpu",
        A + "policy_loss.dro_beta",
        A + "optim.warmup_style",
        *(f"{section}custom_reward_function.{name}" for section in ("", "reward.") for name in ("path", "name")),
        *("reward_model.num_workers", "reward.num_workers"),
    )
)
