"""Advantage, loss, aggregation and clip: names that exist, and pairs that compute what they are named for."""

from collections.abc import Collection, Iterator

from mrl.algo.spec import ADVANTAGES, AGGREGATIONS, KL_TYPES, LOSSES
from mrl.config.schema import RunConfig
from mrl.config.violation import Broken, did_you_mean
from mrl.models import ModelSpec

_LOSS = "algorithm.policy_loss"
# A clip this many times wider than the widest sensible one was written for another kind of ratio.
_OTHER_SCALE = 10


def loss_rules(config: RunConfig, model: ModelSpec) -> Iterator[Broken]:
    algorithm, loss = config.algorithm, config.algorithm.policy_loss
    yield from _known("algorithm.adv_estimator", algorithm.adv_estimator, ADVANTAGES)
    yield from _known("algorithm.kl_loss_type", algorithm.kl_loss_type, KL_TYPES)
    yield from _known(f"{_LOSS}.loss_mode", loss.loss_mode, LOSSES)
    yield from _known(f"{_LOSS}.loss_agg_mode", loss.loss_agg_mode, AGGREGATIONS)
    yield from _group(config)
    if loss.loss_mode in LOSSES and not loss.force:
        yield from _aggregation(config)
        yield from _clip(config)


def loss_notes(config: RunConfig) -> Iterator[str]:
    """A clip ratio that is wide for its loss and not wide enough to be refused."""
    for name, value, limit in _clips(config):
        if limit < value < limit * _OTHER_SCALE:
            yield f"{_LOSS}.{name} = {value:g} is wide for {config.algorithm.policy_loss.loss_mode} (over {limit:g}): it may never clip"


def _known(field: str, name: str, table: Collection[str]) -> Iterator[Broken]:
    if name not in table:
        yield Broken(field, f"unknown name; {did_you_mean(name, table)}", "", tuple(table))


def _group(config: RunConfig) -> Iterator[Broken]:
    spec = ADVANTAGES.get(config.algorithm.adv_estimator)
    if spec is not None and spec.needs_group and config.rollout.n < 2:
        why = "the advantage compares responses to one prompt; of a single one it says nothing"
        yield Broken("rollout.n", f"must be at least 2 with adv_estimator {spec.name}", why, (2, 4, 8, 16))


def _aggregation(config: RunConfig) -> Iterator[Broken]:
    loss = config.algorithm.policy_loss
    spec = LOSSES[loss.loss_mode]
    if loss.loss_agg_mode in AGGREGATIONS and loss.loss_agg_mode not in spec.aggregations:
        why = (
            f"{spec.name} is defined per sequence, and {loss.loss_agg_mode} would weigh sequences by their length; "
            f"{_LOSS}.force: true keeps it as it is"
        )
        yield Broken(f"{_LOSS}.loss_agg_mode", f"does not go with loss_mode {spec.name}", why, spec.aggregations)


def _clip(config: RunConfig) -> Iterator[Broken]:
    for name, value, limit in _clips(config):
        if value >= limit * _OTHER_SCALE:
            why = (
                "the ratio of a whole sequence is a mean over its tokens and spreads as 1/sqrt(length), so a band made for single tokens "
                f"never clips; {_LOSS}.force: true keeps it as it is"
            )
            rule = f"is a token-level clip, too wide for loss_mode {config.algorithm.policy_loss.loss_mode} (at most {limit:g})"
            yield Broken(f"{_LOSS}.{name}", rule, why, (3e-4, 4e-4))


def _clips(config: RunConfig) -> list[tuple[str, float, float]]:
    """(key, value, the widest sensible value) of the clip ratios, for losses that have such a limit."""
    loss = config.algorithm.policy_loss
    limit = LOSSES[loss.loss_mode].clip_warning_above if loss.loss_mode in LOSSES else None
    names = ("clip_ratio_low", "clip_ratio_high")
    return [] if limit is None else [(name, getattr(loss, name), limit) for name in names]
