"""Rules of engines that hold weights in FP8 (rollout.quantization): which models, devices and layouts can have them."""

from collections.abc import Callable, Iterator

from mrl.config.deployment import rollout_layout
from mrl.config.family_rules import engine_is_old, on_device
from mrl.config.rule_row import RuleRow
from mrl.config.schema import RunConfig
from mrl.errors import MrlError, Violation
from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout
from mrl.model.quantised import BLOCK, quantised_faults
from mrl.model.quantised_shards import ranks_fault, workers_fault

_KEY = "rollout.quantization"
_BLOCK = "rollout.quantization_block"
_VLLM = "rollout.engine_kwargs.vllm"


def quantisation_notes(config: RunConfig) -> Iterator[str]:
    """Yields notes on a gap to training that nothing corrects, and on what computes FP8 on a CPU."""
    if config.rollout.quantization is None:
        return
    algorithm = config.algorithm
    if algorithm.rollout_correction.level is None and algorithm.anchor != "rollout":
        is_filtered = config.rollout.top_p != 1 or config.rollout.top_k != -1
        cure = "level: token (TIS) weighs the gap"
        if is_filtered or algorithm.on_policy:
            cure = "nothing here weighs the gap"
        yield (
            f"{_KEY} {config.rollout.quantization} without algorithm.rollout_correction: responses are sampled from "
            f"rounded weights and trained as if from exact ones; {cure}"
        )
    if on_device(config, "cpu"):
        yield (
            f"{_KEY} {config.rollout.quantization} on cpu: engines hold the FP8 values and scales as on devices "
            "but compute with the products in rollout.dtype, where GPU kernels also quantise activations"
        )


def ranks_block(config: RunConfig) -> int:
    """Rows and columns of the blocks that the actor's ranks must leave whole; 0 where they need not.

    On the slow path a tensor becomes FP8 values once it is whole.
    """
    if config.reshard.path == "slow":
        return 0
    return config.rollout.fp8_block


def _is_on(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: config.rollout.quantization is not None and broken(config, model)


def _family(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    if config.rollout.quantization is None:
        return
    for why in quantised_faults(model):
        yield Violation(_KEY, f"must be null for a model of the {model.family} family", why, (None,))


def _cuts(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    block = config.rollout.fp8_block
    if not block or any(quantised_faults(model)):
        return
    try:
        train = TrainLayout.build(config.actor.layout, model)
        of_workers = workers_fault(model, rollout_layout(config.rollout), block)
    except MrlError:  # another rule reports it
        return
    if fault := ranks_fault(model, train, ranks_block(config)) or of_workers:
        rule = f"needs cuts between blocks of {block} x {block}: {fault}"
        why = "a block has one scale, which comes from all of it; choose degrees of parallelism that leave blocks whole"
        yield Violation(_KEY, rule, why, (None,))


QUANTISATION_RULES = (
    RuleRow(
        _KEY,
        _is_on(lambda c, m: on_device(c, "npu")),
        "must be null on npu",
        "vllm-ascend has no kernels for FP8 weights with a scale a block",
        (None,),
    ),
    RuleRow(
        _KEY,
        _is_on(lambda c, m: (c.cluster.accelerator or "").startswith("a100")),
        "must be null on A100",
        "its tensor cores compute nothing in FP8",
        (None,),
    ),
    RuleRow(
        _KEY,
        _is_on(engine_is_old),
        "needs vLLM 0.32",
        "the weight sync knows FP8 values and scales as that release has them",
        (None,),
    ),
    _family,
    *(
        RuleRow(
            key,
            _is_on(differs),
            f"must be bfloat16 with {_KEY}",
            "an FP8 value rounds a bfloat16 number, and vLLM computes with it in bfloat16",
            ("bfloat16",),
        )
        for key, differs in (
            ("model.dtype", lambda c, m: c.model.dtype != "bfloat16"),
            ("rollout.dtype", lambda c, m: c.rollout.dtype not in (None, "bfloat16")),
        )
    ),
    _cuts,
    RuleRow(
        _BLOCK,
        _is_on(lambda c, m: not on_device(c, "cpu") and c.rollout.quantization_block != BLOCK),
        f"must be {BLOCK} outside cpu",
        "kernels of FP8 know no other blocks",
        (BLOCK,),
    ),
    RuleRow(
        _BLOCK,
        lambda c, m: c.rollout.quantization is None and c.rollout.quantization_block != BLOCK,
        f"needs {_KEY}",
        "without it nothing has blocks, and the setting would be ignored",
        (BLOCK,),
    ),
    *(
        RuleRow(
            f"{_VLLM}.{name}",
            _is_on(lambda c, m, name=name: name in c.rollout.vllm_kwargs),
            f"must be left out with {_KEY}",
            why,
        )
        for name, why in (
            ("load_format", "no file has FP8 values; the first weight sync brings them"),
            ("hf_overrides", "mrl itself sets there how FP8 values are stored"),
        )
    ),
)
