"""Rules of images (model.vision): which models and layouts can have them, and what does not go with them."""

from collections.abc import Callable, Iterator
from os.path import isdir
from pathlib import Path
from typing import Any

from mrl.config.rule_row import Rule, RuleRow
from mrl.config.schema import LayoutConfig, RunConfig
from mrl.errors import MrlError, Violation
from mrl.model import ModelSpec, read_hf_config
from mrl.model.layout import TrainLayout
from mrl.model.peft_files import tower_digest
from mrl.model.trained_tower import FROZEN, PROJECTOR, TRAINED
from mrl.plain_files import TEXT_BYTES, read_settings

_VISION = "model.vision"
_OF_IMAGES = {
    "language_model_only", "limit_mm_per_prompt", "mm_device_do_normalize", "mm_encoder_only", "mm_encoder_tp_mode",
    "mm_processor_cache_gb", "mm_processor_kwargs", "skip_mm_profiling",
}  # fmt: skip
_PROCESSOR = "preprocessor_config.json"
_SIZES = ("patch_size", "temporal_patch_size", "spatial_merge_size")  # of config.json's vision_config
_NUMBERS = ("image_mean", "image_std", "rescale_factor", "do_rescale", "do_normalize")  # of an image processor
_BLIND = "is not computed with images yet"


def _seeing(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: config.model.vision is not None and broken(config, model)


def first_layers(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """Checks that the actor's first pipeline chunk has the layers behind which features of images are added."""
    if config.model.vision is not None:
        yield from narrow_first_chunk(config.actor.layout, model, "actor.layout")


def narrow_first_chunk(degrees: LayoutConfig, model: ModelSpec, field: str) -> Iterator[Violation]:
    """Says where a model that sees has fewer layers in its first pipeline chunk than features to add."""
    if model.tower is None:
        return
    try:
        layout = TrainLayout.build(degrees, model)
    except MrlError:  # which is said by itself
        return
    first = layout.chunk_layers[0][0]
    if first < model.tower.features:
        yield Violation(
            field,
            f"must give the first pipeline chunk at least {model.tower.features} decoder layers; it has {first}",
            "features of images are added behind so many layers (deepstack_visual_indexes), and one tensor alone goes "
            "from chunk to chunk",
        )


def _training(broken: Callable[[RunConfig, ModelSpec], bool]) -> Callable[[RunConfig, ModelSpec], bool]:
    return lambda config, model: config.model.vision in (TRAINED, PROJECTOR) and broken(config, model)


def _eyes(folder: str) -> dict[str, Any]:
    """Returns what decides which numbers a model is given of an image, and where they go."""
    config = read_hf_config(folder)
    found = {key: config.get(key) for key in ("image_token_id", "vision_start_token_id")}
    found |= {key: (config.get("vision_config") or {}).get(key) for key in _SIZES}
    file = Path(folder) / _PROCESSOR
    if file.is_file():
        processor = read_settings(file, TEXT_BYTES)
        found |= {f"{_PROCESSOR}: {key}": processor[key] for key in _NUMBERS if key in processor}
    return found


def _sees_the_same(field: str, folder: Callable[[RunConfig], str | None]) -> Rule:
    """Builds the rule that a second model takes the pixels and the tokens that the actor is given of an image."""

    def judge(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
        path = folder(config)
        if config.model.vision is None or path is None or not (isdir(path) and isdir(config.model.path)):
            return
        try:
            own, other = _eyes(config.model.path), _eyes(path)
        except MrlError as error:
            yield Violation(field, f"cannot be used: {error}")
            return
        if odd := [key for key in own if key in other and own[key] != other[key]]:
            shown = ", ".join(f"{key} = {other[key]} instead of {own[key]}" for key in odd[:3])
            yield Violation(
                field,
                f"sees otherwise than model.path: {shown}",
                "it is given the pixels that model.path's processor makes",
            )

    return judge


def _reference_tower(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """A reference looks through the actor's frozen tower."""
    path = config.ref.path
    if config.model.vision != FROZEN or path is None or not (isdir(path) and isdir(config.model.path)):
        return
    try:
        same = tower_digest(path) == tower_digest(config.model.path)
    except MrlError as error:
        yield Violation("ref.path", f"cannot be used: {error}")
        return
    if not same:
        yield Violation(
            "ref.path",
            "has another vision tower than model.path",
            "the reference model sees through the actor's, which is frozen (model.vision)",
        )


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
        "after a sync an engine lacks features of images that its unfinished requests still need",
        ("sync",),
    ),
    RuleRow(
        "algorithm.adv_estimator",
        _training(lambda c, m: c.algorithm.needs_critic),
        f"must be one without a critic {_OF_TRAINED}",
        "the critic's vision tower is not trained",
    ),
    RuleRow(
        "actor.override_ddp_config.overlap_grad_reduce",
        _training(lambda c, m: bool(c.actor.override_ddp_config.get("overlap_grad_reduce"))),
        f"must be false {_OF_TRAINED}",
        "the tower's backward comes after the last micro-batch, when Megatron already sums gradients",
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
    first_layers,
    RuleRow(
        "rollout.speculation",
        _seeing(lambda c, m: c.rollout.speculation is not None),
        "must be null with model.vision",
        f"drafting behind images {_BLIND}",
        (None,),
    ),
    RuleRow(
        "rollout.engine_kwargs",
        _seeing(lambda c, m: bool(_OF_IMAGES & c.rollout.vllm_kwargs.keys())),
        f"must leave out vLLM's arguments of images with model.vision: {', '.join(sorted(_OF_IMAGES))}",
        "mrl sets them for engines",
    ),
    RuleRow(
        "model.override_transformer_config.apply_rope_fusion",
        _seeing(lambda c, m: bool(c.model.override_transformer_config.get("apply_rope_fusion"))),
        "must be false with model.vision",
        "Megatron's fused kernel turns by one position a token, and those of images have three",
        (False,),
    ),
)

VISION_PATH_RULES = (
    _sees_the_same("critic.path", lambda c: c.critic.path if c.algorithm.needs_critic else None),
    _sees_the_same("ref.path", lambda c: c.ref.path if c.algorithm.needs_reference else None),
    _sees_the_same(
        "distillation.teacher_model.model_path",
        lambda c: c.distillation.teacher_model.model_path if c.distillation.enabled else None,
    ),
    _reference_tower,
)
