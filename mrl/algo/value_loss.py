"""The loss that trains a critic: pure tensor functions of its values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algo.aggregate import aggregate, in_metrics, masked
from mrl.algo.losses import LossOutput
from mrl.algo.plain import Denominators, ValueLossParameters


@dataclass(frozen=True)
class ValueInputs:
    """One micro-batch. Every tensor is [batch, response_length] and holds whole sequences."""

    values: Tensor  # the critic's current values; carry the gradient
    old_values: Tensor  # its values before the first update of the step
    returns: Tensor
    response_mask: Tensor  # bool: the tokens that count


def value_loss(parameters: ValueLossParameters, inputs: ValueInputs, denominators: Denominators) -> LossOutput:
    """Returns this micro-batch's share of the loss: half the squared error, the larger of the plain and the clipped
    one.

    A value is clipped where it has moved more than cliprange_value since before the step. This is what PPO's first code
    (openai/baselines, ppo2) and verl's `compute_value_loss` do.
    """
    mask = inputs.response_mask
    values = masked(inputs.values, mask)
    old = masked(inputs.old_values, mask)
    returns = masked(inputs.returns, mask)
    reach = parameters.cliprange_value
    plain = (values - returns).square()
    clipped = (torch.minimum(torch.maximum(values, old - reach), old + reach) - returns).square()
    mode = parameters.loss_agg_mode
    total = aggregate(0.5 * torch.maximum(plain, clipped), mask, mode)
    tokens = mask.sum()
    metrics = {
        "critic/vf_loss": in_metrics(total, mask, mode, denominators),
        "critic/vf_clipfrac": (((clipped > plain) & mask).sum(), tokens),
        "critic/vpred_mean": (values.detach().sum(), tokens),
    }
    return LossOutput(total / max(denominators.of(mode), 1), metrics)
