"""What the files of this folder have in common: a check is a function from a `Machine` to figures, and ends in one JSON
line.

    {"check": "digest", "status": "ok", "seconds": 1.2, "device": "cuda", "gb_per_s": 310.0}

A check that cannot run here raises Skip with a word; one that finds something wrong raises Wrong with the cure. One of
several parts says each as it is done (`Machine.part`), as a line of its own with the status "part": so what was
measured stays where the next part takes too long.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240  # of one check, on a device: an engine of the first start compiles
CPU_LIMIT_S = 400  # whole runs and eight processes at once on two cores, others beside them
OK, FAILED, SKIPPED, PART = "ok", "failed", "skipped", "part"
STAMP, OUT, SIZES = "MRL_LADDER_STAMP", "MRL_LADDER_OUT", "MRL_LADDER_SIZES"  # of a check's own process

Figures = dict[str, Any]


class Skip(Exception):
    """This machine cannot run the check; the message says what it lacks."""


class Wrong(Exception):
    """The machine or mrl does not do what it must; the message ends with what to do about it."""


@dataclass(frozen=True)
class Machine:
    """The device that is checked; on the CPU all sizes are small."""

    device: str
    check: str = ""  # that runs now
    sizes: Mapping[str, int] = field(default_factory=lambda: json.loads(os.environ.get(SIZES, "{}")))

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    @property
    def limit_s(self) -> int:
        """Of one check."""
        return CPU_LIMIT_S if self.small else LIMIT_S

    def size(self, on_device: int, on_cpu: int, name: str = "") -> int:
        """The one that fits here, or what the caller gave for `name` (--size NAME=N)."""
        return self.sizes.get(name, on_cpu if self.small else on_device)

    def part(self, figures: Figures) -> Figures:
        """Says a part of the check's figures now, and returns it."""
        emit({"check": self.check, "device": self.device, "status": PART} | figures)
        return figures

    @cached_property
    def platform(self) -> Any:
        """mrl's platform of the device. Raises EnvironmentFault where it is not there."""
        from mrl.platforms import get_platform

        return get_platform(self.device)

    @property
    def dtype(self) -> Any:
        """What layers compute in: bfloat16, on the CPU float32, which has no product of the other worth the name."""
        import torch

        return torch.float32 if self.small else torch.bfloat16

    @property
    def torch_device(self) -> Any:
        return self.platform.device

    def seconds(self, run: Callable[[], Any], repeats: int = 5) -> float:
        """Of the fastest run after one that warms up; the device is waited for."""
        run()
        times = []
        for _ in range(repeats):
            self.platform.synchronize()
            began = time.perf_counter()
            run()
            self.platform.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    def peak_of(self, run: Callable[[], Any]) -> float:
        """GiB that `run` takes above what is held before it."""
        self.platform.release_cache()
        self.platform.reset_peak_memory()
        before = self.platform.max_memory_allocated_gb()
        run()
        self.platform.synchronize()
        return self.platform.max_memory_allocated_gb() - before

    def needs_accelerator(self, what: str) -> None:
        """Raises Skip on the CPU."""
        if self.small:
            raise Skip(f"the CPU has no {what}")


@dataclass(frozen=True)
class Check:
    """`fast`: it loads no Megatron and no vLLM, and takes a few seconds on a CPU. `limit_s`: of it, on a device."""

    name: str
    function: Callable[[Machine], Figures]
    fast: bool = False
    limit_s: int = LIMIT_S


CHECKS: dict[str, Check] = {}


def check(
    fast: bool = False, limit_s: int = LIMIT_S
) -> Callable[[Callable[[Machine], Figures]], Callable[[Machine], Figures]]:
    """Registers a function under its name."""

    def register(function: Callable[[Machine], Figures]) -> Callable[[Machine], Figures]:
        CHECKS[function.__name__] = Check(function.__name__, function, fast, limit_s)
        return function

    return register


def run_check(name: str, machine: Machine) -> Figures:
    """The line of one check. A hang ends the process by SIGALRM, of which whoever started it makes a line."""
    from mrl.errors import MrlError

    began, said = time.monotonic(), {"check": name, "device": machine.device}
    signal.alarm(limit_of(name, machine))
    try:
        figures = {"status": OK} | CHECKS[name].function(replace(machine, check=name))
    except Skip as error:
        figures = {"status": SKIPPED, "why": str(error)}
    except (Wrong, MrlError) as error:
        figures = {"status": FAILED, "why": str(error)}
    except Exception as error:  # a ladder goes on with the next rung
        figures = {"status": FAILED, "why": f"{type(error).__name__}: {error}", "where": _where(error)}
    finally:
        signal.alarm(0)
    return said | figures | {"seconds": round(time.monotonic() - began, 2)}


def limit_of(name: str, machine: Machine) -> int:
    """Seconds that the check may take."""
    return machine.limit_s if machine.small else CHECKS[name].limit_s


def _where(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"


def say(line: Figures) -> None:
    """Prints the line, rounded to what can be read."""
    print(json.dumps({name: _rounded(value) for name, value in line.items()}), flush=True)


def emit(line: Figures) -> None:
    """Says the line, and keeps it, with what made it, in the file that the caller named (--out)."""
    say(line)
    if out := os.environ.get(OUT):
        line = json.loads(os.environ.get(STAMP, "{}")) | line
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def expect(holds: bool, otherwise: str) -> None:
    """Raises Wrong with `otherwise`."""
    if not holds:
        raise Wrong(otherwise)


def quiet() -> None:
    """What libraries print goes to stderr: stdout has the lines alone."""
    sys.stdout.flush()
    lines = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(lines, "w", buffering=1)
