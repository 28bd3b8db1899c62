"""Writes a plan with several processes. A kill loses only unfinished files, and half an output is never visible.

The processes hold no model, import no torch, and end with their parent. They write into a folder beside the output. It
is locked, checked for space, continued after a kill, and renamed at the end.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
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
from typing import IO, Any

from mrl.checkpoint.check_output import source_checks, verification
from mrl.checkpoint.manifest import FileFacts, fsync
from mrl.checkpoint.open_checkpoint import Checkpoint
from mrl.checkpoint.planned_file import Container, PlannedFile, disk_fault, file_bytes, write_planned_file
from mrl.checkpoint.stored_boxes import BoxReader
from mrl.errors import ConfigError, EnvironmentFault
from mrl.units import MIB

SMALL_BYTES = 64 * MIB  # starting processes would take longer
_SYNCS = 4  # files that are synced together
_FORMAT = 1  # of the written files; a conversion with another number does not continue what an older mrl began


@dataclass(frozen=True)
class Options:
    """Options of a conversion. The result does not depend on them."""

    workers: int = 1
    verify: bool = False  # read the output again and compare it with the source before it gets its name
    progress: bool = False  # a bar on standard error


@dataclass(frozen=True)
class Target:
    """What to write."""

    files: tuple[PlannedFile, ...]
    container: Container
    digests: bool  # SHA-256 of every file for a manifest, about half of the work
    # writes the accompanying files into their folder; returns size and digest of those that `verify` reads again
    finish: Callable[[Path, FileFacts], FileFacts]
    reopen: Callable[[Path], Checkpoint]  # opens the finished folder in order to verify it


@dataclass(frozen=True)
class ConversionReport:
    """Summary of a conversion."""

    tensors: int  # counts Hugging Face tensors
    bytes: int  # of the written weight files
    files: int
    resumed_files: int  # files that an interrupted earlier start had finished
    verified: bool
    seconds: float
    # tensors of the source that the model computes itself, random states, Megatron's optimizer states
    left_out: tuple[str, ...]
    unchecked: int  # tensors of a torch_dist source without checksum, in which damage cannot be detected
    left_out_layers: int = 0  # for multi-token prediction, which the written config.json no longer names
    left_out_critic: bool = False  # the source has a critic beside the model
    of_vision_tower: int = 0  # tensors copied unchanged from another checkpoint's vision tower
    drafting: int = 0  # tensors of layers for multi-token prediction, as they were, with the trained embedding and head
    # of these, tensors named like copies of the embedding or output layer that are none, and stay as they were
    other_copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class WriteFile:
    """Writes one file, in any process."""

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
    """Yields a function run(tasks) that yields (task, task(readers)) as tasks finish. `readers` belong to
    `checkpoints`.

    With a count of one, all tasks run here. The first error cancels the tasks that have not begun, and is raised. The
    processes are forked at once, so they have what is imported and opened here. Call this before starting threads.
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
            "a worker process ended unexpectedly, probably for lack of memory; finished files are kept: run the same "
            "command again with fewer --workers"
        ) from None


def _start_worker(checkpoints: tuple[Checkpoint, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the signal and stops giving out tasks
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

    An interrupted conversion continues when it is started again with the same source and plan. Raises ConfigError for
    an output that exists, EnvironmentFault for a damaged source or a full disk.
    """
    options = options or Options()
    began = time.monotonic()
    work = output.with_name(f".{output.name}.partial")
    files = target.files
    refuse_in_the_way(output, source.folder)
    sizes = {file.name: file_bytes(target.container, file) for file in files}
    processes = 1
    if sum(sizes.values()) > SMALL_BYTES:
        processes = options.workers
    digests = target.digests or options.verify
    checks = source_checks(source, {entry.role for file in files for entry in file.entries})
    with locked(work, _identity(source, target, digests), sizes) as (folder, done), workers(processes, [source]) as run:
        resumed = len(done)
        tasks = [WriteFile(folder, file, target.container, digests) for file in files if file.name not in done]
        with _progress(options.progress, folder, sizes):
            unchecked = _write_and_check(run, tasks, checks, work, done)
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
    return ConversionReport(
        tensors,
        sum(sizes.values()),
        len(files),
        resumed,
        options.verify,
        seconds,
        source.left_out,
        unchecked,
        left_out_critic=source.has_critic,
    )


def _write_and_check(run: RunTasks, writes: list[WriteFile], checks: list[Task], work: Path, done: FileFacts) -> int:
    """Writes the files, and compares the source with its digests meanwhile, so that processor and disk are both busy.

    Returns how many tensors of the source have no checksum.
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
        alternated = [task for task in chain.from_iterable(zip_longest(checks, writes)) if task is not None]
        for task, result in run(alternated):
            if isinstance(task, WriteFile):
                finishing.append(disk.submit(finish, task.file.name, result))
            elif isinstance(result, EnvironmentFault):
                damage = result
                break
            else:
                unchecked += result
    if damage is not None:
        done.clear()  # files made from a damaged source are not kept for the next start
        raise damage
    for future in finishing:
        future.result()
    return unchecked


def _verify(source: Checkpoint, target: Target, folder: Path, facts: FileFacts, processes: int) -> None:
    """Verifies the output. Removes everything if it is wrong, so that the next start begins again."""
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


def refuse_in_the_way(output: Path, source: Path) -> None:
    """Raises ConfigError for an output that exists, except an empty folder, and for one inside of its source."""
    if output.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{output} is inside of {source}, which stays as it is; choose another output")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists and is not an empty folder; choose another output")


def _identity(source: Checkpoint, target: Target, digests: bool) -> str:
    """Returns a digest. Two conversions with the same digest write and record the same.

    Two plans may differ only in the bytes around the tensors.
    """
    return hashlib.sha256(
        repr((_FORMAT, source.identity, target.files, target.container, digests)).encode()
    ).hexdigest()


@contextmanager
def _progress(wanted: bool, folder: Path, sizes: dict[str, int]) -> Iterator[None]:
    """A bar that reads the sizes of the files, so that worker processes need not report."""
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
            except FileNotFoundError:  # not begun, or just renamed
                continue
    return total


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
            # what another conversion left, or one that finished nothing
            shutil.rmtree(work / "done", ignore_errors=True)
            shutil.rmtree(work / "files")
            (work / "files").mkdir()
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
            f"warning: {work.absolute().parent} is on a file system without locks ({error.strerror}); make sure that "
            "no other conversion writes the same output",
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
