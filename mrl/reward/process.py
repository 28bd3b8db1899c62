"""One scoring process as seen from the trainer: started, asked, killed.

Pipes carry JSON lines; see mrl.reward.worker.
"""

import contextlib
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
from typing import IO

from mrl.errors import ConfigError
from mrl.reward.items import DIED, TIMEOUT, RewardSpec

PIPE_BYTES = 65536
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class WorkerFailure(Exception):
    """The process did not answer. `reason` is `timeout` or `died`."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class WorkerProcess:
    """A process of its own session, so that killing it takes along whatever the user's function started.

    Used by one thread.
    """

    def __init__(
        self,
        spec: RewardSpec,
        log: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
    ):
        """Starts it without waiting. What the user's function prints goes to `log`, by default to standard error.

        `environment` and `folder`, where it works if there is one of that name: by default this process's.
        """
        requests, self._requests = os.pipe()
        self._results, results = os.pipe()
        os.set_blocking(self._requests, False)
        self._buffer = b""
        self._spec = spec
        # -P: the working directory is no import path, so a file of the user's called json.py shadows nothing
        command = [sys.executable, "-P", "-m", "mrl.reward.worker", str(requests), str(results)]
        self._process = subprocess.Popen(
            command, pass_fds=(requests, results), stdin=subprocess.DEVNULL, stdout=log or 2, stderr=log or 2,
            start_new_session=True, env=_environment(environment),
            cwd=folder if folder and os.path.isdir(folder) else None,
        )  # fmt: skip
        os.close(requests)
        os.close(results)

    def wait_ready(self, timeout_s: float) -> None:
        """Returns once the function is loaded.

        Raises ConfigError with the worker's reason, WorkerFailure if it hangs or dies.
        """
        line = (json.dumps(dataclasses.asdict(self._spec)) + "\n").encode()
        answer = json.loads(next(self.exchange(line, 1, timeout_s)))
        if "error" in answer:
            raise ConfigError(answer["error"])

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
            if readable:
                for line in self._receive():
                    yield line
                    answers -= 1
                    deadline = time.monotonic() + timeout_s

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Sends SIGKILL to the process and all it started; any thread may call it."""
        # gone already; macOS says the latter of a zombie
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills, reaps and closes the pipes."""
        self.kill()
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
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return lines

    def _last_words(self) -> str:
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "the scoring process closed its result channel"
        if status < 0:
            return f"the scoring process was killed by {signal.Signals(-status).name}"
        return f"the scoring process ended with exit status {status}"


def _environment(given: Mapping[str, str] | None) -> dict[str, str]:
    """The given one, by default this process's, with this very package importable and one thread per process."""
    own = os.environ if given is None else given
    paths = [str(PACKAGE_ROOT), *filter(None, [own.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **own, "PYTHONPATH": os.pathsep.join(paths)}
