"""What a run says of a step: its metrics, its samples' file, and advice to the person who watches."""

from collections.abc import Callable, Mapping
from math import sqrt

import numpy as np
import psutil

from mrl.config.rollout_rules import filters, needed_devices
from mrl.config.schema import DataConfig, RunConfig
from mrl.platforms.hosting import get_hosting
from mrl.record.metrics import GENERATING, PhaseTimer, length_metrics, reward_metrics, speed_metrics
from mrl.record.sinks import Record
from mrl.record.views import Rows
from mrl.train.rollouts import Rollouts
from mrl.units import GIB

CLIPS_TOO_MUCH = 0.4
MISMATCH = "rollout_corr/k3_kl"
MISMATCH_LIMIT = 1e-2  # nats a token; mixtures of experts without replay of routes have about 1.5e-3 (arXiv:2510.11370)
FIRST_STEPS, DRIFT_FACTOR, DRIFT_FLOOR = 5, 5.0, 1e-4  # below the floor even a manyfold growth is rounding
PAPER_BAND, PAPER_LENGTH = 3e-4, 1000  # GSPO's lower clip, and the response length in tokens at which it fits


def reward_parts(rollouts: Rollouts) -> list[dict[str, float | str]]:
    """What is written of the rewards of the step's samples."""
    return [{**result.parts, "score": result.score, "reason": result.reason} for result in rollouts.results]


def sample_metrics(data: DataConfig, epoch: int, rollouts: Rollouts) -> dict[str, float]:
    """What the step's samples say: lengths, scores, rewards after penalties."""
    scores = np.array([result.score for result in rollouts.results])
    return {
        "training/epoch": float(epoch),
        **reward_metrics(scores, rollouts.rewards),
        **length_metrics(rollouts.samples.rows, data.max_prompt_length, data.max_response_length),
    }


def time_metrics(config: RunConfig, timer: PhaseTimer, rollouts: Rollouts) -> dict[str, float]:
    """Seconds of the step's phases, and tokens over time and devices, trainer's and engines'.

    Where generation runs ahead of training the phase "gen" is a wait, of which nothing follows for a token.
    """
    waits = {GENERATING} if config.trainer.schedule != "sync" else set()
    seconds = {name: value for name, value in timer.seconds.items() if name not in waits}
    return timer.metrics() | speed_metrics(rollouts.samples.rows, seconds, needed_devices(config))


def memory_metrics() -> dict[str, float]:
    """Memory in use on this host, in GiB."""
    return {"perf/cpu_memory_used_gb": psutil.virtual_memory().used / GIB}


def clip_advice(config: RunConfig, metrics: Mapping[str, float]) -> str | None:
    """One line when GSPO's band never clips, or clips most of the batch; None when all is well or nothing can be said.

    The first update on a rollout has ratios of one, so with a single update a rollout nothing is ever clipped, and that
    is right.
    """
    loss, clipped = config.algorithm.policy_loss, metrics.get("actor/pg_clipfrac")
    if loss.loss_mode not in ("gspo", "gspo-token") or clipped is None or config.updates_per_step < 2:
        return None
    if 0 < clipped <= CLIPS_TOO_MUCH:
        return None
    length = metrics.get("response_length/mean", 0.0)
    fitting = f"; at {length:.0f} tokens a band near {PAPER_BAND * sqrt(PAPER_LENGTH / length):.1g} is usual" if length > 0 else ""
    cure = "widen it or lower actor.optim.lr" if clipped else "narrow it, unless the learning rate is still warming up"
    return (
        f"warning: actor/pg_clipfrac is {clipped:.3g} (healthy: above 0, up to {CLIPS_TOO_MUCH}): algorithm.policy_loss.clip_ratio_low and "
        f"_high, {loss.clip_ratio_low:g} and {loss.clip_ratio_high:g}, clip {'most sequences' if clipped else 'nothing'}; {cure}. "
        f"The ratio of a sequence spreads as 1/sqrt(response length){fitting}"
    )


def routes_advice(config: RunConfig, metrics: Mapping[str, float]) -> str | None:
    """One line when tokens came to a replayed update without the engine's routes; None when all had theirs, or none were asked for."""
    missing = metrics.get("router/missing_routes", 0.0)
    if not missing:
        return None
    cached = config.rollout.enable_prefix_caching and not get_hosting(config.cluster.device).returns_routes
    cure = "rollout.enable_prefix_caching: false brings those of cached prompts" if cached else "see logs/engine-N.log in the run directory"
    return f"warning: router/missing_routes is {missing:.3g}: this share of choices is the trainer's own, not the engine's (R3); {cure}"


class MismatchWatch:
    """Says once when generation's and training's probabilities are far apart, or drift: k3_kl far above what the first steps had."""

    def __init__(self) -> None:
        self._first: list[float] = []

    def advice(self, config: RunConfig, metrics: Mapping[str, float]) -> str | None:
        """One line, or None when all is well or the step says nothing of it."""
        now = metrics.get(MISMATCH)
        if now is None:
            return None
        usual = float(np.median(self._first)) if len(self._first) == FIRST_STEPS else now
        if len(self._first) < FIRST_STEPS:
            self._first.append(now)
        if now > MISMATCH_LIMIT:
            size = f"above {MISMATCH_LIMIT:g}"
        elif now > max(DRIFT_FACTOR * usual, DRIFT_FLOOR):
            size = f"{now / usual:.0f} times that of the first {FIRST_STEPS} steps" if usual else "where it was 0 at first"
        else:
            return None
        return f"warning: {MISMATCH} is {now:.2g} nats a token, {size}: {_mismatch_cure(config)}"


def _mismatch_cure(config: RunConfig) -> str:
    if filtered := ", ".join(f"rollout.{name} {value:g}" for name, value in filters(config).items()):
        return (
            f"words were left out ({filtered}), whose share is in it; without the filter it measures what training and generation compute"
        )
    if config.algorithm.anchor == "rollout":
        cure = "algorithm.anchor: rollout takes it for a step of the policy; use recompute with a rollout_correction"
    elif config.algorithm.rollout_correction.level is None:
        cure = "set algorithm.rollout_correction (level token, mode truncate, high 2 is TIS; level token, mode mask, 0.5 to 5 is IcePop)"
    else:
        cure = "the correction hides it at the price of samples; see rollout_corr/rejected_token_share and effective_sample_share"
    return f"generation and training disagree more than rounding explains. Check rollout.dtype against model.dtype; {cure}"


class AdvisedRecord:
    """A record that also prints advice, the first of each kind there is, once a run."""

    def __init__(self, record: Record, config: RunConfig) -> None:
        self._record, self._config = record, config
        self._advisers: list[Callable[[RunConfig, Mapping[str, float]], str | None]] = [clip_advice, routes_advice, MismatchWatch().advice]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the step's metrics."""
        self._record.write(step, metrics)
        for adviser in tuple(self._advisers):
            if advice := adviser(self._config, metrics):
                self._advisers.remove(adviser)
                print(f"step {step}: {advice}", flush=True)  # a live table lets lines pass above it

    def progress(self, phase: str, done: int, total: int) -> None:
        """Passes on how far a phase is."""
        self._record.progress(phase, done, total)

    def generations(self, step: int, rows: Rows) -> None:
        """Passes on validation responses."""
        self._record.generations(step, rows)

    def close(self) -> None:
        """Closes the record."""
        self._record.close()
