"""Names of advantages, losses, aggregations and KL estimators, with what holds for each; no torch.

Configuration and docs read these tables. The implementations bind to them by name, and a test compares the two sets, so a name
stands here exactly when it runs. Names are verl's.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AdvantageSpec:
    """`needs_group`: compares responses to one prompt, so one response a prompt leaves nothing to compare."""

    name: str
    needs_group: bool
    summary: str


@dataclass(frozen=True)
class AggregationSpec:
    """`denominator`: which global count divides the sum. `needs_scale_factor`: wants `loss_scale_factor`."""

    name: str
    denominator: Literal["tokens", "sequences"]
    needs_scale_factor: bool
    summary: str


@dataclass(frozen=True)
class LossSpec:
    """`aggregations`: those that keep the loss what its paper says. `clip_warning_above`: a clip ratio above it is a likely mistake."""

    name: str
    aggregations: tuple[str, ...]
    clip_warning_above: float | None
    needs_rollout_log_probs: bool
    has_dual_clip: bool
    summary: str


@dataclass(frozen=True)
class KlSpec:
    """`estimator`: whose value is taken. `k2_gradient`: the gradient is k2's, whatever the value is (verl's trailing `+`)."""

    name: str
    estimator: Literal["k1", "abs", "k2", "k3"]
    k2_gradient: bool
    summary: str


def _table(*specs):
    return {spec.name: spec for spec in specs}


ADVANTAGES: dict[str, AdvantageSpec] = _table(
    AdvantageSpec(
        "grpo",
        needs_group=True,
        summary="(score - group mean) / group std (arXiv:2402.03300); norm_adv_by_std_in_grpo=False drops the std (Dr.GRPO)",
    ),
)

AGGREGATIONS: dict[str, AggregationSpec] = _table(
    AggregationSpec("token-mean", "tokens", False, "every token of the mini-batch weighs the same (DAPO, arXiv:2503.14476)"),
    AggregationSpec("seq-mean-token-sum", "sequences", False, "tokens summed in a sequence, mean over sequences"),
    AggregationSpec("seq-mean-token-mean", "sequences", False, "mean over the tokens of a sequence, mean over sequences (GRPO, GSPO)"),
    AggregationSpec(
        "seq-mean-token-sum-norm",
        "sequences",
        True,
        "tokens summed in a sequence and divided by the constant loss_scale_factor, mean over sequences (Dr.GRPO, arXiv:2503.20783)",
    ),
)

LOSSES: dict[str, LossSpec] = _table(
    LossSpec(
        "gspo",
        aggregations=("seq-mean-token-mean",),
        # The sequence ratio's spread is a token's over sqrt(length): a band of 0.2 never clips; 0.02 is already wide at 4 tokens.
        clip_warning_above=0.02,
        needs_rollout_log_probs=False,
        has_dual_clip=False,
        summary="sequence-level ratio and clipping in its token form (GSPO-token, arXiv:2507.18071)",
    ),
    LossSpec(
        "vanilla",
        aggregations=tuple(AGGREGATIONS),
        clip_warning_above=None,
        needs_rollout_log_probs=False,
        has_dual_clip=True,
        summary="token-level PPO clipping with separate bounds (arXiv:1707.06347) and the dual clip (arXiv:1912.09729)",
    ),
)

KL_TYPES: dict[str, KlSpec] = _table(
    *(
        KlSpec(name + plus, estimator, bool(plus), summary + (", with the gradient of k2" if plus else ""))
        for plus in ("", "+")
        for name, estimator, summary in (
            ("kl", "k1", "log ratio"),
            ("k1", "k1", "log ratio"),
            ("abs", "abs", "absolute log ratio"),
            ("mse", "k2", "half the squared log ratio"),
            ("k2", "k2", "half the squared log ratio"),
            ("low_var_kl", "k3", "exp(-l) + l - 1, never negative"),
            ("k3", "k3", "exp(-l) + l - 1, never negative"),
        )
    )
)
