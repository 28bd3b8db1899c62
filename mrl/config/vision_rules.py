"""Rules of images (model.vision): which models and layouts can have them, and what does not go with them."""

from collections.abc import Callable, Iterator

from mrl.config.rule_row import RuleRow
from mrl.config.schema import RunConfig
from mrl.errors import MrlError, Violation
from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout
from mrl.model.trained_tower import PROJECTOR, TRAINED

_VISION = "model.vision"
_OF_IMAGES = {
    "language_model_only", "limit_mm_per_prompt", "mm_device_do_normalize", "mm_encoder_only", "mm_encoder_tp_mode",
    "mm_processor_cache_gb", "mm_processor_kwargs", "skip_mm_profiling",
}  # fmt: skip
_BLIND = "is not computed with images yet"


def _seeing(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: config.model.vision is not None and broken(config, model)


def _first_layers(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    if config.model.vision is None or model.tower is None:
        return
    try:
        layout = TrainLayout.build(config.actor.layout.model_dump(), model)
    except MrlError:  # which is said by itself
        return
    first = layout.chunk_layers[0][0]
    if first < model.tower.features:
        yield Violation(
            "actor.layout",
            f"must give the first pipeline chunk at least {model.tower.features} decoder layers; it has {first}",
            "features of images are added behind so many layers (deepstack_visual_indexes), and one tensor alone goes "
            "from chunk to chunk",
        )


def _training(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: config.model.vision in (TRAINED, PROJECTOR) and broken(config, model)


_OF_TRAINED = "with model.vision: trained or projector"
TRAINED_RULES = (
    RuleRow(
        "actor.optim.vision_lr",
        lambda c, m: c.actor.optim.vision_lr is not None and c.model.vision not in (TRAINED, PROJECTOR),
        "must be left out",
        "no vision tower is trained, which model.vision says",
        (None,),
    ),
    RuleRow(
        "actor.lora.rank",
        _training(lambda c, m: c.actor.lora.rank > 0),
        f"must be 0 {_OF_TRAINED}",
        "a checkpoint of adapters has no weights of a tower",
        (0,),
    ),
    RuleRow(
        "trainer.schedule",
        _training(lambda c, m: c.trainer.schedule != "sync"),
        f"must be sync {_OF_TRAINED}",
        "an engine that continues requests after a sync has forgotten features of images that they have yet to read",
        ("sync",),
    ),
    RuleRow(
        "cluster.placement",
        _training(lambda c, m: c.cluster.placement == "colocated"),
        f"must be separate {_OF_TRAINED}",
        "a tower that sleeps and then comes with a sync has not been tried",
        ("separate",),
    ),
    RuleRow(
        "actor.override_ddp_config.overlap_grad_reduce",
        _training(lambda c, m: bool(c.actor.override_ddp_config.get("overlap_grad_reduce"))),
        f"must be false {_OF_TRAINED}",
        "the tower goes backward after the last micro-batch, when Megatron has begun to sum gradients",
        (False,),
    ),
)

VISION_RULES = (
    RuleRow(
        _VISION,
        _seeing(lambda c, m: not m.is_wrapped),
        "must be null for a model that reads text alone",
        "the checkpoint in model.path has no vision tower",
        (None,),
    ),
    *TRAINED_RULES,
    _first_layers,
    RuleRow(
        "rollout.turns",
        _seeing(lambda c, m: c.rollout.turns is not None),
        "must be null with model.vision",
        "engines do not carry images from turn to turn yet",
        (None,),
    ),
    RuleRow(
        "rollout.quantization",
        _seeing(lambda c, m: c.rollout.quantization is not None),
        "must be null with model.vision",
        "vLLM would quantise the vision tower with the text model",
        (None,),
    ),
    RuleRow(
        "rollout.speculation",
        _seeing(lambda c, m: c.rollout.speculation is not None),
        "must be null with model.vision",
        f"drafting behind images {_BLIND}",
        (None,),
    ),
    RuleRow(
        "algorithm.adv_estimator",
        _seeing(lambda c, m: c.algorithm.needs_critic),
        "must be one without a critic with model.vision",
        f"a critic {_BLIND}",
    ),
    RuleRow(
        "distillation.enabled",
        _seeing(lambda c, m: c.distillation.enabled),
        "must be false with model.vision",
        f"a teacher {_BLIND}",
        (False,),
    ),
    RuleRow(
        "ref.path",
        _seeing(lambda c, m: c.ref.path not in (None, c.model.path)),
        "must be left out with model.vision",
        "the reference model would see through the actor's vision tower",
        (None,),
    ),
    RuleRow(
        "rollout.engine_kwargs",
        _seeing(lambda c, m: bool(_OF_IMAGES & c.rollout.vllm_kwargs.keys())),
        f"must leave out vLLM's arguments of images with model.vision: {', '.join(sorted(_OF_IMAGES))}",
        "mrl sets them, so that engines see what ranks see",
    ),
    RuleRow(
        "model.override_transformer_config.apply_rope_fusion",
        _seeing(lambda c, m: bool(c.model.override_transformer_config.get("apply_rope_fusion"))),
        "must be false with model.vision",
        "Megatron's fused kernel turns by one position a token, and those of images have three",
        (False,),
    ),
)
