"""Rules of the actor and its reference model: layout, batches, token budgets, offload, recompute, experts, router
replay.

A micro-batch size is an upper limit. A rank's samples are cut evenly into as few micro-batches as it allows, equally
many on every rank. Where an interleaved pipeline needs more micro-batches, the cuts are finer. Empty micro-batches fill
up the rest.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil
from typing import Any

from mrl.config.rule_row import Rule, RuleRow, on_only_where
from mrl.config.schema import ActorConfig, RefConfig, RunConfig, leaf
from mrl.errors import Violation, nearest
from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout, check_train_layout

_TRANSFORMER = "model.override_transformer_config"
_OPTIMIZER = "actor.optim.override_optimizer_config"
_DDP = "actor.override_ddp_config"
_MINI = "actor.ppo_mini_batch_size"
_BATCH = "data.train_batch_size"
_VLLM = "rollout.engine_kwargs.vllm"
_IGNORED = "it would be ignored"
_UNROUTED = ActorConfig.model_fields["max_unrouted_share"].default

# Modules that Megatron-core 0.16.1 accepts for selective recompute (TransformerConfig.__post_init__), without
# mla_up_proj, which no plan knows.
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
# Megatron refuses allgather where sequences differ in length (TransformerConfig.__post_init__), as they always do here.
_DISPATCHERS = ("alltoall", "flex")
# "a2a+p2p" needs process groups of two levels, which mrl does not make.
_CONTEXT_KINDS = ("p2p", "all_gather", "a2a")
_BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
# vLLM arguments that make the engine's routes wrong or incomplete: the right value of each, and the reason.
# Sources: vllm-project/vllm PR 28284, PR 39917 and PR 48622.
_ROUTES_NEED = {
    "pipeline_parallel_size": (1, "each stage sees the routes of its own layers only"),
    "prefill_context_parallel_size": (1, "each rank sees the routes of its own tokens only"),
    "decode_context_parallel_size": (1, "each rank sees the routes of its own tokens only"),
}


def actor_notes(config: RunConfig, model: ModelSpec) -> Iterator[str]:
    """Yields notes on settings that are legal and cost something, or have no effect."""
    yield from _offload_notes(config)
    if config.ref != RefConfig() and not (config.algorithm.use_kl_loss or config.algorithm.use_kl_in_reward):
        yield (
            "ref: is set, and no reference model is loaded, because neither algorithm.use_kl_loss nor "
            "use_kl_in_reward is true"
        )
    if config.actor.router_replay == "R3" and config.rollout.enable_prefix_caching and config.cluster.device == "cpu":
        why = (
            "tokens that the cache had can come back without routes and then use the trainer's own "
            "(router/missing_routes says how many)"
        )
        yield f"actor.router_replay R3 with prefix caching on {config.cluster.device}: {why}"


def _offload_notes(config: RunConfig) -> Iterator[str]:
    moved = [f"actor.{name}" for name in config.actor.offloaded] + ["ref.param_offload"] * config.ref.param_offload
    given = _adam(config)
    share = _number(given.get("optimizer_offload_fraction"))
    aware = given.get("use_precision_aware_optimizer")
    if moved and config.cluster.placement == "separate":
        yield (
            f"{', '.join(moved)}: the actor has its devices for itself (cluster.placement: "
            "separate), so this only costs time"
        )
    if moved and config.cluster.device == "cpu":
        yield f"{', '.join(moved)}: on cpu the device is the host, whose memory then holds what is moved twice"
    if not given.get("optimizer_cpu_offload"):
        return
    if share == 0:
        yield f"{_OPTIMIZER}.optimizer_cpu_offload moves nothing while optimizer_offload_fraction is 0, its default"
    elif not aware:
        yield (
            f"{_OPTIMIZER}.optimizer_cpu_offload without use_precision_aware_optimizer leaves float32 "
            "weights on the device too"
        )
    elif share == 1 and config.actor.optimizer_offload:
        yield (
            "actor.optimizer_offload adds nothing to optimizer_cpu_offload, which keeps and updates Adam's "
            "states on the host anyway"
        )


def _layout(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    for violation in check_train_layout(config.actor.layout, model):
        yield replace(violation, field=f"actor.layout.{violation.field}")


def _batches(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Checks the division of a batch. Later checks need earlier ones, so one mistake gives one message."""
    batch = config.data.train_batch_size
    mini = config.actor.ppo_mini_batch_size
    if batch % mini:
        why = f"each step makes whole optimizer updates of {mini} prompts each"
        yield Violation(_MINI, f"must divide {_BATCH} = {batch}", why, nearest(mini, batch, lambda v: batch % v == 0))
        return
    n = config.rollout.n
    dp = config.actor.layout.data_parallel_size
    if dp and mini * n % dp:
        allowed = nearest(mini, batch, lambda v: batch % v == 0 and v * n % dp == 0)
        rule = f"times rollout.n = {n} must be a multiple of the data-parallel size {dp}"
        yield Violation(_MINI, rule, "every rank takes the same number of samples of each mini-batch", allowed)


