"""Runs a process in a sandbox: gives it its input, keeps of its output, and ends it at its time or its limits."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mrl.acting.kept_output import KeptOutput
from mrl.acting.sandboxes.sandbox import MEMORY, PROCESSES, SECONDS, STOPPED, Command, Ran, SandboxSpec

_LOOK_S = 0.1  # between two looks at memory and processes
_READ_BYTES = 65536
_KIB = 1024


def watched(process: subprocess.Popen, command: Command, spec: SandboxSpec) -> Ran:
    """Feeds a process, reads what it prints, and ends it where it takes too much, or where the command's file `stop`
    appears. It has pipes for both.
    """
    output = KeptOutput(command.most // 2)
    end = time.monotonic() + command.seconds
    look = time.monotonic() + _LOOK_S
    reason = ""
    poll = _polled(process, command.input)
    unsent = memoryview(command.input)
    while not reason:
        for descriptor, _ in poll.poll(_LOOK_S * 1000):
            if descriptor == process.stdout.fileno():
                data = os.read(descriptor, _READ_BYTES)
                output.add(data)
                if not data:
                    poll.unregister(descriptor)
                    return _ended(process, output, "" if _ends_by(process, end) else SECONDS)
            else:
                unsent = _sent(process, poll, unsent)
        now = time.monotonic()
        if now > end:
            reason = SECONDS
        elif now > look:
            reason = (
                STOPPED if command.stop is not None and os.path.exists(command.stop) else too_much(process.pid, spec)
            )
            look = now + _LOOK_S
    return _ended(process, output, reason)


def _polled(process: subprocess.Popen, input: bytes) -> select.poll:
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    if input:
        os.set_blocking(process.stdin.fileno(), False)
        poll.register(process.stdin, select.POLLOUT)
    else:
        process.stdin.close()
    return poll


def _sent(process: subprocess.Popen, poll: select.poll, unsent: memoryview) -> memoryview:
    """Returns what is still to be sent. Whoever does not read it need not."""
    try:
        unsent = unsent[os.write(process.stdin.fileno(), unsent[:_READ_BYTES]) :]
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        unsent = unsent[:0]
    if not unsent:
        poll.unregister(process.stdin)
        with suppress(BrokenPipeError):
            process.stdin.close()
    return unsent


def _ends_by(process: subprocess.Popen, end: float) -> bool:
    """Waits for a process that prints no more. Returns whether it ended in time."""
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _ended(process: subprocess.Popen, output: KeptOutput, reason: str) -> Ran:
    """Ends the process, where it runs, with its group."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()
    if not process.stdin.closed:
        with suppress(BrokenPipeError):
            process.stdin.close()
    status = process.wait()
    return Ran(None if reason else status, output.content, reason, output.left_out)


def too_much(process: int, spec: SandboxSpec) -> str:
    """Returns which limit a process exceeds together with all below it; empty for none."""
    processes = list(below([process]))
    if len(processes) > spec.max_processes:
        return PROCESSES
    if sum(map(_own_bytes, processes)) > spec.memory_bytes:
        return MEMORY
    return ""


def below(processes: Sequence[int]) -> Iterator[int]:
    """Yields all descendants of processes."""
    waiting = list(processes)
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}/task")
        with suppress(OSError):  # it may have ended
            for thread in os.listdir(folder):
                children = [int(number) for number in (folder / thread / "children").read_text().split()]
                yield from children
                waiting += children


def _own_bytes(process: int) -> int:
    """Returns memory that a process does not share with the files it maps."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * _KIB
    return 0
