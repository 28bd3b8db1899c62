"""What a run says of a step: its metrics; advice is printed beside it."""

from collections.abc import Iterable, Mapping

import numpy as np

from mrl.cluster.hosts import Hosts, Peak
from mrl.config.schema import AlgorithmConfig, DataConfig, TrainerConfig
from mrl.data.samples import SampleRows
from mrl.errors import MrlError, described
from mrl.flow.step_batch import StepBatch
from mrl.model import ModelSpec, forward_flops
from mrl.record.attempts import UnderWay
from mrl.record.metrics import GENERATING, PhaseTimer, length_metrics, reward_metrics, speed_metrics, turn_metrics
from mrl.record.quarantine import REWARD, Quarantine
from mrl.record.run_dir import RunDir
from mrl.record.shown_rows import extreme_rows, write_shown_rows
from mrl.record.sinks import Record
from mrl.record.views import Rows
from mrl.reward.items import OK, UNJUDGED
from mrl.train.advice import Adviser
from mrl.train.rollouts import TRAIN_RESPONSES, Rollouts
from mrl.units import GIB


def sample_metrics(data: DataConfig, epoch: int, rollouts: Rollouts) -> dict[str, float]:
    """What the step's samples say: lengths, scores, rewards after penalties."""
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
    """Seconds of the step's phases, and tokens over time and `devices`, trainer's and engines'.

    Where generation runs ahead of training the phase "gen" is a wait, of which nothing follows for a token.
    """
    waits = {GENERATING} if trainer.schedule != "sync" else set()
    seconds = {name: value for name, value in timer.seconds.items() if name not in waits}
    return timer.metrics() | speed_metrics(rollouts.made, seconds, devices)


def memory_metrics(hosts: Hosts) -> dict[str, float]:
    """Memory in use on the fullest host, in GiB."""
    return {"perf/cpu_memory_used_gb": hosts.memory_used() / GIB}


def mfu_metrics(
    algorithm: AlgorithmConfig,
    model: ModelSpec,
    rows: SampleRows,
    peak: Peak,
    seconds: Mapping[str, float],
    teacher: ModelSpec | None = None,
) -> dict[str, float]:
    """FLOPs that the step's samples cost, over what devices could do in the time.

    `seconds`: `update` on the ranks, `step` in all. Counted are the sequences as they are, each by itself: no padding,
    experts that a token is sent to, the output layer of sampled tokens alone, and layers that are computed twice once.
    A backward pass costs two forward ones; generation and each pass of log-probs one, whatever a cache saved. A
    `teacher`'s pass costs one of its own. A critic costs what the actor does, a pass for its values and an update. A
    step that trains it alone asks no teacher, and a reference for a KL in the reward alone.
    """
    lengths = rows.sequence_lengths.tolist()
    sampled = int(rows.sampled_lengths.sum())
    forward = forward_flops(model, lengths, sampled)
    taught = 0.0
    passes = 1 + (not algorithm.on_policy)
    if algorithm.needs_critic:
        passes += 1 + 3
    of_actor = {}
    if not seconds["update"]:  # a critic was trained alone
        passes += algorithm.use_kl_in_reward
    else:
        passes += algorithm.needs_reference + 3
        if teacher is not None:
            taught = forward_flops(teacher, lengths, sampled)
        of_actor = {"perf/mfu/actor": 3 * forward / (seconds["update"] * peak.actor)}
    return of_actor | {"perf/mfu/step": (passes * forward + taught) / (seconds["step"] * peak.run)}


class AdvisedRecord:
    """A record that also prints advice: the first of each kind, once a run.

    It notes how many responses of a step are there, for the start that goes on after a loss.
    """

    def __init__(self, record: Record, advisers: Iterable[Adviser], under_way: UnderWay) -> None:
        self._record = record
        self._advisers = list(advisers)
        self._under_way = under_way

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the step's metrics."""
        self._record.write(step, metrics)
        self._under_way.done(step)
        for adviser in tuple(self._advisers):
            if advice := adviser(metrics):
                self._advisers.remove(adviser)
                print(f"step {step}: {advice}", flush=True)  # a live table lets lines pass above it

    def progress(self, phase: str, done: int, total: int) -> None:
        """Passes on how far a phase is."""
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


def record_shown_rows(run_dir: RunDir, step: int, trained: StepBatch, rollouts: Rollouts) -> None:
    """Writes log-probs of the best and the worst responses, and of those that differ most from generation's.

    Writes nothing on policy: then log-probs come with the update, and rows are gone with it. What fails in showing is
    printed and ends no run. What the run itself met is raised: a lost rank, a signal or a lost lock.
    """
    if trained.log_gaps is None:
        return
    try:
        scores = [result.score for result in rollouts.results]
        reasons = [result.reason for result in rollouts.results]
        kinds = extreme_rows(scores, trained.rows.group_id.tolist(), reasons, trained.log_gaps.tolist())
        of_rows = trained.old_log_probs_of(sorted(row for rows in kinds.values() for row in rows))
        ids = trained.rows.sample_id
        run_dir.check_lock()
        write_shown_rows(run_dir.path, step, {int(ids[row]): log_probs for row, log_probs in of_rows.items()})
    except MrlError:
        raise
    except Exception as error:
        print(f"note: the log-probs to look at of step {step} are not written: {described(error)}", flush=True)