def longest_sample(config: RunConfig) -> int:
    """Returns the tokens of the longest sample, padded for tensor and context parallelism."""
    parts = config.actor.layout.sequence_parts
    tokens = config.data.max_sample_length + padding_of_branches(config, config.actor.layout.context_parallel_size)
    return ceil(tokens / parts) * parts


def padding_of_branches(config: RunConfig, context: int) -> int:
    """Returns the most padding tokens that an agent's response can need beside its own tokens.

    Each turn may begin another branch. Context parallelism over `context` ranks pads each branch by itself. The last
    branch is padded with the pack.
    """
    rollout = getattr(config, "rollout", None)  # a refused section is missing; the sample itself is still judged
    turns = getattr(rollout, "turns", None)
    if context == 1 or turns is None or not getattr(rollout, "endpoint", False):
        return 0
    return (turns.max_turns - 1) * (2 * context - 1)


def _smallest_budget(config: RunConfig) -> int:
    """Returns the fewest tokens a device that hold the longest sample."""
    return ceil(longest_sample(config) / config.actor.layout.context_parallel_size)


def _adam(config: RunConfig) -> dict[str, Any]:
    return config.actor.optim.override_optimizer_config


def _transformer(config: RunConfig) -> dict[str, Any]:
    return config.model.override_transformer_config


def _overlaps_exchange(config: RunConfig) -> bool:
    """Whether stages exchange while they compute: the given value, else true in an interleaved pipeline."""
    if "overlap_p2p_comm" in _transformer(config):
        return _transformer(config)["overlap_p2p_comm"]
    return config.actor.layout.virtual_pipeline > 1


def _dispatcher(config: RunConfig) -> Any:
    return _transformer(config).get("moe_token_dispatcher_type", "alltoall")


def _overlaps_shared(config: RunConfig, model: ModelSpec) -> bool:
    is_recomputed = "shared_experts" in (_transformer(config).get("recompute_modules") or ())
    return _dispatcher(config) == "alltoall" and model.shared_expert_intermediate_size > 0 and not is_recomputed


def _actor_is_dynamic(config: RunConfig) -> bool:
    return config.actor.use_dynamic_bsz


def _ref_is_dynamic(config: RunConfig) -> bool:
    own = config.ref.log_prob_use_dynamic_bsz
    if own is None:
        return config.actor.use_dynamic_bsz
    return own


