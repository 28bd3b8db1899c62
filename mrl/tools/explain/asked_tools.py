"""Asks a run's tools again what they answered in stored responses, and says whose answers those were.

    response   sampled: a call --reader--> name, arguments --tool--> answer of now --dialect--> its tokens
               context: tokens of the run's answer  <--------------- compared --------------------+

Calls are read from the sampled tokens, as the run read them. Each different call is made in two processes of unlike
hash seeds. Once a tool does not answer one of its calls alike, its answers are not a function of the call, and the
whole tool is left out: of what is drawn, single answers are alike by chance. Turns of which a call failed are left out,
too. Tools that may act on the world are not asked again but on demand.

Answers to other calls of the step are a fault of the run. Others may be one of the world, which changes (a date, a
file, an index): they are told only where many turns have them, of tools that answered each call alike in all turns of
the step, and never instead of what else is found.
"""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mrl.acting.dialects import ToolCall, dialect_of
from mrl.acting.environment_pool import EnvironmentPool
from mrl.acting.offer import name_of
from mrl.config.schema import RunConfig
from mrl.config.schema_rollout import TurnsConfig
from mrl.data.dataset import load_tokenizer
from mrl.engine.call_reader import DialectReader
from mrl.engine.requests import turns_spec
from mrl.errors import EnvironmentFault, MrlError
from mrl.model.hub import local_folder
from mrl.record.sample_files import read_samples, readable
from mrl.reward.confine import KEEPS_WHOLE, landlock_version
from mrl.reward.items import OK
from mrl.schedule.conversation import shortened
from mrl.tools.explain.replay import StoredRun

_SEED = "PYTHONHASHSEED"
_SEEDS = ("1", "2")  # of hashes, in two processes
_ASKED = 16  # calls of a tool at least, of which few are made several times
_LATE = "not all calls of tools could be made again in their share of the time (--minutes)"
_OTHERS = 0.5  # share of the unlike answers that must be those of other calls
_LEAST_OTHERS = 2  # of them: calls that are mixed up are two
_LEAST_SHARE, _LEAST_TURNS = 0.1, 3  # of unlike turns with answers of no other call


@dataclass(frozen=True)
class AnsweredTurn:
    """A turn whose calls were all answered: its sampled tokens, its calls, and the tokens of the answers."""

    sample_id: int
    number: int  # from 1, in its response
    sampled: list[int]
    calls: list[ToolCall]
    context: list[int]


