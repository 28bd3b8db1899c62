"""Costs of a distillation's teacher: bytes on a rank, seconds a step.

It lies on the actor's ranks in a layout of its own. Its fullest stage is counted beside each of the actor's.
"""

from dataclasses import dataclass, replace

from mrl.config.schema import RunConfig
from mrl.config.schema_actor import LoraConfig
from mrl.config.teacher_model import teacher_of
from mrl.model import ModelSpec, planning_model_spec
from mrl.model.precision import Precision
from mrl.plan.model_state import stage_state
from mrl.plan.plan_inputs import PlanInputs


@dataclass(frozen=True)
class TeacherBytes:
    """Bytes of the teacher on the fullest rank; 0: there is none."""

    parameters: int = 0
    log_prob: int = 0  # activations of its pass
    batch: int = 0  # inputs of its micro-batches, and outputs of the pass
    looking: int = 0  # at images: its own tower's pass and features


def teacher_inputs(inputs: PlanInputs) -> PlanInputs | None:
    """Returns the same inputs with the teacher in the actor's place, for its passes only; None without distillation.

    Raises ConfigError for an illegal layout, and for an unknown teacher.
    """
    teacher = teacher_of(inputs.config, _known)
    if teacher is None:
        return None
    return replace(inputs, config=_as_actor(inputs.config), model=teacher.model, train=teacher.layout)


def _known(path: str) -> ModelSpec:
    return planning_model_spec(path)[0]


def _as_actor(config: RunConfig) -> RunConfig:
    """Returns the configuration with the teacher's micro-batch limits and Megatron fields in the actor's place."""
    own = config.distillation.teacher_model
    limits = {
        "log_prob_micro_batch_size_per_gpu": own.log_prob_micro_batch_size_per_gpu,
        "log_prob_max_token_len_per_gpu": own.log_prob_max_token_len_per_gpu,
        "router_replay": "disabled",
        "lora": LoraConfig(),  # adapters are the student's
    }
    given = {name: value for name, value in limits.items() if value is not None}
    model = config.model.model_copy(update={"override_transformer_config": own.override_transformer_config})
    return config.model_copy(update={"actor": config.actor.model_copy(update=given), "model": model})


def teacher_parameters(teacher: PlanInputs) -> int:
    """Returns the bytes of the teacher's parameters on the fullest rank. `teacher` comes from `teacher_inputs`."""
    precision = Precision(teacher.element_bytes)
    stages = range(teacher.train.pipeline)
    return max(stage_state(teacher.model, teacher.train, pp, precision).parameters for pp in stages)
