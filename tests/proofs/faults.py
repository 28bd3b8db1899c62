"""What a lost engine and a lost rank cost a run that goes on: when it is noticed, when it is back, how long the loop
stands, and whether the run is bit for bit the one that nobody disturbed.

The tiny preset, a save a step. Each row is a run of its own: a signal at one point of the second step, and seconds
from there by the lines that the run prints. `stood_s` is the time between the lines of metrics of the step before and
of the step itself, less what the undisturbed run took between the two. Who was stopped here is told to go on as soon as
the run has noticed it, and that must change nothing: `continued` counts those who were there to be told. A row takes
about a minute.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fault_run import MARK
from random_kills import ROOT
from supervised_faults import RUN_S, VICTIMS, supervised

from mrl.crash_points import VARIABLE
from mrl.record.run_dir import METRICS, read_metrics
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

PRESETS = ROOT / "parallel_configs" / "tiny-moe"
STEPS = 5
STEPS_OF_TWO = 40  # of a run that goes on with the other engine: until the lost one is back
DEADLINE_S = 10  # that an engine may go without a token
RANKS_DEADLINE_S = 20  # of all calls in a step, to ranks and to engines
LOOK_S = 0.02


@dataclass(frozen=True)
class Row:
    """A fault. `engines`: how many the run has."""

    point: str
    victim: str
    signal: str = "SIGKILL"
    engines: int = 1
    schedule: str = "sync"
    shares: bool = False  # engine and ranks take turns on the same devices

    @property
    def steps(self) -> int:
        return STEPS_OF_TWO if self.engines > 1 else STEPS

    @property
    def crashes(self) -> bool:
        """Whether a process of the run does it to itself, at a place that MRL_CRASH_AT has: `point` is PLACE:NTH."""
        return ":" in self.point

    @property
    def name(self) -> str:
        words = "-".join(map(str, list(asdict(self).values())[:-1])).replace(" ", "_").replace(",", "")
        words = words.replace(":", "_")
        return words + "-shares" * self.shares

    @property
    def whole(self) -> str:
        """The undisturbed run that it is held against, and timed by."""
        return f"whole-{self.schedule}-{self.engines}" + "-shares" * self.shares

    @property
    def preset(self) -> Path:
        """The configuration that it is a run of."""
        return PRESETS / ("cpu-colocated.yaml" if self.shares else "cpu.yaml")


@dataclass(frozen=True)
class Supervised(Row):
    """Who is killed is above ranks and engines, and the run starts again as a whole, under `mrl train --restarts`."""

    point: str = "a step"
    victim: str = "driver"

    @property
    def steps(self) -> int:
        """More where the run goes on for a while without what is lost."""
        return STEPS_OF_TWO if self.victim == "gcs" else STEPS

    @property
    def whole(self) -> str:
        return f"{super().whole}-{self.steps}" if self.steps > STEPS else super().whole


ROWS = (
    Row("answers come back", "vllm"),
    Row("answers come back", "vllm", engines=2),
    Row("weights arrive", "vllm", engines=2),
    Row("proved, not committed", "vllm", engines=2),
    Row("answers come back", "vllm", "SIGSTOP"),
    Row("ranks update", "rank"),
    Row("weights are moved", "rank"),
    Row("a checkpoint is written", "rank"),
    Row("ranks update", "rank", "SIGSTOP"),
    Row("answers come back", "vllm", schedule="bounded"),
    Row("ranks update", "rank", schedule="bounded"),
    Row("requests are sent", "vllm"),
    Row("engines stand still", "vllm", schedule="bounded"),
    Row("engines go to sleep", "vllm", shares=True),
    Row("engines wake", "vllm", shares=True),
    Row("answers come back", "every vllm", engines=2),
    Row("requests are sent", "vllm", "SIGSTOP"),
    Row("engines stand still", "vllm", "SIGSTOP", schedule="bounded"),
    Row("weights arrive", "vllm", "SIGSTOP", engines=2),
    Row("proved, not committed", "vllm", "SIGSTOP", engines=2),
    Row("answers come back", "every vllm", "SIGSTOP", engines=2),
    Row("engines go to sleep", "vllm", "SIGSTOP", shares=True),
    Row("engines wake", "vllm", "SIGSTOP", shares=True),
    Row("ranks compute log-probs", "rank"),
    Row("ranks compute log-probs", "rank", "SIGSTOP"),
    Row("weights are moved", "rank", "SIGSTOP"),
    Row("a checkpoint is written", "rank", "SIGSTOP"),
    Row("rank 1 collective:400", "rank"),  # in the second step, which has some 300
    Row("rank 1 collective:400", "rank", "SIGSTOP"),
    Row("rank 1 collective:400", "rank", "skip"),
    Row("engine 0 connect_sync:1", "vllm"),  # the first sync, before the first step
    Row("engine 0 connect_sync:1", "vllm", "SIGSTOP"),
    *(Supervised(victim=victim) for victim in VICTIMS),
)
NOTICED = re.compile(r"engine \d+ is lost: |the ranks are started again")
BACK = re.compile(rf"engine \d+ serves again|{MARK} ranks are back")
STOPPED = re.compile(rf"{MARK} stopped ([\d ]+)")
ENGINES = re.compile(rf"{MARK} engines started in ([\d.]+) s")


class Faults:
    """Runs in a work folder, a result beside each."""

    def __init__(self, world: Path, work: Path) -> None:
        self._world = world
        self._work = work

    def missing(self, rows: Sequence[Row] = ROWS) -> Iterator[str]:
        """Makes one run after the other that is not there, and names it before."""
        for row in rows:
            for name, disturbed in ((row.whole, False), (row.name, True)):
                file = self._work / f"{name}.json"
                if file.exists():
                    continue
                yield name
                file.write_text(json.dumps(self._run(row, name, disturbed)))
                print(f"{name}: {file.read_text()}", flush=True)

    def result(self, row: Row) -> dict[str, Any]:
        """A row's figures."""
        whole = json.loads((self._work / f"{row.whole}.json").read_text())
        own = json.loads((self._work / f"{row.name}.json").read_text())
        step = sum(at <= own["sent"] for at in own["lines"])  # lines before; the step that is under way
        usual_s = duration(whole, step)
        return asdict(row) | {
            "steps": row.steps,
            "noticed_s": round(own["noticed"] - own["sent"], 2),
            "back_s": round(own["back"] - own["sent"], 2),
            "stood_s": round(duration(own, step) - usual_s, 2),
            "step_s": round(usual_s, 2),
            "engines_start_s": whole["engines_start_s"],
            "start_s": round(whole["loop"], 2),
            "said": own.get("said", ""),
            "continued": own.get("continued"),
            "difference": self._difference(row),
        }

    def _difference(self, row: Row) -> str | None:
        runs = self._work / row.name, self._work / row.whole
        rows = (read_metrics(run / METRICS) for run in runs)
        folders = (run / "checkpoints" / f"step-{row.steps}" for run in runs)
        return metrics_difference(*rows) or checkpoint_difference(*folders)

    def _run(self, row: Row, name: str, disturbed: bool) -> dict[str, Any]:
        """Seconds since its start: of the signal, of what was said of it, and of each step's first line."""
        run_dir = self._work / name
        if disturbed and isinstance(row, Supervised):
            return supervised(row.victim, row.preset, settings(row, self._world, run_dir), run_dir)
        point = row.point if disturbed else "none"
        fired = self._work / f"{name}.fired"
        environment = dict(os.environ)
        if disturbed and row.crashes:
            fired.unlink(missing_ok=True)
            environment[VARIABLE] = f"{row.point}:{row.signal}:{fired}"
            point = "none"
        words = [str(row.preset), point, row.victim, row.signal, *settings(row, self._world, run_dir)]
        command = [sys.executable, str(Path(__file__).with_name("fault_run.py")), *words]
        log = self._work / f"{name}.log"
        began = time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=environment)
            found = follow(process, log, run_dir, began, fired)
        if process.wait() != 0:
            raise RuntimeError(f"exit code {process.returncode}: {log}")
        return found


