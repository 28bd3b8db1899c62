"""The loop, the optimizer's schedule, and names of rewards and loggers."""

from collections.abc import Iterator

from mrl.config.schema import RunConfig
from mrl.config.violation import Broken, did_you_mean
from mrl.model import ModelSpec
from mrl.record.sinks import VIEWS
from mrl.reward.builtin_rules import RULES
from mrl.reward.resolve import AUTO

_REWARDS = (AUTO, *RULES)
_LOGGERS = ("jsonl", *VIEWS)


def run_rules(config: RunConfig, model: ModelSpec) -> Iterator[Broken]:
    yield from _schedule(config)
    yield from _frequencies(config)
    if config.reward.custom_reward_function is None and config.reward.function not in _REWARDS:
        rule = f"is no built-in reward; {did_you_mean(config.reward.function, _REWARDS)}"
        yield Broken("reward.function", rule, "a function of your own goes under reward.custom_reward_function", _REWARDS)
    for name in config.reward.bonus_rules:
        if name not in RULES:
            yield Broken("reward.bonus_rules", f"{name} is no built-in rule; {did_you_mean(name, tuple(RULES))}", "", tuple(RULES))
    if config.reward.reward_manager == "naive" and config.algorithm.overlong_buffer.enable:
        why = "verl's naive manager pays no overlong penalty; leave reward_manager out to have both"
        yield Broken("reward.reward_manager", "is naive while algorithm.overlong_buffer is on", why, ("dapo", None))
    yield from _mixing(config)
    for name in config.trainer.logger:
        if name not in _LOGGERS:
            yield Broken(
                "trainer.logger", f"{name} is no logger; {did_you_mean(name, _LOGGERS)}", "each is a view of the metrics", _LOGGERS
            )


def _mixing(config: RunConfig) -> Iterator[Broken]:
    weights, files = config.data.train_weights, config.data.train_files
    if weights and len(weights) != len(files):
        rule = f"has {len(weights)} weights for {len(files)} train_files"
        yield Broken("data.train_weights", rule, "each file has one, in their order")
    if weights and (min(weights) < 0 or sum(weights) == 0):
        yield Broken("data.train_weights", "must be at least 0, and one of them more", "they are shares of an epoch's prompts")


def _schedule(config: RunConfig) -> Iterator[Broken]:
    optim = config.actor.optim
    if optim.min_lr > optim.lr:
        yield Broken("actor.optim.min_lr", f"must be at most actor.optim.lr = {optim.lr:g}", "the rate decays towards it", (0.0, optim.lr))
    if optim.lr_decay_steps is not None and optim.lr_decay_steps <= optim.lr_warmup_steps:
        rule = f"must be more than lr_warmup_steps = {optim.lr_warmup_steps}"
        yield Broken("actor.optim.lr_decay_steps", rule, "warm-up counts as part of the decay", (optim.lr_warmup_steps + 1,))
    total = config.total_updates
    if optim.lr_decay_steps is None and optim.lr_decay_style != "constant" and total is not None and optim.lr_warmup_steps >= total:
        why = f"the rate decays over all {total} updates of the run, and warm-up is part of them"
        yield Broken("actor.optim.lr_warmup_steps", f"must be less than {total}", why, (0, total - 1))


def _frequencies(config: RunConfig) -> Iterator[Broken]:
    trainer = config.trainer
    for name in ("save_freq", "test_freq"):
        value = getattr(trainer, name)
        if value != -1 and value < 1:
            yield Broken(f"trainer.{name}", "must be -1 or at least 1 step", "-1 switches it off", (-1, 1))
    if trainer.test_freq >= 1 and not config.data.val_files:
        yield Broken("data.val_files", f"is empty while trainer.test_freq = {trainer.test_freq}", "there is nothing to validate on")
