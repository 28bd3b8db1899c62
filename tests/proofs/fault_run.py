"""`mrl train` with a signal to one of its processes at a chosen point, and the run goes on: for faults.py.

python tests/proofs/fault_run.py CONFIG POINT VICTIM SIGNAL [KEY=VALUE ...]

The signal goes out when the run comes to POINT, one of `points`, in its second step; POINT `none` disturbs nothing.
VICTIM is the last `rank`, `vllm` below the last engine, or `every vllm`. It prints when engines and ranks have started,
when the signal is sent, whom it stopped, and when ranks are back.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from threading import Timer
from typing import Any

import psutil

from mrl.cluster.rollout_group import RolloutGroup
from mrl.config.load import load_config
from mrl.driver import loop
from mrl.driver.assemble import Run, open_run
from mrl.driver.preflight import RunInputs
from mrl.driver.step_batch import StepBatch
from mrl.errors import MrlError

MARK = "fault:"  # begins what faults.py reads
AMID_S = 0.15  # from the beginning of an update into the midst of it
PROCESSES = {"rank": "ray::ActorWorker", "vllm": "VLLM::Worker"}
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def main(config: str, point: str, victim: str, number: str, *overrides: str) -> int:
    time_engines()
    with open_run(RunInputs.of(load_config(config, overrides=list(overrides))), resume=False) as run:
        say("loop begins")
        say_when_back(run)
        if point != "none":
            points(run)[point](lambda: send(victim, signal.Signals[number]))
        try:
            loop.train_on(run)
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


def points(run: Run) -> dict[str, Callable[[Callable[[], None]], None]]:
    """By name: takes what sends the signal, and has it called when the run is there."""
    engines, actor, generation = run.responder.engines, run.actor, run.generation
    begins = run.state.step + 1  # the step after the first of this start

    def in_second_step(kill: Callable[[], None]) -> Callable[[], None]:
        victims = iter([kill])  # one
        return lambda: next(victims, int)() if run.state.step >= begins else None

    return {
        "requests are sent": lambda kill: wrap(generation.streams, "send", after(in_second_step(kill))),
        "answers come back": lambda kill: wrap(generation.streams, "take", after(in_second_step(kill), if_any=True)),
        "engines stand still": lambda kill: wrap(generation, "drain", after(in_second_step(kill))),
        "weights are moved": lambda kill: wrap(actor, "refs", after_call("send_weights", in_second_step(kill))),
        "weights arrive": lambda kill: wrap(engines, "refs", after_call("receive_weights", in_second_step(kill))),
        "proved, not committed": lambda kill: wrap(engines, "commit", before(in_second_step(kill))),
        "engines go to sleep": lambda kill: wrap(engines, "refs", after_call("sleep", in_second_step(kill))),
        "engines wake": lambda kill: wrap(engines, "refs", after_call("wake_weights", in_second_step(kill))),
        "ranks compute log-probs": lambda kill: wrap(actor, "score", before(amid(in_second_step(kill)))),
        "ranks update": lambda kill: wrap(StepBatch, "update", before(amid(in_second_step(kill)))),
        "a checkpoint is written": lambda kill: wrap(
            actor, "refs", after_call("write_checkpoint", in_second_step(kill))
        ),
    }


def wrap(owner: Any, name: str, wrapper: Wrapper) -> None:
    """The owner's method, wrapped."""
    setattr(owner, name, wrapper(getattr(owner, name)))


def after(then: Callable[[], None], if_any: bool = False) -> Wrapper:
    """Calls `then` behind each call, or each that gave something."""

    def wrapper(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            found = method(*arguments, **named)
            if found or not if_any:
                then()
            return found

        return wrapped

    return wrapper


def amid(then: Callable[[], None]) -> Callable[[], None]:
    """Calls `then` a little later."""
    return lambda: Timer(AMID_S, then).start()


def before(first: Callable[[], None]) -> Wrapper:
    """Calls `first` before each call."""

    def wrapper(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            first()
            return method(*arguments, **named)

        return wrapped

    return wrapper


def after_call(sent: str, then: Callable[[], None]) -> Wrapper:
    """Calls `then` when the call of that name was sent to all, and before anybody has answered."""

    def wrapper(refs: Callable[..., dict]) -> Callable[..., dict]:
        def wrapped(method: str, *arguments: Any, **named: Any) -> dict:
            answers = refs(method, *arguments, **named)
            if method == sent:
                then()
            return answers

        return wrapped

    return wrapper


def pid_of(victim: str) -> int:
    """The last of several: not the one that answers first."""
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
