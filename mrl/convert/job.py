"""Writes a plan with several processes so that a kill loses only the files in work, and nobody ever sees half an output."""

import fcntl
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.convert.plan import PlannedFile
from mrl.convert.processes import in_parallel
from mrl.convert.source import Checkpoint
from mrl.convert.verify import check_files, verify_output
from mrl.convert.writer import file_bytes, write_file
from mrl.errors import ConfigError, EnvironmentFault
from mrl.reshard.manifest import fsync

SMALL_BYTES = 64 * 1024**2  # starting processes would take longer than this
Facts = dict[str, dict[str, Any]]  # file name -> {"bytes", "sha256"}; the digest only where something reads it


@dataclass(frozen=True)
class Options:
    """How to convert; the result does not depend on it."""

    workers: int = 1
    verify: bool = False  # read the output again and compare it with the source, before it gets its name
    progress: bool = False  # a bar on standard error


@dataclass(frozen=True)
class Report:
    """What was done."""

    tensors: int  # Hugging Face tensors
    bytes: int  # of the written weight files
    files: int
    resumed_files: int  # of them, finished by an earlier start that was interrupted
    verified: bool
    seconds: float
    left_out: tuple[str, ...]  # tensors of the source that its model computes by itself, and random states of another layout


def convert(
    source: Checkpoint, files: tuple[PlannedFile, ...], output: Path, finish: Callable[[Path, Facts], None], digests: bool, options: Options
) -> Report:
    """Writes `files` into a folder beside `output`, calls `finish(folder, facts)` for what goes with them, and renames the folder.

    The facts have SHA-256 with `digests`, for a manifest; it is about half of the work.
    An interrupted conversion goes on where it was when it is started again with the same source and plan.
    Raises ConfigError for an output that is in the way, EnvironmentFault for a damaged source or a disk that is too small or full.
    """
    began, work = time.monotonic(), output.with_name(f".{output.name}.partial")
    _refuse_in_the_way(output)
    sizes = {file.name: file_bytes(file, source.dtype) for file in files}
    workers = options.workers if sum(sizes.values()) > SMALL_BYTES else 1
    _check_source(source, workers)
    digests = digests or options.verify
    with _locked(work, _identity(source, files, digests), sizes) as (folder, done):
        resumed = len(done)
        with _progress(options.progress, folder, sum(sizes.values())):
            tasks = [(folder, file, digests) for file in files if file.name not in done]
            for (_, file, _), facts in in_parallel(write_file_of, (source.folder,), tasks, workers):
                _keep(work, file.name, facts)
                done[file.name] = facts
        finish(folder, done)
        tensors = len({piece.hf_name for file in files for entry in file.entries for piece in entry.pieces})
        if options.verify:
            _verify(source, folder, files, done, workers)
        _publish(folder, output)
    shutil.rmtree(work, ignore_errors=True)
    return Report(tensors, sum(sizes.values()), len(files), resumed, options.verify, time.monotonic() - began, source.unused)


def _verify(source: Checkpoint, folder: Path, files: tuple[PlannedFile, ...], done: Facts, workers: int) -> None:
    """Wrong files are not left for the next start to go on from."""
    try:
        verify_output(source, folder, files, done, workers)
    except EnvironmentFault:
        shutil.rmtree(folder.parent, ignore_errors=True)
        raise


def write_file_of(readers, task: tuple[Path, PlannedFile, bool]) -> dict[str, Any]:
    """One task of a worker process."""
    return write_file(readers[0], *task)


def _refuse_in_the_way(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists and is not an empty folder; choose another output")


def _check_source(source: Checkpoint, workers: int) -> None:
    """Every byte of a checkpoint of ours is what was written. Hugging Face checkpoints carry no digests."""
    if source.manifest is not None:
        check_files(source.folder, source.manifest.files(), workers)


def _identity(source: Checkpoint, files: tuple[PlannedFile, ...], digests: bool) -> str:
    """Two conversions of the same identity write and record the same."""
    return hashlib.sha256(repr((source.identity, files, digests)).encode()).hexdigest()


@contextmanager
def _locked(work: Path, identity: str, sizes: dict[str, int]) -> Iterator[tuple[Path, Facts]]:
    """The folder to write into and the files that an earlier start finished there; nobody else writes meanwhile.

    Before anything is written, the disk is known to be large enough. A start that finishes nothing leaves nothing behind.
    """
    done = _finished(work, identity, sizes)
    _check_space(work, sum(size for name, size in sizes.items() if name not in done))
    folder = work / "files"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{work.parent} cannot be written ({error.strerror}); choose another output") from error
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{work} is being written by another conversion; wait for it or choose another output") from None
        done = _finished(work, identity, sizes)
        if not done:
            _empty(work)
        (work / "identity").write_text(identity)
        try:
            yield folder, done
        finally:
            if not done:
                shutil.rmtree(work, ignore_errors=True)


def _finished(work: Path, identity: str, sizes: dict[str, int]) -> Facts:
    """What an earlier start of the same conversion finished and recorded."""
    try:
        if (work / "identity").read_text() != identity:
            return {}
    except OSError:
        return {}
    found = {name: work / "done" / f"{name}.json" for name in sizes}
    facts = {name: json.loads(record.read_text()) for name, record in found.items() if record.is_file()}
    return {name: f for name, f in facts.items() if (file := work / "files" / name).is_file() and file.stat().st_size == sizes[name]}


def _keep(work: Path, name: str, facts: dict[str, Any]) -> None:
    """Records that a file is finished. The file itself is on the disk by now."""
    (work / "done").mkdir(exist_ok=True)
    record = work / "done" / f"{name}.json"
    part = record.with_suffix(".part")
    part.write_text(json.dumps(facts))
    fsync(part)
    part.rename(record)


def _empty(work: Path) -> None:
    """Of another conversion, or of one that finished nothing."""
    shutil.rmtree(work / "done", ignore_errors=True)
    shutil.rmtree(work / "files")
    (work / "files").mkdir()


def _check_space(work: Path, needed: int) -> None:
    existing = next(parent for parent in work.absolute().parents if parent.is_dir())
    held = sum(f.stat().st_size for f in work.rglob("*.part")) if work.is_dir() else 0
    free = shutil.disk_usage(existing).free + held
    if needed > free:
        raise EnvironmentFault(
            f"{existing}: {needed / 1e9:.1f} GB are to be written and {free / 1e9:.1f} GB are free; free some or choose another output"
        )


def _publish(folder: Path, output: Path) -> None:
    for file in folder.rglob("*"):
        fsync(file)
    fsync(folder)
    if output.exists():
        output.rmdir()
    folder.rename(output)
    fsync(output.parent)


@contextmanager
def _progress(wanted: bool, folder: Path, total: int) -> Iterator[None]:
    """A bar fed by the sizes of the files, so that worker processes need not report."""
    if not wanted:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    with Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task, stop = bar.add_task("", total=total), threading.Event()

        def follow() -> None:
            while not stop.wait(0.2):
                bar.update(task, completed=_written(folder))

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            bar.update(task, completed=_written(folder))


def _written(folder: Path) -> int:
    total = 0
    for file in folder.glob("*.safetensors*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # it was renamed just now
            continue
    return total
