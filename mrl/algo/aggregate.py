"""From values per token to one number, and metrics of micro-batches as parts; both add up over micro-batches and ranks.

A micro-batch gives a numerator; dividing it by the mini-batch's count makes the micro-batch losses add up to the
mini-batch's loss, in value and in gradient, however the batch is cut or ordered. No rank needs to see the whole batch.
"""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mrl.algo.plain import Denominators, FloatParts
from mrl.algo.spec import AGGREGATIONS
from mrl.errors import ConfigError

Numerator = Callable[[Tensor, Tensor, float], Tensor]
NUMERATORS: dict[str, Numerator] = {}

MetricParts = dict[str, tuple[Tensor, Tensor]]  # name -> (sum of value x weight, sum of weight), 0-dim and detached

# both moments add up over parts, a standard deviation would not; mrl.record makes it of them
LOG_SEQ_RATIO = "actor/log_seq_ratio_mean"
LOG_SEQ_RATIO_SQUARE = "actor/log_seq_ratio_square_mean"


def _aggregation(name: str) -> Callable[[Numerator], Numerator]:
    def bind(function: Numerator) -> Numerator:
        NUMERATORS[AGGREGATIONS[name].name] = function
        return function

    return bind


@_aggregation("token-mean")
def _tokens(values: Tensor, mask: Tensor, scale: float) -> Tensor:
    return masked(values, mask).sum()


@_aggregation("seq-mean-token-sum")
def _token_sums(values: Tensor, mask: Tensor, scale: float) -> Tensor:
    return masked(values, mask).sum()


@_aggregation("seq-mean-token-mean")
def _token_means(values: Tensor, mask: Tensor, scale: float) -> Tensor:
    return sequence_mean(values, mask).sum()


@_aggregation("seq-mean-token-sum-norm")
def _scaled_token_sums(values: Tensor, mask: Tensor, scale: float) -> Tensor:
    return masked(values, mask).sum() / scale


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with zeros outside the mask, so that whatever stands in padding, NaN included,
    has no value and no gradient.
    """
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[batch]: mean over each row's masked tokens; 0 for a row without any."""
    return masked(values, mask).sum(-1) / mask.sum(-1).clamp(min=1)


def aggregate(values: Tensor, mask: Tensor, loss_agg_mode: str, loss_scale_factor: float | None = None) -> Tensor:
    """Numerator of the aggregation, a scalar; divide it by `Denominators.of(loss_agg_mode)`.

    `values` and `mask` (bool) are [batch, response_length]. `loss_scale_factor` is the constant of
    `seq-mean-token-sum-norm`; verl's default for it, the padded width, changes with the batch, so here it has to be
    given (ConfigError).
    """
    spec = AGGREGATIONS.get(loss_agg_mode)
    if spec is None:
        raise ConfigError(f"loss_agg_mode: {loss_agg_mode!r} is unknown; allowed: {', '.join(AGGREGATIONS)}")
    if spec.needs_scale_factor and loss_scale_factor is None:
        raise ConfigError(
            f"loss_agg_mode {loss_agg_mode} needs loss_scale_factor, usually data.max_response_length; it is not set"
        )
    return NUMERATORS[loss_agg_mode](values, mask, loss_scale_factor or 1.0)


def count(mask: Tensor) -> Denominators:
    """Counts of one rank's part of a mini-batch ([batch, response_length] bool);
    add up the parts of all data-parallel ranks.
    """
    return Denominators(int(mask.sum()), int(mask.any(-1).sum()))


def local_weight(mask: Tensor, loss_agg_mode: str) -> Tensor:
    """What this micro-batch contributes to the denominator, a scalar tensor on the mask's device (no sync)."""
    if AGGREGATIONS[loss_agg_mode].denominator == "tokens":
        return mask.sum()
    return mask.any(-1).sum()


def to_floats(parts: MetricParts) -> FloatParts:
    """Plain floats of all parts, with one transfer from the device, in float32 or what is wider
    (not every device has float64).
    """
    if not parts:
        return {}
    scalars = [x.detach() for pair in parts.values() for x in pair]
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in scalars), torch.float32)
    numbers = torch.stack([x.to(dtype) for x in scalars]).tolist()
    return dict(zip(parts, zip(numbers[::2], numbers[1::2], strict=True), strict=True))


def merge(parts: Iterable[FloatParts]) -> FloatParts:
    """Sums of values and weights over micro-batches and ranks."""
    merged: FloatParts = {}
    for part in parts:
        for name, (value, weight) in part.items():
            before = merged.get(name, (0.0, 0.0))
            merged[name] = (before[0] + value, before[1] + weight)
    return merged
