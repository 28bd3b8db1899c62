"""Checks that every node sees the run directory. Ranks write their part of a checkpoint into it, and read those of
others when they resume.
"""

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mrl.errors import EnvironmentFault

SEEN_S = 10.0  # until another node's file is visible: network file systems cache a folder's content for a while


@dataclass(frozen=True)
class FolderMark:
    """A file of the run directory that exists while ranks look for it."""

    path: str
    text: str

    def is_seen(self) -> bool:
        """Tells whether this process's node has that file."""
        deadline = time.monotonic() + SEEN_S
        while not (seen := self._read() == self.text) and time.monotonic() < deadline:
            time.sleep(SEEN_S / 50)
        return seen

    def _read(self) -> str:
        try:
            return Path(self.path).read_text(encoding="ascii")
        except OSError:
            return ""


@contextmanager
def marked(run_dir: Path) -> Iterator[FolderMark]:
    """Puts a mark into the folder for the duration of the block."""
    run_dir.mkdir(parents=True, exist_ok=True)
    mark = FolderMark(str(run_dir.resolve() / f".seen-{secrets.token_hex(4)}"), secrets.token_hex(16))
    Path(mark.path).write_text(mark.text, encoding="ascii")
    try:
        yield mark
    finally:
        Path(mark.path).unlink(missing_ok=True)


def check_seen(run_dir: Path, seen: Mapping[str, tuple[str, bool]]) -> None:
    """Raises EnvironmentFault that names nodes whose processes did not see the mark.

    `seen`: name of a process -> address of its node, and whether it saw the mark.
    """
    blind: dict[str, list[str]] = {}
    for process, (address, saw) in seen.items():
        if not saw:
            blind.setdefault(address, []).append(process)
    if blind:
        nodes = "; ".join(f"{address} ({', '.join(processes)})" for address, processes in blind.items())
        raise EnvironmentFault(
            f"{run_dir} is not the same folder on every node: what is written here is not seen on {nodes}; "
            "checkpoints are written by ranks of all nodes: give a --run-dir on a file system that they share"
        )
