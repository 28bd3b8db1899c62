"""`mrl train` with a signal to one of its processes at a chosen point, and the run goes on: for faults.py.

python scripts/evidence/fault_run.py CONFIG POINT VICTIM SIGNAL [KEY=VALUE ...]

POINT and VICTIM as ahead_killed.py has them, or `every vllm` for all of them at once; POINT `none` disturbs nothing. It
prints when engines and ranks have started, when the signal is sent, whom it stopped, and when ranks are back.
"""

import os
import signal
import sys
import time
from typing import Any

from ahead_killed import points, wrap
from colocated_killed import pid_of, pids_of

from mrl.cluster.rollout_group import RolloutGroup
from mrl.config.load import load_config
from mrl.driver.assemble import Run, open_run
from mrl.driver.loop import train_on
from mrl.driver.preflight import RunInputs
from mrl.errors import MrlError

MARK = "fault:"  # begins what faults.py reads


def main(config: str, point: str, victim: str, number: str, *overrides: str) -> int:
    time_engines()
    with open_run(RunInputs.of(load_config(config, overrides=list(overrides))), resume=False) as run:
        say("loop begins")
        say_when_back(run)
        if point != "none":
            points(run)[point](lambda: send(victim, signal.Signals[number]))
        try:
            train_on(run)
        except MrlError as error:
            print(f"ended: {error}", flush=True)
            return error.exit_code
    return 0


def say(what: str) -> None:
    print(f"{MARK} {what}", flush=True)


def time_engines() -> None:
    """Says how long all engines took to start, the first time."""
    began: list[float] = []

    def note(method: Any) -> Any:
        def noting(*arguments: Any, **named: Any) -> Any:
            began.append(time.monotonic())
            return method(*arguments, **named)

        return noting

    def tell(method: Any) -> Any:
        def telling(*arguments: Any, **named: Any) -> Any:
            found = method(*arguments, **named)
            say(f"engines started in {time.monotonic() - began[0]:.2f} s")
            return found

        return telling

    wrap(RolloutGroup, "start", note)
    wrap(RolloutGroup, "wait_started", tell)


def say_when_back(run: Run) -> None:
    """Says when ranks that were started again stand, each time."""
    again = run.start_again

    def telling(*arguments: Any) -> Run:
        started = again(*arguments)
        say("ranks are back")
        say_when_back(started)
        return started

    run.start_again = telling


def send(victim: str, number: signal.Signals) -> None:
    pids = [pid_of(victim)] if victim in ("rank", "vllm") else pids_of(victim.removeprefix("every "))
    say("sent")
    for pid in pids:
        os.kill(pid, number)
    if number == signal.SIGSTOP:
        say(f"stopped {' '.join(map(str, pids))}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