def _budget(field: str, switch: str, is_on: Callable[[RunConfig], bool]) -> Rule:
    """Builds the rule of one token budget: its switch is on, and it holds the longest sample."""

    def judge(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
        value = leaf(config, field)
        if value is None:
            return
        if not is_on(config):
            yield Violation(field, f"needs {switch}: true", _IGNORED, (None,))
        elif value < (least := _smallest_budget(config)):
            cp = config.actor.layout.context_parallel_size
            longest = longest_sample(config)
            rule = (
                f"times context_parallel_size = {cp} must hold the longest sample: prompt and response, "
                f"padded, are {longest} tokens"
            )
            yield Violation(field, rule, "a sample is never cut over micro-batches", (least, 2 * least))

    return judge


_BUDGETS = (
    _budget("actor.ppo_max_token_len_per_gpu", "actor.use_dynamic_bsz", _actor_is_dynamic),
    _budget("actor.log_prob_max_token_len_per_gpu", "actor.use_dynamic_bsz", _actor_is_dynamic),
    _budget("ref.log_prob_max_token_len_per_gpu", "ref.log_prob_use_dynamic_bsz", _ref_is_dynamic),
)


def _context(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    layout = config.actor.layout
    kind = _transformer(config).get("cp_comm_type")
    cp = layout.context_parallel_size
    tp = layout.tensor_model_parallel_size
    if cp > 1 and kind == "a2a" and (model.num_attention_heads // tp % cp or model.num_key_value_heads // tp % cp):
        rule = f"a2a needs context_parallel_size = {cp} to divide the heads of a tensor rank"
        why = (
            f"it trades tokens for heads: {model.num_attention_heads} and {model.num_key_value_heads} "
            f"heads over {tp} tensor ranks"
        )
        yield Violation(f"{_TRANSFORMER}.cp_comm_type", rule, why, ("p2p", "all_gather"))


def _context_kind(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    kind = _transformer(config).get("cp_comm_type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and not all(each in _CONTEXT_KINDS for each in kinds):
        why = "these use the one group of ranks that share a sequence"
        yield Violation(f"{_TRANSFORMER}.cp_comm_type", "is unknown, or needs groups of its own", why, _CONTEXT_KINDS)


def fixed_storages(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Refuses options that know weights or gradients by their address, which offloading changes."""
    moved = " and ".join(f"actor.{name}" for name in ("param_offload", "grad_offload") if getattr(config.actor, name))
    if moved and config.actor.override_ddp_config.get("nccl_ub"):
        why = "the communicator has registered the memory of the buffers"
        yield Violation(f"{_DDP}.nccl_ub", f"must be false with {moved}", why, (False,))


def _full_recompute(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    given = _transformer(config)
    if given.get("recompute_granularity") != "full":
        return
    if given.get("recompute_method") not in ("uniform", "block"):
        rule = "must say how with recompute_granularity: full"
        why = "layers are recomputed in equal groups (uniform), or only the first ones of a stage (block)"
        yield Violation(f"{_TRANSFORMER}.recompute_method", rule, why, ("uniform", "block"))
    layers = given.get("recompute_num_layers")
    if not isinstance(layers, int) or layers < 1:
        rule = "must be at least 1 with recompute_granularity: full"
        why = "full recompute goes by groups of that many layers"
        yield Violation(f"{_TRANSFORMER}.recompute_num_layers", rule, why, (1,))
    elif given.get("recompute_method") == "uniform":
        # the actor's first: what a critic would have is unknown where keys of the algorithm are refused
        yield from _uniform_groups(config, model, layers) or _uniform_groups(config.of_critic, model, layers)


def _uniform_groups(config: RunConfig | None, model: ModelSpec, layers: int) -> list[Violation]:
    if config is None or not config.actor.layout.world_size or check_train_layout(config.actor.layout, model):
        return []
    layout = TrainLayout.build(config.actor.layout, model)
    counts = {count for stage in layout.chunk_layers for count in stage}
    if not any(count % layers for count in counts):
        return []
    rule = f"must divide the layers of every chunk, {sorted(counts)}, with recompute_method: uniform"
    why = "Megatron looks for all layers of the last group"
    divisors = tuple(n for n in range(1, layers) if not any(count % n for count in counts))
    return [Violation(f"{_TRANSFORMER}.recompute_num_layers", rule, why, divisors)]


def _recomputed_layers(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    kind = _transformer(config).get("recompute_granularity")
    if kind not in (None, "selective"):
        return
    why = "selective recompute goes by recompute_modules"
    if kind is None:
        why = _IGNORED
    for name in ("recompute_method", "recompute_num_layers"):
        if _transformer(config).get(name) is not None:
            yield Violation(f"{_TRANSFORMER}.{name}", "needs recompute_granularity: full", why, (None,))


def _recomputed_modules(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    modules = _transformer(config).get("recompute_modules")
    if _transformer(config).get("recompute_granularity") != "selective" or not isinstance(modules, list):
        return
    for name in modules:
        if name not in RECOMPUTE_MODULES:
            rule = f"{name} is no module that can be recomputed"
            why = "selective recompute goes by Megatron's own names"
            if name == "mla_up_proj":
                rule = f"{name} must be left out"
                why = "how much memory it spares was never measured, so no plan could count it"
            yield Violation(f"{_TRANSFORMER}.recompute_modules", rule, why, RECOMPUTE_MODULES)


def _dense(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    for name in _transformer(config):
        if name.startswith("moe_") and not model.is_moe:
            yield Violation(f"{_TRANSFORMER}.{name}", "is for mixtures of experts, and the model is dense", _IGNORED)


def _many(name: str, config: RunConfig) -> int | None:
    """Returns the number of values that a transformer field has, or None where it is no list."""
    value = _transformer(config).get(name)
    if isinstance(value, list | tuple):
        return len(value)
    return None


def _no_auxiliary_loss(config: RunConfig) -> float | list[float]:
    """Returns a coefficient of 0 for each load balancing type."""
    types = _many("moe_router_load_balancing_type", config)
    if types is None:
        return 0.0
    return [0.0] * types


def _balancing(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    given = _transformer(config)
    if not model.is_moe:
        return
    balancing = given.get("moe_router_load_balancing_type", "none")
    if not all(kind in _BALANCING for kind in (balancing if isinstance(balancing, list) else [balancing])):
        why = (
            "experts must be chosen by the highest scores, as engines choose them and as routes are recorded; "
            "sinkhorn chooses others"
        )
        yield Violation(
            f"{_TRANSFORMER}.moe_router_load_balancing_type", "must keep the routers' own choice", why, _BALANCING
        )


def _replay_engines(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if config.actor.router_replay != "R3":
        return
    given = config.rollout.vllm_kwargs
    for name, (value, why) in _ROUTES_NEED.items():
        if name in given and given[name] != value:
            rule = f"must be {'null' if value is None else str(value).lower()} with actor.router_replay R3"
            yield Violation(f"{_VLLM}.{name}", rule, why, (value,))


def _number(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return 0.0


BATCH_RULES = (_batches, *_BUDGETS[:2])  # a critic's section must keep them too (critic_rules.py)
ACTOR_RULES = (
    _layout,
    _batches,
    RuleRow(
        "actor.ppo_max_token_len_per_gpu",
        lambda c, m: c.actor.use_dynamic_bsz and c.actor.ppo_max_token_len_per_gpu is None,
        "must be set with actor.use_dynamic_bsz: true",
        "micro-batches need a size",
        lambda c, m: (_smallest_budget(c),),
    ),
    RuleRow(
        "ref.log_prob_max_token_len_per_gpu",
        lambda c, m: (
            _ref_is_dynamic(c) and not c.actor.use_dynamic_bsz and c.ref.log_prob_max_token_len_per_gpu is None
        ),
        "must be set with ref.log_prob_use_dynamic_bsz: true and actor.use_dynamic_bsz: false",
        "the actor has no limit in tokens to lend",
        lambda c, m: (_smallest_budget(c),),
    ),
    *_BUDGETS,
    _context,
    _context_kind,
    # Megatron's schedules raise in the first pass (core/pipeline_parallel/schedules.py).
    on_only_where(
        f"{_TRANSFORMER}.overlap_p2p_comm",
        lambda c, m: c.actor.layout.pipeline_model_parallel_size == 1 or c.actor.layout.virtual_pipeline > 1,
        "needs virtual_pipeline_model_parallel_size above 1",
        "only an interleaved pipeline exchanges so",
    ),
    on_only_where(
        f"{_TRANSFORMER}.batch_p2p_comm",
        lambda c, m: not _overlaps_exchange(c),
        "must be false with overlap_p2p_comm",
        "Megatron refuses both, and an interleaved pipeline overlaps its exchange by itself",
    ),
    on_only_where(
        f"{_TRANSFORMER}.use_te_activation_func",
        lambda c, m: not _transformer(c).get("bias_activation_fusion", m.is_moe),
        "needs bias_activation_fusion: false",
        "Megatron refuses both, and a mixture of experts is built with the fusion",
    ),
    fixed_storages,
    RuleRow(
        "actor.max_unrouted_share",
        lambda c, m: c.actor.max_unrouted_share != _UNROUTED and c.actor.router_replay != "R3",
        f"must be {_UNROUTED} unless actor.router_replay is R3",
        _IGNORED,
        (_UNROUTED,),
    ),
    on_only_where(
        f"{_OPTIMIZER}.optimizer_cpu_offload",
        lambda c, m: c.model.dtype != "float32",
        "needs model.dtype: bfloat16",
        "Megatron 0.16.1 builds this Adam over views of float32 weights, which torch refuses",
    ),
    RuleRow(
        f"{_OPTIMIZER}.decoupled_weight_decay",
        lambda c, m: _adam(c).get("optimizer_cpu_offload") and not _adam(c).get("decoupled_weight_decay", True),
        "must be true with optimizer_cpu_offload",
        "Megatron's Adam on the host is an AdamW",
        (True,),
    ),
    *(
        on_only_where(
            f"{_OPTIMIZER}.{name}",
            lambda c, m: _adam(c).get("optimizer_cpu_offload"),
            "needs optimizer_cpu_offload: true",
            _IGNORED,
            (),
        )
        for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")
    ),
    RuleRow(
        f"{_OPTIMIZER}.optimizer_offload_fraction",
        lambda c, m: not 0 <= _number(_adam(c).get("optimizer_offload_fraction")) <= 1,
        "must be from 0 to 1",
        "it is the share of parameters",
        (0.0, 1.0),
    ),
    on_only_where(
        f"{_OPTIMIZER}.use_precision_aware_optimizer",
        lambda c, m: _adam(c).get("optimizer_cpu_offload"),
        "must be false, or optimizer_cpu_offload true with it",
        "Transformer Engine's Adam then keeps the float32 weights on the device, in a format that no checkpoint holds",
    ),
    RuleRow(
        f"{_TRANSFORMER}.recompute_granularity",
        lambda c, m: _transformer(c).get("recompute_granularity") not in (None, "full", "selective"),
        "must be full, selective or null",
        "Megatron recomputes whole layers, the modules that are named, or nothing",
        ("full", "selective", None),
    ),
    _full_recompute,
    _recomputed_layers,
    on_only_where(
        f"{_TRANSFORMER}.recompute_modules",
        lambda c, m: _transformer(c).get("recompute_granularity") == "selective",
        "needs recompute_granularity: selective",
        _IGNORED,
        (None,),
    ),
    _recomputed_modules,
    on_only_where(
        f"{_TRANSFORMER}.distribute_saved_activations",
        lambda c, m: not c.actor.layout.uses_sequence_parallel,
        "must be false",
        "with sequence parallelism they are distributed already",
    ),
    _dense,
    RuleRow(
        f"{_TRANSFORMER}.moe_token_dispatcher_type",
        lambda c, m: m.is_moe and _dispatcher(c) not in _DISPATCHERS,
        "must be " + " or ".join(_DISPATCHERS),
        "Megatron's other dispatchers do not take sequences of different lengths",
        _DISPATCHERS,
    ),
    on_only_where(
        f"{_TRANSFORMER}.moe_enable_deepep",
        lambda c, m: not m.is_moe or _dispatcher(c) == "flex",
        "needs moe_token_dispatcher_type: flex",
        "Megatron refuses it",
    ),
    on_only_where(
        f"{_TRANSFORMER}.moe_shared_expert_overlap",
        lambda c, m: not m.is_moe or _overlaps_shared(c, m),
        "needs a shared expert that is not recomputed and moe_token_dispatcher_type: alltoall",
        "there is nothing to overlap otherwise, or Megatron refuses it",
    ),
    _balancing,
    RuleRow(
        f"{_TRANSFORMER}.moe_aux_loss_coeff",
        lambda c, m: _many("moe_aux_loss_coeff", c) != _many("moe_router_load_balancing_type", c),
        "must be one number with one moe_router_load_balancing_type, and a list of one a type with a list of them",
        "Megatron builds a loss of each type with its own coefficient, and fails where they do not match",
        lambda c, m: (_no_auxiliary_loss(c),),
    ),
    on_only_where(
        "actor.freeze_router",
        lambda c, m: m.is_moe,
        "must be false for a dense model",
        "there is no router to freeze",
    ),
    RuleRow(
        "actor.router_replay",
        lambda c, m: c.actor.router_replay != "disabled" and not m.is_moe,
        "must be disabled for a dense model",
        "there is no router to replay",
        ("disabled",),
    ),
    on_only_where(
        f"{_TRANSFORMER}.moe_router_fusion",
        lambda c, m: c.actor.router_replay == "disabled",
        "must be false unless actor.router_replay is disabled",
        "the fused kernel chooses the experts itself, so none can be replayed",
    ),
    *(
        on_only_where(
            f"actor.{name}",
            lambda c, m: c.actor.router_replay != "R2" or not m.is_moe,
            "must be left out with actor.router_replay R2",
            "routes are kept by micro-batch, so old log-probs must be cut as the update is",
            (None,),
        )
        for name in ("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
    ),
    _replay_engines,
)
