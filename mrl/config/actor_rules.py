"""The actor: its layout, batches and token budgets, offload, recompute, experts, router replay, and the reference
model.

A micro-batch size is a limit: a rank's samples are cut evenly into as few micro-batches as it allows, equally many on
every rank. Where an interleaved pipeline needs more of them, the cuts are finer and what is lacking is filled with
micro-batches that count for nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil
from typing import Any

from mrl.config.schema import RefConfig, RunConfig, leaf
from mrl.errors import Violation, nearest
from mrl.model import ModelSpec
from mrl.model.layout import check_train_layout

_TRANSFORMER = "model.override_transformer_config"
_OPTIMIZER = "actor.optim.override_optimizer_config"
_DDP = "actor.override_ddp_config"
_MINI, _BATCH = "actor.ppo_mini_batch_size", "data.train_batch_size"
_VLLM = "rollout.engine_kwargs.vllm"
_IGNORED = "it would be ignored"
Rule = Callable[[RunConfig, ModelSpec], Iterator[Violation]]

# What Megatron-core 0.16.1 lets selective recompute name (TransformerConfig.__post_init__), without those of attention
# we do not build.
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
# Megatron refuses allgather where sequences differ in length (TransformerConfig.__post_init__), as they always do here.
_DISPATCHERS = ("alltoall", "flex")
# "a2a+p2p" goes over process groups of two levels, which nobody makes.
_CONTEXT_KINDS = ("p2p", "all_gather", "a2a")
_BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
# vLLM arguments under which the engine's routes are refused, wrong or incomplete, each with the value that is right and
# why.
# Sources: vllm-project/vllm PR 28284, PR 39917 and PR 48622.
_ROUTES_NEED = {
    "pipeline_parallel_size": (1, "each stage sees the routes of its own layers only"),
    "prefill_context_parallel_size": (1, "each rank sees the routes of its own tokens only"),
    "decode_context_parallel_size": (1, "each rank sees the routes of its own tokens only"),
    "speculative_config": (None, "a draft model's routers write over those of the first layers"),
}


def actor_notes(config: RunConfig, model: ModelSpec) -> Iterator[str]:
    """Settings that are legal and cost something, or do nothing."""
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
    given = config.actor.optim.override_optimizer_config
    share, aware = _number(given.get("optimizer_offload_fraction")), given.get("use_precision_aware_optimizer")
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
    """Each rule speaks only where those it builds on hold, so that one mistake is one line."""
    batch, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    if batch % mini:
        why = f"each step makes whole optimizer updates of {mini} prompts each"
        yield Violation(_MINI, f"must divide {_BATCH} = {batch}", why, nearest(mini, batch, lambda v: batch % v == 0))
        return
    n, dp = config.rollout.n, config.actor.layout.data_parallel_size
    if dp and mini * n % dp:
        allowed = nearest(mini, batch, lambda v: batch % v == 0 and v * n % dp == 0)
        rule = f"times rollout.n = {n} must be a multiple of the data-parallel size {dp}"
        yield Violation(_MINI, rule, "every rank takes the same number of samples of each mini-batch", allowed)


def longest_sample(config: RunConfig) -> int:
    """Tokens of the longest sample as the actor computes it:
    padded to the parts that tensor and context parallelism cut it into.
    """
    parts = config.actor.layout.sequence_parts
    return ceil((config.data.max_prompt_length + config.data.max_response_length) / parts) * parts


def _smallest_budget(config: RunConfig) -> int:
    """Tokens a device that hold the longest sample, which context parallelism cuts."""
    return ceil(longest_sample(config) / config.actor.layout.context_parallel_size)


def _actor_is_dynamic(config: RunConfig) -> bool:
    return config.actor.use_dynamic_bsz


def _ref_is_dynamic(config: RunConfig) -> bool:
    own = config.ref.log_prob_use_dynamic_bsz
    return config.actor.use_dynamic_bsz if own is None else own


def _actor_has_budget(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if config.actor.use_dynamic_bsz and config.actor.ppo_max_token_len_per_gpu is None:
        rule = "is not set while actor.use_dynamic_bsz is true"
        yield Violation(
            "actor.ppo_max_token_len_per_gpu", rule, "micro-batches need a size", (_smallest_budget(config),)
        )


def _ref_has_budget(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if (
        _ref_is_dynamic(config)
        and not config.actor.use_dynamic_bsz
        and config.ref.log_prob_max_token_len_per_gpu is None
    ):
        rule = "is not set while ref.log_prob_use_dynamic_bsz is true and actor.use_dynamic_bsz is false"
        why = "the actor has no limit in tokens to lend"
        yield Violation("ref.log_prob_max_token_len_per_gpu", rule, why, (_smallest_budget(config),))


def _budget(field: str, switch: str, is_on: Callable[[RunConfig], bool]) -> Rule:
    """The rule of one budget: it is used, and holds the longest sample."""

    def judge(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
        value = leaf(config, field)
        if value is None:
            return
        if not is_on(config):
            yield Violation(field, f"needs {switch}: true", _IGNORED, (None,))
        elif value < (least := _smallest_budget(config)):
            cp, longest = config.actor.layout.context_parallel_size, longest_sample(config)
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
    layout, kind = config.actor.layout, config.model.override_transformer_config.get("cp_comm_type")
    cp, tp = layout.context_parallel_size, layout.tensor_model_parallel_size
    if cp > 1 and kind == "a2a" and (model.num_attention_heads // tp % cp or model.num_key_value_heads // tp % cp):
        rule = f"a2a needs context_parallel_size = {cp} to divide the heads of a tensor rank"
        why = (
            f"it trades tokens for heads: {model.num_attention_heads} and {model.num_key_value_heads} "
            f"heads over {tp} tensor ranks"
        )
        yield Violation(f"{_TRANSFORMER}.cp_comm_type", rule, why, ("p2p", "all_gather"))


def _context_kind(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    kind = config.model.override_transformer_config.get("cp_comm_type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and not all(each in _CONTEXT_KINDS for each in kinds):
        why = "these go over the one group of ranks that share a sequence"
        yield Violation(f"{_TRANSFORMER}.cp_comm_type", "is unknown, or needs groups of its own", why, _CONTEXT_KINDS)


# Megatron's schedules raise in the first pass (core/pipeline_parallel/schedules.py).
def _overlapped_exchange(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    given, layout = config.model.override_transformer_config, config.actor.layout
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size or 1
    if stages > 1 and chunks == 1 and given.get("overlap_p2p_comm"):
        rule, why = "needs virtual_pipeline_model_parallel_size above 1", "only an interleaved pipeline exchanges so"
        yield Violation(f"{_TRANSFORMER}.overlap_p2p_comm", rule, why, (False,))
    if chunks > 1 and given.get("batch_p2p_comm") and "overlap_p2p_comm" not in given:
        yield _BATCHED


def _batched_exchange(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    given = config.model.override_transformer_config
    if given.get("batch_p2p_comm") and given.get("overlap_p2p_comm"):
        yield _BATCHED


_BATCHED = Violation(
    f"{_TRANSFORMER}.batch_p2p_comm",
    "must be false with overlap_p2p_comm",
    "Megatron refuses both, and an interleaved pipeline overlaps its exchange by itself",
    (False,),
)


def _activation(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    given = config.model.override_transformer_config
    if given.get("use_te_activation_func") and given.get("bias_activation_fusion", model.is_moe):
        why = "Megatron refuses both, and a mixture of experts is built with the fusion"
        key = f"{_TRANSFORMER}.use_te_activation_func"
        yield Violation(key, "needs bias_activation_fusion: false", why, (False,))


def _host_adam(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    given = config.actor.optim.override_optimizer_config
    for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
        if given.get(name) and not given.get("optimizer_cpu_offload"):
            yield Violation(f"{_OPTIMIZER}.{name}", "needs optimizer_cpu_offload: true", _IGNORED)
    if not 0 <= _number(given.get("optimizer_offload_fraction")) <= 1:
        rule, why = "must be from 0 to 1", "it is the share of parameters"
        yield Violation(f"{_OPTIMIZER}.optimizer_offload_fraction", rule, why, (0.0, 1.0))


def _storages_stay(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Against what knows weights or gradients by their address: what leaves the device comes back elsewhere."""
    moved = " and ".join(f"actor.{name}" for name in ("param_offload", "grad_offload") if getattr(config.actor, name))
    if moved and config.actor.override_ddp_config.get("nccl_ub"):
        why = "the communicator has registered the memory of the buffers"
        yield Violation(f"{_DDP}.nccl_ub", f"must be false with {moved}", why, (False,))


