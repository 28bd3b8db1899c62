"""`mrl train` with a signal sent to one of its processes in the middle of a chosen call: for
scripts/evidence/colocated.py.

python scripts/evidence/colocated_killed.py CONFIG CALL NTH VICTIM SIGNAL RESUME [KEY=VALUE ...]

The signal goes out right after the NTH CALL to all ranks or engines was sent, and before anybody has answered.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import psutil

from mrl.config.load import load_config
from mrl.driver.assemble import open_run
from mrl.driver.loop import train
from mrl.driver.preflight import RunInputs
from mrl.errors import MrlError

PROCESSES = {"rank": "ray::ActorWorker", "engine": "ray::EngineWorker", "vllm": "VLLM::Worker"}


def main(config: str, call: str, nth: str, victim: str, number: str, resume: str, *overrides: str) -> int:
    with open_run(RunInputs.of(load_config(config, overrides=list(overrides))), resume=bool(int(resume))) as run:
        left = [int(nth)]
        for group in (run.actor, run.responder.engines):
            group.refs = _killing(group.refs, call, left, victim, signal.Signals[number])
        if call == "generate":
            streams = run.generation.streams
            streams.send = _signalled(streams.send, left, signal.Signals[number])
        try:
            train(run)
        except MrlError as error:
            print(f"ended: {error}", flush=True)
            return error.exit_code
    return 0


def _killing(
    refs: Callable[..., dict], call: str, left: list[int], victim: str, number: signal.Signals
) -> Callable[..., dict]:
    def sent(method: str, *arguments: Any, **named: Any) -> dict:
        answers = refs(method, *arguments, **named)
        if method == call:
            left[0] -= 1
            if left[0] == 0:
                os.kill(pid_of(victim), number)
        return answers

    return sent


def _signalled(send: Callable[..., None], left: list[int], number: signal.Signals) -> Callable[..., None]:
    """The run notices the signal when its requests are under way."""

    def signalled(*arguments: Any) -> None:
        send(*arguments)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)

    return signalled


def pid_of(victim: str) -> int:
    """The last of several: not the one that answers first."""
    if victim == "driver":
        return os.getpid()
    return pids_of(victim)[-1]


def pids_of(victim: str) -> list[int]:
    """All of a kind, in their order."""
    below = psutil.Process().children(recursive=True)
    return sorted(process.pid for process in below if _name(process).startswith(PROCESSES[victim]))


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
