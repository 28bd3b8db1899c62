"""Describes a configuration's teacher: its model, and its layout on the actor's ranks."""

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
    """Returns the teacher's degrees: its own, or else the actor's, without the actor's expert degrees where it has no
    experts.
    """
    actor = config.actor.layout
    degrees = config.distillation.teacher_model.layout or actor
    if not model.is_moe and degrees.expert_model_parallel_size == actor.expert_model_parallel_size:
        degrees = degrees.model_copy(update={"expert_model_parallel_size": 1})
    if not model.is_moe and degrees.expert_tensor_parallel_size == actor.expert_tensor_parallel_size:
        degrees = degrees.model_copy(update={"expert_tensor_parallel_size": None})
    return degrees


def teacher_of(config: RunConfig, read: Callable[[str], ModelSpec]) -> TeacherModel | None:
    """Returns the teacher, or None without distillation. `read` loads the ModelSpec of a path.

    Raises ConfigError like TrainLayout.build, and whatever `read` raises.
    """
    if not config.distillation.enabled:
        return None
    model = read(config.distillation.teacher_model.model_path)
    return TeacherModel(model, TrainLayout.build(teacher_layout(config, model), model))
