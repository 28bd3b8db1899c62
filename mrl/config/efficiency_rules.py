"""Rules of switches that make an update faster.

They refuse switches that fail only after the model is built, or have no effect: the device lacks their kernels. Sources
are Megatron-core 0.16.1, and 0.17.0 has the same.
"""

from collections.abc import Callable, Iterator

from mrl.config.rule_row import RuleRow
from mrl.config.schema import RunConfig
from mrl.errors import Violation
from mrl.model import ModelSpec
from mrl.platforms.hosting import get_hosting

_TRANSFORMER = "model.override_transformer_config"
_DISPATCHER = f"{_TRANSFORMER}.moe_token_dispatcher_type"
FLEX = "flex"
BACKENDS = ("deepep", "hybridep")
_BOTH = "moe_enable_deepep is the old way to say deepep, and Megatron refuses two"
# core/transformer/moe/moe_utils.py (fused_permute, TE >= 2.1; fused_topk_with_score_function, TE >= 2.7) raises in the
# first forward
_TE_KERNELS = ("moe_permute_fusion", "moe_router_fusion")
_NO_TE = "its kernel is Transformer Engine's, and Megatron refuses it in the first forward without"


def _is_flex(config: RunConfig, model: ModelSpec) -> bool:
    return model.is_moe and config.model.override_transformer_config.get("moe_token_dispatcher_type") == FLEX


