"""The teacher of a configuration: what model it is, and how it lies on the actor's ranks."""

from collections.abc import Callable
from dataclasses import dataclass

from mrl.config.schema import LayoutConfig, RunConfig
from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout


@dataclass(frozen=True)
class TeacherModel:
    """The teacher's sizes and its layout, which has as many ranks as the actor's."""

    model: ModelSpec
    layout: TrainLayout


def teacher_layout(config: RunConfig, model: ModelSpec) -> LayoutConfig:
    """The teacher's degrees: its own, else the actor's, without those of experts where it has none."""
    own = config.distillation.teacher_model.layout
    if own is not None:
        return own
    if model.is_moe:
        return config.actor.layout
    return config.actor.layout.model_copy(update={"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None})


def teacher_of(config: RunConfig, read: Callable[[str], ModelSpec]) -> TeacherModel | None:
    """The teacher, whose config.json `read` reads; None without distillation. Raises ConfigError as TrainLayout.build
    does, and what `read` raises.
    """
    if not config.distillation.enabled:
        return None
    model = read(config.distillation.teacher_model.model_path)
    return TeacherModel(model, TrainLayout.build(teacher_layout(config, model).model_dump(), model))
