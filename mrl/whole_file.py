"""A file that appears whole or not at all, whoever reads meanwhile and whenever the process is killed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def appears_whole(path: Path) -> Iterator[Path]:
    """A name in the same folder to write under. When the block ends the file is brought to the disk and takes the place
    of `path`; nothing of it stays when the block fails.
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
