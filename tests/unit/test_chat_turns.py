"""Where a client's request belongs among kept turns: the example of the module, and random sessions."""

import random
import time

import pytest

from mrl.acting.chat_api import BadRequest, ChatCall, ChatMessage, ChatRequest
from mrl.acting.chat_turns import ChatPlace, KeptTurn, KeptTurns, Move, Why


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def tool(text: str) -> ChatMessage:
    return ChatMessage("tool", text)


def said(text: str, *names: str) -> ChatMessage:
    return ChatMessage("assistant", text, tuple(ChatCall(name, name, {"a": 1}) for name in names))


def asked(*messages: ChatMessage, tools=()) -> ChatRequest:
    return ChatRequest(messages, tools)


def with_turn(kept: KeptTurns, request: ChatRequest, place: ChatPlace, answer: ChatMessage) -> KeptTurns:
    return kept.opened(request, place).answered(kept.asked + 1, answer)


U1, A1, T2, A2, T3 = user("u1"), said("a1", "f"), tool("t2"), said("a2"), tool("t3")
FIRST = asked(U1)
ONE = with_turn(KeptTurns(), FIRST, KeptTurns().place(FIRST), A1)
SECOND = asked(U1, A1, T2)
TWO = with_turn(ONE, SECOND, ONE.place(SECOND), A2)
THIRD = asked(U1, A1, T2, A2, T3)
THREE = with_turn(TWO, THIRD, TWO.place(THIRD), said("a3"))
TOOLS = ({"type": "function", "function": {"name": "f"}},)


def test_the_example_of_the_module():
    assert KeptTurns().place(FIRST) == ChatPlace(Move.BEGINS, None, (U1,))
    assert ONE.place(SECOND) == ChatPlace(Move.EXTENDS, 1, (T2,))
    assert TWO.place(SECOND) == ChatPlace(Move.RETRIES, 1, (T2,), question=2, again=1)
    assert TWO.place(THIRD) == ChatPlace(Move.EXTENDS, 2, (T3,))
    edited = tool("t2'")
    assert TWO.place(asked(U1, A1, edited)) == ChatPlace(Move.BRANCHES, 1, (edited,), Why.EDITED)
    forged = (U1, said("a1'", "f"), T2)
    assert TWO.place(asked(*forged)) == ChatPlace(Move.BRANCHES, None, forged, Why.FORGED)
    assert TWO.place(asked(user("u9"))) == ChatPlace(Move.BRANCHES, None, (user("u9"),), Why.OTHER)
    assert THREE.place(SECOND) == ChatPlace(Move.BRANCHES, 1, (T2,), Why.ASKED_AGAIN, question=2, again=1)
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


def sampled(*steps: tuple[ChatRequest, ChatMessage]) -> tuple[KeptTurns, list[ChatPlace]]:
    kept, places = KeptTurns(), []
    for request, answer in steps:
        places.append(kept.place(request))
        kept = with_turn(kept, request, places[-1], answer)
    return kept, places


A, B, C, D, E = (said(name) for name in "ABCDE")
BEST_OF = [(FIRST, A), (FIRST, B), (FIRST, C)]


def test_of_answers_that_nothing_follows_the_newest_stays():
    kept, places = sampled(*BEST_OF)
    assert [place.move for place in places] == [Move.BEGINS, Move.RETRIES, Move.RETRIES]
    assert kept.leaves == [3] and kept.passed_over == {1: 3, 2: 3}


@pytest.mark.parametrize(("taken", "number"), [(A, 1), (B, 2), (C, 3)])
def test_of_answers_of_one_question_the_one_that_is_gone_on_from_stays(taken, number):
    kept, places = sampled(*BEST_OF, (asked(U1, taken, T2), D))
    assert places[-1] == ChatPlace(Move.EXTENDS, number, (T2,))
    assert kept.leaves == [4] and kept.path(4) == [number, 4]
    assert kept.passed_over == {other: number for other in (1, 2, 3) if other != number}


def test_what_is_asked_at_once_has_its_place_before_it_is_answered():
    """By hand: the same question twice is one of two siblings, another behind the same turn begins a branch; a request
    that is given up is as if it had not been asked, and its number is not given again.
    """
    both = ONE.opened(SECOND, ONE.place(SECOND))
    assert both.place(SECOND) == ChatPlace(Move.RETRIES, 1, (T2,), question=2, again=1)
    assert both.place(asked(U1, A1, T3)) == ChatPlace(Move.BRANCHES, 1, (T3,), Why.EDITED)
    with pytest.raises(BadRequest, match="nothing to answer"):
        both.place(FIRST.__class__((U1, A1)))
    alone = both.without(2)
    assert alone.place(SECOND) == ChatPlace(Move.EXTENDS, 1, (T2,))
    assert both.all_leaves == [2] and both.all_answered.leaves == [1]
    twice = both.opened(SECOND, both.place(SECOND)).answered(3, B).answered(2, A)
    assert twice.leaves == [3] and twice.passed_over == {2: 3} and twice.all_leaves == [2, 3]
    assert alone.opened(SECOND, alone.place(SECOND)).asked == 3
    follows = twice.place(asked(U1, A1, T2, A, T3))
    assert follows == ChatPlace(Move.EXTENDS, 2, (T3,)) and twice.history(2) == (U1, A1, T2, A)


