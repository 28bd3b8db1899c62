"""A shared memory of a command's own: what it leaves there is its own and nobody else's. Needs root, or namespaces of
users.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SHARED = "/dev/shm"
_INSIDE = f'mount --bind "$0" {SHARED} && exec "$@"'


class OwnMemory:
    """A folder in memory that commands which are started with it see as /dev/shm."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="own-memory-", dir=SHARED))

    def __enter__(self) -> "OwnMemory":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, words: Sequence[str]) -> list[str]:
        """What starts the words with this memory, in the process that is started."""
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        return ["unshare", "--mount", *as_root, "sh", "-c", _INSIDE, str(self.folder), *words]

    def left(self) -> list[str]:
        """Names that are there now."""
        return sorted(os.listdir(self.folder))


def is_possible() -> bool:
    """Whether this machine lets commands have a memory of their own."""
    if shutil.which("unshare") is None:
        return False
    with OwnMemory() as memory:
        return subprocess.run(memory.command(["true"]), capture_output=True).returncode == 0