def _hybrid_adam_dtype(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if config.actor.optim.override_optimizer_config.get("optimizer_cpu_offload") and config.model.dtype == "float32":
        why = "Megatron 0.16.1 builds this Adam over views of float32 weights, which torch refuses"
        yield Violation(f"{_OPTIMIZER}.optimizer_cpu_offload", "needs model.dtype: bfloat16", why, (False,))


def _hybrid_adam(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    given = config.actor.optim.override_optimizer_config
    if not given.get("optimizer_cpu_offload"):
        return
    if not given.get("decoupled_weight_decay", True):
        rule = "must be true with optimizer_cpu_offload"
        yield Violation(f"{_OPTIMIZER}.decoupled_weight_decay", rule, "Megatron's is an AdamW", (True,))


def _precision(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    given = config.actor.optim.override_optimizer_config
    if given.get("use_precision_aware_optimizer") and not given.get("optimizer_cpu_offload"):
        rule = "must be false, or optimizer_cpu_offload true with it"
        why = (
            "Transformer Engine's Adam then has the float32 weights on the device, in forms of "
            "its own that no save holds"
        )
        yield Violation(f"{_OPTIMIZER}.use_precision_aware_optimizer", rule, why, (False,))


def _recompute(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    given = config.model.override_transformer_config
    kind, method, layers = (given.get(f"recompute_{part}") for part in ("granularity", "method", "num_layers"))
    if kind not in (None, "full", "selective"):
        why = "Megatron recomputes whole layers, the modules that are named, or nothing"
        yield Violation(f"{_TRANSFORMER}.recompute_granularity", "is unknown", why, ("full", "selective", None))
    if kind == "full":
        yield from _full_recompute(method, layers)
    for part, value in (("method", method), ("num_layers", layers)):
        if kind in (None, "selective") and value is not None:
            why = _IGNORED if kind is None else "selective recompute goes by recompute_modules"
            yield Violation(f"{_TRANSFORMER}.recompute_{part}", "needs recompute_granularity: full", why, (None,))
    modules = given.get("recompute_modules")
    if modules and kind != "selective":
        yield Violation(
            f"{_TRANSFORMER}.recompute_modules", "needs recompute_granularity: selective", _IGNORED, (None,)
        )
    for name in modules if isinstance(modules, list) and kind == "selective" else ():
        if name not in RECOMPUTE_MODULES:
            rule, why = (
                f"{name} is no module that can be recomputed",
                "selective recompute goes by Megatron's own names",
            )
            yield Violation(f"{_TRANSFORMER}.recompute_modules", rule, why, RECOMPUTE_MODULES)


def _saved_activations(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    given = config.model.override_transformer_config
    if given.get("distribute_saved_activations") and config.actor.layout.uses_sequence_parallel:
        why = "with sequence parallelism they are distributed already"
        yield Violation(f"{_TRANSFORMER}.distribute_saved_activations", "must be false", why, (False,))


def _full_recompute(method: Any, layers: Any) -> Iterator[Violation]:
    if method not in ("uniform", "block"):
        rule = "must say how with recompute_granularity: full"
        why = "layers go in equal groups (uniform), or only the first of a stage do (block)"
        yield Violation(f"{_TRANSFORMER}.recompute_method", rule, why, ("uniform", "block"))
    if not isinstance(layers, int) or layers < 1:
        why = "full recompute goes by groups of that many layers"
        yield Violation(
            f"{_TRANSFORMER}.recompute_num_layers", "must be at least 1 with recompute_granularity: full", why, (1,)
        )


def _experts(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    given = config.model.override_transformer_config
    if not model.is_moe:
        for name in (n for n in given if n.startswith("moe_")):
            yield Violation(f"{_TRANSFORMER}.{name}", "is of mixtures of experts, and the model is dense", _IGNORED)
        return
    dispatcher = given.get("moe_token_dispatcher_type", "alltoall")
    if dispatcher not in _DISPATCHERS:
        yield Violation(
            f"{_TRANSFORMER}.moe_token_dispatcher_type",
            "is unknown, or not for sequences of different lengths",
            "Megatron has these ways to bring tokens to experts",
            _DISPATCHERS,
        )
    if given.get("moe_enable_deepep") and dispatcher != "flex":
        yield Violation(
            f"{_TRANSFORMER}.moe_enable_deepep",
            "needs moe_token_dispatcher_type: flex",
            "Megatron refuses it",
            (False,),
        )
    if given.get("moe_shared_expert_overlap") and (
        dispatcher != "alltoall" or not model.shared_expert_intermediate_size
    ):
        rule = "needs a shared expert and moe_token_dispatcher_type: alltoall"
        yield Violation(
            f"{_TRANSFORMER}.moe_shared_expert_overlap", rule, "there is nothing to overlap otherwise", (False,)
        )


def _balancing(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    given = config.model.override_transformer_config
    if not model.is_moe:
        return
    balancing = given.get("moe_router_load_balancing_type", "none")
    if not all(kind in _BALANCING for kind in (balancing if isinstance(balancing, list) else [balancing])):
        why = (
            "experts must be chosen by the highest scores, as engines choose them and as routes are recorded; "
            "sinkhorn's choice is another"
        )
        yield Violation(
            f"{_TRANSFORMER}.moe_router_load_balancing_type", "must keep the routers' own choice", why, _BALANCING
        )


def _freeze(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    if config.actor.freeze_router and not model.is_moe:
        yield Violation(
            "actor.freeze_router", "must be false for a dense model", "there is no router to freeze", (False,)
        )


def _replay(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    if config.actor.router_replay != "disabled" and not model.is_moe:
        yield Violation(
            "actor.router_replay", "must be disabled for a dense model", "there is no router to replay", ("disabled",)
        )


def _replay_unfused(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    mode = config.actor.router_replay
    if mode != "disabled" and config.model.override_transformer_config.get("moe_router_fusion"):
        why = "the fused kernel chooses experts where nothing can be replayed"
        yield Violation(
            f"{_TRANSFORMER}.moe_router_fusion", f"must be false with actor.router_replay {mode}", why, (False,)
        )


def _replay_same_cut(name: str) -> Rule:
    def judge(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
        if config.actor.router_replay == "R2" and getattr(config.actor, name) is not None and model.is_moe:
            why = "routes are kept by micro-batch, so old log-probs must be cut as the update is"
            yield Violation(f"actor.{name}", "must be left out with actor.router_replay R2", why, (None,))

    return judge


def _replay_engines(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    given = config.rollout.vllm_kwargs
    for name, (value, why) in _ROUTES_NEED.items() if config.actor.router_replay == "R3" else ():
        if name in given and given[name] != value:
            rule = f"must be {'null' if value is None else str(value).lower()} with actor.router_replay R3"
            yield Violation(f"{_VLLM}.{name}", rule, why, (value,))


def _reference_layout(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if config.ref.layout is not None:
        why = "the reference model lies as the actor does, on its ranks and in its process groups"
        yield Violation("ref.layout", "must be null", why, (None,))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


ACTOR_RULES = (
    _layout,
    _batches,
    _actor_has_budget,
    _ref_has_budget,
    *_BUDGETS,
    _context,
    _context_kind,
    _overlapped_exchange,
    _batched_exchange,
    _activation,
    _storages_stay,
    _hybrid_adam_dtype,
    _hybrid_adam,
    _host_adam,
    _precision,
    _recompute,
    _saved_activations,
    _experts,
    _balancing,
    _freeze,
    _replay,
    _replay_unfused,
    *map(_replay_same_cut, ("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")),
    _replay_engines,
    _reference_layout,
)
