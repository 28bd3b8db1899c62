"""One scoring process as seen from the trainer: started, asked, killed.

Pipes carry JSON lines, as mrl.reward.worker describes. Tools run in processes of this kind too.
"""

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mrl.errors import ConfigError
from mrl.reward.confine import given_environment
from mrl.reward.items import ANSWER_BYTES, DIED, TIMEOUT

KEEPER = "mrl.reward.keeper"  # the module of the process under which a user's code runs
PIPE_BYTES = 65536
END_S = 5.0  # seconds for the keeper to end what a function started, before the keeper itself is killed
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class WorkerFailure(Exception):
    """The process did not answer. `reason` is `timeout` or `died`."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class ForeignLine(WorkerFailure):
    """A line is not an answer of the process: the function, or something that it started, wrote into the channel."""

    def __init__(self, line: bytes):
        super().__init__(DIED, f"the function wrote into the worker's result channel: {bytes(line[:200])!r}")


class _Followed:
    """A process of somebody else's, in the form of subprocess.Popen, by a descriptor of it (pidfd_open(2))."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def poll(self) -> int | None:
        """Returns 0 once it has ended; its status is its parent's to know."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return 0 if poll.poll(0) else None

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        """Kills it."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Raises subprocess.TimeoutExpired."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return 0

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self._descriptor)


class WorkerProcess:
    """A keeper and the scoring process below it. Ending the keeper ends everything that the user's function started.

    Used by one thread.
    """

    def __init__(
        self,
        spec: Any,
        log: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        module: str = "mrl.reward.worker",
        pass_fds: Sequence[int] = (),
    ):
        """Starts it without waiting. Output of the user's function goes to `log`, by default to standard error.

        `environment`, and `folder` as the working directory if it exists, are by default those of this process. `spec`
        is a dataclass, the first line that `main` of `module` reads. Its `environment` names further variables, and
        its `answer_bytes` limits an answer.
        `pass_fds` are further descriptors that it inherits.
        """
        requests, self._requests = os.pipe()
        self._results, results = os.pipe()
        os.set_blocking(self._requests, False)
        self._buffer = bytearray()
        self._spec = spec
        self._answer_bytes = spec.answer_bytes
        # -P: the working directory is not an import path, so a user's file json.py shadows nothing
        command = [sys.executable, "-P", "-m", KEEPER, str(requests), str(results), module]
        self._process = subprocess.Popen(
            command,
            pass_fds=(requests, results, *pass_fds),
            stdin=subprocess.DEVNULL,
            stdout=log or 2,
            stderr=log or 2,
            start_new_session=True,
            env=_environment(environment, spec.environment),
            cwd=folder if folder and os.path.isdir(folder) else None,
        )
        os.close(requests)
        os.close(results)

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Returns the worker's first answer, once it has loaded its function.

        Raises ConfigError with the worker's reason, WorkerFailure if it hangs or dies.
        """
        line = (json.dumps(dataclasses.asdict(self._spec)) + "\n").encode()
        line = next(self.exchange(line, 1, timeout_s))
        answer = parsed(line)
        if not isinstance(answer, dict):
            raise ForeignLine(line)
        if "error" in answer:
            raise ConfigError(str(answer["error"]))
        return answer

    def exchange(self, data: bytes, answers: int, timeout_s: float) -> Iterator[bytes]:
        """Sends request lines and yields the same number of answer lines, in order.

        Each answer has `timeout_s` seconds after the previous one, because the worker then begins the next item. Raises
        WorkerFailure for the first missing answer. Never blocks on a full pipe in either direction.
        """
        unsent = memoryview(data)
        deadline = time.monotonic() + timeout_s
        while answers:
            readable, writable = self._wait(bool(unsent), deadline)
            if not readable and not writable:
                raise WorkerFailure(TIMEOUT, f"no answer within {timeout_s:g} s")
            if writable:
                unsent = self._send(unsent)
                deadline = time.monotonic() + timeout_s
            lines = []
            if readable:
                lines = self._receive()
            if len(lines) > answers:  # whoever wrote more than the answers, `alive` is false from now on
                self._buffer[:0] = b"\n".join([*lines[answers:], b""])
                del lines[answers:]
            for line in lines:
                yield line
                answers -= 1
                deadline = time.monotonic() + timeout_s
            if not lines and time.monotonic() > deadline:  # the beginning of an answer does not count
                raise WorkerFailure(TIMEOUT, f"no complete answer within {timeout_s:g} s")

    def alive(self) -> bool:
        """Tells whether it can answer: it runs, and wrote nothing that it was not asked for. None may be asked for now.

        Its keeper may outlive it for a moment, but its end of the channel does not.
        """
        poll = select.poll()
        poll.register(self._results, select.POLLIN)
        return self._process.poll() is None and not self._buffer and not poll.poll(0)

    def kill(self) -> None:
        """Makes the keeper kill the process and all that it started. Any thread may call it."""
        self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Kills and collects the process, and closes the pipes."""
        self.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # when the keeper dies, the kernel ends the process below it
            self._process.wait()
        os.close(self._requests)
        os.close(self._results)

    def _wait(self, sending: bool, deadline: float) -> tuple[bool, bool]:
        """Returns (readable, writable); both are false after the deadline."""
        poll = select.poll()
        poll.register(self._results, select.POLLIN)
        if sending:
            poll.register(self._requests, select.POLLOUT)
        ready = {fd for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
        return self._results in ready, self._requests in ready

    def _send(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self._requests, unsent[:PIPE_BYTES]) :]
        except BrokenPipeError:  # it died; its earlier answers can still be read
            return unsent[:0]

    def _receive(self) -> list[bytes]:
        data = os.read(self._results, PIPE_BYTES)
        if not data:
            raise WorkerFailure(DIED, self._last_words())
        self._buffer += data
        if b"\n" not in data and len(self._buffer) <= self._answer_bytes:
            return []
        *lines, self._buffer = self._buffer.split(b"\n")
        if max(map(len, (*lines, self._buffer))) > self._answer_bytes:
            raise ForeignLine(max((*lines, self._buffer), key=len))
        return lines

    def _last_words(self) -> str:
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "the scoring process closed its result channel"
        if status < 0:
            return f"the scoring process was killed by {signal.Signals(-status).name}"
        return f"the scoring process ended with exit status {status}"


class ForkedWorker(WorkerProcess):
    """A keeper and a worker that were forked from a process that had loaded everything, instead of started."""

    def __init__(self, descriptor: int, requests: int, results: int):
        """`descriptor` is the keeper's; `requests` and `results` are this side's ends of its pipes."""
        self._requests = requests
        self._results = results
        os.set_blocking(self._requests, False)
        self._buffer = bytearray()
        self._answer_bytes = ANSWER_BYTES
        self._process = _Followed(descriptor)

    def close(self) -> None:
        """As WorkerProcess.close."""
        super().close()
        self._process.close()

    def _last_words(self) -> str:
        return "the process ended, and had not answered"


def parsed(line: bytes) -> Any:
    """Returns the value of a line. Raises ForeignLine if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ForeignLine(line) from error


def _environment(given: Mapping[str, str] | None, further: tuple[str, ...]) -> dict[str, str]:
    """Returns the usual and `further` variables of the given environment, by default this process's.

    This package is importable with them, and each process uses one thread.
    """
    own = given_environment(os.environ if given is None else given, further)
    paths = [str(PACKAGE_ROOT), *filter(None, [own.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **own, "PYTHONPATH": os.pathsep.join(paths)}
