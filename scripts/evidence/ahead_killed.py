"""`mrl train` with generation ahead, and kill -9 of one of its processes at a chosen point: for ahead_kills.py.

python scripts/evidence/ahead_killed.py CONFIG POINT VICTIM RESUME [KEY=VALUE ...]

When the run comes to POINT in the second step since it was started, the victim is killed: `driver`, the last `rank`, or
`vllm` below the engine. Each point is a place in the run itself, given in `points`.
"""

import os
import signal
import sys
from collections.abc import Callable
from threading import Timer
from typing import Any

from colocated_killed import pid_of

from mrl.config.load import load_config
from mrl.driver import loop
from mrl.driver.assemble import Run, open_run
from mrl.driver.preflight import RunInputs
from mrl.errors import MrlError

AMID_S = 0.15  # from the beginning of an update into the midst of it
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def main(config: str, point: str, victim: str, resume: str, *overrides: str) -> int:
    with open_run(RunInputs.of(load_config(config, overrides=list(overrides))), resume=bool(int(resume))) as run:
        points(run)[point](lambda: os.kill(pid_of(victim), signal.SIGKILL))
        try:
            loop.train(run)
        except MrlError as error:
            print(f"ended: {error}", flush=True)
            return error.exit_code
    return 0


def points(run: Run) -> dict[str, Callable[[Callable[[], None]], None]]:
    """By name: takes what kills, and has it called when the run is there."""
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
        "ranks update": lambda kill: wrap(loop, "update", before(amid(in_second_step(kill)))),
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
