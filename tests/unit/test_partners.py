"""What is done to an environment again where a response goes on elsewhere, and what a record has of calls."""

from types import SimpleNamespace

import numpy as np
import pytest

from mrl.acting.dialects import ToolCall
from mrl.acting.environment_pool import CallAnswer
from mrl.data.samples import Sample, Turn, TurnCall, packed
from mrl.engine import partners
from mrl.engine.partners import CallRecord, ToolPartner, followed, sampled_turns

# calls of three turns, and what each came to: name, digest of its reply (empty: none)
SPOKEN = [
    [ToolCall("guess", {"number": 1}), ToolCall("calculator", {"expression": "1"})],
    [ToolCall("guess", {"number": 2}), ToolCall(problem="unread"), ToolCall("guess", {"number": 3})],
    [ToolCall("guess", {"number": 4})],  # of the turn that goes on
]
CAME_TO = [
    TurnCall("guess", "ok", 0.1, b"one"), TurnCall("calculator", "ok", 0.1, b"sum"),
    TurnCall("guess", "ok", 0.1, b"two"), TurnCall("", "unread"), TurnCall("guess", "unanswered"),
]  # fmt: skip


@pytest.fixture
def partner(monkeypatch) -> ToolPartner:
    """One whose turns are read from numbers."""
    monkeypatch.setattr(partners, "sampled_turns", lambda kept: [np.array([number]) for number in range(3)])
    monkeypatch.setattr(partners, "_calls_of", lambda kept: CAME_TO)
    acting = SimpleNamespace(actions={"guess"}, functions={"guess": {}, "calculator": {}})
    numbers = []

    def calls(number, turn, functions):
        numbers.append(number)
        assert functions is acting.functions
        return SPOKEN[int(turn[0])]

    made = ToolPartner(acting, SimpleNamespace(calls=calls, numbers=numbers), None, lambda: 0.0, None)
    return made


def test_what_was_done_to_an_environment_is_done_again_and_nothing_else(partner):
    """In order: actions that it replied to. A call without an answer was not done, a tool's changes nothing."""
    assert partner._steps(None) == [("guess", {"number": 1}, b"one"), ("guess", {"number": 2}, b"two")]
    assert partner._reader.numbers == [1, 2], "turns count from 1, and the last one has not been answered"


def test_calls_that_do_not_fit_what_they_came_to_are_an_error(partner, monkeypatch):
    monkeypatch.setattr(partners, "_calls_of", lambda kept: CAME_TO[:-1])
    with pytest.raises(ValueError, match=r"zip\(\)"):
        partner._steps(None)


def test_a_record_has_each_calls_outcome_in_order():
    record = CallRecord(parts={"score": 1.0})
    calls = [ToolCall("guess", {}), ToolCall(problem="unread"), ToolCall("guess", {}), ToolCall("stranger", {})]
    answers = {
        2: CallAnswer("ok", "more", seconds=2.0, reward=0.25, parts={"score": 3.0}),
        0: CallAnswer("ok", "less", seconds=1.0, reward=0.5, parts={"score": 2.0, "guesses": 1.0}),
    }
    record.add(calls, answers, {"guess"})
    found = [(call.name, call.reason, call.seconds) for call in record.calls[0]]
    assert found == [("guess", "ok", 1.0), ("", "unread", 0.0), ("guess", "ok", 2.0), ("", "not_called", 0.0)]
    assert record.rewards == [0.75]
    assert record.parts == {"score": 3.0, "guesses": 1.0}, "the last answer's parts count"
    record.completed(3)
    assert record.calls[1:] == [[], []] and record.rewards == [0.75, 0.0, 0.0]
    record.completed(2)
    assert len(record.calls) == 3


def test_a_record_that_is_continued_lacks_the_turn_under_way():
    row = SimpleNamespace(
        turn_calls=np.array([2, 0, 3]), turn_rewards=np.array([0.5, 0.0, 9.0]), part_names=np.array([b"score"]),
        part_values=np.array([2.0]), call_names=np.array([b"guess", b""] + [b"guess"] * 3),
        call_reasons=np.zeros(5, np.int64), call_seconds=np.arange(5.0),
        call_replies=np.array([b"a", b"b", b"", b"", b""]),
    )  # fmt: skip
    record = CallRecord.of(row)
    assert [[call.name for call in turn] for turn in record.calls] == [["guess", ""], []]
    assert [call.seconds for call in record.calls[0]] == [0.0, 1.0]
    assert (record.rewards, record.parts) == ([0.5, 0.0], {"score": 2.0})


def test_what_the_model_said_in_each_turn_is_without_the_context_behind_it():
    row = Sample(
        0, 0, 0, 1, (7, 8), (1, 2, 5, 6, 3), (-0.1, -0.2, 0, 0, -0.3), "stop", 5, sampled=(1, 1, 0, 0, 1),
        turns=(Turn(0, "stop", 2, 0.5), Turn(4, "stop")), calls=(TurnCall("guess", "ok"), TurnCall("", "unread")),
    )  # fmt: skip
    made = packed([row])
    assert [turn.tolist() for turn in sampled_turns(made)] == [[1, 2], [3]]
    more = followed(made, [9, 9], calls=1, seconds=0.25)
    assert more.token_ids.tolist() == [7, 8, 1, 2, 5, 6, 3, 9, 9] and more.sampled[-2:].tolist() == [False, False]
    assert [turn.tolist() for turn in sampled_turns(more)] == [[1, 2], [3], []]
    assert (more.turn_calls.tolist(), more.turn_seconds.tolist()) == ([2, 1, 0], [0.5, 0.25, 0])
