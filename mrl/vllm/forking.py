"""On the CPU, vLLM's own processes are forked from a server that has imported vLLM once.

An engine is a front end in its Ray actor, a core below it, and a worker for each part of its tensors. vLLM spawns core
and workers, as an accelerator's runtime demands, and each then takes 7 s of CPU to import the same modules, one after
the other. Here the front end starts the server before it imports vLLM itself, and the others come out of it with all
imported:

    front end  |- import vllm -|- configuration -|- asks -> core -> asks -> workers
    server     |- import vllm -|    waits        |- fork ..... core    fork ... workers

The server is multiprocessing's own (`forkserver`); it has one thread and no tensor, so that a process from it is as
fresh as a new interpreter. What differs is handed over: the environment of whoever asks, the number of threads and the
cores that they may run on. What can only be had at the start of a process is other libraries than the server's, and
many threads of which each is bound to its core: then a process is spawned as before.
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

from mrl.vllm.process_watch import end_with_parent

IMPORTED = "mrl.vllm.forked"  # by the server: all that a core and a worker need
PRELOADED = "LD_PRELOAD"
THREADS = "OMP_NUM_THREADS"
# of which OpenMP binds threads as it is loaded, each in a syntax of its own; of one core it is the first number
BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")
MOST_THREADS = 8  # so many find their cores by themselves
# where vLLM looks for them, from the packages' folders
_OPENMP = ("../torch.libs/libgomp*.so*", "lib/libgomp*.so*")
_HEAP = ("libs/libtcmalloc_minimal*.so*", "libs/libtcmalloc.so*")
_SERVER = "MRL_FORK_SERVER_PRELOADED"  # with what libraries it runs, for the processes below it


class ForkedProcess(context.ForkServerProcess):
    """A process from the server, or a spawned one where the server cannot give it what it needs."""

    environment: dict[str, str] | None  # that it takes over; None where it is spawned, which brings its own

    def start(self) -> None:
        """Starts the process as multiprocessing does, from the environment of now."""
        self.environment = dict(os.environ) if can_fork(os.environ) else None
        super().start()

    @staticmethod
    def _Popen(process: "ForkedProcess") -> Any:
        if process.environment is not None:
            return context.ForkServerProcess._Popen(process)
        process._start_method = "spawn"
        return context.SpawnProcess._Popen(process)

    def run(self) -> None:
        """What it is for, in the environment in which it was asked for; it ends with the process that asked."""
        if self.environment is not None:
            take_over(self.environment)
        end_with_parent()
        super().run()


class ForkingContext(context.ForkServerContext):
    """multiprocessing, as vLLM asks for it."""

    Process = ForkedProcess


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a process from the server is as good as one that is spawned in this environment."""
    threads = environment.get(THREADS, "")
    same_libraries = environment.get(_SERVER) == environment.get(PRELOADED, "")
    return same_libraries and threads.isdecimal() and 0 < int(threads) <= MOST_THREADS


def take_over(environment: Mapping[str, str]) -> None:
    """Gives this process the environment, and what libraries read of it when they were loaded."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    if cores := bound_cores(environment):
        os.sched_setaffinity(0, cores)  # its threads are to come, and inherit it
    torch.set_num_threads(int(environment[THREADS]))


def bound_cores(environment: Mapping[str, str]) -> set[int]:
    """The cores that OpenMP would bind threads to; empty where it would not."""
    said = next((environment[name] for name in BINDING if name in environment), "")
    return {int(number) for number in re.findall(r"\d+", said.split("proclist=")[-1])}


def start_server(folder: Path) -> None:
    """Starts it in the background; before this process imports vLLM, which would take as long again.

    Its socket is in `folder`, which whoever made it removes, after a kill too.
    """
    before = os.environ.get(PRELOADED, "")
    os.environ[_SERVER] = os.environ[PRELOADED] = preloaded_libraries(before)
    forkserver.set_forkserver_preload(["__main__", IMPORTED])
    own = multiprocessing.current_process()._config  # what it is asked through is in a folder that processes inherit
    own["tempdir"] = tempfile.mkdtemp(prefix="fork-", dir=folder)
    try:
        forkserver.ensure_running()
    finally:
        del own["tempdir"]
        os.environ[PRELOADED] = before


def leave_server() -> None:
    """Leaves the server once all processes are there: it ends with the last of them.

    A kill leaves nothing of its socket behind. A process that goes on to another engine starts another server.
    """
    server = forkserver._forkserver
    if server._forkserver_pid is None:
        return
    os.close(server._forkserver_alive_fd)
    shutil.rmtree(os.path.dirname(server._forkserver_address), ignore_errors=True)
    server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None


def install() -> None:
    """vLLM's processes come from the server from here on, where this process, or one above it, has started one.

    The coordinator of data-parallel ranks always does as ForkedProcess: nobody else ends it with its engine.
    """
    from vllm.v1.engine import coordinator

    coordinator.get_mp_context = ForkingContext
    if _SERVER not in os.environ:
        return
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    utils.get_mp_context = multiproc_executor.get_mp_context = ForkingContext


def preloaded_libraries(given: str) -> str:
    """LD_PRELOAD as vLLM's CPU platform sets it while it makes an engine's configuration: OpenMP of torch, its heap."""
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
    found = (path for pattern in patterns for path in glob.glob(os.path.normpath(os.path.join(folder, pattern))))
    return next(found, None)
