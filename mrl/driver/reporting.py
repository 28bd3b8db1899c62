"""Makes the metrics of a step and of generation ahead of it, and prints advice and warnings with them."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from mrl.algo.rows import RowValues
from mrl.cluster.hosts import Hosts, Peak
from mrl.config.schema import AlgorithmConfig, DataConfig, TrainerConfig
from mrl.data.samples import SampleRows
from mrl.driver.advice import Adviser
from mrl.driver.step_batch import StepBatch
from mrl.errors import MrlError, described
from mrl.generate.rollouts import TRAIN_RESPONSES, Rollouts
from mrl.model import ModelSpec, forward_flops
from mrl.record.attempts import UnderWay
from mrl.record.metrics import (
    GENERATING,
    PhaseTimer,
    length_metrics,
    reward_metrics,
    speed_metrics,
    turn_metrics,
)
from mrl.record.quarantine import REWARD, Quarantine
from mrl.record.run_dir import RunDir, append_lines, json_line
from mrl.record.shown_rows import extreme_rows, write_shown_rows
from mrl.record.sinks import Record
from mrl.record.views import Rows
from mrl.reward.items import OK, UNJUDGED
from mrl.units import GIB

SPIKE = 30.0  # relative to the median
SPIKE_WINDOW = 64  # number of the newest updates for the median
SPIKE_LEAST = 8  # number of updates before one is judged
SPIKE_RANGES = 20  # ranges of samples in a line


def sample_metrics(data: DataConfig, epoch: int, rollouts: Rollouts) -> dict[str, float]:
    """Returns metrics of the step's samples: lengths, scores, rewards after penalties."""
    scores = np.array([result.score for result in rollouts.results])
    judged = np.array([result.reason not in UNJUDGED for result in rollouts.results], bool)
    return {
        "training/epoch": float(epoch),
        **reward_metrics(scores[judged], rollouts.rewards[judged]),
        **length_metrics(rollouts.made, data.max_prompt_length, data.max_response_length),
        **turn_metrics(rollouts.made),
    }


def set_failures_aside(run_dir: RunDir, step: int, rollouts: Rollouts) -> None:
    """Writes the step's responses whose reward failed into the run's quarantine."""
    prompts = rollouts.samples.rows.prompt_id
    failed = [(row, result) for row, result in enumerate(rollouts.results) if result.reason != OK]
    lines = [
        {
            "step": step,
            "prompt_id": int(prompts[row]),
            "sample_id": int(rollouts.samples.rows.sample_id[row]),
            "data_source": result.data_source,
            "reason": result.reason,
            "detail": result.detail,
        }
        for row, result in failed
    ]
    Quarantine(run_dir.path, run_dir.check_lock).add(REWARD, lines)


def time_metrics(trainer: TrainerConfig, devices: int, timer: PhaseTimer, rollouts: Rollouts) -> dict[str, float]:
    """Returns seconds of the step's phases, and token rates over `devices`, of trainer and engines.

    If generation runs ahead of training, the phase "gen" is only a wait. Then no rate follows from it.
    """
    waits = {GENERATING} if trainer.schedule != "sync" else set()
    seconds = {name: value for name, value in timer.seconds.items() if name not in waits}
    return timer.metrics() | speed_metrics(rollouts.made, seconds, devices)


def memory_metrics(hosts: Hosts) -> dict[str, float]:
    """Returns the memory in use on the fullest host, in GiB."""
    return {"perf/cpu_memory_used_gb": hosts.memory_used() / GIB}


def mfu_metrics(
    algorithm: AlgorithmConfig,
    model: ModelSpec,
    rows: SampleRows,
    peak: Peak,
    seconds: Mapping[str, float],
    teacher: ModelSpec | None = None,
    epochs: tuple[int, int] = (1, 1),
) -> dict[str, float]:
    """Returns the FLOPs of the step's samples, relative to the devices' peak in the same time.

    `seconds`: `update` is the time on the ranks, `step` the total. Sequences count with their real lengths, each by
    itself, without padding. Only experts that a token is sent to count, and the output layer only for sampled tokens.
    Recomputed layers count once.

    A backward pass costs as much as two forward passes. An update makes both in each of its `epochs`, those of the
    actor and of its critic. Generation and each pass of log-probs cost one, even if a cache saved some of it. A
    `teacher` costs one pass of its own model. A critic costs as much as the actor: a pass for its values, and an
    update. A step that trains only the critic asks no teacher, and a reference only for a KL in the reward.
    """
    lengths = rows.sequence_lengths.tolist()
    sampled = int(rows.sampled_lengths.sum())
    forward = forward_flops(model, lengths, sampled)
    taught = 0.0
    passes = 1 + (not algorithm.on_policy)
    if algorithm.needs_critic:
        passes += 1 + 3 * epochs[1]
    of_actor = {}
    if not seconds["update"]:  # only a critic was trained
        passes += algorithm.use_kl_in_reward
    else:
        passes += algorithm.needs_reference + 3 * epochs[0]
        if teacher is not None:
            taught = forward_flops(teacher, lengths, sampled)
        of_actor = {"perf/mfu/actor": 3 * epochs[0] * forward / (seconds["update"] * peak.actor)}
    return of_actor | {"perf/mfu/step": (passes * forward + taught) / (seconds["step"] * peak.run)}


