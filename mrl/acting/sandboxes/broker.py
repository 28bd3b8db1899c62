"""The process that starts sandboxes for a process of tools.

A process of tools gives up mounting, sockets and writing before it loads what a user wrote, and whatever it starts has
given that up too. So this one is forked before. It starts sandboxes of the run's own specification alone, whoever asks.

    [verb, number, arguments], content  -->  [error or null, value], content

Both are a line of JSON, which has the length of the bytes behind it as its last element.
"""

import ctypes
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from mrl.acting.sandboxes.sandbox import Command, Ran, Sandbox, SandboxError, SandboxSpec
from mrl.acting.sandboxes.starting import start
from mrl.errors import ConfigError

_PR_SET_PDEATHSIG = 1
Answer = tuple[Any, bytes]


class Broker:
    """The process, as seen from the one that it serves, which ends it by its own end."""

    def __init__(self, spec: SandboxSpec):
        """Forks it."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        if os.fork() == 0:
            try:
                ours.close()
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() == parent:
                    _serve(theirs.makefile("rwb"), spec)
            finally:
                os._exit(0)
        theirs.close()
        self._channel = ours.makefile("rwb")
        self.spec = spec

    def ask(self, verb: str, number: int | None, arguments: Sequence[Any] = (), content: bytes = b"") -> Answer:
        """Returns a value and bytes. Raises SandboxError with what went wrong."""
        try:
            _send(self._channel, [verb, number, list(arguments)], content)
            (error, value), content = _received(self._channel)
        except (OSError, ValueError) as lost:
            raise SandboxError("the process that starts sandboxes has ended") from lost
        if error is not None:
            raise SandboxError(error)
        return value, content

    def start(
        self,
        image: str | None = None,
        folder: str | None = None,
        endpoint: int | None = None,
        places: Sequence[str] = (),
    ) -> Sandbox:
        """As mrl.acting.sandboxes.starting.start."""
        (number, folder), _ = self.ask("start", None, (image, folder, endpoint, list(places)))
        return _Brokered(self, number, folder)


class _Brokered(Sandbox):
    """A sandbox of the broker's."""

    def __init__(self, broker: Broker, number: int, folder: str):
        self._broker = broker
        self._number = number
        self.folder = folder

    def _run(self, command: Command) -> Ran:
        arguments = (command.words, command.seconds, command.most, command.environment, command.stop)
        (status, reason, left_out), output = self._broker.ask("run", self._number, arguments, command.input)
        return Ran(status, output, reason, left_out)

    def read(self, path: str) -> bytes:
        """As Sandbox.read."""
        return self._broker.ask("read", self._number, (path,))[1]

    def write(self, path: str, content: bytes) -> None:
        """As Sandbox.write."""
        self._broker.ask("write", self._number, (path,), content)

    def packed(self) -> bytes:
        """As Sandbox.packed."""
        return self._broker.ask("packed", self._number)[1]

    def unpack(self, archive: bytes) -> None:
        """As Sandbox.unpack."""
        self._broker.ask("unpack", self._number, (), archive)

    def end(self) -> None:
        """As Sandbox.end."""
        self._broker.ask("end", self._number)


def _serve(channel: BinaryIO, spec: SandboxSpec) -> None:
    """The broker's life."""
    starter = _Starter(spec)
    while True:
        try:
            (verb, number, arguments), content = _received(channel)
        except ValueError:  # the other end is gone
            return
        try:
            value, answer = starter.answer(verb, number, arguments, content)
            error = None
        except (SandboxError, ConfigError, OSError) as failure:
            error = str(failure)
            value, answer = None, b""
        except Exception as failure:  # of a client's package: it costs this sandbox alone
            error = f"{type(failure).__name__}: {failure}"
            value, answer = None, b""
        _send(channel, [error, value], answer)


class _Starter:
    """Sandboxes by number."""

    def __init__(self, spec: SandboxSpec):
        self._spec = spec
        self._started = 0
        self._at: dict[int, Sandbox] = {}

    def answer(self, verb: str, number: int | None, arguments: Sequence[Any], content: bytes) -> Answer:
        """Answers one request."""
        if verb == "start":
            return self._start(*arguments)
        if verb == "end":
            if (ended := self._at.pop(number, None)) is not None:
                ended.end()
            return None, b""
        sandbox = self._at.get(number)
        if sandbox is None:
            raise SandboxError("the sandbox has ended")
        answers: Mapping[str, Callable[..., Answer]] = {
            "run": lambda: _ran(sandbox, content, *arguments),
            "read": lambda: (None, sandbox.read(*arguments)),
            "write": lambda: (sandbox.write(*arguments, content), b""),
            "packed": lambda: (None, sandbox.packed()),
            "unpack": lambda: (sandbox.unpack(content), b""),
        }
        return answers[verb]()

    def _start(self, *arguments: Any) -> Answer:
        sandbox = start(self._spec, *arguments)
        self._started += 1
        self._at[self._started] = sandbox
        return (self._started, sandbox.folder), b""


def _ran(sandbox: Sandbox, input: bytes, command: Sequence[str], *arguments: Any) -> Answer:
    ran = sandbox.run(command, input, *arguments)
    return (ran.status, ran.reason, ran.left_out), ran.output


def _send(channel: BinaryIO, header: Sequence[Any], content: bytes) -> None:
    channel.write(json.dumps([*header, len(content)]).encode() + b"\n")
    channel.write(content)
    channel.flush()


def _received(channel: BinaryIO) -> tuple[list[Any], bytes]:
    """Returns what was sent. Raises ValueError at the end."""
    line = channel.readline()
    *header, length = json.loads(line)
    content = channel.read(length)
    if len(content) < length:
        raise ValueError("the channel ended within an answer")
    return header, content