def duration(run: dict[str, Any], step: int) -> float:
    """Seconds from the line before, or from where the loop began, to the line behind so many others."""
    lines = [run["loop"], *run["lines"]]
    return lines[step + 1] - lines[step]


def follow(process: subprocess.Popen, log: Path, run_dir: Path, began: float, fired: Path) -> dict[str, Any]:
    """What a run says, with seconds since `began`, until it has ended. `fired` is there once it crashed by itself."""
    found: dict[str, Any] = {"lines": []}
    with log.open() as said:
        while True:
            over = process.poll() is not None
            now = time.monotonic() - began
            if fired.exists():
                found.setdefault("sent", now)
            take(found, said.read(), now)
            if "noticed" in found and "stopped" in found:
                found.setdefault("continued", 0)
                found["continued"] += go_on(found.pop("stopped"))
            steps = len(read_metrics(run_dir / METRICS)) if (run_dir / METRICS).exists() else 0
            found["lines"] += [now] * (steps - len(found["lines"]))
            if over:
                return found
            if now > RUN_S:
                process.kill()
            time.sleep(LOOK_S)


def take(found: dict[str, Any], text: str, now: float) -> None:
    """Notes what is said for the first time: what follows the signal only behind it."""
    if match := ENGINES.search(text):
        found.setdefault("engines_start_s", float(match[1]))
    if f"{MARK} loop begins" in text:
        found.setdefault("loop", now)
    if f"{MARK} sent" in text:
        found.setdefault("sent", now)
    if match := STOPPED.search(text):
        found["stopped"] = [int(pid) for pid in match[1].split()]
    noticed = NOTICED.search(text)
    if "sent" in found and noticed:
        found.setdefault("noticed", now)
        found.setdefault("said", said_of(text, noticed.start()))
    if "noticed" in found and BACK.search(text):
        found.setdefault("back", now)