class AdvisedRecord:
    """A record that also prints advice: the first of each kind, once in a run.

    It counts the responses of a step, for a restart after a loss.
    """

    def __init__(self, record: Record, advisers: Iterable[Adviser], under_way: UnderWay) -> None:
        self._record = record
        self._advisers = list(advisers)
        self._under_way = under_way

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the step's metrics, and prints advice about them."""
        self._record.write(step, metrics)
        self._under_way.done(step)
        for adviser in tuple(self._advisers):
            if advice := adviser(metrics):
                self._advisers.remove(adviser)
                print(f"step {step}: {advice}", flush=True)  # a live table lets printed lines pass above it

    def progress(self, phase: str, done: int, total: int) -> None:
        """Passes on the progress of a phase."""
        if phase == TRAIN_RESPONSES:
            self._under_way.arrived(done, total)
        self._record.progress(phase, done, total)

    def generations(self, step: int, rows: Rows) -> None:
        """Passes on validation responses."""
        self._record.generations(step, rows)

    def close(self) -> None:
        """Closes the record."""
        self._under_way.close()
        self._record.close()


def record_shown_rows(
    run_dir: RunDir, step: int, trained: StepBatch, gaps: RowValues | None, rollouts: Rollouts
) -> None:
    """Writes log-probs of the best and worst responses, and of those that differ most from generation's.

    `gaps` are those of `mismatch_of_rows`. On policy, without any, it writes nothing, because log-probs come with the
    update, and rows are gone by then. Errors of the display are printed and do not end the run. Errors of the run
    itself are raised: a lost rank, a signal or a lost lock.
    """
    if gaps is None:
        return
    try:
        scores = [result.score for result in rollouts.results]
        reasons = [result.reason for result in rollouts.results]
        mean_gaps = gaps["log_gap"] / np.maximum(trained.rows.sampled_lengths, 1)
        kinds = extreme_rows(scores, trained.rows.group_id.tolist(), reasons, mean_gaps.tolist())
        of_rows = trained.log_probs_of(sorted(row for rows in kinds.values() for row in rows))
        ids = trained.rows.sample_id
        run_dir.check_lock()
        write_shown_rows(run_dir.path, step, {int(ids[row]): log_probs for row, log_probs in of_rows.items()})
    except MrlError:
        raise
    except Exception as error:
        print(f"note: the log-probs to look at of step {step} are not written: {described(error)}", flush=True)


def note_warning(run_dir: RunDir, step: int, text: str) -> None:
    """Keeps a warning for the report. A disk that takes no more loses it: it was printed. Raises LostLock."""
    run_dir.check_lock()
    with suppress(OSError):
        append_lines(run_dir.warnings, json_line({"step": step, "text": text}))


class SpikeWatch:
    """Reports updates with a much larger gradient than earlier ones, each with its samples.

    Clipping bounds the effect of such an update on the weights. Its samples show the reason.
    Each start of the run begins anew.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def look(
        self,
        step: int,
        clip_grad: float,
        norms: Sequence[float],
        sample_ids: Sequence[np.ndarray],
        note: Callable[[int, str], None] = lambda step, text: None,
    ) -> None:
        """Takes the norms of a step's updates, in their order, and prints a line for each that is a spike.

        `norms`: before clipping; NaN for a skipped update. `sample_ids`: of each update's rows. `note` keeps what is
        printed.
        """
        for number, (norm, ids) in enumerate(zip(norms, sample_ids, strict=True), 1):
            if not math.isfinite(norm):
                continue
            # groups of equal values give updates of 0, which must not make other updates unusual
            if len(self._norms) >= SPIKE_LEAST and norm > SPIKE * (usual := float(np.median(self._norms))) > 0:
                text = _norm_text(number, len(norms), norm, usual, clip_grad)
                samples = f"its samples: {in_ranges(ids)}; mrl samples shows them"
                print(f"step {step}: {text}\n  {samples}", flush=True)
                note(step, f"{text.removeprefix('warning: ')}; {samples}")
            self._norms.append(norm)


def _norm_text(number: int, updates: int, norm: float, usual: float, clip_grad: float) -> str:
    became = f"actor.optim.clip_grad ({clip_grad:g}) leaves it as it is"
    if 0 < clip_grad < norm:
        became = f"it was clipped to {clip_grad:g} (actor.optim.clip_grad)"
    which = f"the gradient of update {number} of {updates}"
    return f"warning: {which} has norm {norm:.3g}, more than {SPIKE:g} times the usual {usual:.3g}; {became}"


def in_ranges(ids: np.ndarray) -> str:
    """Writes whole numbers as text, consecutive ones as a range: `0-15, 32-47`."""
    ordered = np.unique(ids)
    parts = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    found = [f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts if len(part)]
    more = [f"and {len(found) - SPIKE_RANGES} more ranges"] if len(found) > SPIKE_RANGES else []
    return ", ".join([*found[:SPIKE_RANGES], *more])
