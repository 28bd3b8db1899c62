"""Runs tasks in worker processes that hold no model and import no torch, and end when their parent does."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, TypeVar

from mrl.convert.source import Reader, open_checkpoint
from mrl.errors import EnvironmentFault

Task = TypeVar("Task")
_READERS: list[Reader] = []  # of a worker process


def in_parallel(
    function: Callable[[Sequence[Reader], Task], Any], folders: Sequence[Path], tasks: Sequence[Task], workers: int
) -> Iterator[tuple[Task, Any]]:
    """(task, function(readers, task)) as they finish; `readers` are of the checkpoints in `folders`, opened once a process.

    With one worker all of it happens here. The first error stops what has not begun and is raised.
    """
    if min(workers, len(tasks)) <= 1:
        with ExitStack() as stack:
            readers = [stack.enter_context(Reader(open_checkpoint(folder))) for folder in folders] if tasks else []
            for task in tasks:
                yield task, function(readers, task)
        return
    pool = ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"), _start, (tuple(folders),))
    try:
        futures = {pool.submit(_call, function, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise EnvironmentFault(
            "a worker process ended by itself, most likely for want of memory; finished files are kept: run the same command again "
            "with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(folders: tuple[Path, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and stops giving out tasks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _READERS.extend(Reader(open_checkpoint(folder)) for folder in folders)


def _end_with_parent() -> None:
    connection.wait([parent_process().sentinel])
    os._exit(1)


def _call(function: Callable[[Sequence[Reader], Task], Any], task: Task) -> Any:
    return function(_READERS, task)
