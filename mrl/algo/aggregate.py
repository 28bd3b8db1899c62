"""Aggregation of token values to one number, and metrics of micro-batches as parts.

A micro-batch gives a numerator, which is divided by the count of the whole mini-batch. So the micro-batch losses add up
to the mini-batch's loss, in value and in gradient. How the batch is cut or ordered does not matter, and no rank needs
to see the whole batch.
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

# parts of a mean and a mean square add up, those of a standard deviation would not; mrl.record computes it from both
LOG_SEQ_RATIO = "actor/log_seq_ratio_mean"
LOG_SEQ_RATIO_SQUARE = "actor/log_seq_ratio_square_mean"


def _aggregation(name: str) -> Callable[[Numerator], Numerator]:
    def bind(function: Numerator) -> Numerator:
        NUMERATORS[AGGREGATIONS[name].name] = function
        return function

    return bind


@_aggregation("token-sum")
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
    """Returns `values` with zeros outside the mask.

    So padding has no value and no gradient, even where it holds NaN.
    """
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean over the masked tokens of each row, [batch]; 0 for a row without any."""
    return masked(values, mask).sum(-1) / mask.sum(-1).clamp(min=1)


def aggregate(values: Tensor, mask: Tensor, loss_agg_mode: str, loss_scale_factor: float | None = None) -> Tensor:
    """Returns the numerator of the aggregation, a scalar, to be divided by `Denominators.of(loss_agg_mode)`.

    `values` and `mask` (bool) are [batch, response_length]. `seq-mean-token-sum-norm` needs the constant
    `loss_scale_factor`. verl's default for it, the padded width, changes with the batch, so there is none here. Raises
    ConfigError where it is missing or the mode is unknown.
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
    """Counts tokens and sequences in one rank's part of a mini-batch, bool [batch, response_length].

    Add up the counts of all data-parallel ranks.
    """
    return Denominators(int(mask.sum()), int(mask.any(-1).sum()))


def in_metrics(
    numerator: Tensor, mask: Tensor, loss_agg_mode: str, denominators: Denominators
) -> tuple[Tensor, Tensor]:
    """Returns a numerator and this micro-batch's share of the denominator, as a metric's parts: scalar tensors on the
    mask's device, made without a device sync.

    A sum has no denominator. Its metric is the mean of mini-batches' sums, each weighed by its tokens.
    """
    counted = AGGREGATIONS[loss_agg_mode].denominator
    if counted is None:
        return numerator.detach() * denominators.tokens, mask.sum()
    if counted == "tokens":
        return numerator.detach(), mask.sum()
    return numerator.detach(), mask.any(-1).sum()


def to_floats(parts: MetricParts) -> FloatParts:
    """Moves all parts off the device in one transfer, and returns them as plain floats.

    The transfer is in float32 or a wider type of the parts; not every device has float64.
    """
    if not parts:
        return {}
    scalars = [x.detach() for pair in parts.values() for x in pair]
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in scalars), torch.float32)
    numbers = torch.stack([x.to(dtype) for x in scalars]).tolist()
    return dict(zip(parts, zip(numbers[::2], numbers[1::2], strict=True), strict=True))


def merge(parts: Iterable[FloatParts]) -> FloatParts:
    """Adds up values and weights over micro-batches and ranks."""
    merged: FloatParts = {}
    for part in parts:
        for name, (value, weight) in part.items():
            before = merged.get(name, (0.0, 0.0))
            merged[name] = (before[0] + value, before[1] + weight)
    return merged
