"""The scoring process: reads JSON lines from one descriptor and writes one line for each item to another, in order.

mrl.reward.keeper forks it with two inherited descriptors. The first input line is the RewardSpec. The first output line
is {} when the function is ready, or {"error": text}. Each further input line begins with a ticket, and its answer with
the same one. So a line that a function wrote is not taken for an answer. Standard input is empty and standard
output goes to the log, so that a user's function cannot disturb the protocol. Imports only the standard library and
this package.
"""

import json
import math
import os
import resource
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from mrl.errors import ConfigError
from mrl.reward.builtin_rules import RewardFunction
from mrl.reward.confine import NETWORK_STAYS, OFF, WRITING_STAYS, without_network, without_writing
from mrl.reward.items import ACC, ANSWER_BYTES, NOT_A_NUMBER, OK, OUT_OF_MEMORY, RAISED, WRONG_TYPE, RewardSpec
from mrl.reward.resolve import resolve

DETAIL_LIMIT = 2000  # characters
PART_LIMIT = 500
REFUSED = ("Permission denied", "name resolution")  # what is said of a file, and of a host where no network is
ENVIRON = "(at <frozen os>:"  # where os.environ raises
UNSEEN = "of the shell's variables a reward sees few; name this one under reward.environment"
LARGEST_SCORE = 1e30  # advantages are float32, and squares of scores are added

Answer = tuple[str, float | None, dict[str, float | str], str]  # reason, score, parts, detail


def main(requests_fd: int, results_fd: int) -> None:
    """Serves until the requests end."""
    serve(requests_fd, results_fd, RewardSpec, _loaded)


def _loaded(spec: RewardSpec, _: None) -> tuple[dict[str, Any], Callable[..., Answer]]:
    function = resolve(spec)
    return {}, lambda *row: _with_hint(*score_one(function, *row))


def serve(
    requests_fd: int,
    results_fd: int,
    kind: type,
    load: Callable[[Any, Any], tuple[Any, Callable[..., Any]]],
    prepare: Callable[[Any], Any] = lambda spec: None,
    then: Callable[[BinaryIO, int, Callable[..., Any]], None] | None = None,
) -> None:
    """Applies the limits of the spec in the first line, loads what it names, and answers until requests end.

    `kind` is the spec's dataclass. `prepare` is called before any limit holds. With what it returns, `load` returns
    the first output line and the function that answers a request. If it raises, the first output line has the reason.
    `then` is called instead of answer_all.
    """
    requests = os.fdopen(requests_fd, "rb")
    first = requests.readline()
    if not first:  # the run ended while this process started
        return
    spec = kind(**json.loads(first))
    prepared = prepare(spec)
    _limit_memory(spec.max_memory_gib)
    if not spec.network and not without_network():
        print(NETWORK_STAYS, flush=True)
    if not without_writing(tuple(spec.folders)):
        print(WRITING_STAYS, flush=True)
    try:
        ready, answer = load(spec, prepared)
    except ConfigError as error:
        _send(results_fd, {"error": str(error)})
        return
    except Exception as error:  # a user's code may raise anything
        _send(results_fd, {"error": f"what it names cannot be loaded: {_describe(error)}"})
        return
    _send(results_fd, ready)
    (then or partial(answer_all, most=spec.answer_bytes))(requests, results_fd, answer)


def answer_all(requests: BinaryIO, results_fd: int, answer: Callable[..., Any], most: int = ANSWER_BYTES) -> None:
    """Answers requests until they end, each in at most `most` bytes."""
    for line in requests:
        ticket, *request = json.loads(line)
        _send(results_fd, [ticket, *answer(*request)], most)


def score_one(
    function: RewardFunction, data_source: str, response: str, ground_truth: Any, extra_info: dict[str, Any]
) -> Answer:
    """Calls the function and judges its result."""
    try:
        value = function(
            data_source=data_source, solution_str=response, ground_truth=ground_truth, extra_info=extra_info
        )
        return judge(value)
    except MemoryError as error:
        return OUT_OF_MEMORY, None, {}, _describe(error)
    except BaseException as error:  # SystemExit too: a user's function must not end its worker
        return RAISED, None, {}, _describe(error)


def _with_hint(reason: str, score: float | None, parts: dict[str, float | str], detail: str) -> Answer:
    """Adds what may have caused an error, if a function lacked a permission."""
    hint = ""
    if reason == RAISED and any(sign in detail for sign in REFUSED):
        hint = f" ({OFF})"
    if reason == RAISED and detail.startswith("KeyError") and ENVIRON in detail:
        hint = f" ({UNSEEN})"
    return reason, score, parts, detail + hint


def judge(value: Any) -> Answer:
    """Turns a number, or a mapping with `score` and further parts, into an answer. Anything else is a failure with a
    reason.

    A number alone becomes the part `acc` too, as in verl (naive and DAPO reward managers). Dynamic sampling and
    validation read it there.
    """
    named = value if isinstance(value, dict) else {"score": value}
    if "score" not in named:
        return (
            WRONG_TYPE,
            None,
            {},
            f"a dict without 'score'; its keys: {', '.join(map(str, named)) or 'none'}"[:DETAIL_LIMIT],
        )
    parts = {str(k): _part(v) for k, v in named.items() if k != "score"}
    score = named["score"]
    number = _number(score)
    if number is None:
        return WRONG_TYPE, None, parts, f"{type(score).__name__} {str(score)[:PART_LIMIT]!r} where a number is expected"
    if not abs(number) <= LARGEST_SCORE:
        return (
            NOT_A_NUMBER,
            None,
            parts,
            f"the score is {number:g}" + f", beyond {LARGEST_SCORE:g}" * math.isfinite(number),
        )
    return OK, number, parts if named is value else {ACC: number}, ""


def _number(value: Any) -> float | None:
    """Returns a float from Python, numpy or a one-element tensor; None for everything else, including text."""
    if (
        not isinstance(value, bool | int | float)
        and getattr(value, "shape", None) is not None
        and getattr(value, "size", None) is not None
    ):
        value = value.item() if math.prod(value.shape) == 1 else None
    if isinstance(value, bool | int | float):
        return float(value)
    return None


def _part(value: Any) -> float | str:
    number = _number(value)
    if number is not None and math.isfinite(number):
        return number
    return str(value)[:PART_LIMIT]


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = ""
    if frames:
        where = f" (at {frames[-1].filename}:{frames[-1].lineno})"
    return f"{type(error).__name__}: {error}"[:DETAIL_LIMIT] + where


def _send(fd: int, value: Any, most: int = ANSWER_BYTES) -> None:
    """Writes one complete JSON line."""
    data = memoryview((json.dumps(value) + "\n").encode())
    if len(data) > most:
        detail = f"what it returned is {len(data)} bytes of JSON; {most} are taken at most"
        data = memoryview((json.dumps([value[0], WRONG_TYPE, None, {}, detail]) + "\n").encode())
    while data:
        data = data[os.write(fd, data) :]


def _limit_memory(gib: float | None) -> None:
    """Limits the address space.

    A larger allocation raises MemoryError in the function, and the host keeps its memory.
    """
    if gib is not None:
        own = resource.getrlimit(resource.RLIMIT_AS)[1]  # it may be lower already, and is never raised
        limit = int(gib * 1024**3)
        limit = limit if own == resource.RLIM_INFINITY else min(limit, own)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