def test_several_answers_of_one_question_that_are_gone_on_from_are_branches():
    kept, places = sampled(*BEST_OF, (asked(U1, A, T2), D), (asked(U1, B, T2), E), (asked(U1, A, T2, D, T3), C))
    assert (places[4].move, places[4].why, places[4].parent) == (Move.BRANCHES, Why.ASKED_AGAIN, 2)
    assert places[5].move is Move.EXTENDS
    assert kept.leaves == [5, 6] and kept.passed_over == {3: 2}


def test_an_answer_that_was_asked_for_again_after_all_stays_unless_the_conversation_leaves_it():
    steps = [(FIRST, A), (asked(U1, A, T2), D), (FIRST, B)]
    kept, places = sampled(*steps)
    assert (places[2].move, places[2].why) == (Move.BRANCHES, Why.ASKED_AGAIN) and kept.leaves == [2, 3]
    assert sampled(*steps, (FIRST, C))[0].leaves == [2, 4]
    assert sampled(*steps, (asked(U1, A, T2, D, T3), E))[0].leaves == [4]
    kept, places = sampled(*steps, (asked(U1, B, T2), E))
    assert places[3].move is Move.EXTENDS and kept.leaves == [2, 4]


def test_questions_of_other_tools_are_others():
    kept, _ = sampled((FIRST, A), (asked(U1, tools=TOOLS), B))
    assert kept.leaves == [1, 2] and not kept.passed_over


def test_ten_thousand_answers_of_one_question_are_compared_in_no_time():
    turns = tuple(KeptTurn(number, None, (), (U1,), A, 1) for number in range(1, 10_001))
    kept = KeptTurns(turns, 10_000)
    began = time.monotonic()
    assert len(kept.passed_over) == 9_999
    assert kept.place(asked(U1)).move is Move.RETRIES
    assert time.monotonic() - began < 5


def test_of_turns_that_said_the_same_the_newest_is_gone_on_with():
    again = with_turn(TWO, FIRST, TWO.place(FIRST), A1)  # asked again behind which turn 2 stands, and said the same
    assert again.place(asked(U1, A1, T3)) == ChatPlace(Move.EXTENDS, 3, (T3,))
    assert again.place(THIRD) == ChatPlace(Move.EXTENDS, 2, (T3,)), "but the one that holds more of the request"


def test_a_client_goes_back_to_a_line_that_it_left():
    branch = asked(U1, A1, tool("t2'"))
    both = with_turn(TWO, branch, TWO.place(branch), said("b2"))
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
        answer = said(f"a{self.kept.asked}", *rng.sample("fg", rng.randint(0, 2)))
        self.kept = with_turn(self.kept, request, place, answer)
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
        same = [turn for turn in children if [e.key for e in turn.messages] == [e.key for e in place.messages]]
        assert {turn.question for turn in same} == {place.question} - {None}
        followed = {turn.parent for turn in self.kept.turns}
        if place.move is Move.RETRIES:
            assert same and not followed & {turn.number for turn in same}
        for turn in children:
            longer = (*before, *turn.messages, turn.said)
            assert [each.key for each in longer] != [each.key for each in request.messages[: len(longer)]]

    def line(self, number: int | None) -> tuple[ChatMessage, ...]:
        if number is None:
            return ()
        (turn,) = [turn for turn in self.kept.turns if turn.number == number]
        return (*self.line(turn.parent), *turn.messages, turn.said)


def check_leaves(kept: KeptTurns) -> None:
    """By the rule, word for word: of a turn that nothing follows no other answer is newer, or followed since."""
    turns = {turn.number: turn for turn in kept.turns}
    on_paths = {number: kept.path(number) for number in turns}
    for number, turn in turns.items():
        if any(other.parent == number for other in turns.values()):
            assert number not in kept.leaves and number not in kept.passed_over
            continue
        siblings = [other for other in turns if other != number and turns[other].question == turn.question]
        gone_on_since = any(set(siblings) & set(path) for later, path in on_paths.items() if later > number)
        assert (number in kept.passed_over) == gone_on_since == (number not in kept.leaves)
    assert kept.leaves[-1] == kept.asked
    assert all(number not in kept.passed_over for number in kept.passed_over.values())


@pytest.mark.parametrize("seed", range(100))
def test_in_random_sessions_kept_and_new_are_the_request_and_no_kept_turn_is_missed(seed):
    client = Client(seed)
    for _ in range(30):
        client.step()
        check_leaves(client.kept)
    assert client.kept.asked == 30 and len({turn.number for turn in client.kept.turns}) == len(client.kept.turns)


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
