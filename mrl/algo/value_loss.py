"""The loss that trains a critic: pure tensor functions of its values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algo.aggregate import aggregate, local_weight, masked
from mrl.algo.losses import LossOutput
from mrl.algo.plain import Denominators, ValueLossParameters


@dataclass(frozen=True)
class ValueInputs:
    """One micro-batch; every tensor is [batch, response_length], whole sequences."""

    values: Tensor  # of the critic now, carries the gradient
    old_values: Tensor  # before the step's first update
    returns: Tensor
    response_mask: Tensor  # bool: the tokens that count


def value_loss(parameters: ValueLossParameters, inputs: ValueInputs, denominators: Denominators) -> LossOutput:
    """This micro-batch's share of half the squared error, the larger of a value's own and that of the clipped value.

    A value is clipped where it has moved more than cliprange_value from what it was before the step. So has it PPO's
    first code (openai/baselines, ppo2), and verl's `compute_value_loss`.
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
        "critic/vf_loss": (total.detach(), local_weight(mask, mode)),
        "critic/vf_clipfrac": (((clipped > plain) & mask).sum(), tokens),
        "critic/vpred_mean": (values.detach().sum(), tokens),
    }
    return LossOutput(total / max(denominators.of(mode), 1), metrics)
