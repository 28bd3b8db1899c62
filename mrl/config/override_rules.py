"""Rules of `override_*` and `engine_kwargs`.

Each key must be a field that upstream has and that no key of mrl already sets. Its value must be one that mrl can run
and that keeps the actor equal to the engines' model (mrl/config/override_fields.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mrl.config.override_fields import DDP, OPTIMIZER, TRANSFORMER, Effect, Field
from mrl.config.rule_row import on_only_where
from mrl.config.schema import RunConfig, leaf
from mrl.config.upstream_fields import UPSTREAM_FIELDS, UpstreamClass
from mrl.config.yaml_tree import parse_yaml
from mrl.errors import ConfigError, UnknownValue, Violation, did_you_mean
from mrl.model import ModelSpec
from mrl.platforms.npu_mindspeed import MINDSPEED_FIELDS
from mrl.platforms.versions import MEGATRON

_SYNC = "mrl itself, for the weight transfer"

# argument of vLLM -> the key of mrl that decides it, or whatever else does
_VLLM_DECIDED_BY = {
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
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), "rollout.speculation"),
}

_SCALES = (
    "the first forward pass would fill scales of the KV cache, which no sync renews, and the check after a sync would "
    "take them for damaged (mrl/engine/constants.py)"
)
_VLLM = {
    **{name: Field(Effect.OURS, decides) for name, decides in _VLLM_DECIDED_BY.items()},
    "calculate_kv_scales": Field(Effect.BARRED, _SCALES, (False,)),
}

# key, upstream class, fields: Megatron's that may be set or that mrl decides, and vLLM's that mrl decides
_TARGETS: tuple[tuple[str, str, Mapping[str, Field]], ...] = (
    ("model.override_transformer_config", "TransformerConfig", TRANSFORMER),
    ("actor.optim.override_optimizer_config", "OptimizerConfig", OPTIMIZER),
    ("actor.override_ddp_config", "DistributedDataParallelConfig", DDP),
    ("rollout.engine_kwargs.vllm", "AsyncEngineArgs", _VLLM),
)


def override_rules(config: RunConfig, model: ModelSpec | None) -> Iterator[Violation]:
    """Refuses keys of Megatron and vLLM that are unknown there or decided by mrl, and values that cannot run."""
    for key, *_rest in _TARGETS:
        yield from override_faults(key, leaf(config, key) or {}, leaf(config, "cluster.device"), model)


def override_notes(config: RunConfig, model: ModelSpec) -> Iterator[str]:
    """Yields notes on legal Megatron fields that change log-probs or gradients."""
    for key, _, fields in _TARGETS:
        given = _of_the_model(leaf(config, key) or {}, model)
        yield from _rounding_notes(key, given, fields)
        terms = [name for name in given if name in fields and fields[name].effect is Effect.LOSS]
        if any(_is_above_zero(given[name]) for name in terms):
            yield (
                f"{key}: an auxiliary router loss moves log-probs that the policy loss does not account "
                "for; in RL it is usually 0"
            )


def _rounding_notes(key: str, given: Mapping[str, Any], fields: Mapping[str, Field]) -> Iterator[str]:
    """Yields one note for each reason, with all fields that it applies to."""
    rounding = {n: fields[n] for n in given if n in fields and fields[n].effect is Effect.ROUNDING}
    others = {name: field for name, field in rounding.items() if given[name] not in field.usual(None)}
    for why in dict.fromkeys(field.why for field in others.values()):
        names = [name for name, field in others.items() if field.why == why]
        yield f"{key}.{', '.join(names)}: {why}"


def _is_above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _engine_names(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    for name in config.rollout.engine_kwargs:
        if name != config.rollout.name:
            rule = f"belongs to no engine in use; rollout.name is {config.rollout.name}"
            yield Violation(f"rollout.engine_kwargs.{name}", rule, "it would be ignored", (config.rollout.name,))


OVERRIDE_RULES = (
    override_rules,
    on_only_where(
        "actor.override_ddp_config.overlap_param_gather",
        lambda c, m: c.actor.override_ddp_config.get("overlap_grad_reduce"),
        "needs overlap_grad_reduce: true",
        "weights are gathered by buckets, which Megatron makes only with overlap_grad_reduce",
    ),
    on_only_where(
        "actor.override_ddp_config.average_in_collective",
        lambda c, m: c.cluster.device != "cpu",
        "must be false on cpu",
        "gloo's collectives sum, and have no mean",
    ),
    _engine_names,
)


def override_faults(
    key: str, given: Mapping[str, Any], device: str | None, model: ModelSpec | None = None
) -> list[Violation]:
    """Returns what is wrong with the fields given under one override key, such as `model.override_transformer_config`.

    Without `device`, fields that only some devices have are accepted. Without `model`, values that depend on it are not
    judged.
    """
    upstream, fields = next((upstream, fields) for target, upstream, fields in _TARGETS if target == key)
    quoted = list(_quoted(key, upstream, given))
    others = {name: value for name, value in given.items() if f"{key}.{name}" not in {fault.field for fault in quoted}}
    values = _values(key, fields, _of_the_model(others, model), model)
    return [*_names(key, upstream, fields, given, device), *quoted, *values]


def _quoted(key: str, upstream: str, given: Mapping[str, Any]) -> Iterator[Violation]:
    """Refuses numbers, booleans and lists in quotes, which Megatron's classes would take for text. vLLM's convert most
    of them, but not all booleans.
    """
    of_vllm = upstream in UPSTREAM_FIELDS
    for name, text in given.items():
        if not isinstance(text, str):
            continue
        try:
            value = parse_yaml(text, name).plain()
        except ConfigError:
            continue
        if isinstance(value, bool) or not (of_vllm or isinstance(value, str) or value == {}):
            who = "vLLM may take" if of_vllm else "Megatron takes"
            why = f"{who} values as they are, and any text, also 'false', is true"
            yield Violation(f"{key}.{name}", "must be written without quotes", why, (value,))


def _of_the_model(given: Mapping[str, Any], model: ModelSpec | None) -> dict[str, Any]:
    """Drops fields for mixtures of experts where the model is dense. Another rule reports those."""
    try:
        dense = model is not None and not model.is_moe
    except UnknownValue:
        dense = False
    return {name: value for name, value in given.items() if not (dense and name.startswith("moe_"))}


def decided_by(key: str, name: str) -> str | None:
    """Returns the key of mrl (or whatever else) that decides a field of an override key. None where the user decides
    it.
    """
    field = next(fields.get(name) for target, _, fields in _TARGETS if target == key)
    if field is not None and field.effect is Effect.OURS:
        return field.why
    return None


def _settable(upstream: str, fields: Mapping[str, Field], device: str | None) -> UpstreamClass:
    """Returns the class with the fields that a user may set."""
    if upstream in UPSTREAM_FIELDS:
        return upstream_class(upstream, device)
    names = (name for name, field in fields.items() if field.effect is not Effect.OURS)
    return UpstreamClass("megatron-core", MEGATRON, frozenset(names))


def upstream_class(name: str, device: str | None) -> UpstreamClass:
    """Returns the class as the row of `device` has it, because vllm-ascend needs a vLLM of its own.

    Without `device` the class has the fields of all rows.
    """
    usual = UPSTREAM_FIELDS[name]
    if device is not None:
        return UPSTREAM_FIELDS.get(f"{name} on {device}", usual)
    others = (known.fields for key, known in UPSTREAM_FIELDS.items() if key.startswith(f"{name} on "))
    return replace(usual, fields=usual.fields.union(*others))


def _values(
    key: str, fields: Mapping[str, Field], given: Mapping[str, Any], model: ModelSpec | None
) -> Iterator[Violation]:
    """Refuses values that would make the actor another model, or that mrl cannot run."""
    for name, value in given.items():
        field = fields.get(name)
        if field is None or field.effect not in (Effect.FUNCTION, Effect.BARRED):
            continue
        legal = _usual(field, model)
        if legal and value not in legal:
            own = ""
            if field.effect is Effect.FUNCTION:
                own = ", as the model has it"
            yield Violation(f"{key}.{name}", f"must be {_text(legal[0])}{own}", field.why, legal[:1])


def _usual(field: Field, model: ModelSpec | None) -> tuple[Any, ...]:
    try:
        return field.usual(model)
    except UnknownValue:
        return ()


def _text(value: Any) -> str:
    if value is None:
        return "null, or left out"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _names(
    key: str, upstream: str, fields: Mapping[str, Field], given: Mapping[str, Any], device: str | None
) -> Iterator[Violation]:
    known = _settable(upstream, fields, device)
    for name in given:
        if name in fields and fields[name].effect is Effect.OURS:
            rule = f"is decided by {fields[name].why}"
            yield Violation(f"{key}.{name}", rule, "two places could contradict each other")
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
            rule = f"is no field of {upstream} in {known.package} {known.version} that may be set; {closest}"
            yield Violation(f"{key}.{name}", rule, "it is not there, or mrl cannot run another value of it")
