"""Writes a file that appears completely or not at all, for every reader and even if the process is killed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def appears_whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder to write to.

    When the block ends, the file is flushed to disk and replaces `path`. When the block fails, the file is removed.
    """
    work = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield work
        with work.open("rb+") as file:
            os.fsync(file.fileno())
        work.replace(path)
    finally:
        with suppress(OSError):
            work.unlink()
