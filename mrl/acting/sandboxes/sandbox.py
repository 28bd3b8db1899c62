"""What every sandbox can do, and what it is started with.

    start(image or folder) --> run(command, input, seconds), read(path), write(path, content), end()

A sandbox has a read-only root, which is the image's, and three places that are written: its folder, /tmp (which is HOME
too) and /dev/shm. All three begin empty, except for the folder: where the image has it, it begins with the image's
content. They share `max_disk_mib`, and live in memory. What a command has started ends with it.
"""

import posixpath
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KEY = "rollout.turns.sandbox"
MIB = 2**20
MOST_READ = 64 * MIB  # bytes of a file, and of all files of a folder
PLAIN_S = 60.0  # for a command of our own
PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
VARIABLES = {"PATH": PATHS, "HOME": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb"}
# why a command was ended, for `Ran.reason`
SECONDS = "seconds"
MEMORY = "memory"
PROCESSES = "processes"
STOPPED = "stopped"


class SandboxError(Exception):
    """A sandbox cannot be started, has ended, or cannot do what was asked."""


@dataclass(frozen=True)
class SandboxSpec:
    """How sandboxes are started. Names are those of `rollout.turns.sandbox`."""

    backend: str = "bubblewrap"
    image: str | None = None  # of rows that name none
    folder: str = "/workspace"  # where commands run
    address: str | None = None  # of a daemon
    network: str | None = None  # None: no network
    max_memory_gib: float = 2.0
    max_processes: int = 256
    max_disk_mib: float = 512.0
    max_command_seconds: float = 5.0
    max_test_seconds: float = 300.0

    @property
    def memory_bytes(self) -> int:
        """Memory of all processes of a command."""
        return int(self.max_memory_gib * 1024 * MIB)

    @property
    def disk_bytes(self) -> int:
        """Content of all places that are written."""
        return int(self.max_disk_mib * MIB)


class Ran(NamedTuple):
    """The end of a command. `status` is that of its process, negative for a signal, and None where `reason` says why it
    was ended. `output` is what it printed, errors too; of a long one the middle is left out.
    """

    status: int | None
    output: bytes
    reason: str = ""
    left_out: int = 0  # bytes

    @property
    def is_well(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.status == 0

    @property
    def text(self) -> str:
        """The output, or its readable part."""
        return self.output.decode("utf-8", "replace")


@dataclass(frozen=True)
class Command:
    """What a sandbox runs, as `Sandbox.run` is told."""

    words: list[str]
    input: bytes
    seconds: float
    most: int
    environment: dict[str, str]
    stop: str | None = None


class Sandbox(ABC):
    """One sandbox. It runs one command at a time. Use it as a context manager, or call `end`."""

    folder: str  # where commands run

    def run(
        self,
        command: Sequence[str],
        input: bytes = b"",
        seconds: float = PLAIN_S,
        most: int = 80_000,
        environment: Mapping[str, str] | None = None,
        stop: str | None = None,
    ) -> Ran:
        """Runs a command in `folder` and returns how it ended. At most `most` bytes of its output are kept.

        `stop` is a file of this host whose appearance ends the command. Raises SandboxError where the sandbox itself
        has ended.
        """
        return self._run(Command(list(command), input, seconds, most, dict(environment or {}), stop))

    @abstractmethod
    def _run(self, command: Command) -> Ran:
        """Does what `run` says."""

    @abstractmethod
    def end(self) -> None:
        """Ends it with all that it holds. Safe to call twice."""

    def shell(self, script: str, input: bytes = b"", seconds: float = PLAIN_S, most: int = 80_000) -> Ran:
        """Runs a script of the image's shell."""
        return self.run(["sh", "-c", script], input, seconds, most)

    def read(self, path: str) -> bytes:
        """Returns a file. Raises SandboxError for one that cannot be read, or has more than MOST_READ bytes."""
        ran = self.run(["cat", self._absolute(path)], most=MOST_READ)
        if not ran.is_well or ran.left_out:
            why = ran.text[:200] if not ran.left_out else f"it has more than {MOST_READ // MIB} MiB"
            raise SandboxError(f"{path} cannot be read: {why}")
        return ran.output

    def write(self, path: str, content: bytes) -> None:
        """Writes a file, with the folders above it. Raises SandboxError where that fails."""
        full_path = self._absolute(path)
        folder = shlex.quote(posixpath.dirname(full_path))
        ran = self.shell(f"mkdir -p {folder} && cat > {shlex.quote(full_path)}", content)
        if not ran.is_well:
            raise SandboxError(f"{path} cannot be written: {ran.text[:200] or ran.reason}")

    def packed(self) -> bytes:
        """Returns the content of `folder` as a tar archive. Raises SandboxError where it is too much."""
        ran = self.run(["tar", "cf", "-", "."], most=MOST_READ)
        if not ran.is_well or ran.left_out:
            raise SandboxError(f"the folder {self.folder} cannot be packed: {_why(ran)}")
        return ran.output

    def unpack(self, archive: bytes) -> None:
        """Puts the content of a tar archive into `folder`. Raises SandboxError where that fails."""
        ran = self.run(["tar", "xof", "-"], archive)
        if not ran.is_well:
            raise SandboxError(f"files cannot be put into {self.folder}: {_why(ran)}")

    def _absolute(self, path: str) -> str:
        return posixpath.join(self.folder, path)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _why(ran: Ran) -> str:
    if ran.left_out:
        return f"it has more than {MOST_READ // MIB} MiB"
    return ran.reason or ran.text[-200:]
