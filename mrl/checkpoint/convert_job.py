"""Writes a plan with several processes. A kill loses only the files in work, and nobody ever sees half an output.

The processes hold no model, import no torch and end when their parent does.
"""

import hashlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

from mrl.checkpoint.check_output import source_checks, verification
from mrl.checkpoint.manifest import FileFacts
from mrl.checkpoint.open_checkpoint import Checkpoint
from mrl.checkpoint.planned_file import Container, PlannedFile, disk_fault, file_bytes, write_planned_file
from mrl.checkpoint.stored_boxes import BoxReader
from mrl.checkpoint.work_folder import finish_file, locked, publish
from mrl.errors import ConfigError, EnvironmentFault
from mrl.units import MIB

SMALL_BYTES = 64 * MIB  # starting processes would take longer than this
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
    # writes what goes with the files, into their folder; size and digest of what `verify` is to read again of it
    finish: Callable[[Path, FileFacts], FileFacts]
    reopen: Callable[[Path], Checkpoint]  # opens the finished folder, to verify it


@dataclass(frozen=True)
class ConversionReport:
    """What was done."""

    tensors: int  # Hugging Face tensors
    bytes: int  # of the written weight files
    files: int
    resumed_files: int  # of them, finished by an earlier start that was interrupted
    verified: bool
    seconds: float
    # tensors of the source that its model computes by itself, random states, Megatron's optimizer states
    left_out: tuple[str, ...]
    unchecked: int  # stored tensors of a torch_dist source without a checksum: damage in them cannot be seen
    left_out_layers: int = 0  # for multi-token prediction, which the written config.json does not name any more
    left_out_critic: bool = False  # the source has one beside the model
    of_vision_tower: int = 0  # tensors of another checkpoint's vision tower, copied as they are


@dataclass(frozen=True)
class WriteFile:
    """One file to be written, by whichever process."""

    folder: Path
    file: PlannedFile
    container: Container
    digests: bool

    def __call__(self, readers: Sequence[BoxReader]) -> dict[str, Any]:
        return write_planned_file(readers[0], self.folder, self.file, self.container, self.digests)


Task = Callable[[Sequence[BoxReader]], Any]
RunTasks = Callable[[Sequence[Task]], Iterator[tuple[Task, Any]]]  # tasks -> (task, result) as they finish
_READERS: list[BoxReader] = []  # of a worker process


