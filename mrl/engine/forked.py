"""The imports of the server in forking.py, and of nothing else: all modules of a core and a worker of vLLM on the
CPU.
"""

import importlib
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker

from mrl.platforms.imports import many_imports

with suppress(ImportError):  # setproctitle finds the title's memory only while no environment variable is removed
    import setproctitle

    setproctitle.getproctitle()

with many_imports():
    import vllm.model_executor.model_loader
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor  # noqa: F401

    from mrl.engine.cpu_worker import nap_while_waiting
    from mrl.engine.receive import adapter_module

    importlib.import_module(adapter_module())
nap_while_waiting()
# A core also gets its workers from this server, as multiprocessing documents. CPython 3.11 would start a second one.
forkserver._forkserver.ensure_running = resource_tracker.ensure_running
