"""The complete schema of a run's configuration. It loads no torch and reads no file.

Names are verl's wherever verl has the same option. The sections stand in schema_actor.py, schema_algorithm.py,
schema_distillation.py, schema_rollout.py, schema_data.py and schema_run.py. Other modules import them from here.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, model_validator
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
from mrl.config.schema_run import ClusterConfig, ProfileConfig, RecordConfig, ReshardConfig, TrainerConfig
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
    "ProfileConfig",
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

# sections with the keys of actor.layout, which have the actor's values where they are left out
OTHER_LAYOUTS = ("critic.layout", "distillation.teacher_model.layout")


class RunConfig(Section):
    """The configuration of a whole run."""

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

    @model_validator(mode="after")
    def _with_whole_layouts(self) -> "RunConfig":
        """Second models' layouts, which say what differs from the actor's, are whole from here on."""
        critic, teacher = self.critic, self.distillation.teacher_model
        if critic.layout is not None:
            critic = critic.model_copy(update={"layout": critic.layout.beside(self.actor.layout)})
        if teacher.layout is not None:
            teacher = teacher.model_copy(update={"layout": teacher.layout.beside(self.actor.layout)})
        distillation = self.distillation.model_copy(update={"teacher_model": teacher})
        return self.model_copy(update={"critic": critic, "distillation": distillation})

    @property
    def rollout_dtype(self) -> str:
        """Number format of the engines' weights: rollout.dtype, or model.dtype where that is left out."""
        return self.rollout.weights_dtype(self.model.dtype)

    @property
    def scores_before_update(self) -> bool:
        """Whether a step computes log-probs before its update: of the old policy, a reference model or a teacher."""
        return self.algorithm.scores_before_update or self.distillation.enabled

    @property
    def mini_batches(self) -> int:
        """Mini-batches of a step's samples, which are the optimizer updates of one epoch over them."""
        return -(-self.data.train_batch_size // self.actor.ppo_mini_batch_size)

    @property
    def epochs(self) -> tuple[int, int]:
        """Times that a step trains on its samples: the actor, and a critic."""
        return self.actor.ppo_epochs, self.critic.ppo_epochs or self.actor.ppo_epochs

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates in one training step."""
        return self.mini_batches * self.actor.ppo_epochs

    @property
    def total_updates(self) -> int | None:
        """Optimizer updates of the actor in the whole run. None where the length is given in epochs."""
        steps = self.trainer.total_training_steps
        if steps is None:
            return None
        return max(steps - self.trainer.warmup_steps, 1) * self.updates_per_step

    @property
    def compares_responses(self) -> bool:
        """Whether what is trained on depends on how responses to one prompt compare."""
        return self.algorithm.needs_group and not self.distillation.alone

    @property
    def of_critic(self) -> "RunConfig | None":
        """The run with the critic in the actor's place, or None without a critic.

        All its steps are trained, and it has no reference.
        """
        if not self.algorithm.needs_critic:
            return None
        trainer = self.trainer.model_copy(update={"critic_warmup": 0})
        actor = self.critic.as_actor(self.actor)
        model = self.model.model_copy(update={"path": self.critic.path or self.model.path})
        return self.model_copy(update={"actor": actor, "model": model, "trainer": trainer, "ref": RefConfig()})


def leaf(config: BaseModel, field: str) -> Any:
    """Returns the value of a dotted key, or None where the path ends early."""
    value: Any = config
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Returns a copy of the configuration with new values for dotted keys.

    Raises ValueError where the schema does not accept a value.
    """
    dumped = config.model_dump()
    for field, value in values.items():
        *path, last = field.split(".")
        section = dumped
        for part in path:
            section = section[part]
        section[last] = value
    return RunConfig.model_validate(dumped)


def schema_paths(root: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields every dotted path of the schema with its field, sections included."""
    for name, field in root.model_fields.items():
        yield prefix + name, field
        section = section_of(field.annotation)
        if section is not None:
            yield from schema_paths(section, f"{prefix}{name}.")


@cache
def schema_keys() -> dict[str, FieldInfo]:
    """Returns every dotted key that holds a value, with its field. Calls share one table, so nobody may change it."""
    return {path: field for path, field in schema_paths() if section_of(field.annotation) is None}


def verl_names() -> dict[str, str]:
    """Maps verl's keys to keys of this schema that mean the same and take the same values.

    Keys of OTHER_LAYOUTS and of `critic.optim` are left out, because they repeat the actor's.
    """
    others = (*(f"{name}." for name in OTHER_LAYOUTS), "critic.optim.")
    keys = {path: field for path, field in schema_keys().items() if not path.startswith(others)}
    return {name: path for path, field in keys.items() for name in notes_of(field).verl}
