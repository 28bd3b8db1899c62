"""Computes a run's steps again from what it stored: from the nearest checkpoint, or from the model, with its samples.

    checkpoint of step K      steps K+1 .. N          step N once more, changed
    or the model, K = 0  -->  samples/, in order  -->  each experiment from the state before N
                              metrics compared

The ranks are processes of this host in the run's own layout, without Ray and without engines. In the same layout, and
on the same kind of device with the same software, every number comes out with equal bits.
"""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mrl.checkpoint.manifest import read_manifest
from mrl.config.load import load_config
from mrl.config.schema import RunConfig, with_values
from mrl.errors import ConfigError, EnvironmentFault, MrlError
from mrl.plan.measured_steps import STEP
from mrl.platforms.hosting import get_hosting
from mrl.process.free_ports import free_port
from mrl.record.run_dir import RunDir, read_metrics
from mrl.record.sample_files import StepFile, readable, steps_with_responses
from mrl.tools.compare_runs import is_of_clock

if TYPE_CHECKING:
    from mrl.driver.assemble_data import Data

MOST_STEPS = 200  # between a checkpoint and the step, which are all computed again
MORE_STEPS = 20  # up to which an earlier checkpoint is taken than a step needs
TIME_S = 1800.0  # of all ranks together
OLDER_VERSIONS = 3  # that generation may have had, see mrl.driver.replay_views
_TAIL = 2000  # characters of a failed rank's log
# of generation and of the run, which a replay does not have
_NOT_REPLAYED = ("offload/",)


@dataclass(frozen=True)
class StoredRun:
    """A run directory as a replay needs it."""

    folder: RunDir
    config: RunConfig
    rows: dict[int, dict[str, Any]]  # lines of metrics by step

    @classmethod
    def read(cls, path: Path) -> "StoredRun":
        """Reads a run. Raises ConfigError for a folder without one, or of another version."""
        folder = RunDir(path)
        if not folder.config.is_file():
            raise ConfigError(
                f"{path}: holds no run (no {folder.config.name}); give a run directory, such as runs/first"
            )
        try:
            config = load_config(folder.config).config
        except MrlError as error:
            first = str(error).splitlines()[0]
            raise ConfigError(
                f"{folder.config}: was written by another version of mrl ({first}); explain it with that version, "
                "which attempts.jsonl names"
            ) from None
        rows = {row[STEP]: row for row in read_metrics(folder.metrics)}
        if not any(rows):
            raise ConfigError(f"{folder.metrics}: has no step yet; there is nothing to explain")
        return cls(folder, config, rows)

    @property
    def steps(self) -> list[int]:
        """The finished steps, ascending."""
        return sorted(step for step in self.rows if step > 0)

    @property
    def replicas(self) -> int:
        """Data-parallel replicas of the actor."""
        layout = self.config.actor.layout
        return layout.world_size // (
            layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
        )

    def base(self, step: int, earlier: int = 0) -> tuple[int, Path | None]:
        """Returns the newest checkpoint before a step, with its folder; (0, None) for the model itself.

        With `earlier` it is one that is as many steps before that, or the oldest, if that leaves no more than
        MORE_STEPS to compute. Raises ConfigError where samples of a step in between are missing.
        """
        kept = set(steps_with_responses(self.folder.samples))
        found: dict[int, Path | None] = {0: None}
        for folder in self.folder.checkpoints.glob("step-*"):
            with suppress(ValueError):
                number = int(folder.name.removeprefix("step-"))
                if number < step and (folder / "manifest.json").is_file():
                    found[number] = folder
        newest = max(found)
        if earlier:
            allowed = [
                number
                for number in found
                if step - number <= MORE_STEPS and kept.issuperset(range(number + 1, step + 1))
            ]
            if allowed:
                first = max((number for number in allowed if number < step - earlier), default=min(allowed))
                return first, found[first]
        missing = [each for each in range(newest + 1, step + 1) if each not in kept]
        if missing:
            start = (
                f"the checkpoint of step {newest}" if newest else "the run's start, as no checkpoint before it is left"
            )
            raise ConfigError(
                f"--step {step}: it is computed again from {start}, and samples of step {missing[0]} are missing "
                f"({len(missing)} in all); record.samples: all and a larger trainer.max_actor_ckpt_to_keep keep more"
            )
        if step - newest > MOST_STEPS:
            raise ConfigError(
                f"--step {step}: the newest checkpoint before it is of step {newest}, and at most {MOST_STEPS} steps "
                "are computed again; a smaller trainer.save_freq keeps nearer ones"
            )
        return newest, found[newest]


