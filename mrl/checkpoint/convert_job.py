"""Writes a plan with several processes so that a kill loses only the files in work, and nobody ever sees half an output."""

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from mrl.checkpoint.check_output import Check, source_checks, verify_output
from mrl.checkpoint.containers import Container, places
from mrl.checkpoint.file_writer import disk_fault, write_file
from mrl.checkpoint.open_checkpoint import Checkpoint, Reader
from mrl.checkpoint.planned_file import PlannedFile
from mrl.checkpoint.processes import Run, workers
from mrl.checkpoint.work_folder import Facts, finish_file, locked, publish
from mrl.errors import ConfigError, EnvironmentFault

SMALL_BYTES = 64 * 1024**2  # starting processes would take longer than this
_SYNCS = 4  # files that are waited for at once
_FORMAT = 1  # of the written files; another one does not go on with what an older mrl began


@dataclass(frozen=True)
class Options:
    """How to convert; the result does not depend on it."""

    workers: int = 1
    verify: bool = False  # read the output again and compare it with the source, before it gets its name
    progress: bool = False  # a bar on standard error


@dataclass(frozen=True)
class Target:
    """What to write."""

    files: tuple[PlannedFile, ...]
    container: Container
    digests: bool  # SHA-256 of every file, for a manifest; it is about half of the work
    finish: Callable[[Path, Facts], None]  # writes what goes with the files, into their folder
    reopen: Callable[[Path], Checkpoint]  # opens the finished folder, to verify it


@dataclass(frozen=True)
class Report:
    """What was done."""

    tensors: int  # Hugging Face tensors
    bytes: int  # of the written weight files
    files: int
    resumed_files: int  # of them, finished by an earlier start that was interrupted
    verified: bool
    seconds: float
    left_out: tuple[str, ...]  # tensors of the source that its model computes by itself, random states, Megatron's optimizer states
    unchecked: int  # stored tensors of a torch_dist source without a checksum: damage in them cannot be seen


@dataclass(frozen=True)
class Write:
    """One file to be written, by whichever process."""

    folder: Path
    file: PlannedFile
    container: Container
    digests: bool

    def __call__(self, readers: list[Reader]) -> dict[str, Any]:
        return write_file(readers[0], self.folder, self.file, self.container, self.digests)


def convert(source: Checkpoint, target: Target, output: Path, options: Options) -> Report:
    """Writes the target's files into a folder beside `output`, finishes it and renames it.

    An interrupted conversion goes on where it was when it is started again with the same source and plan.
    Raises ConfigError for an output that is in the way, EnvironmentFault for a damaged source or a disk that is too small or full.
    """
    began, work, files = time.monotonic(), output.with_name(f".{output.name}.partial"), target.files
    _refuse_in_the_way(output)
    sizes = {file.name: places(target.container, file, source.dtype)[-1][0] for file in files}
    processes = options.workers if sum(sizes.values()) > SMALL_BYTES else 1
    digests = target.digests or options.verify
    with locked(work, _identity(source, target, digests), sizes) as (folder, done), workers(processes, [source]) as run:
        resumed = len(done)
        tasks = [Write(folder, file, target.container, digests) for file in files if file.name not in done]
        with _progress(options.progress, folder, sizes):
            unchecked = _do(run, tasks, source_checks(source), work, done)
        target.finish(folder, done)
        if options.verify:
            _verify(source, target, folder, done, processes)
        publish(folder, output, done)
    shutil.rmtree(work, ignore_errors=True)
    tensors = len({piece.hf_name for file in files for entry in file.entries for piece in entry.pieces})
    seconds = time.monotonic() - began
    return Report(tensors, sum(sizes.values()), len(files), resumed, options.verify, seconds, source.left_out, unchecked)


def _do(run: Run, writes: list[Write], checks: list[Check], work: Path, done: Facts) -> int:
    """Writes the files and holds the source against its digests meanwhile: the processor has work while the disk has.

    Returns how many tensors of the source carry no checksum.
    """

    def finish(name: str, facts: dict[str, Any]) -> None:
        try:
            finish_file(work, name, facts)
        except OSError as error:
            raise disk_fault(work / "files" / f"{name}.part", error) from error
        done[name] = facts

    finishing, damage, unchecked = [], None, 0
    with ThreadPoolExecutor(_SYNCS) as disk:
        for task, result in run(_alternated(checks, writes)):
            if isinstance(task, Write):
                finishing.append(disk.submit(finish, task.file.name, result))
            elif isinstance(result, EnvironmentFault):
                damage = result
                break
            else:
                unchecked += result
    if damage is not None:
        done.clear()  # nothing that was made of a damaged source is gone on with
        raise damage
    for waited in finishing:
        waited.result()
    return unchecked


def _alternated(one: Iterable[Any], other: Iterable[Any]) -> list[Any]:
    return [task for task in chain.from_iterable(zip_longest(one, other)) if task is not None]


def _verify(source: Checkpoint, target: Target, folder: Path, done: Facts, processes: int) -> None:
    """Wrong files are not left for the next start to go on from."""
    try:
        written = target.reopen(folder)
        with workers(processes, [source, written]) as run:
            verify_output(run, source, written, folder, done)
    except EnvironmentFault:
        shutil.rmtree(folder.parent, ignore_errors=True)
        raise


def _refuse_in_the_way(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists and is not an empty folder; choose another output")


def _identity(source: Checkpoint, target: Target, digests: bool) -> str:
    """Two conversions of the same identity write and record the same. Two plans may differ only in what stands around the tensors."""
    return hashlib.sha256(repr((_FORMAT, source.identity, target.files, target.container, digests)).encode()).hexdigest()


@contextmanager
def _progress(wanted: bool, folder: Path, sizes: dict[str, int]) -> Iterator[None]:
    """A bar fed by the sizes of the files, so that worker processes need not report."""
    if not wanted:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    with Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task, stop = bar.add_task("", total=sum(sizes.values())), threading.Event()

        def follow() -> None:
            while not stop.wait(0.2):
                bar.update(task, completed=_written(folder, sizes))

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            bar.update(task, completed=_written(folder, sizes))


def _written(folder: Path, sizes: dict[str, int]) -> int:
    total = 0
    for name in sizes:
        for file in (folder / name, folder / f"{name}.part"):
            try:
                total += file.stat().st_size
                break
            except FileNotFoundError:  # not begun, or renamed just now
                continue
    return total
