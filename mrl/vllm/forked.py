"""What the server of forking.py imports, and nobody else: all modules of a core and a worker of vLLM on the CPU."""

import gc
import importlib
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker

from mrl.platforms.imports import many_imports

with suppress(ImportError):  # it finds the place of a process's title only while no variable has been taken away
    import setproctitle

    setproctitle.getproctitle()

with many_imports():
    import vllm.model_executor.model_loader
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor  # noqa: F401

    from mrl.vllm.cpu_worker import nap_while_waiting
    from mrl.vllm.receive import adapter_module

    importlib.import_module(adapter_module())
nap_while_waiting()
# A core asks for its workers here too, as multiprocessing documents; CPython 3.11 would start it a server of its own.
forkserver._forkserver.ensure_running = resource_tracker.ensure_running
# What was imported is never freed: no process has to go through it again, and so copy it.
gc.collect()
gc.freeze()
