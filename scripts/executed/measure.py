"""Trains a few steps with the hook of sitecustomize.py in every process, and counts what ran in one of them."""

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from sitecustomize import SLICE_S

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
MEASURED = 3  # of them, from 0: after the plan was compared with step 2 (plan_view.py), before the last
# a function that a process of this kind alone runs
KINDS = {
    "driver": "train_step",
    "rank": "ActorWorker.__init__",
    "engine": "EngineWorker.__init__",
    "scorer": "Scorer.__init__",
    "vLLM below an engine": "register",
}
VERBS = re.compile(r"(ActorWorker|EngineWorker)\.([a-z]\w*?)(?::(\w+))?$")  # a public method, or what `do` is told


@dataclass(frozen=True)
class Ran:
    """A function, or a class of which an object was made, where it has no lines."""

    file: str
    first: int
    last: int
    name: str


@dataclass
class Process:
    """What one process noted."""

    ran: dict[Ran, list[int]]  # slices of time
    steps: list[float]  # times of calls and returns of a step, in turn

    @classmethod
    def of_file(cls, path: Path) -> "Process":
        ran: dict[Ran, list[int]] = defaultdict(list)
        steps = []
        for line in path.read_text(encoding="utf-8").splitlines():
            parts = line.split(maxsplit=4)
            if len(parts) == 2:
                steps.append(float(parts[0]))
            elif len(parts) == 5:
                ran[Ran(parts[1], int(parts[2]), int(parts[3]), parts[4])].append(int(parts[0]))
        return cls(ran, steps)

    @property
    def kind(self) -> str:
        names = {ran.name for ran in self.ran}
        return next((kind for kind, name in KINDS.items() if name in names), "others")

    def modules(self) -> set[str]:
        """Files of modules that it loaded."""
        return {ran.file for ran in self.ran if ran.name == "<module>"}

    def between(self, begin: float, end: float) -> set[Ran]:
        """What ran in slices that lie between two times, modules' own lines left out."""
        first, last = int(begin / SLICE_S) + 1, int(end / SLICE_S) - 1
        return {
            ran for ran, slices in self.ran.items()
            if ran.name != "<module>" and any(first <= one <= last for one in slices)
        }  # fmt: skip


def of_default_preset(work: Path) -> dict:
    """Trains the tiny preset below the new folder `work`, and returns what ran.

    The model of its world learnt nothing before: it runs the same code.
    """
    import make_tiny_world as world

    plan = replace(world.WarmUp(), steps=1, lowest=0.0, highest=1.0)
    with redirect_stdout(sys.stderr):
        world.make(work.resolve() / "tiny-world", 0, False, plan)
    run(work)
    return measured(work / "notes")


def run(work: Path) -> None:
    """Trains STEPS steps of the tiny preset with the hook. The run's folder and the notes are below `work`."""
    notes = work / "notes"
    notes.mkdir(parents=True)
    folders = (Path(__file__).parent, ROOT, os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder),
        "EXECUTED_FOLDER": str(notes.resolve()),
    }
    preset = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
    command = [sys.executable, "-m", "mrl.cli.main", "train", str(preset), "--run-dir", "run"]
    given = [f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false"]
    given += ["rollout.start_timeout_s=3600", "cluster.step_timeout_s=3600"]  # the hook slows what imports much
    command += [word for setting in given for word in ("--set", setting)]
    subprocess.run(command, cwd=work, env=environment, check=True, stdout=sys.stderr)


def measured(notes: Path) -> dict:
    """Figures of one step by kind of process, and of what each kind had loaded at the end."""
    processes = [Process.of_file(path) for path in sorted(notes.iterdir())]
    (driver,) = [process for process in processes if process.kind == "driver"]
    begin, end = driver.steps[2 * MEASURED : 2 * MEASURED + 2]
    by_kind: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        by_kind[process.kind].append(process)
    ran = {kind: set().union(*(each.between(begin, end) for each in held)) for kind, held in by_kind.items()}
    figures = {
        kind: counts(ran[kind]) | {"processes": len(by_kind[kind])} | loaded(by_kind[kind])
        for kind in [*KINDS, "others"] if kind in by_kind
    }  # fmt: skip
    figures["all"] = counts(set().union(*ran.values()))
    return {"by_process": figures, "verbs": {kind: verbs(ran.get(kind, set())) for kind in ("rank", "engine")}}


def counts(ran: set[Ran]) -> dict:
    """Distinct functions, their files and lines, and the dataclasses of which objects were made."""
    functions = {one for one in ran if one.last and ":" not in one.name}
    lines = {(one.file, line) for one in functions for line in range(one.first, one.last + 1)}
    made = sorted({one.name for one in ran if not one.last})
    return {
        "functions": len(functions),
        "files": len({one.file for one in functions}),
        "lines": len(lines),
        "types": made,
    }


def loaded(processes: list[Process]) -> dict[str, int]:
    """Files and AST nodes of all modules that processes of a kind loaded."""
    files = set().union(*(process.modules() for process in processes))
    return {"modules": len(files), "nodes": sum(nodes(ROOT / "mrl" / file) for file in files)}


def nodes(file: Path) -> int:
    return sum(1 for _ in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def verbs(ran: set[Ran]) -> list[str]:
    """What the driver asked of a worker: public methods, and what `do` was told in place of `do`."""
    found = [match for one in ran if (match := VERBS.search(one.name))]
    return sorted({match[3] or match[2] for match in found} - {"do"})
