"""Every rule that holds between keys, or between a key and the model. All are checked, so that one look shows all that is wrong."""

from collections.abc import Iterator

from mrl.config.actor_rules import actor_notes, actor_rules
from mrl.config.batch_rules import batch_rules
from mrl.config.load import ResolvedConfig
from mrl.config.loss_rules import loss_notes, loss_rules
from mrl.config.npu_rules import npu_notes, npu_rules
from mrl.config.override_rules import override_rules
from mrl.config.path_rules import path_rules
from mrl.config.reshard_rules import reshard_notes, reshard_rules
from mrl.config.rollout_rules import rollout_notes, rollout_rules
from mrl.config.run_rules import run_rules
from mrl.config.schema import RunConfig, leaf
from mrl.config.version_rules import version_notes, version_rules
from mrl.config.violation import Broken, ConfigViolation, InvalidConfig
from mrl.model import ModelSpec
from mrl.model.layout import check_train_layout

_GROUPS = (batch_rules, actor_rules, loss_rules, rollout_rules, reshard_rules, run_rules, override_rules, npu_rules, version_rules)


def violations(resolved: ResolvedConfig, model: ModelSpec, check_paths: bool = False) -> list[ConfigViolation]:
    """All broken rules; empty when the configuration is legal. `check_paths`: also look at the files that it names."""
    config = resolved.config
    broken = [*_layout_rules(config, model), *(b for group in _GROUPS for b in group(config, model))]
    if check_paths:
        broken += path_rules(config)
    return [_placed(b, resolved) for b in broken]


def check(resolved: ResolvedConfig, model: ModelSpec, check_paths: bool = False) -> None:
    """Raises InvalidConfig with all violations, if there are any."""
    if found := violations(resolved, model, check_paths):
        raise InvalidConfig(found)


def notes(resolved: ResolvedConfig, model: ModelSpec) -> list[str]:
    """What is legal and still worth a line at the start of a run."""
    return [
        *loss_notes(resolved.config),
        *rollout_notes(resolved.config, model),
        *actor_notes(resolved.config, model),
        *version_notes(resolved.config),
        *npu_notes(resolved.config),
        *reshard_notes(resolved.config),
    ]


def _layout_rules(config: RunConfig, model: ModelSpec) -> Iterator[Broken]:
    for v in check_train_layout(config.actor.layout.model_dump(), model):
        yield Broken(f"actor.layout.{v.field}", v.rule, v.why, v.allowed)


def _placed(broken: Broken, resolved: ResolvedConfig) -> ConfigViolation:
    value = leaf(resolved.config, broken.field)
    return ConfigViolation(broken.field, resolved.where(broken.field), value, broken.rule, broken.why, broken.allowed)
