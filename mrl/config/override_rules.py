"""`override_*` and `engine_kwargs`: keys must be fields that upstream has,
and not ones that a key of ours already sets.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mrl.config.schema import RunConfig, leaf
from mrl.config.upstream_fields import UPSTREAM_FIELDS, UpstreamClass
from mrl.errors import Violation, did_you_mean
from mrl.model import ModelSpec
from mrl.platforms.npu_mindspeed import MINDSPEED_FIELDS

_LAYOUT = "actor.layout."
_CHECKPOINT = "the checkpoint's config.json (model.path)"
_SHARDED = "mrl itself, which always shards the optimizer"
_SYNC = "mrl itself, for the weight transfer"

# field -> the key (or, where there is none, what else) that decides it
_TRANSFORMER = {
    "tensor_model_parallel_size": _LAYOUT + "tensor_model_parallel_size",
    "pipeline_model_parallel_size": _LAYOUT + "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": _LAYOUT + "virtual_pipeline_model_parallel_size",
    "context_parallel_size": _LAYOUT + "context_parallel_size",
    "expert_model_parallel_size": _LAYOUT + "expert_model_parallel_size",
    "expert_tensor_parallel_size": _LAYOUT + "expert_tensor_parallel_size",
    "sequence_parallel": _LAYOUT + "sequence_parallel",
    "num_layers_in_first_pipeline_stage": _LAYOUT + "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage": _LAYOUT + "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split": _LAYOUT + "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": _LAYOUT + "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout": _LAYOUT + "pipeline_layers",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "deterministic_mode": "trainer.deterministic",
    **dict.fromkeys(
        (
            "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
            "moe_ffn_hidden_size",
            "num_moe_experts", "moe_router_topk", "moe_layer_freq", "moe_shared_expert_intermediate_size",
            "moe_shared_expert_gate", "moe_router_pre_softmax", "normalization",
            "layernorm_epsilon", "gated_linear_unit", "activation_func", "add_bias_linear", "add_qkv_bias",
            "qk_layernorm",
        ),
        _CHECKPOINT,
    ),
}  # fmt: skip
_OPTIMIZER = {
    "lr": "actor.optim.lr",
    "min_lr": "actor.optim.min_lr",
    "weight_decay": "actor.optim.weight_decay",
    "adam_beta1": "actor.optim.betas",
    "adam_beta2": "actor.optim.betas",
    "adam_eps": "actor.optim.eps",
    "clip_grad": "actor.optim.clip_grad",
    "params_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "optimizer": "mrl itself, which trains with Adam",
    "use_distributed_optimizer": _SHARDED,
}
_DDP = {"use_distributed_optimizer": _SHARDED}
_VLLM = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "rollout.dtype",
    "seed": "trainer.seed",
    "max_model_len": "data.max_prompt_length + data.max_response_length",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "data_parallel_size": "rollout.data_parallel_size",
    **dict.fromkeys(
        (
            "data_parallel_rank",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_size_local",
            "data_parallel_start_rank",
            "data_parallel_backend",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "data_parallel_multi_port_external_lb",
        ),
        "mrl itself: each data-parallel rank is an actor of its own",
    ),
    "enable_expert_parallel": "rollout.expert_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "enforce_eager": "rollout.enforce_eager",
    "enable_prefix_caching": "rollout.enable_prefix_caching",
    "enable_chunked_prefill": "rollout.enable_chunked_prefill",
    "generation_config": "mrl itself: sampling never comes from the model's folder",
    "override_generation_config": "mrl itself: sampling never comes from the model's folder",
    "logprobs_mode": "mrl itself: training needs processed_logprobs",
    "trust_remote_code": "mrl itself: a checkpoint's code is never run",
    "enable_return_routed_experts": "actor.router_replay",
    "weight_transfer_config": _SYNC,
    "worker_extension_cls": _SYNC,
    "worker_cls": "mrl itself, by device",
}

_GATHER = "Megatron reads it from actor.override_ddp_config, which has a key of the same name"
_GATHER_IN_STEP = "its gathers are begun inside Megatron's own optimizer step; ours leaves out what is not finite"
_ALIGNED = "gathers would begin where the schedule is told to begin them, and nobody tells it"
_WHOLE = (
    "checkpoints and the weight sync read parameters and optimizer shards as the plain "
    "distributed optimizer lays them out"
)
_DELAYED = "nothing in the actor's schedule runs the postponed half, so gradients would be lost"
_PLANNED = (
    "Megatron then asks the forward step for a plan of its layers' parts (core/pipeline_parallel/combined_1f1b.py, "
    "return_schedule_plan), which log-probs without logits and replayed routes do not have"
)

# field -> the one value that it may have, and why: with another one the actor would run and compute something else
_TRANSFORMER_ONLY = {
    "calculate_per_token_loss": (
        False,
        "gradients would no longer be divided by the data-parallel size, for which the loss makes up",
    ),
    "delay_wgrad_compute": (False, _DELAYED),
    "overlap_moe_expert_parallel_comm": (False, _PLANNED),
}
_OPTIMIZER_ONLY = {
    "overlap_param_gather": (False, _GATHER),
    "overlap_param_gather_with_optimizer_step": (False, _GATHER_IN_STEP),
    "loss_scale": (None, "gradients would be divided by a scale that the loss was never multiplied with"),
}
_DDP_ONLY = {
    "align_param_gather": (False, _ALIGNED),
    "num_distributed_optimizer_instances": (1, _WHOLE),
    "use_megatron_fsdp": (False, _WHOLE),
    "use_custom_fsdp": (False, _WHOLE),
    "data_parallel_sharding_strategy": ("no_shard", _WHOLE),
    "delay_wgrad_compute": (False, _DELAYED),
}

_Only = Mapping[str, tuple[Any, str]]

# key, upstream class, fields that are ours, fields that may have one value only
_TARGETS: tuple[tuple[str, str, Mapping[str, str], _Only], ...] = (
    ("model.override_transformer_config", "TransformerConfig", _TRANSFORMER, _TRANSFORMER_ONLY),
    ("actor.optim.override_optimizer_config", "OptimizerConfig", _OPTIMIZER, _OPTIMIZER_ONLY),
    ("actor.override_ddp_config", "DistributedDataParallelConfig", _DDP, _DDP_ONLY),
    ("rollout.engine_kwargs.vllm", "AsyncEngineArgs", _VLLM, {}),
)


def override_rules(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Keys handed on to Megatron and vLLM that are unknown there or that mrl decides,
    and values that it cannot have.
    """
    for key, *_rest in _TARGETS:
        yield from override_faults(key, leaf(config, key) or {}, leaf(config, "cluster.device"))


