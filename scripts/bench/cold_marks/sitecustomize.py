"""Writes down when parts of a start begin and how long they take, in every process of a run; for cold_start.py alone.

Python imports this module as it starts, where its folder is in PYTHONPATH. It changes nothing of what it times. Each
line of the file in MRL_COLD_MARKS is {"name", "pid", "began", "seconds"}, the clock that of time.time().
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import time

FILE = "MRL_COLD_MARKS"
# module -> what of it is timed; a module alone is timed as it is imported, with all that it brings
TIMED = {
    "torch": (),
    "ray": (),
    "transformers": (),
    "megatron.core": (),
    "mbridge": (),
    "vllm": (),
    "mrl.engine.forked": (),
    "mrl.driver.assemble": (),
    "mrl.rank.rank_worker": ("ActorWorker.start",),
    "mrl.engine.engine_worker": ("EngineWorker.__init__", "EngineWorker.start"),
    "mrl.driver.preflight": ("preflight", "check_inputs", "start_lines"),
    "mrl.driver.assemble_data": ("read_data",),
    "mrl.cluster.ray_cluster": ("_init_own",),
    "mrl.cluster.actor_group": ("ActorGroup.start", "ActorGroup._start"),
    "mrl.cluster.rollout_group": ("RolloutGroup.wait_started",),
    "mrl.cluster.scoring": ("start_scorers", "Scorer.start"),
    "mrl.driver.assemble_processes": ("start_processes",),
    "mrl.driver.placement": ("Separate.begin", "Colocated.begin"),
    "mrl.generate.generation": ("Generation.begin",),
    "mrl.driver.loop": ("train_step",),
    "mrl.rank.actor": ("MegatronActor.__init__",),
    "mrl.engine.vllm_engine": ("VllmEngine._start", "VllmEngine._check_order", "VllmEngine._complete"),
    "vllm.engine.arg_utils": ("AsyncEngineArgs.create_engine_config",),
    "vllm.v1.engine.core": ("EngineCore.__init__",),
    "vllm.v1.worker.cpu_worker": (
        "CPUWorker.load_model",
        "CPUWorker.determine_available_memory",
        "CPUWorker.compile_or_warm_up_model",
    ),
}


def write(name: str, began: float) -> None:
    """Appends a line, in one write."""
    line = {"name": name, "pid": os.getpid(), "began": began, "seconds": time.time() - began}
    file = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


class _Timing(importlib.abc.MetaPathFinder):
    """Finds modules of TIMED as everybody would, and has their loader time them."""

    def find_spec(self, name, path=None, target=None):
        if name not in TIMED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(_executed, run)
        return spec


def _executed(run, module) -> None:
    began = time.time()
    run(module)
    write(f"import {module.__name__}", began)
    for path in TIMED[module.__name__]:
        owner, _, leaf = path.rpartition(".")
        holder = getattr(module, owner, None) if owner else module
        if holder is not None and leaf in vars(holder):
            setattr(holder, leaf, _timed(vars(holder)[leaf], path))


def _timed(function, name: str):
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def timed(*arguments, **named):
            began = time.time()
            try:
                return await function(*arguments, **named)
            finally:
                write(name, began)

        return timed

    @functools.wraps(function)
    def timed(*arguments, **named):
        began = time.time()
        try:
            return function(*arguments, **named)
        finally:
            write(name, began)

    return timed


if FILE in os.environ:
    sys.meta_path.insert(0, _Timing())
