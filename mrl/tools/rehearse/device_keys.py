"""Removes keys that need an accelerator from a rehearsal, and names each with the reason.

All other keys run on CPUs unchanged.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mrl.config.override_rules import MINDSPEED_FIELDS
from mrl.config.schema import RunConfig, leaf
from mrl.config.schema_rollout import AUTO, MTP
from mrl.errors import MrlError
from mrl.model import ModelSpec, planning_model_spec
from mrl.tools.rehearse.notes import Change, OutOfReach

_TRANSFORMER = "model.override_transformer_config"
_ADAM = "actor.optim.override_optimizer_config"
_DDP = "actor.override_ddp_config"
_VLLM = "rollout.engine_kwargs"
_DRAFTED = 2  # tokens, where a plan was to find the number
_TE = "a kernel of Transformer Engine or of the device"
_GRAPHS = "graphs are captured on accelerators only"
_FP8 = "8-bit kernels are the accelerator's"
# beginning of a field's name -> why a CPU cannot have it; the longest match counts
_FIELDS: dict[str, dict[str, str]] = {
    _TRANSFORMER: {
        **dict.fromkeys(MINDSPEED_FIELDS, "MindSpeed's, which runs on its own device only"),
        "moe_permute_fusion": _TE,
        "moe_router_fusion": _TE,
        "apply_rope_fusion": _TE,
        "cross_entropy_": _TE,
        "bias_activation_fusion": _TE,
        "bias_dropout_fusion": _TE,
        "masked_softmax_fusion": _TE,
        "persist_layer_norm": _TE,
        "memory_efficient_layer_norm": _TE,
        "gradient_accumulation_fusion": _TE,
        "use_fused_": _TE,
        "fused_": _TE,
        "use_transformer_engine": _TE,
        "use_te_": _TE,
        "attention_backend": _TE,
        "attention_softmax_in_fp32": _TE,
        "tp_comm_": "overlapped communication is Transformer Engine's",
        "symmetric_ar_type": "symmetric memory is the accelerator's",
        "moe_enable_deepep": "DeepEP's kernels are the accelerator's",
        "moe_deepep": "DeepEP's kernels are the accelerator's",
        "moe_flex_dispatcher": "its kernels are the accelerator's",
        "moe_shared_expert_overlap": "streams overlap on accelerators only",
        "moe_grouped_gemm": _TE,
        "moe_use_legacy_grouped_gemm": _TE,
        "enable_cuda_graph": _GRAPHS,
        "external_cuda_graph": _GRAPHS,
        "cuda_graph": _GRAPHS,
        "fp8": _FP8,
        "fp4": _FP8,
        "cpu_offloading": "activations are on the host already",
        "fine_grained_activation_offloading": "activations are on the host already",
        "batch_p2p_sync": "it waits for a device",
    },
    _ADAM: {"fp8": _FP8, "store_param_remainders": _TE},
    _DDP: {
        "fp8": _FP8,
        "nccl_ub": "registered buffers are the accelerator's",
        "use_nccl": "the accelerator's communicator",
    },
}
_FLEX = "flex"  # a dispatcher whose kernels are DeepEP's
# arguments of vLLM that its CPU build accepts; all others are left out
_VLLM_ON_CPU = ("disable_log_stats", "max_logprobs", "scheduling_policy", "enable_log_requests", "disable_cascade_attn")
LOGGERS = ("jsonl", "console", "tensorboard")  # loggers that write to this machine only


def device_changes(config: RunConfig) -> tuple[list[Change], list[OutOfReach]]:
    """Returns override keys and engine switches without those that need an accelerator, and what was removed."""
    changes = []
    lost = []
    for key in _FIELDS:
        given = leaf(config, key)
        out = {name: why for name in given if (why := _why(key, name, given))}
        lost += [OutOfReach(f"{key}.{name}", why) for name, why in out.items()]
        if out:
            changes.append(
                Change(key, given, {name: value for name, value in given.items() if name not in out}, "on a CPU")
            )
    lost += _lost_arguments(config.rollout.engine_kwargs)
    if kept := _kept_arguments(config.rollout.engine_kwargs):
        changes.append(Change(_VLLM, config.rollout.engine_kwargs, kept, "on a CPU"))
    elif config.rollout.engine_kwargs:
        changes.append(Change(_VLLM, config.rollout.engine_kwargs, {}, "on a CPU"))
    for change, reason in _engine_switches(config):
        changes.append(change)
        lost.append(OutOfReach(change.key, reason))
    return changes, [*lost, *_not_read(config)]


def _why(key: str, name: str, given: Mapping[str, Any]) -> str:
    """Says why a field cannot be used on a CPU. Empty where it can, or where its value changes nothing."""
    if name == "moe_token_dispatcher_type" and given[name] == _FLEX:
        return "its kernels are DeepEP's"
    fitting = [start for start in _FIELDS[key] if name.startswith(start)]
    if fitting and given[name] not in (None, False):
        return _FIELDS[key][max(fitting, key=len)]
    return ""


def _kept_arguments(engine_kwargs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    kept = {}
    for engine, arguments in engine_kwargs.items():
        on_cpu = {key: value for key, value in arguments.items() if key in _VLLM_ON_CPU}
        if on_cpu:
            kept[engine] = on_cpu
    return kept


def _lost_arguments(engine_kwargs: Mapping[str, Mapping[str, Any]]) -> list[OutOfReach]:
    return [
        OutOfReach(f"{_VLLM}.{engine}.{name}", "an argument of vLLM that its CPU build may not take")
        for engine, args in engine_kwargs.items()
        for name in args
        if name not in _VLLM_ON_CPU
    ]


def _engine_switches(config: RunConfig) -> Iterator[tuple[Change, str]]:
    rollout = config.rollout
    if rollout.enforce_eager is False:
        yield Change("rollout.enforce_eager", False, None, "on a CPU"), "vLLM's CPU build captures no graphs"
    if rollout.enable_chunked_prefill:
        change = Change("rollout.enable_chunked_prefill", True, None, "on a CPU")
        yield change, "vLLM's CPU build dies of a prompt that is computed in parts"
    model = _model(config.model.path)
    if rollout.enable_prefix_caching and model is not None and model.is_latent:
        change = Change("rollout.enable_prefix_caching", True, False, "on a CPU")
        yield change, "vLLM's CPU kernel of latent attention has no prefix cache"
    yield from _draft_switches(config, model)
    if config.rollout_dtype != "float32" and model is not None and model.is_hybrid:
        change = Change("rollout.dtype", rollout.dtype, "float32", "on a CPU")
        yield change, "engines on a CPU compute gated delta attention in float32 alone"
    if hosted := [name for name in config.trainer.logger if name not in LOGGERS]:
        kept = tuple(name for name in config.trainer.logger if name in LOGGERS)
        change = Change("trainer.logger", config.trainer.logger, kept, "no account is written to")
        yield change, f"{', '.join(hosted)}: a rehearsal writes to no account of yours"


def _draft_switches(config: RunConfig, model: ModelSpec | None) -> Iterator[tuple[Change, str]]:
    """Yields what becomes of drafts on a CPU, where whether a response is drafted may not depend on the others."""
    speculation = config.rollout.speculation
    if speculation is None or model is None:
        return
    key, was = "rollout.speculation", speculation.model_dump()
    latent_layer = model.is_latent and speculation.method == MTP
    if speculation.head is not None or model.is_hybrid or latent_layer:
        why = "a head fits no small model" if speculation.head is not None else "vLLM's CPU build cannot draft for it"
        yield Change(key, was, None, "on a CPU"), why
        if config.actor.mtp.train:
            yield Change("actor.mtp.train", True, False, "nothing drafts"), why
        return
    tokens = _DRAFTED if speculation.tokens == AUTO else speculation.tokens
    alike = was | {"tokens": tokens, "max_num_seqs": None, "draft_sample_method": "greedy"}
    if alike != was:
        yield Change(key, was, alike, "on a CPU"), "drafts on a CPU depend on no batch and are not sampled"
    if speculation.method == MTP and config.rollout_dtype != "float32":
        change = Change("rollout.dtype", config.rollout.dtype, "float32", "on a CPU")
        yield change, "layers draft on a CPU in float32 alone"


def _model(path: str) -> ModelSpec | None:
    """Returns the model, or None where it is neither here nor known. Other code refuses such a model."""
    try:
        return planning_model_spec(path)[0]
    except MrlError:
        return None


def _not_read(config: RunConfig) -> Iterator[OutOfReach]:
    """Yields keys that stay unchanged and that nothing on a CPU reads."""
    yield OutOfReach("rollout.gpu_memory_utilization", "an engine on a CPU has a KV cache of rollout.cpu_kvcache_gib")
    if config.cluster.nnodes > 1:
        yield OutOfReach("cluster.nnodes", f"{config.cluster.nnodes} there, 1 here: no byte crosses a network")
    if config.reshard.transport == "ipc":
        yield OutOfReach("reshard.transport", "memory of a device cannot be shared where there is none")
