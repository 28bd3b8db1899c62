"""Changes that would make a plan fit. Each is tried on the configuration, and suggested only if the whole plan then
fits.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from mrl.config.load import ResolvedConfig
from mrl.config.lora_rules import reference_is_the_base
from mrl.config.rules import violations
from mrl.config.schema import RunConfig, with_values
from mrl.config.schema_actor import SWITCHES
from mrl.config.yaml_tree import dump_value
from mrl.errors import ConfigError
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import PlanInputs

_Change = dict[str, Any]  # dotted key -> value
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
HOST_ADAM = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "use_precision_aware_optimizer": True,
}
_TRANSFORMER = "model.override_transformer_config"
_OPTIMIZER = "actor.optim.override_optimizer_config"
_DOUBLED = (
    "expert_model_parallel_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
)
_TEACHER = "distillation.teacher_model"
_PASS_LIMITS = ("log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
_SHOWN = 5


def fitting_changes(inputs: PlanInputs) -> list[list[str]]:
    """Returns lists of arguments for --set that each make the plan fit.

    Single changes are tried first, then pairs. The change that costs the least speed stands first.
    """
    single = [change for change in _changes(inputs.config) if change]
    for tried in (single, [first | second for first, second in combinations(single, 2)]):
        if fitting := [_settings(change) for change in tried if _fits(inputs, change)]:
            return fitting[:_SHOWN]
    return []


def _changes(config: RunConfig) -> Iterator[_Change]:
    actor = config.actor
    rollout = config.rollout
    if actor.ppo_micro_batch_size_per_gpu > 1 and not actor.use_dynamic_bsz:
        least = {"actor.ppo_micro_batch_size_per_gpu": 1, "actor.log_prob_micro_batch_size_per_gpu": 1}
        yield least | _limits_left_out(config)
    yield _least_tokens(config)
    yield _limits_left_out(config)
    for name in (
        ("param_offload", "grad_offload", "optimizer_offload") if config.cluster.placement == "colocated" else ()
    ):
        yield {} if getattr(actor, name) else {f"actor.{name}": True}
    for name in SWITCHES.values() if config.algorithm.needs_critic else ():
        yield {} if getattr(config.critic, name) else {f"critic.{name}": True}
    if config.algorithm.needs_reference and not reference_is_the_base(config):
        yield {} if config.ref.param_offload else {"ref.param_offload": True}
    if config.distillation.enabled:
        yield {} if config.distillation.teacher_model.param_offload else {f"{_TEACHER}.param_offload": True}
    if config.model.override_transformer_config.get("recompute_granularity") != "full":
        has_modules = bool(config.model.override_transformer_config.get("recompute_modules"))
        fields = _RECOMPUTE | ({"recompute_modules": None} if has_modules else {})
        yield {f"{_TRANSFORMER}.{key}": value for key, value in fields.items()}
    for name in _DOUBLED:
        yield {f"actor.layout.{name}": 2 * getattr(actor.layout, name)}
    if not actor.optim.override_optimizer_config.get("optimizer_cpu_offload"):
        yield {f"{_OPTIMIZER}.{key}": value for key, value in HOST_ADAM.items()}
    if rollout.num_engines % 2 == 0:
        yield {
            "rollout.tensor_model_parallel_size": 2 * rollout.tensor_model_parallel_size,
            "rollout.num_engines": rollout.num_engines // 2,
        }
    for share in (0.1, 0.2):
        yield {"rollout.gpu_memory_utilization": round(rollout.gpu_memory_utilization - share, 2)}


def _least_tokens(config: RunConfig) -> _Change:
    """Returns the smallest token budget that holds the longest sample; empty where the budget is not larger."""
    actor = config.actor
    data = config.data
    least = -(-data.max_sample_length // actor.layout.context_parallel_size)
    if (
        not actor.use_dynamic_bsz
        or max(actor.ppo_max_token_len_per_gpu or 0, actor.log_prob_max_token_len_per_gpu or 0) <= least
    ):
        return {}
    smallest = {"actor.ppo_max_token_len_per_gpu": least, "actor.log_prob_max_token_len_per_gpu": least}
    return smallest | _limits_left_out(config)


def _limits_left_out(config: RunConfig) -> _Change:
    """Leaves out the limits of micro-batches that reference and teacher have of their own: the actor's then hold."""
    own = {"ref": config.ref} if config.algorithm.needs_reference else {}
    if config.distillation.enabled:
        own[_TEACHER] = config.distillation.teacher_model
    return {
        f"{section}.{name}": None
        for section, keys in own.items()
        for name in _PASS_LIMITS
        if getattr(keys, name, None) is not None
    }


def _fits(inputs: PlanInputs, change: _Change) -> bool:
    try:
        config = with_values(inputs.config, change)
        if violations(ResolvedConfig(config, {}), inputs.model):
            return False
        changed = PlanInputs.of(config, inputs.model, inputs.device, inputs.assumptions, inputs.validation_prompts)
        return memory_section(changed)["fits"]
    except (ConfigError, ValueError):  # no such layout, or no value that the schema takes
        return False


def _settings(change: _Change) -> list[str]:
    return [f"{key}={dump_value(value)}" for key, value in change.items()]
