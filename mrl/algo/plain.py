"""Types of losses without torch: its import takes a second, and drivers and writers do without it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mrl.algo.spec import AGGREGATIONS

FloatParts = dict[str, tuple[float, float]]  # MetricParts as plain numbers; (value, 1) where a metric is no mean


@dataclass(frozen=True)
class Denominators:
    """Counts of a whole mini-batch over all ranks: response tokens, and sequences that have a response token."""

    tokens: int
    sequences: int

    @classmethod
    def counted(cls, trained: np.ndarray) -> "Denominators":
        """Counts tokens and sequences, given the number of trained tokens of each sequence."""
        return cls(tokens=int(trained.sum()), sequences=int((trained > 0).sum()))

    def __add__(self, other: "Denominators") -> "Denominators":
        return Denominators(self.tokens + other.tokens, self.sequences + other.sequences)

    def of(self, loss_agg_mode: str) -> int:
        """Returns the count that divides this aggregation; 1 for a sum."""
        counted = AGGREGATIONS[loss_agg_mode].denominator
        return 1 if counted is None else getattr(self, counted)


@dataclass(frozen=True)
class PolicyLossParameters:
    """The loss and its constants, under their names in the configuration."""

    loss_mode: str = "gspo"
    loss_agg_mode: str = "seq-mean-token-mean"
    clip_ratio_low: float = 3e-4
    clip_ratio_high: float = 4e-4
    clip_ratio_c: float = 10.0
    loss_scale_factor: float | None = None
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    distillation_coef: float = 0.0  # weight of the teacher's term in the loss
    distillation_mode: str = "k2"
    distillation_clamp: float | None = None
    distillation_log_prob_clamp: float | None = None
    dro_beta: float = 0.05
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 2e-4
    ppo_kl_coef: float = 0.1
    custom: Mapping[str, float] = field(default_factory=dict)  # constants of a user's loss


@dataclass(frozen=True)
class ValueLossParameters:
    """Constants of a critic's loss, under their names in section `critic` of the configuration."""

    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"
