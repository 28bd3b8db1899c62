"""Gives advice to the user who watches a run: one line if a metric of a step is unusual, with a remedy. No torch."""

from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt

import numpy as np

from mrl.config.rollout_rules import filters
from mrl.config.schema import AlgorithmConfig, PolicyLossConfig, RolloutConfig
from mrl.platforms.hosting import get_hosting

Adviser = Callable[[Mapping[str, float]], str | None]
CLIPS_TOO_MUCH = 0.4
MISMATCH = "rollout_corr/k3_kl"
MISMATCH_LIMIT = 1e-2  # nats per token; mixtures of experts without replay have about 1.5e-3 (arXiv:2510.11370)
# below the floor even a large relative growth is rounding
FIRST_STEPS = 5
DRIFT_FACTOR = 5.0
DRIFT_FLOOR = 1e-4
# GSPO's lower clip, and the response length in tokens at which it fits
PAPER_BAND = 3e-4
PAPER_LENGTH = 1000


def clip_advice(loss: PolicyLossConfig, updates_per_step: int, metrics: Mapping[str, float]) -> str | None:
    """Returns one line if GSPO's band never clips, or clips most of the batch; None if all is well or it cannot tell.

    The first update on a rollout has ratios of one. So a single update for each rollout correctly clips nothing.
    """
    clipped = metrics.get("actor/pg_clipfrac")
    if loss.loss_mode not in ("gspo", "gspo-token") or clipped is None or updates_per_step < 2:
        return None
    if 0 < clipped <= CLIPS_TOO_MUCH:
        return None
    length = metrics.get("response_length/mean", 0.0)
    fitting = ""
    if length > 0:
        fitting = f"; at {length:.0f} tokens a band near {PAPER_BAND * sqrt(PAPER_LENGTH / length):.1g} is usual"
    cure = "narrow it, unless the learning rate is still warming up"
    if clipped:
        cure = "widen it or lower actor.optim.lr"
    return (
        f"warning: actor/pg_clipfrac is {clipped:.3g} (healthy: above 0, up to {CLIPS_TOO_MUCH}): "
        f"algorithm.policy_loss.clip_ratio_low and _high, {loss.clip_ratio_low:g} and {loss.clip_ratio_high:g}, clip "
        f"{'most sequences' if clipped else 'nothing'}; {cure}. The ratio of a sequence spreads as 1/sqrt(response "
        f"length){fitting}"
    )


def routes_advice(rollout: RolloutConfig, device: str, metrics: Mapping[str, float]) -> str | None:
    """Returns one line if tokens of a replayed update lacked the engine's routes.

    Returns None if all had theirs, or replay is off.
    """
    missing = metrics.get("router/missing_routes", 0.0)
    if not missing:
        return None
    cached = rollout.enable_prefix_caching and not get_hosting(device).returns_routes
    cure = "see logs/engine-N.log in the run directory"
    if cached:
        cure = "rollout.enable_prefix_caching: false brings those of cached prompts"
    return (
        f"warning: router/missing_routes is {missing:.3g}: this share of choices is the trainer's own, not "
        f"the engine's (R3); {cure}"
    )


class MismatchWatch:
    """Warns once if the probabilities of generation and training are far apart, or drift.

    They drift if k3_kl is far above its value in the first steps.
    """

    def __init__(self, algorithm: AlgorithmConfig, rollout: RolloutConfig) -> None:
        self._algorithm = algorithm
        self._rollout = rollout
        self._first: list[float] = []

    def advice(self, metrics: Mapping[str, float]) -> str | None:
        """Returns one line; None if all is well or the step has no such metrics."""
        now = metrics.get(MISMATCH)
        if now is None:
            return None
        usual = float(np.median(self._first)) if len(self._first) == FIRST_STEPS else now
        if len(self._first) < FIRST_STEPS:
            self._first.append(now)
        if now > MISMATCH_LIMIT:
            size = f"above {MISMATCH_LIMIT:g}"
        elif now > max(DRIFT_FACTOR * usual, DRIFT_FLOOR):
            size = "where it was 0 at first"
            if usual:
                size = f"{now / usual:.0f} times that of the first {FIRST_STEPS} steps"
        else:
            return None
        cure = _mismatch_cure(self._algorithm, self._rollout)
        return f"warning: {MISMATCH} is {now:.2g} nats a token, {size}: {cure}"


def _mismatch_cure(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> str:
    if filtered := ", ".join(f"rollout.{name} {value:g}" for name, value in filters(rollout).items()):
        return (
            f"words were left out ({filtered}), whose share is in it; without the filter it measures what "
            "training and generation compute"
        )
    if algorithm.anchor == "rollout":
        cure = "algorithm.anchor: rollout takes it for a step of the policy; use recompute with a rollout_correction"
    elif algorithm.rollout_correction.level is None:
        cure = (
            "set algorithm.rollout_correction (level token, mode truncate, high 2 is TIS; level token, mode "
            "icepop, 0.5 to 5 is IcePop)"
        )
    else:
        cure = (
            "the correction hides it at the price of samples; see rollout_corr/rejected_token_share "
            "and effective_sample_share"
        )
    why = "generation and training disagree more than rounding explains. Check rollout.dtype against model.dtype"
    if rollout.quantization is not None:
        why = f"engines hold weights rounded to {rollout.quantization}, whose share is in it"
    return f"{why}; {cure}"


def advisers(algorithm: AlgorithmConfig, rollout: RolloutConfig, device: str, updates_per_step: int) -> list[Adviser]:
    """Returns one adviser of each kind, for the steps of one run in order."""
    return [
        partial(clip_advice, algorithm.policy_loss, updates_per_step),
        partial(routes_advice, rollout, device),
        MismatchWatch(algorithm, rollout).advice,
    ]
