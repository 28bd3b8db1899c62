"""Batch sizes: prompts to mini-batches, mini-batches to data-parallel ranks, a rank's samples to micro-batches.

A micro-batch size is a limit: a rank's samples are cut evenly into as few micro-batches as it allows, equally many on every rank. Where
an interleaved pipeline needs more of them, the cuts are finer and what is lacking is filled with micro-batches that count for nothing.
"""

from collections.abc import Callable, Iterator

from mrl.config.schema import RunConfig
from mrl.config.violation import Broken
from mrl.model import ModelSpec
from mrl.model.layout import LayoutDegrees

_MINI, _BATCH = "actor.ppo_mini_batch_size", "data.train_batch_size"


def data_parallel_size(config: RunConfig) -> int:
    """Data-parallel degree of the actor; 0 where the layout is illegal and the degree is not whole."""
    degrees = LayoutDegrees.of(config.actor.layout.model_dump())
    size, rest = divmod(degrees.world_size, degrees.dense_ranks)
    return 0 if rest else size


def batch_rules(config: RunConfig, model: ModelSpec) -> Iterator[Broken]:
    """Each rule speaks only where those it builds on hold, so that one mistake is one line."""
    batch, mini, n, dp = config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n, data_parallel_size(config)
    if batch % mini:
        why = f"each step makes whole optimizer updates of {mini} prompts each"
        yield Broken(_MINI, f"must divide {_BATCH} = {batch}", why, nearest(mini, batch, lambda v: batch % v == 0))
        return
    if not dp:
        return
    yield from _over_ranks(config, batch, mini, n, dp)


def _over_ranks(config: RunConfig, batch: int, mini: int, n: int, dp: int) -> Iterator[Broken]:
    if mini * n % dp:
        allowed = nearest(mini, batch, lambda v: batch % v == 0 and v * n % dp == 0)
        rule = f"times rollout.n = {n} must be a multiple of the data-parallel size {dp}"
        yield Broken(_MINI, rule, "every rank takes the same number of samples of each mini-batch", allowed)


def nearest(value: int, highest: int, legal: Callable[[int], bool], count: int = 4) -> tuple[int, ...]:
    """The legal numbers from 1 to `highest` that are closest to `value`, ascending."""
    close = sorted((v for v in range(1, highest + 1) if legal(v)), key=lambda v: (abs(v - value), v))
    return tuple(sorted(close[:count]))
