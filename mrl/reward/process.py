"""One scoring process as seen from the trainer: started, asked, killed.

Pipes carry JSON lines; see mrl.reward.worker. Tools are called in processes of this kind too.
"""

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from mrl.errors import ConfigError
from mrl.reward.confine import given_environment
from mrl.reward.items import ANSWER_BYTES, DIED, TIMEOUT

KEEPER = "mrl.reward.keeper"  # the module of the process below which a user's code runs
PIPE_BYTES = 65536
END_S = 5.0  # to end what a function started; one that is past it may be stopped, and is killed itself
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class WorkerFailure(Exception):
    """The process did not answer. `reason` is `timeout` or `died`."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class ForeignLine(WorkerFailure):
    """What came is no answer of the process: the function, or something that it started, wrote into the channel."""

    def __init__(self, line: bytes):
        super().__init__(DIED, f"the function wrote into the worker's result channel: {bytes(line[:200])!r}")


class WorkerProcess:
    """A keeper and the process below it that scores: ending the one ends whatever the user's function started.

    Used by one thread.
    """

    def __init__(
        self,
        spec: Any,
        log: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        module: str = "mrl.reward.worker",
    ):
        """Starts it without waiting. What the user's function prints goes to `log`, by default to standard error.

        `environment` and `folder`, where it works if there is one of that name: by default this process's. `spec`: a
        dataclass, the first line that `main` of `module` reads; its `environment` names further variables.
        """
        requests, self._requests = os.pipe()
        self._results, results = os.pipe()
        os.set_blocking(self._requests, False)
        self._buffer = bytearray()
        self._spec = spec
        # -P: the working directory is no import path, so a file of the user's called json.py shadows nothing
        command = [sys.executable, "-P", "-m", KEEPER, str(requests), str(results), module]
        self._process = subprocess.Popen(
            command,
            pass_fds=(requests, results),
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
        """Returns the worker's first answer, once it has loaded what it is for.

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
        """Sends request lines and yields as many answer lines, in order.

        Each answer has `timeout_s` seconds from the one before it, because the worker begins an item when it has
        answered the last. Raises WorkerFailure for the first answer that does not come. Never blocks on a full pipe in
        either direction.
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
            for line in lines:
                yield line
                answers -= 1
                deadline = time.monotonic() + timeout_s
            if not lines and time.monotonic() > deadline:  # the beginning of an answer is none
                raise WorkerFailure(TIMEOUT, f"no whole answer within {timeout_s:g} s")

    def alive(self) -> bool:
        """Whether it can answer: its keeper may outlive it for a moment, and its end of the channel does not."""
        poll = select.poll()
        poll.register(self._results, 0)
        return self._process.poll() is None and not poll.poll(0)

    def kill(self) -> None:
        """Has the keeper kill the process and all it started; any thread may call it."""
        self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Kills, reaps and closes the pipes."""
        self.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and with the keeper the kernel ends the process below it
            self._process.wait()
        os.close(self._requests)
        os.close(self._results)

    def _wait(self, sending: bool, deadline: float) -> tuple[bool, bool]:
        """(readable, writable), both false when the deadline has passed and nothing stands ready."""
        poll = select.poll()
        poll.register(self._results, select.POLLIN)
        if sending:
            poll.register(self._requests, select.POLLOUT)
        ready = {fd for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
        return self._results in ready, self._requests in ready

    def _send(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self._requests, unsent[:PIPE_BYTES]) :]
        except BrokenPipeError:  # it died: what it answered before that is still to be read
            return unsent[:0]

    def _receive(self) -> list[bytes]:
        data = os.read(self._results, PIPE_BYTES)
        if not data:
            raise WorkerFailure(DIED, self._last_words())
        self._buffer += data
        if b"\n" not in data and len(self._buffer) <= ANSWER_BYTES:
            return []
        *lines, self._buffer = self._buffer.split(b"\n")
        if max(map(len, (*lines, self._buffer))) > ANSWER_BYTES:
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


def parsed(line: bytes) -> Any:
    """The value of a line. Raises ForeignLine for what is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ForeignLine(line) from error


def _environment(given: Mapping[str, str] | None, further: tuple[str, ...]) -> dict[str, str]:
    """The usual variables and `further` ones of the given environment, by default this process's, with this very
    package importable and one thread per process.
    """
    own = given_environment(os.environ if given is None else given, further)
    paths = [str(PACKAGE_ROOT), *filter(None, [own.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **own, "PYTHONPATH": os.pathsep.join(paths)}
