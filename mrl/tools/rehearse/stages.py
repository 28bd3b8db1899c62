"""Runs the two commands of a rehearsal as processes: `mrl train` for one step and a save, `mrl train --resume` for one
more.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mrl.tools.own_command import run_mrl, stopped_by_sigterm
from mrl.tools.rehearse.compose import STEPS, WorkFolder
from mrl.tools.rehearse.watched import write_hook

TRAIN = "train"
RESUME = "resume"
DEADLINE_S = 900.0  # for one command; it usually takes one to two minutes, a few on a busy machine
_LAST_LINES = 12
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Ended:
    """The end of a command. `code` is its exit code; None past the deadline."""

    phase: str
    code: int | None
    seconds: float
    log: Path

    @property
    def why(self) -> str:
        """The reason of a failure: the command's own message, or the end of its output."""
        text = self.log.read_text(encoding="utf-8", errors="replace").rstrip()
        if self.code is None:
            return f"no end after {DEADLINE_S:g} s; {_end_of(text)}"
        start = text.rfind("\nmrl train: ")
        if start >= 0 and "Traceback" not in text[start:]:
            return text[start + 1 :].removeprefix("mrl train: ")
        return _end_of(text)

    @property
    def line(self) -> int:
        """Number of the line in the log that shows the failure."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((i for i, line in enumerate(lines, 1) if line.startswith(("mrl train: ", "Traceback"))), len(lines))


def _end_of(text: str) -> str:
    return "\n".join(text.splitlines()[-_LAST_LINES:])


def run_stages(work: WorkFolder, tell: Callable[[str], None]) -> list[Ended]:
    """Runs both commands, the second only if the first succeeds. `tell` is called with the name of each."""
    commands = {
        TRAIN: ["train", str(work.config), "--set", "trainer.total_training_steps=1"],
        RESUME: ["train", str(work.config), "--resume"],
    }
    labels = {TRAIN: "train: one step and its save", RESUME: f"resume: step {STEPS} from the save"}
    ended: list[Ended] = []
    write_hook(work.hook, work.exercised)
    with stopped_by_sigterm():
        for phase, arguments in commands.items():
            tell(labels[phase])
            ended.append(_run(phase, arguments, work))
            if ended[-1].code != 0:
                break
    return ended


def _run(phase: str, arguments: list[str], work: WorkFolder) -> Ended:
    began = time.monotonic()
    code = run_mrl(arguments, work.log(phase), DEADLINE_S, environment(work))
    return Ended(phase, code, time.monotonic() - began, work.log(phase))


def environment(work: WorkFolder) -> dict[str, str]:
    """Returns the caller's environment, changed for a rehearsal.

    Processes join no cluster, use no network and one thread each, and have the hook of watched.py.
    """
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    paths = [str(work.hook), str(_PACKAGE_ROOT), *filter(None, [own.get("PYTHONPATH")])]
    own |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return own | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(os.pathsep.join(paths).split(os.pathsep)))}
