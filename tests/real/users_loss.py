"""A user's loss, as the configuration names it: REINFORCE with a leash on the log-ratio."""

import torch

from mrl.algo.losses import TokenLoss, register_loss


@register_loss("leashed")
def leashed(parameters, inputs, log_ratio):
    values = -inputs.advantages * inputs.log_probs + parameters.custom["beta"] * log_ratio.square()
    return TokenLoss(values, torch.zeros_like(inputs.response_mask))
