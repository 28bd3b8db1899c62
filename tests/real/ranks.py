"""Runs one program on several ranks as subprocesses, with a deadline, and always ends what it started."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from deadlines import RUN_S

from mrl.platforms.hosting import get_hosting
from mrl.process.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
_TAIL = 4000  # characters of a failed rank's log that are shown


def run_ranks(program: Path, world_size: int, out: Path, arguments: list[str], deadline_s: float = RUN_S) -> None:
    """`python program rank world_size out *arguments` on every rank; results are files that ranks write under `out`.

    Raises AssertionError with the end of the logs when a rank fails or the deadline passes.
    """
    out.mkdir(parents=True, exist_ok=True)
    logs = [out / f"rank-{rank}.log" for rank in range(world_size)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            ranks.append(Rank(program, [str(rank), str(world_size), str(out), *arguments], log))
        problem = _wait(ranks, deadline_s)
    finally:
        for process in ranks:
            process.end()
    if problem:
        shown = "\n".join(f"--- {log.name}\n{log.read_text()[-_TAIL:]}" for log in logs)
        raise AssertionError(f"{program.name} {' '.join(arguments)}: {problem}\n{shown}")


class Rank:
    """One rank's process, forked from the rank server of this test process."""

    def __init__(self, program: Path, arguments: list[str], log: Path):
        self.code: int | None = None
        start = {"program": str(program), "arguments": arguments, "environment": _environment(), "log": str(log)}
        self.pid = _ask({"start": start})

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        if self.code is None:
            self.code = _ask({"poll": self.pid})
        return self.code

    def end(self) -> None:
        """Ends it with all its children."""
        if self.poll() is None:
            for kill in (os.killpg, os.kill):  # the group, then one that had not made its group yet
                with suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.01)


def _ask(request: dict) -> Any:
    server = _server()
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        raise AssertionError(f"the rank server ended with {server.wait()}")
    return json.loads(answer)


@functools.cache
def _server() -> subprocess.Popen:
    """Started once a test process, which it does not outlive: it ends with its input."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "real" / "rank_server.py")],
        env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def _environment() -> dict[str, str]:
    return os.environ | get_hosting("cpu").actor_environment() | {"PYTHONPATH": str(ROOT)}


def agree_on_port(out: Path, rank: int, meeting: int) -> int:
    """For the ranks' program: a free port for their meeting number `meeting`,
    found by rank 0 right before it is used.
    """
    file = out / f"port-{meeting}"
    if rank == 0:
        file.with_suffix(".part").write_text(str(free_port()))
        file.with_suffix(".part").rename(file)
    while not file.exists():
        time.sleep(0.01)  # the program has a deadline
    return int(file.read_text())


def _wait(ranks: list[Rank], deadline_s: float) -> str | None:
    """What went wrong, or None. Returns at the first failure: the other ranks would wait for the failed one."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        codes = [process.poll() for process in ranks]
        if failed := [rank for rank, code in enumerate(codes) if code]:
            time.sleep(0.5)  # the others' own reports
            return f"ranks {failed} failed"
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)
    return f"not done after {deadline_s:.0f} s"
