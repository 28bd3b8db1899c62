"""Handlers of verl's trainers that generate ahead of training. They write trainer.schedule.

One step off means the same here: the next step's responses are generated while a step trains. In verl's fully
asynchronous trainer a step of mrl is what it trains on between two weight syncs. That is trigger_parameter_sync_step x
require_batches mini-batches. Its share of stale samples becomes whole steps.

Sources: verl's docs/advance/fully_async.md and the configurations of the two trainers.
"""

from math import ceil
from typing import Any

from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import FULLY_ASYNC, ONE_STEP_OFF, Override, VerlSettings

_TRAINING = "async_training."
_OTHER = "is a key of verl's fully asynchronous trainer, and the script starts another"
_IN_ORDER = "groups are trained on in the order of the data, whatever is finished first; verl takes what is"
_BEFORE = (
    "verl takes the engine's log-probs for the policy that a step begins with (bypass); where generation is ahead they "
    "are those of older weights, so they are computed anew here and the difference is weighed"
)


def _asynchronous(o: Override, out: Import, settings: VerlSettings) -> None:
    name = o.key.removeprefix(_TRAINING)
    if settings.ahead != FULLY_ASYNC:
        out.leave("unsupported", o.key, o.value, _OTHER, o.line)
        return
    match name, o.value:
        case ("staleness_threshold", int() | float()):
            why = f"{o.value:g} of a step's samples may be of older weights in verl; whole steps here"
            out.put("renamed", o.key, "trainer.max_staleness", ceil(o.value), why, o.line)
        case ("trigger_parameter_sync_step" | "require_batches", int()):
            out.put("renamed", o.key, "data.train_batch_size", settings.prompts, _prompts(settings), o.line)
        case ("partial_rollout", bool()):
            partial = o.value and settings.staleness > 0
            why = "nothing is begun by older weights at staleness 0"
            if partial == o.value:
                why = ""
            out.put("renamed", o.key, "trainer.partial_rollouts", partial, why, o.line)
        case ("use_rollout_log_probs", True) if not settings.given(f"{_TRAINING}compute_prox_log_prob"):
            why = "the engine's log-probs are those of the policy that a step begins with"
            out.put("renamed", o.key, "algorithm.anchor", "rollout", why, o.line)
        case ("use_rollout_log_probs", bool()):
            out.leave("implied", o.key, o.value, "log-probs are computed anew", o.line)
        case ("compute_prox_log_prob", bool()):
            why = "log-probs of the weights that a step begins with are computed"
            out.leave("implied", o.key, o.value, why, o.line)
        case _ if name.startswith(("checkpoint_engine", "use_trainer_do_validate")):
            out.leave("not_applicable", o.key, o.value, "weights go from shard to shard; engines answer", o.line)
        case _:
            out.leave("unsupported", o.key, o.value, "no such key of a schedule here", o.line)


def _prompts(settings: VerlSettings) -> str:
    sync, batches = (settings.value(_TRAINING + name) for name in ("trigger_parameter_sync_step", "require_batches"))
    return f"prompts between two syncs of the weights: {sync} x {batches} mini-batches of {settings.mini_batch}"


def _total(o: Override, out: Import, settings: VerlSettings) -> None:
    if settings.ahead != FULLY_ASYNC:
        out.leave("unsupported", o.key, o.value, _OTHER, o.line)
    elif isinstance(o.value, int):
        steps = max(1, o.value // settings.prompts)
        why = f"{o.value} prompts in steps of {settings.prompts}"
        out.put("renamed", o.key, "trainer.total_training_steps", steps, why, o.line)
    else:
        out.leave("implied", o.key, o.value, "the length follows from trainer.total_epochs", o.line)


def _test_freq(o: Override, out: Import, settings: VerlSettings) -> None:
    value = -1
    if not isinstance(o.value, int) or o.value >= 1:
        value = o.value
    _of_rollouter(o, out, settings, "trainer.test_freq", value)


def _epochs(o: Override, out: Import, settings: VerlSettings) -> None:
    _of_rollouter(o, out, settings, "trainer.total_epochs", o.value)


def _of_rollouter(o: Override, out: Import, settings: VerlSettings, to: str, value: Any) -> None:
    """Handles a key of verl's rollouter, which counts weight syncs. These are steps here."""
    if settings.ahead == FULLY_ASYNC:
        out.put("renamed", o.key, to, value, "of the part that generates", o.line)
    else:
        out.leave("unsupported", o.key, o.value, _OTHER, o.line)


SCHEDULE_HANDLERS = {
    _TRAINING: _asynchronous,
    "rollout.total_rollout_steps": _total,
    "rollout.test_freq": _test_freq,
    "rollout.total_epochs": _epochs,
}


def carry_schedule(out: Import, settings: VerlSettings) -> None:
    """Writes trainer.schedule for a trainer that generates ahead, and its consequences, after all keys are read."""
    entry = settings.command.entry
    if settings.ahead == ONE_STEP_OFF:
        out.put("renamed", entry, "trainer.schedule", "one_step_off", "the next step's responses, while a step trains")
    elif settings.ahead == FULLY_ASYNC:
        out.put("renamed", entry, "trainer.schedule", "bounded", f"generation runs ahead; {_IN_ORDER}")
        _defaults_of_fully_async(out, settings)
        out.warnings.append(f"{entry or 'fully_async'}: {_IN_ORDER}")
    if settings.ahead:
        out.drop("data.gen_batch_size", "groups are issued one by one where generation is ahead")
    if settings.ahead == ONE_STEP_OFF or (settings.ahead and out.values.get("trainer.max_staleness")):
        _weigh_older_tokens(out)


def _defaults_of_fully_async(out: Import, settings: VerlSettings) -> None:
    """Writes what such a script leaves to defaults. Its `data.train_batch_size` is 0, and verl does not read it."""
    out.retract("data.train_batch_size", "verl's fully asynchronous trainer does not read it")
    if out.values.get("data.train_batch_size") != settings.prompts:
        out.put("implied", "", "data.train_batch_size", settings.prompts, _prompts(settings))
    if "trainer.max_staleness" not in out.values:
        out.put("implied", "", "trainer.max_staleness", ceil(settings.staleness), "verl's default, in whole steps")
    if "trainer.partial_rollouts" not in out.values:
        out.put("implied", "", "trainer.partial_rollouts", settings.staleness > 0, "verl's default")
    if out.values.get("trainer.partial_rollouts") and out.values.get("rollout.turns.tool_config_path"):
        why = "tools of verl's classes cannot be brought back to where they were"
        out.drop("trainer.partial_rollouts", why)
        out.put("chosen", "", "trainer.partial_rollouts", False, why)
        out.warnings.append(f"trainer.partial_rollouts: {why}")


def _weigh_older_tokens(out: Import) -> None:
    """Replaces anchor rollout by recompute, because the engine's log-probs belong to older weights there."""
    anchor = "algorithm.anchor"
    level = "algorithm.rollout_correction.level"
    if out.values.get(anchor) != "rollout":
        return
    out.drop(anchor, _BEFORE)
    out.put("chosen", "", anchor, "recompute", _BEFORE)
    out.drop("algorithm.rollout_correction.weigh", "what a rejection keeps is weighed, too")
    if out.values.get(level) is None:
        weighing = {"level": "token", "mode": "truncate", "high": 2.0}
        for name, value in weighing.items():
            out.put("chosen", "", f"algorithm.rollout_correction.{name}", value, "weighs tokens of older weights")
    out.warnings.append(_BEFORE)
