"""The shape of a run's configuration: every key, its type, default and meaning. No torch, no file access.

Names are verl's wherever verl has the same thing, so that what people know carries over. Unknown keys are refused.
The sections stand in schema_actor.py, schema_algorithm.py, schema_distillation.py, schema_rollout.py, schema_data.py
and schema_run.py; everybody else imports them from here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mrl.config.schema_actor import (
    ActorConfig,
    CriticConfig,
    Dtype,
    LayoutConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RefConfig,
)
from mrl.config.schema_algorithm import (
    AlgorithmConfig,
    CustomLossConfig,
    FilterGroupsConfig,
    KlControlConfig,
    OverlongBufferConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
)
from mrl.config.schema_data import CustomRewardConfig, DataConfig, RewardConfig
from mrl.config.schema_distillation import DistillationConfig, DistillationLossConfig, TeacherConfig
from mrl.config.schema_rollout import RolloutConfig, ValSamplingConfig
from mrl.config.schema_run import ClusterConfig, RecordConfig, ReshardConfig, TrainerConfig
from mrl.config.section import Section, notes_of, section_of

__all__ = [
    "OTHER_LAYOUTS",
    "ActorConfig",
    "AlgorithmConfig",
    "ClusterConfig",
    "CriticConfig",
    "CustomLossConfig",
    "CustomRewardConfig",
    "DataConfig",
    "DistillationConfig",
    "DistillationLossConfig",
    "Dtype",
    "FilterGroupsConfig",
    "KlControlConfig",
    "LayoutConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PolicyLossConfig",
    "RecordConfig",
    "RefConfig",
    "ReshardConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "Section",
    "TeacherConfig",
    "TrainerConfig",
    "ValSamplingConfig",
    "leaf",
    "schema_keys",
    "schema_paths",
    "verl_names",
]

# sections with the keys of actor.layout
OTHER_LAYOUTS = ("ref.layout", "critic.layout", "distillation.teacher_model.layout")


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    actor: ActorConfig
    ref: RefConfig = RefConfig()
    critic: CriticConfig = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    distillation: DistillationConfig = DistillationConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    reshard: ReshardConfig = ReshardConfig()
    record: RecordConfig = RecordConfig()

    @property
    def rollout_dtype(self) -> str:
        """Number format of the engines' weights: rollout.dtype, else the model's."""
        return self.rollout.weights_dtype(self.model.dtype)

    @property
    def scores_before_update(self) -> bool:
        """Whether a pass of log-probs comes before the update: the old policy's, a reference model's, the teacher's."""
        return self.algorithm.scores_before_update or self.distillation.enabled

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps on the responses of one training step."""
        return -(-self.data.train_batch_size // self.actor.ppo_mini_batch_size)

    @property
    def total_updates(self) -> int | None:
        """Optimizer steps of the whole run without those that train a critic alone; None when its length is given in
        epochs.
        """
        steps = self.trainer.total_training_steps
        if steps is None:
            return None
        return max(steps - self.trainer.warmup_steps, 1) * self.updates_per_step

    @property
    def of_critic(self) -> "RunConfig | None":
        """The run with the critic in the actor's place, whose steps are all trained, and without a reference; None
        without a critic.
        """
        if not self.algorithm.needs_critic:
            return None
        trainer = self.trainer.model_copy(update={"critic_warmup": 0})
        actor = self.critic.as_actor(self.actor)
        model = self.model.model_copy(update={"path": self.critic.path or self.model.path})
        return self.model_copy(update={"actor": actor, "model": model, "trainer": trainer, "ref": RefConfig()})


def leaf(config: BaseModel, field: str) -> Any:
    """The value of a dotted key; None where the path ends early."""
    value: Any = config
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The configuration with other values of dotted keys. Raises ValueError for what the schema does not take."""
    dumped = config.model_dump()
    for field, value in values.items():
        *path, last = field.split(".")
        section = dumped
        for part in path:
            section = section[part]
        section[last] = value
    return RunConfig.model_validate(dumped)


def schema_paths(root: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted path of the schema with its field, sections included."""
    for name, field in root.model_fields.items():
        yield prefix + name, field
        section = section_of(field.annotation)
        if section is not None:
            yield from schema_paths(section, f"{prefix}{name}.")


def schema_keys() -> dict[str, FieldInfo]:
    """Every dotted key that holds a value."""
    return {path: field for path, field in schema_paths() if section_of(field.annotation) is None}


def verl_names() -> dict[str, str]:
    """verl's keys that mean what a key here means and take the same values, and that key; none of OTHER_LAYOUTS.

    Nor is one of `critic.optim`, which has the actor's fields.
    """
    others = (*(f"{name}." for name in OTHER_LAYOUTS), "critic.optim.")
    keys = {path: field for path, field in schema_keys().items() if not path.startswith(others)}
    return {name: path for path, field in keys.items() for name in notes_of(field).verl}
