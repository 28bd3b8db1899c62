"""Collects all rules for values, between keys, and between a key and the model. All are judged, so one look shows all.

Each rule is a row or a function (rule_row.py) in one of the files `*_rules.py`. A rule of a single key stands at its
key. Rules are judged one by one. Where the schema refuses a part of a configuration (mrl/config/load.py), rules that do
not read that part are still judged. A function ends where it reads a refused key. So a function holds one rule, or
rules that read the same keys.

Everything that refuses a layout before a run. A test holds that each file of rules that names a degree is here:

    limits of one key    at the key: schema_actor.py, schema_rollout.py
    actor's degrees      mrl/model/layout_rules.py, for critic and teacher too (critic_rules.py, distillation_rules.py)
    batches on them      actor_rules.py, loss_rules.py (rows of a mini-batch)
    engines' degrees     rollout_rules.py, mrl/model/layout.py (RolloutLayout)
    by family            family_rules.py
    by feature           lora_rules.py, quantisation_rules.py, efficiency_rules.py, vision_rules.py,
                         speculation_rules.py
    by device, version   device_rules.py
    by Megatron's keys   override_rules.py
    devices of processes mrl/model/device_grid.py
    weights of a worker  mrl/model/vllm_parameters.py; blocks of FP8: mrl/model/quantised_shards.py
    a sync between them  mrl/reshard/plan.py (dtype, topology, budget, and a plan that is not proved)
    engines' memory      mrl/plan/plan_rules.py; that of ranks is only predicted, by `mrl plan`
    the cluster's size   mrl/cluster/prerequisites.py (check_size), once Ray is there

What is checked again where processes start (mrl/rank/parallel.py, mrl/engine/handshake.py) is a guard: a configuration
that got so far does not break it. In a run only memory can: mrl/cluster/gates.py.

In words, generated from the same rules: docs/layouts.md and docs/refusals.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mrl.config.actor_rules import ACTOR_RULES, actor_notes
from mrl.config.critic_rules import CRITIC_RULES
from mrl.config.device_rules import DEVICE_RULES, narrow_experts, npu_notes, version_notes
from mrl.config.distillation_rules import DISTILLATION_RULES, distillation_notes
from mrl.config.efficiency_rules import EFFICIENCY_RULES
from mrl.config.endpoint_rules import ENDPOINT_RULES
from mrl.config.family_rules import HYBRID_RULES, LATENT_RULES, ROTATION_RULES, SINK_RULES
from mrl.config.load import ResolvedConfig, SchemaRefusal
from mrl.config.lora_rules import LORA_RULES
from mrl.config.loss_rules import LOSS_RULES, loss_notes
from mrl.config.override_rules import OVERRIDE_RULES, override_notes
from mrl.config.quantisation_rules import QUANTISATION_RULES, quantisation_notes
from mrl.config.rollout_rules import ROLLOUT_RULES, reshard_notes, rollout_notes
from mrl.config.rule_row import Rule
from mrl.config.run_rules import PATH_RULES, RUN_RULES, SEEN_RULES, template_notes
from mrl.config.schedule_rules import SCHEDULE_RULES, schedule_notes
from mrl.config.schema import RunConfig, leaf, schema_keys
from mrl.config.section import KeyRule, Section, notes_of
from mrl.config.speculation_rules import SPECULATION_RULES, speculation_notes
from mrl.config.vision_rules import VISION_RULES
from mrl.errors import InvalidConfig, MrlError, UnknownValue, Violation
from mrl.model import ModelSpec, planning_model_spec
from mrl.record.redact import without_secrets


def violations(resolved: ResolvedConfig, model: ModelSpec, check_paths: bool = False) -> list[Violation]:
    """Returns all broken rules. The list is empty when the configuration is legal.

    With `check_paths` the files that it names are looked at too.
    """
    judged = (*RULES, *PATH_RULES) if check_paths else RULES
    model = _as_run(model, resolved.config)
    return [_placed(violation, resolved) for rule in judged for violation in _judged(rule, resolved.config, model)]


def seen_violations(resolved: ResolvedConfig, model: ModelSpec) -> list[Violation]:
    """Returns visible faults of the files that the configuration names, on a host that may not be the run's."""
    return [_placed(violation, resolved) for rule in SEEN_RULES for violation in _judged(rule, resolved.config, model)]