class ToolAsker:
    """Reads a run's tools once, and asks them again. Use it as a context manager."""

    def __init__(self, run: StoredRun, end: float = math.inf):
        """`end`: when no answer is waited for any more, by time.monotonic().

        Raises ConfigError or EnvironmentFault where the tools cannot be started.
        """
        config = run.config
        self._run = run
        self._end = end
        self._spec = turns_spec(config.rollout.turns, config.data)
        tokenizer = load_tokenizer(local_folder(config.model.path))
        self._left_out: set[str] = set()  # tools whose answers are not a function of the call
        self._answers: dict[str, str] = {}  # by call
        spec = replace(self._spec.tools, environment=(*self._spec.tools.environment, _SEED))
        with ExitStack() as opened:
            self._pools = [
                opened.enter_context(
                    EnvironmentPool(spec, 1, self._spec.timeout_s, environment=os.environ | {_SEED: seed})
                )
                for seed in _SEEDS
            ]
            schemas = list(self._pools[0].offer.all_schemas)
            self._functions = {name_of(each): each["function"] for each in schemas}
            self._tools = {name_of(each) for each in self._pools[0].offer.tools}
            self._dialect = dialect_of(tokenizer, {**self._spec.template_arguments, "tools": schemas})
            self._reader = DialectReader(self._dialect, self._spec)
            self._opened = opened.pop_all()

    def __enter__(self) -> "ToolAsker":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def turns(self, step: int) -> list[AnsweredTurn]:
        """Returns the turns of a step whose calls were all answered. Raises FileNotFoundError without its samples."""
        folder = self._run.folder.samples
        with readable(folder, step):
            return [turn for row in read_samples(folder, step) for turn in self._turns_of(row)]

    def _turns_of(self, row: Mapping[str, Any]) -> Iterator[AnsweredTurn]:
        ids, sampled = np.array(row["response_ids"], np.int64), np.array(row["sampled"], bool)
        starts = [turn["first_token"] for turn in row["turns"]]
        ends = [*starts[1:], len(ids)]
        told = iter(row["calls"])
        for number, (turn, start, end) in enumerate(zip(row["turns"], starts, ends, strict=True), 1):
            reasons = [next(told)["reason"] for _ in range(turn["calls"])]
            part, own = ids[start:end], sampled[start:end]
            if not reasons or own.all() or any(reason != OK for reason in reasons):
                continue
            calls = self._reader.calls(number, part[own].tolist(), self._functions)
            if all(call.problem is None and call.name in self._tools for call in calls):
                yield AnsweredTurn(row["sample_id"], number, part[own].tolist(), calls, part[~own].tolist())

    def answers(self, turns: Sequence[AnsweredTurn]) -> dict[str, str]:
        """Returns what the tools say now to the calls of turns, by `key_of` a call, without tools that do not repeat
        and calls that fail. Raises EnvironmentFault where there is no time for them.
        """
        calls = {key_of(call): call for turn in turns for call in turn.calls}
        new = {key: call for key, call in calls.items() if key not in self._answers and call.name not in self._left_out}
        if new and self._left() == 0:
            raise EnvironmentFault(_LATE)
        of_tool = Counter(call.name for call in new.values())
        asked = {
            key: [
                pool.call(call.name, call.arguments)
                for _ in range(-(-_ASKED // (len(self._pools) * of_tool[call.name])))
                for pool in self._pools
            ]
            for key, call in new.items()
        }
        for key, futures in asked.items():
            try:
                first, *others = (future.result(self._left()) for future in futures)
            except TimeoutError:
                for each in (future for futures in asked.values() for future in futures):
                    each.cancel()
                raise EnvironmentFault(_LATE) from None
            if any((each.reason, each.text) != (first.reason, first.text) for each in others):
                self._left_out.add(new[key].name)
            elif first.reason == OK:
                self._answers[key] = shortened(first.text, self._spec.max_answer_characters)
        return {
            key: self._answers[key]
            for key, call in calls.items()
            if key in self._answers and call.name not in self._left_out
        }

    def _left(self) -> float | None:
        return None if self._end == math.inf else max(self._end - time.monotonic(), 0.0)

    def context(self, turn: AnsweredTurn, answers: Sequence[str]) -> list[int]:
        """Returns the tokens of answers behind a turn."""
        return list(self._dialect.context(turn.sampled, answers))


def key_of(call: ToolCall) -> str:
    """Identifies what a call asks."""
    return json.dumps([call.name, call.arguments], sort_keys=True, default=str)


def tool_asker(run: StoredRun, end: float = math.inf, repeats_calls: bool = False) -> "ToolAsker | str":
    """Returns what asks a run's tools again until `end` of time.monotonic(), or why nothing does; empty where it has
    none. `repeats_calls`: also those that may act on the world.
    """
    config: RunConfig = run.config
    turns = config.rollout.turns
    if turns is None or config.rollout.agent is not None or not (turns.tools or turns.mcp_servers):
        return ""
    if not repeats_calls and (why := _acts(turns)):
        return f"{why}, and are not asked again; --repeat-calls asks them"
    try:
        return ToolAsker(run, end)
    except MrlError as error:
        return f"tools are not asked again: {str(error).splitlines()[0]}"


def _acts(turns: TurnsConfig) -> str:
    """Returns why a run's tools may act on the world, or keep what one call left for another; empty if not."""
    if turns.network:
        return "rollout.turns.network: tools that use the network may act on the world"
    if turns.folders:
        return "rollout.turns.folders: tools that write into folders may act on the world"
    if turns.mcp_servers:
        return "rollout.turns.mcp_servers: servers may keep what a call leaves, or act on the world"
    if turns.path is not None and landlock_version() < KEEPS_WHOLE:
        return "rollout.turns.path: nothing keeps tools from writing files on this host (no Landlock), so they may act"
    return ""


@dataclass(frozen=True)
class ToolFinding:
    """What is wrong with answers. `is_fault`: they are those of other calls, which no change of the world explains."""

    cause: str
    evidence: str
    is_fault: bool


def of_tools(step: int, asker: ToolAsker) -> ToolFinding | None:
    """Returns how tools answered otherwise than they do now; None where they did not, or in few turns."""
    turns = asker.turns(step)
    answers = asker.answers(turns)
    compared = [turn for turn in turns if all(key_of(call) in answers for call in turn.calls)]
    unlike = [
        turn for turn in compared if asker.context(turn, [answers[key_of(call)] for call in turn.calls]) != turn.context
    ]
    if not unlike:
        return None
    evidence = f"{{}} of {len(compared)} turns with calls have other answers than the tools give now"
    of_text: dict[int, set[tuple[int, ...]]] = {}
    others = [turn for turn in unlike if len(turn.calls) == 1 and _is_of_others(turn, answers, asker, of_text)]
    if len(others) >= max(_OTHERS * len(unlike), _LEAST_OTHERS):
        ids = ", ".join(str(turn.sample_id) for turn in others[:8])
        return ToolFinding(
            "tools answered other calls than they were asked",
            f"{evidence.format(len(unlike))}; {len(others)} have what the tools say to another call of the step "
            f"(responses {ids})",
            True,
        )
    drawn = _drawn(turns)
    unlike = [turn for turn in unlike if drawn.isdisjoint(call.name for call in turn.calls)]
    if len(unlike) < max(_LEAST_SHARE * len(compared), _LEAST_TURNS):
        return None
    ids = ", ".join(str(turn.sample_id) for turn in unlike[:8])
    return ToolFinding(
        "tools answered otherwise than they do now", f"{evidence.format(len(unlike))} (responses {ids})", False
    )


def _drawn(turns: Sequence[AnsweredTurn]) -> set[str]:
    """Returns the tools that answered one call in several ways."""
    first: dict[tuple[str, int], list[int]] = {}
    found = set()
    for turn in turns:
        call, *others = turn.calls
        if not others and first.setdefault((key_of(call), turn.sampled[-1]), turn.context) != turn.context:
            found.add(call.name)
    return found


def _is_of_others(
    turn: AnsweredTurn, answers: Mapping[str, str], asker: ToolAsker, of_text: dict[int, set[tuple[int, ...]]]
) -> bool:
    """`of_text`: what all answers look like behind a turn, which depends on its last token alone."""
    end = turn.sampled[-1]
    if end not in of_text:
        of_text[end] = {tuple(asker.context(turn, [text])) for text in set(answers.values())}
    return tuple(turn.context) in of_text[end]