@dataclass(frozen=True)
class Replay:
    """What came out. `differences`: of each step, name, stored and replayed value of metrics that are not equal.

    `weights`: whether the weights and optimizer states after the last step are those of its checkpoint; None where
    there is none. `experiments`: metrics of the last step with one thing changed, by name; `failed`: what could not be
    computed, with the reason. `views`: other ways in which generation may have computed the last step's
    log-probs, the model's own first (mrl.driver.replay_views). `served`: what each rank wrote of the weights that the
    step was generated with, and `log_probs` what ranks compute of the responses that differ most, by sample id; both
    empty where they were not asked for. With guesses `step` is the first that does not repeat, and `experiments` are
    they.
    """

    first: int
    step: int
    metrics: dict[str, float]
    compared: int
    differences: dict[int, list[tuple[str, Any, Any]]]
    weights: bool | None
    experiments: dict[str, dict[str, float]]
    failed: dict[str, str]
    seconds: float
    views: list[dict[str, Any]] = field(default_factory=list)
    served: list[dict[str, Any]] = field(default_factory=list)
    log_probs: dict[int, list[float]] = field(default_factory=dict)

    @property
    def repeats(self) -> bool:
        """Tells whether everything came out with equal bits."""
        return not self.differences and self.weights is not False


def replayed_faults(config: RunConfig) -> list[str]:
    """Returns why steps of a configuration cannot be computed again here; empty where they can."""
    faults = []
    if config.record.samples != "all":
        faults.append(f"record.samples: {config.record.samples} kept a part of each step's rows; all keeps them")
    if config.actor.router_replay == "R3" and not config.record.routes:
        faults.append("actor.router_replay: R3 trained on the engines' routes, which record.routes: true keeps")
    if config.algorithm.needs_critic:
        faults.append(f"algorithm.adv_estimator: {config.algorithm.adv_estimator} has a critic, which is not replayed")
    if config.distillation.enabled:
        faults.append("distillation.enabled: a teacher is not replayed")
    if config.rollout.turns is not None or config.rollout.agent is not None:
        faults.append("rollout.turns: responses of several turns are not replayed")
    if config.algorithm.custom_advantage is not None:
        faults.append("algorithm.custom_advantage: a function of yours may keep something from step to step")
    return faults


def replay(
    run: StoredRun,
    step: int,
    experiments: Sequence[Mapping[str, Any]] = (),
    guesses: Sequence[Mapping[str, Any]] = (),
    seconds: float = TIME_S,
    views: bool = False,
    floor: float = 0.0,
    earlier: int = 0,
    settings: Mapping[str, Any] = MappingProxyType({}),
    served: Path | None = None,
) -> Replay:
    """Computes a step again, and experiments with it. Raises ConfigError for a run that does not allow it.

    `guesses`: experiments with the first step that does not repeat, if there is one; later steps are not computed then.
    `views`: also computes how generation may have come to its log-probs, if the mean difference is above `floor`, nats
    a token. `earlier`: steps that are computed again before this one, if a checkpoint allows it. `settings` replace
    those of the run by path; then nothing is compared with checkpoints. `served`: an empty folder for the weights that
    the step was generated with, which ranks write where no view says what generation had.
    Raises EnvironmentFault where a rank fails, or all are not done after `seconds`.
    """
    from mrl.driver.stored_step import check_routes_kept

    if step not in run.rows or step < 1:
        raise ConfigError(f"--step {step}: the run has no such step; it has {_range(run.steps)}")
    config = with_values(run.config, settings)
    if faults := replayed_faults(config):
        raise ConfigError(f"{run.folder.path}: its steps cannot be computed again: {'; '.join(faults)}")
    first, checkpoint = run.base(step, max(earlier, OLDER_VERSIONS if views else 0))
    for number in range(first + 1, step + 1):
        with readable(run.folder.samples, number):
            _ = StepFile(run.folder.samples, number).scores  # damaged files are told before ranks start
            check_routes_kept(config, run.folder.samples, number)
    begun = time.perf_counter()
    kept = run.folder.checkpoints / f"step-{step}"
    has_weights = not settings and (kept / "manifest.json").is_file()
    stored = {
        number: {name: value for name, value in run.rows[number].items() if _is_replayed(name)}
        for number in range(first + 1, step + 1)
    }
    with tempfile.TemporaryDirectory(prefix="mrl-replay-") as made:
        folder = Path(made)
        order = {
            "run": str(run.folder.path.resolve()), "first": first + 1, "step": step, "weights": has_weights,
            "checkpoint": None if checkpoint is None else str(checkpoint.resolve()), "stored": stored,
            "total_steps": _total_steps(run.config), "experiments": list(experiments), "guesses": list(guesses),
            "views": views, "floor": floor, "settings": dict(settings), "seconds": seconds,
            "served": None if served is None else str(served.resolve()),
            "kl_coef": first_kl_coef(run, checkpoint),
        }  # fmt: skip
        (folder / "order.json").write_text(json.dumps(order), encoding="utf-8")
        (folder / "config.yaml").write_text(run.folder.config.read_text(encoding="utf-8"), encoding="utf-8")
        answers = _ranks(config, folder, seconds)
    again = {int(number): metrics for number, metrics in answers[0]["steps"].items()}
    found = _experiments(answers)
    served = [answer["served"] for answer in answers if answer["served"] is not None]
    if unwritten := [part["failed"] for part in served if "failed" in part]:
        served = []
        found["the comparison with transformers"] = unwritten[0]
    return Replay(
        first,
        max(again),
        again[max(again)],
        sum(len(metrics.keys() & stored[number].keys()) for number, metrics in again.items()),
        {int(number): [tuple(each) for each in unlike] for number, unlike in answers[0]["differences"].items()},
        _same_weights(kept, answers) if answers[0]["file"] is not None else None,
        {name: metrics for name, metrics in found.items() if isinstance(metrics, dict)},
        {name: why for name, why in found.items() if isinstance(why, str)},
        time.perf_counter() - begun,
        answers[0]["views"],
        served,
        {int(number): values for answer in answers for number, values in answer["log_probs"].items()},
    )