def go_on(pids: Sequence[int]) -> int:
    """Tells stopped processes to go on; how many were there to be told."""
    told = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            told += 1
    return told


def said_of(text: str, at: int) -> str:
    """The line there; of ranks the one before it, which has the reason."""
    lines = text[:at].split("\n")
    whole = lines[-1] + text[at:].split("\n")[0]
    if "ranks are started again" in whole:
        return lines[-2] if len(lines) > 1 else ""
    return whole


def settings(row: Row, world: Path, run_dir: Path) -> list[str]:
    """Small batches, a save a step; restarts as they are by default."""
    data = world / "data"
    given = [
        f"model.path={world / 'model'}", f"data.train_files={data / 'train.parquet'}", "data.val_files=[]",
        "data.train_batch_size=8", "actor.ppo_mini_batch_size=4", "actor.optim.lr_warmup_steps=1",
        f"trainer.total_training_steps={row.steps}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2",
        "trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.deterministic=true",
        f"trainer.schedule={row.schedule}", "trainer.logger=[console]", f"trainer.run_dir={run_dir}",
        f"rollout.generate_timeout_s={DEADLINE_S}", f"cluster.step_timeout_s={RANKS_DEADLINE_S}",
    ]  # fmt: skip
    if row.schedule == "bounded":
        given += ["trainer.max_staleness=2", "trainer.partial_rollouts=true", "trainer.segment_tokens=1"]
    if row.shares:
        given += [f"actor.{kind}_offload=true" for kind in ("param", "grad", "optimizer")]
    if "connect_sync" in row.point:
        given.append(f"reshard.timeout_s={RANKS_DEADLINE_S}")  # that ranks wait for an engine there
    if row.engines == 2:
        given += ["rollout.num_engines=2", "cluster.n_gpus_per_node=4", "cluster.cpus_per_engine=0.5"]
    return given
