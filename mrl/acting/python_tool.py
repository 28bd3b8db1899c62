"""The built-in tool `python`: runs a program that the model wrote and discards it.

Each call has its own process and folder (mrl.acting.sandbox). This module watches the time and the content of the
folder. The output of the program is the answer. If it was ended, the reason is the answer.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from mrl.acting.environment import LONGEST
from mrl.acting.kept_output import KeptOutput
from mrl.acting.sandbox import CODE, MIB, PythonLimits
from mrl.acting.tool import Tool
from mrl.errors import ConfigError
from mrl.reward.keeper import SCRATCH
from mrl.reward.process import PACKAGE_ROOT

PYTHON = "python"
MOST_FILES = 256
UNCONFINED_KEY = "rollout.turns.python.unconfined"
_LOOK_S = 0.05  # between two checks of the folder
_READ_BYTES = 65536
_KEPT = LONGEST // 2 - 100  # bytes of output that are kept at either end
_START = f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r}); from mrl.acting.sandbox import main; del "
_START += "sys.path[0]; main()"
# no other variables: no thread may be started, but libraries would; and the order of a set is that of its program
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_ENVIRONMENT |= {"PYTHONHASHSEED": "0"}
_PROBE = """
import os, socket

def is_refused(act, *arguments):
    try:
        act(*arguments)
    except PermissionError:
        return True
    return False

for name, act, *arguments in (
    ("a process", os.fork), ("a socket", socket.socket), ("another folder", os.listdir, "/"),
    ("a signal", os.kill, os.getppid(), 0),
):
    if not is_refused(act, *arguments):
        print(f"{name} is not refused")
"""


class ProgramEnded(Exception):
    """The program was ended, or ended itself, without an answer."""


def python_tool(limits: PythonLimits) -> Tool:
    """Makes the tool. Raises ConfigError if programs must be confined, but cannot be."""
    refuse_unconfined("rollout.turns.tools: python", limits)

    def python(code: str) -> str:
        """Runs a Python program, and says what it prints.

        Args:
            code: the whole program; it has no network, no other process, and forgets all when it has ended
        """
        return run_program(code, limits)

    return Tool.of(python, PYTHON)


def refuse_unconfined(who: str, limits: PythonLimits) -> None:
    """Raises ConfigError if this machine cannot confine a program, unless it may run unconfined."""
    why = None
    if not limits.unconfined:
        why = fault()
    if why is not None:
        raise ConfigError(
            f"{who} would run what a model writes, and this machine cannot confine it: {why}. Leave it out, or set "
            f"{UNCONFINED_KEY} to true, which lets it do whatever the user may"
        )


def fault() -> str | None:
    """Returns why this machine cannot confine a program; None if it can. A program tries what is forbidden."""
    try:
        output = run_program(_PROBE, PythonLimits(max_seconds=60.0))
    except (ProgramEnded, OSError) as error:
        return str(error)
    if output == NOTHING:
        return None
    return output.strip()


NOTHING = "(it printed nothing)"
_NAMES_OF_SIGNALS = {each.value: each.name for each in signal.Signals}  # without real-time signals


def run_program(code: str, limits: PythonLimits) -> str:
    """Returns what the program printed, including errors. Raises ProgramEnded if it exceeded limits or a signal ended
    it.
    """
    with _folder() as folder, _pipe() as (outcome, report):
        (folder / CODE).write_bytes(code.encode("utf-8", "replace"))
        process = _started(folder, limits, report)
        output = KeptOutput(_KEPT)
        try:
            why = _watched(process, folder, limits, output)
        finally:
            status = _end(process)
        # where the process could not give up something, it says so, and the program never ran
        with suppress(BlockingIOError):
            raise ProgramEnded(os.read(outcome, _READ_BYTES).decode())
    return _answer(output.text, status, why)


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Two descriptors, to read from and to write to; reading does not wait."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


def _started(folder: Path, limits: PythonLimits, report: int) -> subprocess.Popen:
    """The process of the program in its folder, which says by `report` what it could not give up."""
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-s",
            "-B",
            "-u",
            "-X",
            "utf8",
            "-c",
            _START,
            json.dumps(asdict(limits)),
            str(os.getpid()),
            str(report),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=_ENVIRONMENT,
        cwd=folder,
        pass_fds=(report,),
    )


@contextmanager
def _folder() -> Iterator[Path]:
    """Makes a folder for one call. If this process is killed meanwhile, its keeper removes it."""
    scratch = os.environ.get(SCRATCH)
    if scratch is not None:
        os.makedirs(scratch, mode=0o700, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="mrl-python-", dir=scratch)
    try:
        yield Path(folder)
    finally:
        with suppress(OSError, RecursionError):
            shutil.rmtree(folder)


def _watched(process: subprocess.Popen, folder: Path, limits: PythonLimits, output: KeptOutput) -> str | None:
    """Reads output until the program has ended. Returns why it must be ended; None if it ended by itself."""
    end = time.monotonic() + limits.max_seconds
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    printing = True
    while True:
        if printing and poll.poll(_LOOK_S * 1000):
            data = os.read(process.stdout.fileno(), _READ_BYTES)
            output.add(data)
            printing = bool(data)
        elif not printing:  # it may continue without output
            time.sleep(_LOOK_S / 10)
        if why := _too_much(folder, limits):
            return why
        if not printing and _has_ended(process):
            return None
        if time.monotonic() > end:
            return f"it had not ended after {limits.max_seconds:g} s"


def _has_ended(process: subprocess.Popen) -> bool:
    """Tells whether it has ended, without reaping it, so that its number is not reused."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _too_much(folder: Path, limits: PythonLimits) -> str | None:
    """Returns which limit the content of the folder exceeds; None for none."""
    with os.scandir(folder) as entries:
        files = list(entries)
    if len(files) > MOST_FILES:
        return f"it made more than {MOST_FILES} files"
    held = 0
    for each in files:
        with suppress(OSError):
            known = each.stat(follow_symlinks=False)
            held += max(known.st_size, known.st_blocks * 512)
    if held > limits.max_files_mib * MIB:
        return f"its files came to more than {limits.max_files_mib:g} MiB"
    return None


def _end(process: subprocess.Popen) -> int:
    """Ends it and its group, which an unconfined program may have filled. Returns its status, negative for a signal."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()
    return process.wait()


def _answer(output: str, status: int, why: str | None) -> str:
    if why is None and status < 0:
        why = f"it was ended by {_NAMES_OF_SIGNALS.get(-status, f'signal {-status}')}"
    if why is not None:
        if output:
            why = f"{why}; it had printed:\n{output}"
        raise ProgramEnded(why)
    if status and not output:
        return f"(it printed nothing, and ended by status {status})"
    return output or NOTHING
