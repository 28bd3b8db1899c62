"""A run that is left alone, and the same one ended at one point after the other and resumed: not one bit may differ.

For scripts that name the points: colocated.py, ahead_kills.py. Both runs are in a work folder that remembers what was
done: with --for SECONDS the next call goes on there.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
from stamp import facts

from mrl.record.run_dir import METRICS, read_metrics
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 400.0  # deadline of one start


class Point(Protocol):
    """Where a run is ended: a dataclass, which stands in the results as it is."""

    @property
    def exit_code(self) -> int:
        """Of the driver."""

    @property
    def words(self) -> list[str]:
        """The driver's arguments behind the preset."""


@dataclass(frozen=True)
class Claim:
    """What is ended where: the part in which two claims differ."""

    command: str  # the script that shows it
    preset: Path
    driver: Path  # called as DRIVER PRESET *point.words RESUME [KEY=VALUE ...]
    points: Sequence[Point]
    steps: int
    settings: Callable[[Path, Path], list[str]]  # of a run with this world and this directory: KEY=VALUE
    summary: Callable[[list[dict], list[dict]], dict[str, Any]]  # of the endings and of the whole run's metrics
    steps_compared: tuple[int, ...]  # checkpoints of both runs


@dataclass(frozen=True)
class Ending:
    """How the run ended at a point."""

    point: Point
    exit_code: int
    steps: int  # that had their line of metrics by then
    difference: str | None  # of those lines; None: no bit


def show(claim: Claim, description: str | None) -> dict | None:
    """Goes on with a claim as the command line says; its results, None where there is no time left for them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    limit = "begin no further start after this many seconds"
    parser.add_argument("--for", type=float, default=float("inf"), dest="seconds", help=limit)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    run = KilledRun(claim, options.world.resolve(), options.work.resolve())
    deadline = time.monotonic() + options.seconds
    while run.is_unfinished:
        if time.monotonic() > deadline:
            print("to be continued", flush=True)
            return None
        run.go_on()
    results = run.results()
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return results


class KilledRun:
    """The run that is left alone and the one that is not."""

    def __init__(self, claim: Claim, world: Path, work: Path):
        self._claim, self._world, self._work = claim, world, work
        self._whole, self._run, self._file = work / "whole", work / "run", work / "endings.json"

    @property
    def is_unfinished(self) -> bool:
        return not (self._work / "finished").exists()

    def endings(self) -> list[dict]:
        return json.loads(self._file.read_text()) if self._file.exists() else []

    def go_on(self) -> None:
        """One start: of the run that is left alone, of the other one up to its next end, or of its rest."""
        done = self.endings()
        if not (self._work / "whole.done").exists():
            self._train(self._whole)
            (self._work / "whole.done").touch()
        elif len(done) < len(self._claim.points):
            self._end(self._claim.points[len(done)], done)
        else:
            self._train(self._run, "--resume")
            (self._work / "finished").touch()

    def _end(self, point: Point, done: list[dict]) -> None:
        claim, log = self._claim, self._work / f"point-{len(done)}.log"
        words = [str(claim.preset), *point.words, str(int(bool(done))), *claim.settings(self._world, self._run)]
        finish([sys.executable, str(claim.driver), *words], log, point.exit_code)
        rows = read_metrics(self._run / METRICS)
        whole = read_metrics(self._whole / METRICS)[: len(rows)]
        done.append(asdict(Ending(point, point.exit_code, len(rows), metrics_difference(whole, rows))))
        self._file.write_text(json.dumps(done, indent=1))
        print(f"{len(done)} of {len(claim.points)}: {done[-1]}", flush=True)

    def differences(self) -> list[str]:
        """All that were found, those of the ends first."""
        runs = (self._whole, self._run)
        metrics = metrics_difference(*(read_metrics(folder / METRICS) for folder in runs))
        checkpoints = [
            checkpoint_difference(*(folder / "checkpoints" / f"step-{step}" for folder in runs))
            for step in self._claim.steps_compared
        ]
        return [text for text in (*(end["difference"] for end in self.endings()), metrics, *checkpoints) if text]

    def results(self) -> dict:
        """What goes to the results file."""
        endings = self.endings()
        return facts(self._claim.command) | {
            "machine": platform.machine(),
            "steps": self._claim.steps,
            **self._claim.summary(endings, read_metrics(self._whole / METRICS)),
            "differences": self.differences(),
            "endings": endings,
        }

    def _train(self, run_dir: Path, *more: str) -> None:
        settings = [text for given in self._claim.settings(self._world, run_dir) for text in ("--set", given)]
        program = "from mrl.cli.main import main; main()"
        command = [sys.executable, "-c", program, "train", str(self._claim.preset), *more, *settings]
        finish(command, run_dir.with_suffix(".log"), wanted=0)


def finish(command: list[str], log: Path, wanted: int) -> None:
    """Runs a command to its end, and ends what it left.

    Raises RuntimeError for another exit code than the one wanted.
    """
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        below: dict[int, psutil.Process] = {}
        deadline = time.monotonic() + RUN_S
        while process.poll() is None and time.monotonic() < deadline:
            below |= {child.pid: child for child in _children(process.pid)}
            time.sleep(0.5)
    if process.poll() is None:
        process.kill()
    _, left = psutil.wait_procs(list(below.values()), timeout=60)
    for one in left:
        one.kill()
    if process.wait() != wanted:
        raise RuntimeError(f"exit code {process.returncode} where {wanted} was expected: {log}")


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
