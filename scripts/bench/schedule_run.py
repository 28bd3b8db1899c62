"""One run of scripts/bench/schedule.py: `mrl train`, with engines on the first core and all else on the second.

taskset -c A python scripts/bench/schedule_run.py CONFIG B [KEY=VALUE ...]

Started on core A alone, so that the engine computes with one thread, there; once all is started, ranks and everything
else but the engine's processes move to core B. Without cores apart: B is `-`, and nothing moves.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil

from mrl.config.load import load_config
from mrl.driver.assemble import open_run
from mrl.driver.loop import train
from mrl.driver.preflight import RunInputs

ENGINE = "ray::EngineWorker"


def main(config: str, core: str, *overrides: str) -> None:
    with open_run(RunInputs.of(load_config(config, overrides=list(overrides))), resume=False) as run:
        if core != "-":
            move_to(core)
        train(run)


def move_to(core: str) -> None:
    """This process and all that it started, threads included, but for the engine's."""
    everything = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for pid in sorted(everything - set(of_engines())):
        subprocess.run(["taskset", "-acp", core, str(pid)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def of_engines() -> Iterator[int]:
    """Their workers' processes, and vLLM's below them."""
    for process in psutil.Process().children(recursive=True):
        if " ".join(process.cmdline()).startswith(ENGINE):
            yield process.pid
            yield from (child.pid for child in process.children(recursive=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
