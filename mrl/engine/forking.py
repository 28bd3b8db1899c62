"""Forks vLLM's own processes on the CPU from a server that has imported vLLM once.

An engine has a front end in its Ray actor, a core below it, and a worker for each rank. vLLM spawns core and workers,
as the runtimes of accelerators demand. Each would then take 7 s of CPU to import the same modules, one after the other.
Here the front end starts the server before it imports vLLM itself. The others are forked from the server with
everything imported:

    front end  |- import vllm -|- configuration -|- asks -> core -> asks -> workers
    server     |- import vllm -|    waits        |- fork ..... core    fork ... workers

The server is multiprocessing's own (`forkserver`). It has one thread and no tensor, so a process from it is as fresh as
a new interpreter. The environment of the caller is handed over, with its number of threads and its cores. Two things
can only be had at the start of a process: other libraries than the server's, and many threads that are each bound to a
core. Then a process is spawned as before.
"""

import glob
import importlib.util
import multiprocessing
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from multiprocessing import context, forkserver
from pathlib import Path
from typing import Any

from mrl.engine.process_watch import end_with_parent

IMPORTED = "mrl.engine.forked"  # the server imports it, with all modules that a core and a worker need
PRELOADED = "LD_PRELOAD"
THREADS = "OMP_NUM_THREADS"
# OpenMP binds threads by these when it is loaded, each with its own syntax; for one core the first number counts
BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")
MOST_THREADS = 8  # up to so many threads need not be bound
# where vLLM looks for these libraries, from the folders of packages
_OPENMP = ("../torch.libs/libgomp*.so*", "lib/libgomp*.so*")
_HEAP = ("libs/libtcmalloc_minimal*.so*", "libs/libtcmalloc.so*")
_SERVER = "MRL_FORK_SERVER_PRELOADED"  # tells processes below the server which libraries it runs with


class ForkedProcess(context.ForkServerProcess):
    """A process from the server, or a spawned one where the server cannot provide what it needs."""

    environment: dict[str, str] | None  # applied to a forked process; None for a spawned one, which inherits its own

    def start(self) -> None:
        """Starts the process as multiprocessing does, with the current environment."""
        self.environment = dict(os.environ) if can_fork(os.environ) else None
        super().start()

    @staticmethod
    def _Popen(process: "ForkedProcess") -> Any:
        if process.environment is not None:
            return context.ForkServerProcess._Popen(process)
        process._start_method = "spawn"
        return context.SpawnProcess._Popen(process)

    def run(self) -> None:
        """Runs the target in the caller's environment. The process ends with the one that started it."""
        if self.environment is not None:
            take_over(self.environment)
        end_with_parent()
        super().run()


class ForkingContext(context.ForkServerContext):
    """The multiprocessing context that vLLM gets."""

    Process = ForkedProcess


def can_fork(environment: Mapping[str, str]) -> bool:
    """Returns whether a process from the server is as good as a spawned one in this environment."""
    threads = environment.get(THREADS, "")
    same_libraries = environment.get(_SERVER) == environment.get(PRELOADED, "")
    return same_libraries and threads.isdecimal() and 0 < int(threads) <= MOST_THREADS


def take_over(environment: Mapping[str, str]) -> None:
    """Applies an environment to this process, and what libraries read from it when they were loaded."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    if cores := bound_cores(environment):
        os.sched_setaffinity(0, cores)  # later threads inherit it
    torch.set_num_threads(int(environment[THREADS]))


def bound_cores(environment: Mapping[str, str]) -> set[int]:
    """Returns the cores to which OpenMP would bind threads; empty where it would not."""
    binding = next((environment[name] for name in BINDING if name in environment), "")
    return {int(number) for number in re.findall(r"\d+", binding.split("proclist=")[-1])}


def start_server(folder: Path) -> None:
    """Starts the server in the background. Call it before this process imports vLLM, so that both imports run at once.

    Its socket lies in `folder`, which the caller removes, after a kill too.
    """
    before = os.environ.get(PRELOADED, "")
    os.environ[_SERVER] = os.environ[PRELOADED] = preloaded_libraries(before)
    forkserver.set_forkserver_preload(["__main__", IMPORTED])
    inherited = multiprocessing.current_process()._config  # processes inherit the folder of the server's socket
    inherited["tempdir"] = tempfile.mkdtemp(prefix="fork-", dir=folder)
    try:
        forkserver.ensure_running()
    finally:
        del inherited["tempdir"]
        os.environ[PRELOADED] = before


def leave_server() -> None:
    """Leaves the server once all processes have started; it ends with the last of them.

    A kill leaves no socket behind. A process that starts another engine later starts another server.
    """
    server = forkserver._forkserver
    if server._forkserver_pid is None:
        return
    os.close(server._forkserver_alive_fd)
    shutil.rmtree(os.path.dirname(server._forkserver_address), ignore_errors=True)
    server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None


def install() -> None:
    """Makes vLLM fork its processes from here on, where this process or one above it has started a server.

    The coordinator of data-parallel ranks is always a ForkedProcess, since nothing else ends it with its engine.
    """
    from vllm.v1.engine import coordinator

    coordinator.get_mp_context = ForkingContext
    if _SERVER not in os.environ:
        return
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    utils.get_mp_context = multiproc_executor.get_mp_context = ForkingContext


def preloaded_libraries(given: str) -> str:
    """Returns LD_PRELOAD as vLLM's CPU platform sets it in an engine's configuration: torch's OpenMP, and vLLM's
    heap.
    """
    openmp = _library("torch", *_OPENMP)
    heap = _library("vllm", *_HEAP)
    libraries = []
    if given:
        libraries = [given]
    if openmp and not re.search("libomp|libgomp|libiomp", given):
        libraries = [*libraries, openmp]
    if heap and "libtcmalloc" not in given:
        libraries = [heap, *libraries]
    return ":".join(libraries)


def _library(package: str, *patterns: str) -> str | None:
    folder = os.path.dirname(importlib.util.find_spec(package).origin)  # imports nothing
    for pattern in patterns:
        for path in glob.glob(os.path.normpath(os.path.join(folder, pattern))):
            return path
    return None
