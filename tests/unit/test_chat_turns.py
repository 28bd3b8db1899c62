"""Where a client's request belongs among kept turns: the example of the module, and random sessions."""

import random

import pytest

from mrl.acting.chat_api import BadRequest, ChatCall, ChatMessage, ChatRequest
from mrl.acting.chat_turns import ChatPlace, KeptTurns, Move, Why


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def tool(text: str) -> ChatMessage:
    return ChatMessage("tool", text)


def said(text: str, *names: str) -> ChatMessage:
    return ChatMessage("assistant", text, tuple(ChatCall(name, name, {"a": 1}) for name in names))


def asked(*messages: ChatMessage, tools=()) -> ChatRequest:
    return ChatRequest(messages, tools)


U1, A1, T2, A2, T3 = user("u1"), said("a1", "f"), tool("t2"), said("a2"), tool("t3")
FIRST = asked(U1)
ONE = KeptTurns().with_turn(FIRST, KeptTurns().place(FIRST), A1)
SECOND = asked(U1, A1, T2)
TWO = ONE.with_turn(SECOND, ONE.place(SECOND), A2)
THIRD = asked(U1, A1, T2, A2, T3)
THREE = TWO.with_turn(THIRD, TWO.place(THIRD), said("a3"))
TOOLS = ({"type": "function", "function": {"name": "f"}},)


def test_the_example_of_the_module():
    assert KeptTurns().place(FIRST) == ChatPlace(Move.BEGINS, None, (U1,))
    assert ONE.place(SECOND) == ChatPlace(Move.EXTENDS, 1, (T2,))
    assert TWO.place(SECOND) == ChatPlace(Move.RETRIES, 1, (T2,), replaced=2)
    assert TWO.place(THIRD) == ChatPlace(Move.EXTENDS, 2, (T3,))
    edited = tool("t2'")
    assert TWO.place(asked(U1, A1, edited)) == ChatPlace(Move.BRANCHES, 1, (edited,), Why.EDITED)
    forged = (U1, said("a1'", "f"), T2)
    assert TWO.place(asked(*forged)) == ChatPlace(Move.BRANCHES, None, forged, Why.FORGED)
    assert TWO.place(asked(user("u9"))) == ChatPlace(Move.BRANCHES, None, (user("u9"),), Why.OTHER)
    assert THREE.place(SECOND) == ChatPlace(Move.BRANCHES, 1, (T2,), Why.ASKED_AGAIN)
    assert TWO.place(asked(U1, A1, T2, tools=TOOLS)).why is Why.TOOLS


def test_arguments_forged_in_a_call_are_another_history():
    another = ChatMessage("assistant", "a1", (ChatCall("f", "f", {"a": 2}),))
    assert ONE.place(asked(U1, another, T2)).why is Why.FORGED
    dropped = asked(U1, said("a1"), T2)
    assert ONE.place(dropped).why is Why.FORGED
    assert ONE.place(asked(U1, T2)).why is Why.EDITED


def test_where_nothing_is_new_there_is_nothing_to_answer():
    with pytest.raises(BadRequest, match="nothing to answer"):
        ONE.place(asked(U1, A1))


def test_a_retry_replaces_and_what_it_said_first_is_no_history_any_more():
    again = TWO.with_turn(SECOND, TWO.place(SECOND), said("a2 anew"))
    assert [turn.number for turn in again.turns] == [1, 3] and again.said == 3
    assert again.place(asked(U1, A1, T2, said("a2 anew"), T3)) == ChatPlace(Move.EXTENDS, 3, (T3,))
    assert again.place(THIRD).why is Why.FORGED


def test_of_turns_that_said_the_same_the_newest_is_gone_on_with():
    again = TWO.with_turn(FIRST, TWO.place(FIRST), A1)  # asked again behind which turn 2 stands, and said the same
    assert again.place(asked(U1, A1, T3)) == ChatPlace(Move.EXTENDS, 3, (T3,))
    assert again.place(THIRD) == ChatPlace(Move.EXTENDS, 2, (T3,)), "but the one that holds more of the request"


def test_a_client_goes_back_to_a_line_that_it_left():
    branch = asked(U1, A1, tool("t2'"))
    both = TWO.with_turn(branch, TWO.place(branch), said("b2"))
    assert both.place(THIRD) == ChatPlace(Move.EXTENDS, 2, (T3,))
    assert both.place(asked(*branch.messages, said("b2"), T3)) == ChatPlace(Move.EXTENDS, 3, (T3,))


class Client:
    """Speaks at random: goes on, asks again, edits, forges, begins anew; keeps lines as it saw them."""

    def __init__(self, seed: int):
        self.rng, self.lines, self.kept = random.Random(seed), [], KeptTurns()

    def step(self) -> None:
        rng = self.rng
        whole = []
        if self.lines and rng.random() < 0.9:
            whole = list(rng.choice(self.lines[-3:]))
        if whole and rng.random() < 0.3:
            whole = whole[: rng.randrange(len(whole))]
        while whole and whole[-1].role != "assistant":
            whole.pop()
        if whole and rng.random() < 0.1:
            whole[-1] = said("forged")
        new = [rng.choice([user, tool])(str(rng.randint(0, 3))) for _ in range(rng.randint(1, 2))]
        request = asked(*whole, *new)
        place = self.kept.place(request)
        self.check(request, place)
        answer = said(f"a{self.kept.said}", *rng.sample("fg", rng.randint(0, 2)))
        self.kept = self.kept.with_turn(request, place, answer)
        self.lines.append((*request.messages, answer))

    def check(self, request: ChatRequest, place: ChatPlace) -> None:
        """What is kept and what is new are the request, whole, in order."""
        before = self.line(place.parent)
        assert [each.key for each in (*before, *place.messages)] == [each.key for each in request.messages]
        assert (place.why is None) == (place.move is not Move.BRANCHES)
        assert (place.move is Move.BEGINS) == (not self.kept.turns)
        children = [turn for turn in self.kept.turns if turn.parent == place.parent]
        if place.move is Move.EXTENDS:
            assert place.parent is not None and not children
        if place.move is Move.RETRIES:
            (old,) = [turn for turn in children if turn.number == place.replaced]
            assert [each.key for each in old.messages] == [each.key for each in place.messages]
            assert not [turn for turn in self.kept.turns if turn.parent == old.number]
        for turn in children:
            longer = (*before, *turn.messages, turn.said)
            assert [each.key for each in longer] != [each.key for each in request.messages[: len(longer)]]

    def line(self, number: int | None) -> tuple[ChatMessage, ...]:
        if number is None:
            return ()
        (turn,) = [turn for turn in self.kept.turns if turn.number == number]
        return (*self.line(turn.parent), *turn.messages, turn.said)


@pytest.mark.parametrize("seed", range(100))
def test_in_random_sessions_kept_and_new_are_the_request_and_no_kept_turn_is_missed(seed):
    client = Client(seed)
    for _ in range(30):
        client.step()
    assert client.kept.said == 30 and len({turn.number for turn in client.kept.turns}) == len(client.kept.turns)


def test_random_sessions_meet_every_move_and_reason():
    moves, reasons = set(), set()
    for seed in range(60):
        client = Client(seed)
        place = KeptTurns.place

        def noted(kept, request, place=place):
            found = place(kept, request)
            moves.add(found.move)
            reasons.add(found.why)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KeptTurns, "place", noted)
            for _ in range(20):
                client.step()
    assert moves == set(Move) and reasons >= {Why.EDITED, Why.FORGED, Why.ASKED_AGAIN, Why.OTHER}
