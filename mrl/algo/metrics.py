"""Metrics of micro-batches as parts that add up, so that no rank needs to see the whole batch."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

MetricParts = dict[str, tuple[Tensor, Tensor]]  # name -> (sum of value x weight, sum of weight), 0-dim and detached
FloatParts = dict[str, tuple[float, float]]

# both moments add up over parts, a standard deviation would not; mrl.record makes it of them
LOG_SEQ_RATIO = "actor/log_seq_ratio_mean"
LOG_SEQ_RATIO_SQUARE = "actor/log_seq_ratio_square_mean"


def to_floats(parts: MetricParts) -> FloatParts:
    """Plain floats of all parts, with one transfer from the device, in float32 or what is wider (not every device has float64)."""
    if not parts:
        return {}
    scalars = [x.detach() for pair in parts.values() for x in pair]
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in scalars), torch.float32)
    numbers = torch.stack([x.to(dtype) for x in scalars]).tolist()
    return dict(zip(parts, zip(numbers[::2], numbers[1::2], strict=True), strict=True))


def merge(parts: Iterable[FloatParts]) -> FloatParts:
    """Sums of values and weights over micro-batches and ranks."""
    merged: FloatParts = {}
    for one in parts:
        for name, (value, weight) in one.items():
            before = merged.get(name, (0.0, 0.0))
            merged[name] = (before[0] + value, before[1] + weight)
    return merged
