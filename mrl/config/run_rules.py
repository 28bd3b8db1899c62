"""The loop, the optimizer's schedule, names of rewards and loggers; and files that a configuration names.

Files are looked for only where the run is to happen: a preset is legal on a machine without its data.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.errors import Violation, did_you_mean
from mrl.model import ModelSpec
from mrl.record.sinks import VIEWS
from mrl.reward.builtin_rules import RULES
from mrl.reward.resolve import AUTO

_REWARDS = (AUTO, *RULES)
_LOGGERS = ("jsonl", *VIEWS)


def _rewards(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if config.reward.custom_reward_function is None and config.reward.function not in _REWARDS:
        rule = f"is no built-in reward; {did_you_mean(config.reward.function, _REWARDS)}"
        yield Violation(
            "reward.function", rule, "a function of your own goes under reward.custom_reward_function", _REWARDS
        )


def _bonus(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    for name in config.reward.bonus_rules:
        if name not in RULES:
            yield Violation(
                "reward.bonus_rules",
                f"{name} is no built-in rule; {did_you_mean(name, tuple(RULES))}",
                "",
                tuple(RULES),
            )


def _reward_manager(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if config.reward.reward_manager == "naive" and config.algorithm.overlong_buffer.enable:
        why = "verl's naive manager pays no overlong penalty; leave reward_manager out to have both"
        yield Violation("reward.reward_manager", "is naive while algorithm.overlong_buffer is on", why, ("dapo", None))


def _loggers(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    for name in config.trainer.logger:
        if name not in _LOGGERS:
            rule = f"{name} is no logger; {did_you_mean(name, _LOGGERS)}"
            yield Violation("trainer.logger", rule, "each is a view of the metrics", _LOGGERS)


def _mixing(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    weights, files = config.data.train_weights, config.data.train_files
    if weights and len(weights) != len(files):
        rule = f"has {len(weights)} weights for {len(files)} train_files"
        yield Violation("data.train_weights", rule, "each file has one, in their order")


def _enough_prompts(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    data = config.data
    at_a_time = data.prompts_at_a_time
    if data.train_max_samples is not None and data.train_max_samples < at_a_time:
        why = f"a step takes {at_a_time} prompts (data.gen_batch_size or data.train_batch_size)"
        yield Violation("data.train_max_samples", f"must be at least {at_a_time}", why, (at_a_time,))


def _lowest_rate(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    optim = config.actor.optim
    if optim.min_lr > optim.lr:
        rule = f"must be at most actor.optim.lr = {optim.lr:g}"
        yield Violation("actor.optim.min_lr", rule, "the rate decays towards it", (0.0, optim.lr))


def _decay(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    optim = config.actor.optim
    if optim.lr_decay_steps is not None and optim.lr_decay_steps <= optim.lr_warmup_steps:
        rule = f"must be more than lr_warmup_steps = {optim.lr_warmup_steps}"
        yield Violation(
            "actor.optim.lr_decay_steps", rule, "warm-up counts as part of the decay", (optim.lr_warmup_steps + 1,)
        )


def _warmup(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    optim = config.actor.optim
    if optim.lr_decay_steps is not None or optim.lr_decay_style == "constant":
        return
    total = config.total_updates
    if total is not None and optim.lr_warmup_steps >= total:
        why = f"the rate decays over all {total} updates of the run, and warm-up is part of them"
        yield Violation("actor.optim.lr_warmup_steps", f"must be less than {total}", why, (0, total - 1))


def _validation(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if config.trainer.test_freq >= 1 and not config.data.val_files:
        rule = f"is empty while trainer.test_freq = {config.trainer.test_freq}"
        yield Violation("data.val_files", rule, "there is nothing to validate on")


def _resume(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        rule = "is not set while trainer.resume_mode is resume_path"
        yield Violation("trainer.resume_from_path", rule, "there is no checkpoint to begin from")
    elif trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        rule = "must be resume_path while trainer.resume_from_path is set"
        why = "a checkpoint that is named would be passed over without a word"
        yield Violation("trainer.resume_mode", rule, why, ("resume_path",))


RUN_RULES = (
    _lowest_rate,
    _decay,
    _warmup,
    _validation,
    _rewards,
    _bonus,
    _reward_manager,
    _mixing,
    _enough_prompts,
    _loggers,
    _resume,
)


def run_dir(config: RunConfig) -> Path:
    """Where the run writes: trainer.run_dir, else runs/<experiment_name>."""
    return Path(config.trainer.run_dir or Path("runs") / config.trainer.experiment_name)


def _names_prompts(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if not config.data.train_files:
        yield Violation(
            "data.train_files", "names no file", "training needs prompts; --set data.train_files=[FILE, ...]"
        )


def _train_files(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    yield from _unreadable("data.train_files", *config.data.train_files)


def _val_files(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    yield from _unreadable("data.val_files", *config.data.val_files)


def _reward_file(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    custom = config.reward.custom_reward_function
    if custom is not None and not _readable(str(Path(custom.path).expanduser())):
        yield Violation("reward.custom_reward_function.path", "is not a file that can be read", _from_here(custom.path))


def _loss_file(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    loss = config.algorithm.policy_loss.custom
    if loss is not None and not _readable(loss.path):
        yield Violation("algorithm.policy_loss.custom.path", "is not a file that can be read", _from_here(loss.path))


def _unreadable(field: str, *files: str) -> Iterator[Violation]:
    return (
        Violation(field, f"{file} is not a file that can be read", _from_here(file))
        for file in files
        if not _readable(file)
    )


def _readable(file: str) -> bool:
    return Path(file).is_file() and os.access(file, os.R_OK)


def _from_here(file: str) -> str:
    return "" if Path(file).is_absolute() else f"a relative path starts at the current directory, {Path.cwd()}"


def _first_checkpoint(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    folder = config.trainer.resume_from_path
    if folder is not None and not Path(folder).is_dir():
        yield Violation("trainer.resume_from_path", "is no folder", _from_here(folder))


def _writable(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    folder, why = run_dir(config).absolute(), "the run writes its checkpoints and metrics there"
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not existing.is_dir():
        yield Violation("trainer.run_dir", f"cannot be made: {existing} is a file", why)
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Violation("trainer.run_dir", f"cannot be written: no permission in {existing}", why)


PATH_RULES = (_names_prompts, _train_files, _val_files, _reward_file, _loss_file, _first_checkpoint, _writable)