@contextmanager
def workers(count: int, checkpoints: Sequence[Checkpoint]) -> Iterator[RunTasks]:
    """A function run(tasks) that gives (task, task(readers)) as they finish; `readers` are of `checkpoints`.

    With a count of one all of it happens here. The first error stops what has not begun and is raised. The processes
    are forked at once, so that they have what is imported and opened here; call this before threads are started.
    """
    if count <= 1:
        readers = [checkpoint.reader() for checkpoint in checkpoints]
        try:
            yield partial(_run_here, readers)
        finally:
            for reader in readers:
                reader.close()
        return
    pool = ProcessPoolExecutor(count, get_context("fork"), _start_worker, (tuple(checkpoints),))
    pool.submit(os.getpid).result()
    try:
        yield partial(_run_in_pool, pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _run_here(readers: list[BoxReader], tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
    for task in tasks:
        yield task, task(readers)


def _run_in_pool(pool: ProcessPoolExecutor, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
    try:
        futures = {pool.submit(_run_task, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise EnvironmentFault(
            "a worker process ended by itself, most likely for want of memory; finished files are kept: run the same "
            "command again with fewer --workers"
        ) from None


def _start_worker(checkpoints: tuple[Checkpoint, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and stops giving out tasks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _READERS.extend(checkpoint.reader() for checkpoint in checkpoints)


def _end_with_parent() -> None:
    connection.wait([parent_process().sentinel])
    os._exit(1)


def _run_task(task: Task) -> Any:
    return task(_READERS)


def run_conversion(
    source: Checkpoint, target: Target, output: Path, options: Options | None = None
) -> ConversionReport:
    """Writes the target's files into a folder beside `output`, finishes it and renames it.

    An interrupted conversion goes on where it was when it is started again with the same source and plan.
    Raises ConfigError for an output that is in the way, EnvironmentFault for a damaged source or a disk that is too
    small or full.
    """
    options = options or Options()
    began = time.monotonic()
    work = output.with_name(f".{output.name}.partial")
    files = target.files
    refuse_in_the_way(output)
    sizes = {file.name: file_bytes(target.container, file) for file in files}
    processes = 1
    if sum(sizes.values()) > SMALL_BYTES:
        processes = options.workers
    digests = target.digests or options.verify
    with locked(work, _identity(source, target, digests), sizes) as (folder, done), workers(processes, [source]) as run:
        resumed = len(done)
        tasks = [WriteFile(folder, file, target.container, digests) for file in files if file.name not in done]
        with _progress(options.progress, folder, sizes):
            unchecked = _write_and_check(run, tasks, source_checks(source), work, done)
        try:
            beside = target.finish(folder, done)
        except OSError as error:
            raise EnvironmentFault(f"{error.filename or folder} cannot be written ({error.strerror})") from error
        if options.verify:
            _verify(source, target, folder, done | beside, processes)
        publish(folder, output, done)
    shutil.rmtree(work, ignore_errors=True)
    tensors = len({piece.hf_name for file in files for entry in file.entries for piece in entry.pieces})
    seconds = time.monotonic() - began
    has_critic = source.manifest is not None and bool(source.manifest.critic)
    return ConversionReport(
        tensors,
        sum(sizes.values()),
        len(files),
        resumed,
        options.verify,
        seconds,
        source.left_out,
        unchecked,
        left_out_critic=has_critic,
    )


def _write_and_check(run: RunTasks, writes: list[WriteFile], checks: list[Task], work: Path, done: FileFacts) -> int:
    """Writes the files and compares the source with its digests meanwhile: the processor has work while the disk has.

    Returns how many tensors of the source carry no checksum.
    """

    def finish(name: str, facts: dict[str, Any]) -> None:
        try:
            finish_file(work, name, facts)
        except OSError as error:
            raise disk_fault(work / "files" / f"{name}.part", error) from error
        done[name] = facts

    finishing = []
    damage = None
    unchecked = 0
    with ThreadPoolExecutor(_SYNCS) as disk:
        for task, result in run(_alternated(checks, writes)):
            if isinstance(task, WriteFile):
                finishing.append(disk.submit(finish, task.file.name, result))
            elif isinstance(result, EnvironmentFault):
                damage = result
                break
            else:
                unchecked += result
    if damage is not None:
        done.clear()  # nothing that was made of a damaged source is gone on with
        raise damage
    for future in finishing:
        future.result()
    return unchecked


def _alternated(checks: Iterable[Task], writes: Iterable[Task]) -> list[Task]:
    return [task for task in chain.from_iterable(zip_longest(checks, writes)) if task is not None]


def _verify(source: Checkpoint, target: Target, folder: Path, facts: FileFacts, processes: int) -> None:
    """Wrong files are not left for the next start to go on from."""
    try:
        written = target.reopen(folder)
        tasks = verification(source, written, folder, facts)
        with workers(processes, [source, written]) as run:
            for _, result in run(tasks):
                if isinstance(result, EnvironmentFault):
                    raise result
    except EnvironmentFault:
        shutil.rmtree(folder.parent, ignore_errors=True)
        raise


def refuse_in_the_way(output: Path) -> None:
    """Raises ConfigError for an output that is there and no empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists and is not an empty folder; choose another output")


def _identity(source: Checkpoint, target: Target, digests: bool) -> str:
    """Two conversions of the same identity write and record the same.

    Two plans may differ only in what stands around the tensors.
    """
    return hashlib.sha256(
        repr((_FORMAT, source.identity, target.files, target.container, digests)).encode()
    ).hexdigest()


@contextmanager
def _progress(wanted: bool, folder: Path, sizes: dict[str, int]) -> Iterator[None]:
    """A bar fed by the sizes of the files, so that worker processes need not report."""
    if not wanted:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    with Progress(
        BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as bar:
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
