"""The folder that a conversion writes into until it is done: locked, checked for space, continued after a kill, and
renamed at the end.
"""

import fcntl
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mrl.checkpoint.manifest import FileFacts, fsync
from mrl.errors import ConfigError, EnvironmentFault


@contextmanager
def locked(work: Path, identity: str, sizes: dict[str, int]) -> Iterator[tuple[Path, FileFacts]]:
    """Yields the folder to write into, locked, and the files that an earlier start finished there.

    Checks first that the disk is large enough. A start that finishes nothing leaves nothing behind.
    """
    folder = work / "files"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{work.parent} cannot be written ({error.strerror}); choose another output") from error
    with (work / "lock").open("w") as lock:
        _take(lock, work)
        done = _finished(work, identity, sizes)
        _check_space(work, done, sizes)
        if not done:
            _empty(work)
        (work / "identity").write_text(identity)
        try:
            yield folder, done
        finally:
            if not done:
                shutil.rmtree(work, ignore_errors=True)


def _take(lock: IO[str], work: Path) -> None:
    """Raises ConfigError while another process has the lock. On a file system without locks, writes without one."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{work} is being written by another conversion; wait for it or choose another output"
        ) from None
    except OSError as error:
        print(
            f"warning: {work.absolute().parent} is on a file system without locks ({error.strerror}); see to it that "
            "no other conversion has the same output",
            file=sys.stderr,
        )


def finish_file(work: Path, name: str, facts: dict[str, Any]) -> None:
    """Waits until a written file is on the disk, then names it and records that it is finished.

    Raises OSError.
    """
    part = work / "files" / f"{name}.part"
    fsync(part)
    part.rename(work / "files" / name)
    (work / "done").mkdir(exist_ok=True)
    record = _record(work, name)
    # not synced: if a power failure loses or empties a record, its file is merely written again
    record.with_suffix(".part").write_text(json.dumps(facts))
    record.with_suffix(".part").rename(record)


def _record(work: Path, name: str) -> Path:
    return work / "done" / f"{name.replace('/', '-')}.json"


def _finished(work: Path, identity: str, sizes: dict[str, int]) -> FileFacts:
    """Returns what an earlier start of the same conversion finished and recorded."""
    try:
        if (work / "identity").read_text() != identity:
            return {}
    except OSError:
        return {}
    recorded = {name: facts for name in sizes if (facts := _read_record(_record(work, name))) is not None}
    return {name: facts for name, facts in recorded.items() if _has_size(work / "files" / name, sizes[name])}


def _has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _read_record(record: Path) -> dict[str, Any] | None:
    try:
        return json.loads(record.read_text())
    except (OSError, ValueError):
        return None


def _empty(work: Path) -> None:
    """Removes what another conversion left, or one that finished nothing."""
    shutil.rmtree(work / "done", ignore_errors=True)
    shutil.rmtree(work / "files")
    (work / "files").mkdir()


def _check_space(work: Path, done: FileFacts, sizes: dict[str, int]) -> None:
    """Checks the disk's space. Files that will be deleted count as free: unfinished ones, or all of another conversion.

    If the disk is too small they stay, so that the other conversion can continue. An empty folder is removed.
    """
    needed = sum(size for name, size in sizes.items() if name not in done)
    old = [file for file in (work / "files").rglob("*.part" if done else "*") if file.is_file()]
    free = shutil.disk_usage(work).free + sum(file.stat().st_size for file in old)
    if needed > free:
        if not done and not old:
            shutil.rmtree(work, ignore_errors=True)
        disk = work.absolute().parent
        raise EnvironmentFault(
            f"{disk}: {needed / 1e9:.1f} GB are to be written and {free / 1e9:.1f} GB are free; free some "
            "or choose another output"
        )


def publish(folder: Path, output: Path, durable: Iterable[str]) -> None:
    """Renames the finished folder. The `durable` files are already on the disk."""
    written = {folder / name for name in durable}
    for file in folder.rglob("*"):
        if file not in written:
            fsync(file)
    fsync(folder)
    if output.exists():
        output.rmdir()
    folder.rename(output)
    fsync(output.parent)
