"""Notes which functions of `mrl/` run, in every process of a run whose PYTHONPATH has this folder.

Python imports it at the start of a process. Where EXECUTED_FOLDER names a folder, each process writes a file PID there,
with a line for a function the first time that it runs in a slice of time of SLICE_S: number of the slice, file, first
and last line, name. A function runs when it is called, calls, or returns. A line of its own says which verb `do` was
told, behind its name, and of which dataclasses, whose `__init__` is in no file, objects were made. `measure.py` reads
the files.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER = os.environ.get("EXECUTED_FOLDER")
SLICE_S = 0.02
STEP = "train_step"  # its calls and returns are noted with their times
QUIET = ("mbridge", "megatron", "numpy", "pyarrow", "pydantic", "ray", "torch", "transformers", "vllm")
EXECUTORS = "ray._private.function_manager"  # makes what a thread of an actor, which Python did not start, calls first


class Notes:
    """What this process has noted."""

    def __init__(self, root: str):
        self.root = root
        self.names: dict[CodeType, str | None] = {}  # None: of another package
        self.modules: list[str] = []  # lines of those that were loaded: a fork has them too
        self.begin()

    def begin(self) -> None:
        """Opens this process's file; a forked one has its own."""
        self.seen: dict[Any, int] = {}
        self.file = os.open(f"{FOLDER}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for line in self.modules:
            os.write(self.file, line.encode())

    def name(self, code: CodeType) -> str | None:
        """File, first line, last line and name of a function of the package."""
        if not code.co_filename.startswith(self.root):
            return None
        last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
        return f"{code.co_filename[len(self.root) :]} {code.co_firstlineno} {last} {code.co_qualname}"

    def hook(self, frame: FrameType, event: str, _: Any) -> None:
        """Called by Python at every call and return, of functions in C too."""
        code = frame.f_code
        try:
            name = self.names[code]
        except KeyError:
            name = self.names[code] = self.name(code)
        if name is not None:
            self.note(code, name)
            if code.co_name == STEP and event in ("call", "return"):
                os.write(self.file, f"{time.time()} {event}\n".encode())
            if code.co_name == "do" and event == "call" and "verb" in frame.f_locals:
                verb = frame.f_locals["verb"]
                self.note((code, verb), f"{name}:{verb}")
            if event == "call":
                self.callers(frame.f_back)
        elif code.co_filename == "<string>" and code.co_name == "__init__" and event == "call":
            made = type(frame.f_locals.get("self"))
            if made.__module__.startswith("mrl."):
                self.note(made, f"{made.__module__} 0 0 {made.__qualname__}")

    def callers(self, frame: FrameType | None) -> None:
        """Those that wait for a call run too, until one that was noted in this slice."""
        now = int(time.time() / SLICE_S)
        while frame is not None:
            name = self.names.get(frame.f_code)
            if name is not None:
                if self.seen.get(frame.f_code) == now:
                    return
                self.note(frame.f_code, name)
            frame = frame.f_back

    def note(self, key: Any, name: str) -> None:
        now = int(time.time() / SLICE_S)
        if self.seen.get(key) == now:
            return
        self.seen[key] = now
        line = f"{now} {name}\n"
        if name.endswith("<module>") and line not in self.modules:
            self.modules.append(line)
        os.write(self.file, line.encode())


class Imports(importlib.abc.MetaPathFinder):
    """Keeps the hook out of other packages' imports, and brings it into threads that Python did not start.

    Imports of QUIET would take minutes with it, and run nothing of mrl. A thread of a Ray actor first calls what
    EXECUTORS makes.
    """

    def __init__(self, hook: Any):
        self.hook = hook

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in QUIET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            before = sys.getprofile()
            sys.setprofile(None)
            try:
                load(module)
            finally:
                sys.setprofile(before)
            if name == EXECUTORS:
                self.patch(module.FunctionActorManager)

        spec.loader.exec_module = exec_module
        return spec

    def patch(self, manager: Any) -> None:
        make, hook = manager._make_actor_method_executor, self.hook

        def noted(self: Any, name: str, method: Any) -> Any:
            executor = make(self, name, method)

            def execute(*args: Any, **kwargs: Any) -> Any:
                sys.setprofile(hook)
                return executor(*args, **kwargs)

            execute.name, execute.method = executor.name, executor.method
            return execute

        manager._make_actor_method_executor = noted


if FOLDER:
    notes = Notes(str(Path(__file__).resolve().parents[2] / "mrl") + os.sep)
    os.register_at_fork(after_in_child=notes.begin)
    sys.meta_path.insert(0, Imports(notes.hook))
    threading.setprofile(notes.hook)
    sys.setprofile(notes.hook)
