"""A user's loss that is not a number, for a run that must stop."""

import torch

from mrl.algo.losses import TokenLoss, register_loss


@register_loss("not_a_number")
def not_a_number(parameters, inputs, log_ratio):
    return TokenLoss(inputs.log_probs * float("nan"), torch.zeros_like(inputs.response_mask))