def _range(steps: Sequence[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"


def _is_replayed(name: str) -> bool:
    return not is_of_clock(name) and not name.startswith(_NOT_REPLAYED)


def _total_steps(config: RunConfig) -> int:
    """Returns the steps of the run, which its learning rates follow."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return data_of(config).total_steps


def first_kl_coef(run: StoredRun, checkpoint: Path | None) -> float | None:
    """Returns the weight of a KL in the rewards of the step after a checkpoint; None where it is that of the
    configuration. Weights of later steps follow from it: the run's own metrics may hold a wrong one.
    """
    if run.config.algorithm.kl_ctrl.type == "fixed" or checkpoint is None:
        return None
    return read_manifest(checkpoint).trainer.get("kl_coef")


def data_of(config: RunConfig) -> "Data":
    """Reads a run's prompts and reward function again. Raises what `read_data` raises.

    What that prints, the run has said, and would stand before the JSON of an answer.
    """
    from mrl.driver.assemble_data import read_data

    with redirect_stdout(io.StringIO()):
        return read_data(config.model, config.data, config.rollout, config.reward, config.trainer)


def _ranks(config: RunConfig, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Runs all ranks to their end. Returns their answers. Raises EnvironmentFault with a log's end if one fails."""
    world = config.actor.layout.world_size
    environment = os.environ | get_hosting(config.cluster.device).actor_environment()
    port = str(free_port())
    logs = [folder / f"rank-{rank}.log" for rank in range(world)]
    processes: list[subprocess.Popen] = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "mrl.driver.replay_rank", str(rank), port, str(folder)]
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
                    )
                )
        _wait(processes, logs, seconds)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def _wait(processes: Sequence[subprocess.Popen], logs: Sequence[Path], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            said = logs[failed[0]].read_text(errors="replace")[-_TAIL:].rstrip()
            own = re.search(r"^mrl\.errors\.\w+: (.*)\Z", said, re.M | re.S)  # says all by itself
            if own:
                raise EnvironmentFault(f"the replay cannot go on: {own[1]}")
            raise EnvironmentFault(f"rank {failed[0]} of the replay ended with {codes[failed[0]]}:\n{said}")
        if all(code == 0 for code in codes):
            return
        time.sleep(0.1)
    raise EnvironmentFault(
        f"the replay is not done after {seconds / 60:.0f} minutes, and was ended; mrl explain --minutes gives it more"
    )


def _experiments(answers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float] | str]:
    """Returns the metrics of each experiment by its name, or the reason why it has none on a rank."""
    found = {}
    for name in answers[0]["experiments"]:
        of_ranks = [answer["experiments"][name] for answer in answers]
        failed = [each["failed"] for each in of_ranks if "failed" in each]
        found[name] = failed[0] if failed else of_ranks[0]["metrics"]
    return found


def _same_weights(checkpoint: Path, answers: Sequence[Mapping[str, Any]]) -> bool:
    """Tells whether every rank's file would have the bytes of the checkpoint's."""
    stored = read_manifest(checkpoint).files()
    written = {name: facts for answer in answers for name, facts in answer["file"].items()}
    return all(stored.get(name) == facts for name, facts in written.items())
