"""Asks a run's tools again what they answered in stored responses, and says whose answers those were.

    response   sampled: a call --reader--> name, arguments --tool--> answer of now --dialect--> its tokens
               context: tokens of the run's answer  <--------------- compared --------------------+

Calls are read from the sampled tokens, as the run read them. Each different call is made twice, and those that are not
answered alike are left out, as are turns of which a call failed. Tools that use the network may act on the world, and
are not asked again.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrl.acting.dialects import ToolCall, dialect_of
from mrl.acting.environment_pool import EnvironmentPool
from mrl.acting.offer import name_of
from mrl.config.schema import RunConfig
from mrl.data.dataset import load_tokenizer
from mrl.engine.call_reader import call_reader
from mrl.engine.requests import turns_spec
from mrl.errors import MrlError
from mrl.model.hub import local_folder
from mrl.record.sample_files import read_samples, readable
from mrl.reward.items import OK
from mrl.schedule.conversation import shortened
from mrl.tools.explain.replay import StoredRun

_WORKERS = 2
_OTHERS = 0.5  # share of the unlike answers that must be those of other calls


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

    def __init__(self, run: StoredRun):
        """Raises ConfigError or EnvironmentFault where the tools cannot be started."""
        config = run.config
        self._run = run
        self._spec = turns_spec(config.rollout.turns, config.data)
        tokenizer = load_tokenizer(local_folder(config.model.path))
        self._pool = EnvironmentPool(self._spec.tools, _WORKERS, self._spec.timeout_s)
        try:
            schemas = list(self._pool.offer.all_schemas)
            self._functions = {name_of(each): each["function"] for each in schemas}
            self._tools = {name_of(each) for each in self._pool.offer.tools}
            self._dialect = dialect_of(tokenizer, {**self._spec.template_arguments, "tools": schemas})
            self._reader = call_reader(self._dialect, self._spec)
        except BaseException:
            self._pool.close()
            raise
        self._answers: dict[str, str | None] = {}  # by call; None: not alike twice, or failed

    def __enter__(self) -> "ToolAsker":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

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

    def answers(self, calls: Sequence[ToolCall]) -> dict[str, str]:
        """Returns what the tools say now, by `key_of` a call, without those that do not repeat."""
        new = {key_of(call): call for call in calls if key_of(call) not in self._answers}
        twice = [[self._pool.call(call.name, call.arguments) for call in new.values()] for _ in range(2)]
        for key, *futures in zip(new, *twice, strict=True):
            first, second = (future.result() for future in futures)
            is_same = first.reason == second.reason == OK and first.text == second.text
            self._answers[key] = shortened(first.text, self._spec.max_answer_characters) if is_same else None
        found = {key_of(call): self._answers[key_of(call)] for call in calls}
        return {key: text for key, text in found.items() if text is not None}

    def context(self, turn: AnsweredTurn, answers: Sequence[str]) -> list[int]:
        """Returns the tokens of answers behind a turn."""
        return list(self._dialect.context(turn.sampled, answers))


def key_of(call: ToolCall) -> str:
    """Identifies what a call asks."""
    return json.dumps([call.name, call.arguments], sort_keys=True, default=str)


def tool_asker(run: StoredRun) -> "ToolAsker | str":
    """Returns what asks a run's tools again, or why nothing does; empty where it has none."""
    config: RunConfig = run.config
    turns = config.rollout.turns
    if turns is None or config.rollout.agent is not None or not (turns.tools or turns.mcp_servers):
        return ""
    if turns.network:
        return "rollout.turns.network: tools that use the network may act on the world, and are not asked again"
    try:
        return ToolAsker(run)
    except MrlError as error:
        return f"tools are not asked again: {str(error).splitlines()[0]}"


def of_tools(step: int, asker: ToolAsker) -> tuple[str, str] | None:
    """Returns a cause and its evidence where tools answered otherwise than they do now; None where they did not."""
    turns = asker.turns(step)
    answers = asker.answers([call for turn in turns for call in turn.calls])
    compared = [turn for turn in turns if all(key_of(call) in answers for call in turn.calls)]
    unlike = [
        turn for turn in compared if asker.context(turn, [answers[key_of(call)] for call in turn.calls]) != turn.context
    ]
    if not unlike:
        return None
    evidence = f"{len(unlike)} of {len(compared)} turns with calls have other answers than the tools give now"
    texts = sorted(set(answers.values()))
    others = [turn for turn in unlike if len(turn.calls) == 1 and _is_of_others(turn, texts, asker)]
    if len(others) >= _OTHERS * len(unlike):
        ids = ", ".join(str(turn.sample_id) for turn in others[:8])
        return (
            "tools answered other calls than they were asked",
            f"{evidence}; {len(others)} have what the tools say to another call of the step (responses {ids})",
        )
    ids = ", ".join(str(turn.sample_id) for turn in unlike[:8])
    return "tools answered otherwise than they do now", f"{evidence} (responses {ids})"


def _is_of_others(turn: AnsweredTurn, texts: Sequence[str], asker: ToolAsker) -> bool:
    return any(asker.context(turn, [text]) == turn.context for text in texts)
