"""What a session of an agent keeps of its answers, with an engine and an agent that are told what to do."""

import asyncio
from types import SimpleNamespace

import pytest

from mrl.acting.chat_api import ChatMessage, ChatRequest
from mrl.acting.environment import Reply
from mrl.acting.tool import TurnsSpec
from mrl.data.samples import CALL_REASONS, Sample, Samples, packed
from mrl.engine.agents import AgentSession
from mrl.engine.requests import Request, Sampling
from mrl.engine.spoken import SpokenTurns, _digest
from mrl.schedule.conversation import Stop

USER = ChatMessage("user", "q")


def row(response: list[int], prompt: tuple[int, ...] = (7, 8)) -> Samples:
    return packed([Sample(0, 0, 0, 0, prompt, response, [-0.1] * len(response), "stop", 0)])


def asked_and_answered(spoken: SpokenTurns, *messages: ChatMessage, ids: list[int], said: str = "a") -> int:
    request = spoken.whole(ChatRequest(messages))
    number = spoken.open(request, spoken.locate(request))
    spoken.add(number, ChatMessage("assistant", said), row(ids), [])
    return number


class Text:
    """Reads nothing and cannot tell what was said."""

    def begun(self, chat):
        return []

    def prompt(self, chat):
        return [7, 8]

    def said(self, turn, chat, number):
        raise RuntimeError("no words")


class Turns:
    async def added(self, asked, line, is_first):
        return SimpleNamespace(made=row([1, 2]))


def session(**more) -> AgentSession:
    """A session whose agent has ended."""
    spec = TurnsSpec(None, 9, 9, 9.0, 99, 1.0, 1, max_prompt_length=9, **more)
    agents = SimpleNamespace(spec=spec, text=Text(), clock=lambda: 0.0, pool=SimpleNamespace(log=lambda line: None))
    made = AgentSession(agents, Request(0, (7, 8), 0), Sampling(1.0, 50, ()), Turns())
    made._keys = SimpleNamespace(chat="c", reward="r")
    made._run = asyncio.get_running_loop().create_future()
    made._run.set_result(None)
    return made


def test_answers_come_while_tokens_are_sought_among_those_before(monkeypatch):
    """Looking for the turn happens in a thread of its own."""
    spoken = SpokenTurns()
    for ids in ([1], [1, 2]):
        asked_and_answered(spoken, USER, ids=ids)
    digest = _digest

    def slow(*given):
        monkeypatch.setattr("mrl.engine.spoken._digest", digest)
        asked_and_answered(spoken, USER, ids=[1, 2, 3, 4])  # as the loop does it meanwhile
        return digest(*given)

    monkeypatch.setattr("mrl.engine.spoken._digest", slow)
    request = spoken.whole(ChatRequest((), ids=(7, 8, 1, 5)))
    assert request.messages[-1].content == "5" and len(spoken.row(50).numbers) == 1


def test_of_turns_with_which_token_ids_begin_the_longest_and_then_the_newest_is_gone_on_from():
    spoken = SpokenTurns()
    for ids, said in (([1], "a"), ([1], "b"), ([1, 2], "c"), ([1, 3], "d")):
        asked_and_answered(spoken, USER, ids=ids, said=said)
    told = {ids: spoken.whole(ChatRequest((), ids=ids)).messages for ids in ((7, 8, 1, 5), (7, 8, 1, 2, 5), (7, 9, 5))}
    assert [message.content for message in told[7, 8, 1, 5]] == ["q", "b", "5"]
    assert [message.content for message in told[7, 8, 1, 2, 5]] == ["q", "c", "5"]
    assert [message.content for message in told[7, 9, 5]] == ["7 9 5"]


def test_an_answer_that_cannot_be_told_leaves_no_request_open():
    async def run():
        made = session()
        with pytest.raises(RuntimeError, match="no words"):
            await made.ask(ChatRequest((USER,)))
        return made.is_sampling, made.row()

    assert asyncio.run(run()) == (False, None)


def calls_of(made) -> list[list[tuple[str, str, float]]]:
    return [[(call.name, call.reason, call.seconds) for call in of_turn] for of_turn in made.calls]


def test_what_the_agent_did_after_an_answer_that_is_passed_over_is_a_call_of_the_one_that_stays():
    """So no second of the agent is lost, also where the answer passed over was the last to come."""
    spoken = SpokenTurns()
    for ids in ([1, 2], [3, 4]):
        asked_and_answered(spoken, USER, ids=ids)
        spoken.acted("ok", 2.0)
    made = spoken.row(50)
    assert calls_of(made) == [[("agent", "ok", 2.0), ("agent", "retry", 0.0), ("agent", "ok", 2.0)]]
    assert made.made.turn_seconds.tolist() == [4.0]


def test_what_the_agent_did_in_a_branch_without_room_is_a_call_of_the_last_turn():
    spoken = SpokenTurns()
    for text in "qr":
        asked_and_answered(spoken, ChatMessage("user", text), ids=[1, 2])
        spoken.acted("ok", 2.0)
    made = spoken.row(3)
    assert calls_of(made) == [[("agent", "ok", 2.0)] * 2 + [("agent", "untrained", 0.0)]]
    assert made.made.turn_seconds.tolist() == [4.0]


def test_a_request_that_nobody_waited_for_divides_no_call():
    spoken = SpokenTurns()
    asked_and_answered(spoken, USER, ids=[1, 2])
    spoken.acted("ok", 1.0)
    spoken.acted("timeout", 2.0)
    assert calls_of(spoken.row(50)) == [[("agent", "timeout", 3.0)]] == calls_of(spoken.last_row())


@pytest.mark.parametrize(
    "answer, more, rewards, parts, lost, stop",
    [
        (1, {}, [0.0], [], 1, Stop.ENVIRONMENT),
        (2, {}, [1.0], [b"won"], 0, Stop.CLOSED),
        (1, {"keeps_all_answers": True}, [1.0, 0.0], [b"won"], 0, Stop.CLOSED),
        (None, {}, [1.0], [b"won"], 0, Stop.CLOSED),
    ],
)
def test_a_reward_of_an_answer_that_is_not_in_the_row_is_none_and_is_counted(answer, more, rewards, parts, lost, stop):
    """A question is asked twice, and the first answer is passed over unless all are kept."""

    async def run():
        made = session(needs_reward=True, **more)
        for ids in ([1, 2], [3, 4]):
            asked_and_answered(made._spoken, USER, ids=ids)
        made.reward(Reply("", 1.0, {"won": 1.0}), answer and f"chatcmpl-{answer}")
        made._talk = made._talk.ended(Stop.CLOSED)
        await made._rewarded()
        return made._talk.stop, made.row()

    found, whole = asyncio.run(run())
    assert (found, whole.turn_rewards.tolist(), whole.part_names.tolist()) == (stop, rewards, parts)
    assert whole.call_reasons.tolist().count(CALL_REASONS.index("lost_reward")) == lost
