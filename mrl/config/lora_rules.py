"""Rules of low-rank adapters (actor.lora): which models and layouts can have them, and what does not go with them."""

from collections.abc import Callable, Iterator
from os.path import isdir

from mrl.config.rule_row import RuleRow
from mrl.config.schema import LoraConfig, RunConfig
from mrl.errors import MrlError, Violation
from mrl.model import ModelSpec
from mrl.model.adapters import adapted_modules, smallest_side
from mrl.model.layout import TrainLayout
from mrl.model.peft_files import check_base, read_peft

_RANK = "actor.lora.rank"
_TRANSFORMER = "model.override_transformer_config"
_ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
_OTHERWISE_NAMED = ("phi3", "mixtral", "minimax_m2", "gpt_oss")
_FUSED = ("q_proj", "k_proj", "v_proj")


def has_adapters(config: RunConfig) -> bool:
    """Whether adapters are trained instead of the weights."""
    return config.actor.lora.rank > 0


def reference_is_the_base(config: RunConfig) -> bool:
    """Whether the reference model is the actor without its adapters."""
    return has_adapters(config) and config.ref.path in (None, config.model.path)


def _with(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: has_adapters(config) and broken(config, model)


def _is_covered(model: ModelSpec) -> bool:
    return not model.is_quantised


def _has_no_target(config: RunConfig, model: ModelSpec) -> bool:
    lora = config.actor.lora.adapters
    return lora is not None and bool(lora.targets) and not adapted_modules(model, lora)


def _has_an_empty_stage(config: RunConfig, model: ModelSpec) -> bool:
    try:
        layout = TrainLayout.build(config.actor.layout, model)
    except MrlError:  # which is said by itself
        return False
    return not all(map(sum, layout.chunk_layers))


def _rank(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    lora = config.actor.lora.adapters
    if lora is None or not _is_covered(model) or not adapted_modules(model, lora):
        return
    side, weight = smallest_side(model, lora)
    if lora.rank > side:
        why = "two factors of a higher rank hold more than the weight itself"
        yield Violation(_RANK, f"must be at most {side}, the smaller side of {weight}", why, (side,))


def _needs_rank(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    lora = config.actor.lora
    if lora.rank:
        return
    for name in ("alpha", "target_modules", "dropout", "base_dtype", "path"):
        if getattr(lora, name) != getattr(LoraConfig(), name):
            yield Violation(f"actor.lora.{name}", "needs actor.lora.rank above 0", "without it there are no adapters")


def _router_losses(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    if not has_adapters(config) or not model.is_moe:
        return
    given = config.model.override_transformer_config
    for name in _ROUTER_LOSSES:
        value = given.get(name)
        coefficients = value if isinstance(value, list) else [value]
        if any(coefficients):
            why = "routers stay as the checkpoint has them, and a loss on them would move the adapters before them"
            yield Violation(f"{_TRANSFORMER}.{name}", f"must be 0 with {_RANK}", why, (0.0,))


def _cuts_heads(config: RunConfig, model: ModelSpec) -> bool:
    lora = config.actor.lora.adapters
    cut = model.num_key_value_heads % config.actor.layout.tensor_model_parallel_size
    return bool(cut) and any(name in lora.targets for name in _FUSED)


def _adapter(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """Checks that the adapter that training starts from was made for this model."""
    lora = config.actor.lora
    is_read = lora.adapters is not None and lora.path is not None and _is_covered(model)
    if not is_read or not isdir(lora.path) or not isdir(config.model.path):
        return
    try:
        read_peft(lora.path, model, lora.adapters)
        check_base(lora.path, config.model.path)
    except MrlError as error:
        yield Violation("actor.lora.path", f"cannot be started from: {error}", "")


LORA_RULES = (
    _rank,
    _needs_rank,
    RuleRow(
        "actor.lora.target_modules",
        _with(lambda c, m: not c.actor.lora.target_modules),
        "must name a module",
        "nothing would be trained",
        ("all-linear",),
    ),
    RuleRow(
        "actor.lora.target_modules",
        _with(_has_no_target),
        "must name a module that the model has",
        "nothing would be trained",
        ("all-linear",),
    ),
    RuleRow(
        _RANK,
        _with(lambda c, m: m.family in _OTHERWISE_NAMED),
        "must be 0 for a model of the {m.family} family",
        "its files join or name projections in another way, and adapters are built for q_proj, gate_proj and the like",
        (0,),
    ),
    RuleRow(
        _RANK,
        _with(lambda c, m: m.is_quantised),
        "must be 0 for a checkpoint in FP8 or 4-bit integers",
        "adapters are merged with the files of their base, which are read as they are: convert it to bfloat16 first "
        "(mrl convert hf-to-megatron, megatron-to-hf)",
        (0,),
    ),
    RuleRow(
        "actor.layout.tensor_model_parallel_size",
        _with(lambda c, m: _is_covered(m) and not m.is_latent and _cuts_heads(c, m)),
        "must divide num_key_value_heads = {m.num_key_value_heads} with adapters on q_proj, k_proj or v_proj",
        "a rank has whole heads of factor B",
    ),
    RuleRow(
        "actor.layout.pipeline_model_parallel_size",
        _with(lambda c, m: _has_an_empty_stage(c, m)),
        "must leave every pipeline stage a layer with actor.lora.rank",
        "a stage of embedding or head alone has nothing to train",
    ),
    RuleRow(
        "actor.freeze_router",
        _with(lambda c, m: c.actor.freeze_router),
        "must be false with actor.lora.rank",
        "routers are never trained then",
        (False,),
    ),
    _router_losses,
    RuleRow(
        "actor.lora.base_dtype",
        _with(lambda c, m: c.actor.lora.base_dtype != "model.dtype"),
        "must be model.dtype",
        "a quantised base needs a library that multiplies its weights in Megatron's layers, on devices and on a CPU; "
        "mrl supports none",
        ("model.dtype",),
    ),
    RuleRow(
        "actor.lora.dropout",
        _with(lambda c, m: c.actor.lora.dropout > 0 and c.algorithm.on_policy),
        "must be 0 with algorithm.anchor on_policy",
        "old log-probs come from the pass that trains, and they must be those of the model without dropout",
        (0.0,),
    ),
    RuleRow(
        "ref.param_offload",
        lambda c, m: reference_is_the_base(c) and c.ref.param_offload,
        "must be false with actor.lora.rank",
        "the reference model is the actor without its adapters, and takes no memory of its own",
        (False,),
    ),
)
LORA_PATH_RULES = (_adapter,)
