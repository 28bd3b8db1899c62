"""What a person should be told about a run while it goes on, beyond its numbers."""

from collections.abc import Mapping
from math import sqrt

from mrl.config.describe import updates_per_rollout
from mrl.config.schema import RunConfig
from mrl.record.sinks import Record

CLIPS_TOO_MUCH = 0.4
PAPER_BAND, PAPER_LENGTH = 3e-4, 1000  # GSPO's lower clip, and the response length in tokens at which it fits


def clip_advice(config: RunConfig, metrics: Mapping[str, float]) -> str | None:
    """One line when GSPO's band never clips, or clips most of the batch; None when all is well or nothing can be said.

    The first update on a rollout has ratios of one, so with a single update a rollout nothing is ever clipped, and that is right.
    """
    loss, clipped = config.algorithm.policy_loss, metrics.get("actor/pg_clipfrac")
    if loss.loss_mode != "gspo" or clipped is None or updates_per_rollout(config) < 2:
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


class AdvisedRecord:
    """A record that also prints the first advice there is, once a run."""

    def __init__(self, record: Record, config: RunConfig) -> None:
        self._record, self._config, self._given = record, config, False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the step's metrics."""
        self._record.write(step, metrics)
        advice = None if self._given else clip_advice(self._config, metrics)
        if advice:
            self._given = True
            print(f"step {step}: {advice}", flush=True)  # a live table lets lines pass above it

    def progress(self, phase: str, done: int, total: int) -> None:
        """Passes on how far a phase is."""
        self._record.progress(phase, done, total)

    def close(self) -> None:
        """Closes the record."""
        self._record.close()
