"""Estimators of KL(policy || reference) from sampled tokens (http://joschu.net/blog/kl-approx.html)."""

import numpy as np
import torch
from torch import Tensor

from mrl.algo.spec import KL_TYPES
from mrl.errors import ConfigError

LOG_RATIO_LIMIT = 20.0  # exp beyond it says nothing more and overflows in half precision
K3_LIMIT = 10.0  # verl's bound on one token's k3

ESTIMATORS = {
    "k1": lambda log_ratio: log_ratio,
    "abs": torch.abs,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: _k3(log_ratio),
}


def _k3(log_ratio: Tensor) -> Tensor:
    inverse = (-log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(inverse) - inverse).clamp(-K3_LIMIT, K3_LIMIT)


def kl_per_token(log_probs: Tensor, ref_log_probs: Tensor, kl_loss_type: str) -> Tensor:
    """[batch, response_length] KL of each token; with a trailing `+` the value is the base estimator's and the gradient k2's.

    As a loss term k1 has a gradient that is zero on average and k3 that of the reverse direction; k2's is the right one
    on-policy.
    """
    spec = KL_TYPES.get(kl_loss_type)
    if spec is None:
        raise ConfigError(f"kl_loss_type: {kl_loss_type!r} is unknown; allowed: {', '.join(KL_TYPES)}")
    log_ratio = log_probs - ref_log_probs
    value = ESTIMATORS[spec.estimator](log_ratio)
    if not spec.k2_gradient:
        return value
    carrier = ESTIMATORS["k2"](log_ratio)
    return value.detach() + carrier - carrier.detach()


def kl_in_reward(old_log_probs: np.ndarray, ref_log_probs: np.ndarray, kl_penalty: str, kl_coef: float) -> np.ndarray:
    """float64 [batch, response_length]: kl_coef x KL of each token under the policy before the update, to be taken off its reward.

    Only values matter in a reward, so a trailing `+` changes nothing.
    """
    old, ref = (torch.from_numpy(np.asarray(x, dtype=np.float64)) for x in (old_log_probs, ref_log_probs))
    return kl_coef * kl_per_token(old, ref, kl_penalty).numpy()