def _flex_backend(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    given = config.model.override_transformer_config
    key = f"{_TRANSFORMER}.moe_flex_dispatcher_backend"
    backend = given.get("moe_flex_dispatcher_backend")
    if not model.is_moe or backend is None:
        return
    if backend not in BACKENDS:
        yield Violation(key, "is unknown", "Megatron has these kernels for the flex dispatcher", BACKENDS)
    if given.get("moe_token_dispatcher_type") != FLEX:
        yield Violation(key, "needs moe_token_dispatcher_type: flex", "it would be ignored", (None,))
    elif backend == "hybridep" and given.get("moe_enable_deepep"):
        yield Violation(key, "must be deepep with moe_enable_deepep", _BOTH, ("deepep",))


def _kernels_of_device(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    given = config.model.override_transformer_config
    device = config.cluster.device
    for name in _TE_KERNELS:
        if model.is_moe and given.get(name) and name not in get_hosting(device).moe_fusions:
            yield Violation(f"{_TRANSFORMER}.{name}", f"must be false on {device}", _NO_TE, (False,))


def _recomputes(config: RunConfig, name: str) -> bool:
    """Tells whether a module is among those that are computed again."""
    given = config.model.override_transformer_config
    modules = given.get("recompute_modules")
    return given.get("recompute_granularity") == "selective" and isinstance(modules, list) and name in modules


def scales_are_delayed(config: RunConfig) -> bool:
    """Tells whether ranks compute in FP8 by Megatron's default recipe."""
    given = config.model.override_transformer_config
    return bool(given.get("fp8")) and given.get("fp8_recipe") in (None, "delayed")


_GROUPED = "model.grouped_gemm"
_DELTA = "model.gated_delta"
_INNER = 128  # CUTLASS' kernel in Transformer Engine wants inner sizes that are multiples of it
_WIDEST_KEY = 256  # of flash-linear-attention's kernel (ops/common/chunk_delta_h.py)
_BY_CUBLAS = "Transformer Engine would silently use cuBLAS"


def _by_cutlass(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: config.model.grouped_gemm == "cutlass" and broken(config, model)


def _by_fla(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: config.model.gated_delta == "fla" and broken(config, model)


def _is_split_unevenly(config: RunConfig, model: ModelSpec) -> bool:
    """Tells whether an inner size of the experts' products does not suit CUTLASS' kernel."""
    width = model.moe_intermediate_size // config.actor.layout.expert_tensor
    return bool(model.hidden_size % _INNER or width % _INNER)


EFFICIENCY_RULES = (
    RuleRow(
        _GROUPED,
        _by_cutlass(lambda c, m: not m.is_moe),
        "must be cublas for a dense model",
        "there are no experts whose products it could join",
        ("cublas",),
    ),
    RuleRow(
        _GROUPED,
        _by_cutlass(lambda c, m: "cutlass" not in get_hosting(c.cluster.device).grouped_gemms),
        "must be cublas outside cuda",
        "it names a kernel of Transformer Engine on NVIDIA devices; others have products of their own",
        ("cublas",),
    ),
    RuleRow(
        _GROUPED,
        _by_cutlass(lambda c, m: (c.cluster.accelerator or "").startswith("a100")),
        "must be cublas on A100",
        f"CUTLASS' kernel is for Hopper; {_BY_CUBLAS}",
        ("cublas",),
    ),
    RuleRow(
        _GROUPED,
        _by_cutlass(lambda c, m: c.model.dtype == "float32" or bool(c.model.override_transformer_config.get("fp8"))),
        "must be cublas with float32 and FP8",
        f"CUTLASS' kernel is for 16 bits; {_BY_CUBLAS}",
        ("cublas",),
    ),
    RuleRow(
        _GROUPED,
        _by_cutlass(lambda c, m: m.is_moe and _is_split_unevenly(c, m)),
        "must be cublas: hidden_size and a tensor rank's part of moe_intermediate_size must be multiples of 128",
        f"CUTLASS' kernel takes no other inner sizes; {_BY_CUBLAS}",
        ("cublas",),
    ),
    RuleRow(
        _DELTA,
        _by_fla(lambda c, m: not m.is_hybrid),
        "must be torch for a model without gated delta layers",
        "it would be ignored",
        ("torch",),
    ),
    RuleRow(
        _DELTA,
        _by_fla(lambda c, m: "fla" not in get_hosting(c.cluster.device).delta_kernels),
        "must be torch outside cuda",
        "flash-linear-attention's kernels are made for NVIDIA devices here",
        ("torch",),
    ),
    RuleRow(
        _DELTA,
        _by_fla(lambda c, m: c.model.dtype == "float32"),
        "must be torch with model.dtype: float32",
        "flash-linear-attention's kernel would round float32 to the 10 bits of TF32",
        ("torch",),
    ),
    RuleRow(
        _DELTA,
        _by_fla(lambda c, m: c.trainer.deterministic),
        "must be torch with trainer.deterministic",
        "flash-linear-attention times variants of a kernel at each start, and each of them rounds differently",
        ("torch",),
    ),
    RuleRow(
        _DELTA,
        _by_fla(lambda c, m: m.is_hybrid and m.linear_key_head_dim > _WIDEST_KEY),
        "must be torch with linear_key_head_dim above 256",
        "flash-linear-attention's kernel asserts that it is not",
        ("torch",),
    ),
    RuleRow(
        f"{_TRANSFORMER}.recompute_modules",
        lambda c, m: _recomputes(c, "moe_act") and not m.is_moe,
        "must not name moe_act, and the model is dense",
        "Megatron refuses it without experts",
        ("core_attn", "mlp"),
    ),
    RuleRow(
        f"{_TRANSFORMER}.recompute_modules",
        lambda c, _: scales_are_delayed(c) and (_recomputes(c, "moe_act") or _recomputes(c, "layernorm")),
        "must name neither moe_act nor layernorm with fp8",
        "Megatron refuses them with delayed scaling, its default",
        ("core_attn", "mlp", "moe", "shared_experts"),
    ),
    RuleRow(
        _DISPATCHER,
        lambda c, m: _is_flex(c, m) and not get_hosting(c.cluster.device).has_flex_dispatcher,
        "must be alltoall outside cuda",
        "the kernels of DeepEP and HybridEP are NVIDIA's",
        ("alltoall",),
    ),
    RuleRow(
        _DISPATCHER,
        lambda c, m: _is_flex(c, m) and c.actor.layout.expert_model_parallel_size * c.actor.layout.expert_tensor == 1,
        "needs experts over several ranks",
        "there is no other rank to send tokens to, and Megatron's dispatcher asserts that there is one",
        ("alltoall",),
    ),
    _flex_backend,
    _kernels_of_device,
)
