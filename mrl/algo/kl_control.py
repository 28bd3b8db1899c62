"""The coefficient of the KL in the reward, from one step to the next."""

from typing import Literal

LARGEST_ERROR = 0.2  # bound of |kl / target_kl - 1| in the equation below


def next_kl_coef(
    kind: Literal["fixed", "adaptive"], kl_coef: float, kl: float, target_kl: float, samples: int, horizon: float
) -> float:
    """Returns the coefficient of the step after one with `samples` responses, whose mean KL a token was `kl` nats.

    adaptive: kl_coef (1 + e samples / horizon) with e = clip(kl / target_kl - 1, -0.2, 0.2). It is the proportional
    controller of arXiv:1909.08593 (section 2.2), with samples / horizon as its gain, as in verl. fixed: the same one.
    """
    if kind == "fixed":
        return kl_coef
    error = min(max(kl / target_kl - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return kl_coef * (1 + error * samples / horizon)