def _gathers_beside_reduction(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    given, key = config.actor.override_ddp_config, "actor.override_ddp_config.overlap_param_gather"
    if given.get("overlap_param_gather") and not given.get("overlap_grad_reduce"):
        why = (
            "weights are gathered by buckets, which Megatron makes for overlap_grad_reduce alone; it refuses the other"
        )
        yield Violation(key, "needs overlap_grad_reduce: true", why, (False,))


def _engine_names(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    for name in config.rollout.engine_kwargs:
        if name != config.rollout.name:
            rule = f"belongs to no engine in use; rollout.name is {config.rollout.name}"
            yield Violation(f"rollout.engine_kwargs.{name}", rule, "it would be ignored", (config.rollout.name,))


OVERRIDE_RULES = (override_rules, _gathers_beside_reduction, _engine_names)


def override_faults(key: str, given: Mapping[str, Any], device: str | None) -> list[Violation]:
    """What is wrong with fields given under one of the override keys on a device: `model.override_transformer_config`,
    ...

    `device` None: not known, and nothing is said of fields that some device has.
    """
    upstream, ours, only = next((upstream, ours, only) for target, upstream, ours, only in _TARGETS if target == key)
    return [*_names(key, upstream, ours, given, device), *_values(key, only, given)]


def decided_by(key: str, name: str) -> str | None:
    """Our key (or what else) that decides a field of an override key; None where the field is the user's."""
    return next(ours.get(name) for target, _, ours, _ in _TARGETS if target == key)


def upstream_class(name: str, device: str | None) -> UpstreamClass:
    """The class as the row of `device` has it: vllm-ascend goes with a vLLM of its own.

    None: with the fields of all rows.
    """
    usual = UPSTREAM_FIELDS[name]
    if device is not None:
        return UPSTREAM_FIELDS.get(f"{name} on {device}", usual)
    others = (known.fields for key, known in UPSTREAM_FIELDS.items() if key.startswith(f"{name} on "))
    return replace(usual, fields=usual.fields.union(*others))


def _values(key: str, only: _Only, given: Mapping[str, Any]) -> Iterator[Violation]:
    for name, (legal, why) in only.items():
        if name in given and given[name] != legal:
            yield Violation(
                f"{key}.{name}", f"must be {'null' if legal is None else str(legal).lower()}", why, (legal,)
            )


def _names(
    key: str, upstream: str, ours: Mapping[str, str], given: Mapping[str, Any], device: str | None
) -> Iterator[Violation]:
    known = upstream_class(upstream, device)
    for name in given:
        if name in ours:
            yield Violation(f"{key}.{name}", f"is decided by {ours[name]}", "two places could contradict each other")
        elif name in MINDSPEED_FIELDS and upstream == "TransformerConfig":
            if device not in ("npu", None):
                yield Violation(
                    f"{key}.{name}",
                    "is MindSpeed's, which runs with cluster.device npu only",
                    "Megatron has no such field",
                )
        elif name not in known.fields:
            closest = did_you_mean(name, sorted(known.fields))
            closest = closest if closest.startswith("did") else "no name is close to it"
            rule = f"is no field of {upstream} in {known.package} {known.version}; {closest}"
            yield Violation(f"{key}.{name}", rule, "it would only be found when that class is built, on the cluster")
