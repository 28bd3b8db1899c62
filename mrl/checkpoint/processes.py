"""Runs tasks in worker processes that hold no model and import no torch, and end when their parent does."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection, get_context, parent_process
from typing import Any, TypeVar

from mrl.checkpoint.open_checkpoint import Checkpoint, Reader
from mrl.errors import EnvironmentFault

Task = TypeVar("Task", bound=Callable[[Sequence[Reader]], Any])
Run = Callable[[Sequence[Any]], Iterator[tuple[Any, Any]]]  # tasks -> (task, result) as they finish
_READERS: list[Reader] = []  # of a worker process


@contextmanager
def workers(count: int, checkpoints: Sequence[Checkpoint]) -> Iterator[Run]:
    """A function run(tasks) that gives (task, task(readers)) as they finish; `readers` are of `checkpoints`.

    With a count of one all of it happens here. The first error stops what has not begun and is raised. The processes are forked at once,
    so that they have what is imported and opened here; call this before threads are started.
    """
    if count <= 1:
        readers = [Reader(checkpoint) for checkpoint in checkpoints]
        try:
            yield partial(_here, readers)
        finally:
            for reader in readers:
                reader.close()
        return
    pool = ProcessPoolExecutor(count, get_context("fork"), _start, (tuple(checkpoints),))
    pool.submit(os.getpid).result()
    try:
        yield partial(_there, pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _here(readers: list[Reader], tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
    for task in tasks:
        yield task, task(readers)


def _there(pool: ProcessPoolExecutor, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
    try:
        futures = {pool.submit(_call, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise EnvironmentFault(
            "a worker process ended by itself, most likely for want of memory; finished files are kept: run the same command again "
            "with fewer --workers"
        ) from None


def _start(checkpoints: tuple[Checkpoint, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and stops giving out tasks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _READERS.extend(Reader(checkpoint) for checkpoint in checkpoints)


def _end_with_parent() -> None:
    connection.wait([parent_process().sentinel])
    os._exit(1)


def _call(task: Task) -> Any:
    return task(_READERS)