def check(resolved: ResolvedConfig, model: ModelSpec, check_paths: bool = False) -> None:
    """Raises InvalidConfig with all violations, if there are any."""
    if broken := violations(resolved, model, check_paths):
        raise InvalidConfig(broken)


def with_rules(refusal: SchemaRefusal, check_paths: bool = False) -> SchemaRefusal:
    """Adds to a refusal by the schema what the rules refuse in the rest of that configuration."""
    broken = violations(refusal.rest, _model_of(refusal.rest), check_paths)
    return SchemaRefusal([*refusal.violations, *broken], refusal.rest)


def notes(resolved: ResolvedConfig, model: ModelSpec) -> list[str]:
    """Returns the notes on legal settings that are worth a line at the start of a run."""
    return [
        *loss_notes(resolved.config),
        *distillation_notes(resolved.config),
        *rollout_notes(resolved.config, model),
        *speculation_notes(resolved.config),
        *template_notes(resolved.config),
        *quantisation_notes(resolved.config),
        *actor_notes(resolved.config, model),
        *override_notes(resolved.config, model),
        *version_notes(resolved.config),
        *npu_notes(resolved.config),
        *narrow_experts(resolved.config, model),
        *reshard_notes(resolved.config),
        *schedule_notes(resolved.config, model),
    ]


def _as_run(model: "ModelSpec | _UnknownModel", config: RunConfig) -> "ModelSpec | _UnknownModel":
    """Returns the model with the positions that it is run with."""
    try:
        positions = config.model.max_position_embeddings
    except UnknownValue:
        return model
    if positions is None or isinstance(model, _UnknownModel):
        return model
    return replace(model, max_position_embeddings=positions)


class _UnknownModel:
    """Stands in for a model that cannot be read. Rules that read it are not judged."""

    def __getattr__(self, name: str) -> Any:
        raise UnknownValue(name)


def _model_of(resolved: ResolvedConfig) -> ModelSpec | _UnknownModel:
    try:
        return planning_model_spec(resolved.config.model.path)[0]
    except (MrlError, UnknownValue):
        return _UnknownModel()


def _judged(rule: Rule, config: RunConfig, model: ModelSpec) -> list[Violation]:
    broken = []
    try:
        for violation in rule(config, model):
            broken.append(violation)
    except UnknownValue:
        pass  # violations found before that key was read stay
    return broken


def _of_one_key(field: str, rule: KeyRule) -> Rule:
    def judge(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
        value = leaf(config, field)
        return (
            Violation(field, text, rule.why, rule.allowed) for text in (() if value is None else rule.faults(value))
        )

    return judge


_KEY_RULES = tuple(
    _of_one_key(path, notes_of(field).rule) for path, field in schema_keys().items() if notes_of(field).rule
)
RULES = (
    *ACTOR_RULES,
    *EFFICIENCY_RULES,
    *_KEY_RULES,
    *LOSS_RULES,
    *ROLLOUT_RULES,
    *SPECULATION_RULES,
    *ENDPOINT_RULES,
    *ROTATION_RULES,
    *LATENT_RULES,
    *HYBRID_RULES,
    *SINK_RULES,
    *LORA_RULES,
    *CRITIC_RULES,
    *DISTILLATION_RULES,
    *QUANTISATION_RULES,
    *VISION_RULES,
    *RUN_RULES,
    *SCHEDULE_RULES,
    *OVERRIDE_RULES,
    *DEVICE_RULES,
)


def _placed(violation: Violation, resolved: ResolvedConfig) -> Violation:
    value = leaf(resolved.config, violation.field)
    if isinstance(value, Section):  # what was written of it
        value = without_secrets(value.model_dump(exclude_defaults=True))
    return replace(violation, value=value, where=resolved.where(violation.field))
