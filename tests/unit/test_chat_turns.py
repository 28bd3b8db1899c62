"""Where a client's request belongs among kept turns: the example of the module, and random sessions."""

import json
import random
import time

import pytest

from mrl.acting.chat_api import BadRequest, ChatCall, ChatMessage, ChatRequest
from mrl.acting.chat_turns import ChatPosition, KeptTurns, Move, Why


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def tool(text: str) -> ChatMessage:
    return ChatMessage("tool", text)


def said(text: str, *names: str) -> ChatMessage:
    return ChatMessage("assistant", text, tuple(ChatCall(name, name, {"a": 1}) for name in names))


def asked(*messages: ChatMessage, tools=()) -> ChatRequest:
    return ChatRequest(messages, tools)


def answered(kept: KeptTurns, request: ChatRequest, answer: ChatMessage) -> ChatPosition:
    position = kept.locate(request)
    kept.answer(kept.open(request, position), answer)
    return position


def sampled(*steps: tuple[ChatRequest, ChatMessage]) -> tuple[KeptTurns, list[ChatPosition]]:
    kept = KeptTurns()
    return kept, [answered(kept, *step) for step in steps]


U1, A1, T2, A2, T3 = user("u1"), said("a1", "f"), tool("t2"), said("a2"), tool("t3")
FIRST = asked(U1)
SECOND = asked(U1, A1, T2)
THIRD = asked(U1, A1, T2, A2, T3)
STEPS = ((FIRST, A1), (SECOND, A2), (THIRD, said("a3")))
ONE, TWO, THREE = (sampled(*STEPS[:count])[0] for count in (1, 2, 3))
TOOLS = ({"type": "function", "function": {"name": "f"}},)


def test_the_example_of_the_module():
    assert KeptTurns().locate(FIRST) == ChatPosition(Move.BEGINS, None, (U1,))
    assert ONE.locate(SECOND) == ChatPosition(Move.EXTENDS, 1, (T2,))
    assert TWO.locate(SECOND) == ChatPosition(Move.RETRIES, 1, (T2,), question=2, again=1)
    assert TWO.locate(THIRD) == ChatPosition(Move.EXTENDS, 2, (T3,))
    edited = tool("t2'")
    assert TWO.locate(asked(U1, A1, edited)) == ChatPosition(Move.BRANCHES, 1, (edited,), Why.EDITED)
    forged = (U1, said("a1'", "f"), T2)
    assert TWO.locate(asked(*forged)) == ChatPosition(Move.BRANCHES, None, forged, Why.FORGED)
    assert TWO.locate(asked(user("u9"))) == ChatPosition(Move.BRANCHES, None, (user("u9"),), Why.OTHER)
    assert THREE.locate(SECOND) == ChatPosition(Move.BRANCHES, 1, (T2,), Why.ASKED_AGAIN, question=2, again=1)
    assert TWO.locate(asked(U1, A1, T2, tools=TOOLS)).why is Why.TOOLS


def test_arguments_forged_in_a_call_are_another_history():
    another = ChatMessage("assistant", "a1", (ChatCall("f", "f", {"a": 2}),))
    assert ONE.locate(asked(U1, another, T2)).why is Why.FORGED
    dropped = asked(U1, said("a1"), T2)
    assert ONE.locate(dropped).why is Why.FORGED
    assert ONE.locate(asked(U1, T2)).why is Why.EDITED


def test_a_number_that_a_client_in_javascript_writes_anew_is_the_same():
    """JSON.stringify(JSON.parse(text)) of Node 20: whole numbers beyond 2**53 are those of doubles."""
    for text, anew in (
        ("1234567890123456789", "1234567890123456800"),
        ("100000000000000000000000000000000000000", "1e+38"),
        ("9007199254740993", "9007199254740992"),
        ("[-0.0, 1.0, 1e22]", "[0, 1, 1e+22]"),
    ):
        mine, other = (ChatMessage("assistant", "", (ChatCall("f", "f", {"a": json.loads(x)}),)) for x in (text, anew))
        assert mine.key == other.key
        assert mine.key != ChatMessage("assistant", "", (ChatCall("f", "f", {"a": 9007199254740991}),)).key
    huge = ChatMessage("assistant", "", (ChatCall("f", "f", {"a": 10**400}),))  # beyond doubles
    assert huge.key == huge.key


def test_an_answer_of_which_a_client_keeps_the_calls_alone_is_gone_on_from():
    """As crewai's, agno's and haystack's clients do, which drop the text beside calls."""
    bare = said("", "f")
    assert ONE.locate(asked(U1, bare, T2)) == ChatPosition(Move.EXTENDS, 1, (T2,))
    assert TWO.locate(asked(U1, bare, T2, A2, T3)) == ChatPosition(Move.EXTENDS, 2, (T3,))
    for other in (said("", "g"), said("", "f", "f"), said(""), said("a1'", "f")):
        assert ONE.locate(asked(U1, other, T2)).why is Why.FORGED
    # the ids of calls say which of several answers it was, and the newest is meant without them
    kept = KeptTurns()
    for number, text in ((1, "A text"), (2, "B text")):
        call = ChatCall(f"call_{number}_0", "f", {"a": 1})
        answered(kept, FIRST, ChatMessage("assistant", text, (call,)))
    for number in (1, 2):
        call = ChatCall(f"call_{number}_0", "f", {"a": 1})
        assert kept.locate(asked(U1, ChatMessage("assistant", "", (call,)), T2)).parent == number
    assert kept.locate(asked(U1, bare, T2)).parent == 2
    kept, _ = sampled((FIRST, A1), (FIRST, bare), (FIRST, said("a1'", "f")))
    assert kept.locate(asked(U1, bare, T2)).parent == 2  # what was said so comes first
    assert kept.locate(asked(U1, A1, T2)).parent == 1


def test_behind_what_the_model_said_it_may_say_more_but_not_behind_its_calls():
    """As OpenAI's and vLLM's servers have it; autogen's teams of one agent ask so."""
    with pytest.raises(BadRequest, match="nothing answers them"):
        ONE.locate(asked(U1, A1))
    more = asked(U1, A1, T2, A2)
    assert TWO.locate(more) == ChatPosition(Move.EXTENDS, 2, ())
    kept, _ = sampled((FIRST, A1), (SECOND, A2), (more, said("a3")))
    assert kept.locate(more) == ChatPosition(Move.RETRIES, 2, (), question=3, again=1)
    assert kept.locate(asked(U1, A1, T2, A2, said("a3"), T3)) == ChatPosition(Move.EXTENDS, 3, (T3,))
    assert kept.locate(asked(U1, A1, T2, A2, T3)) == ChatPosition(Move.BRANCHES, 2, (T3,), Why.EDITED)
    assert THREE.locate(more) == ChatPosition(Move.BRANCHES, 2, (), Why.EDITED)
    number = kept.open(more, kept.locate(more))
    kept.drop(number)
    assert kept.locate(asked(*more.messages, said("a3"), T3)).parent == 3


A, B, C, D, E = (said(name) for name in "ABCDE")
BEST_OF = [(FIRST, A), (FIRST, B), (FIRST, C)]


def test_of_answers_that_nothing_follows_the_newest_stays():
    kept, positions = sampled(*BEST_OF)
    assert [position.move for position in positions] == [Move.BEGINS, Move.RETRIES, Move.RETRIES]
    assert kept.leaves == [3] and kept.passed_over == {1: 3, 2: 3}


@pytest.mark.parametrize(("taken", "number"), [(A, 1), (B, 2), (C, 3)])
def test_of_answers_of_one_question_the_one_that_is_gone_on_from_stays(taken, number):
    kept, positions = sampled(*BEST_OF, (asked(U1, taken, T2), D))
    assert positions[-1] == ChatPosition(Move.EXTENDS, number, (T2,))
    assert kept.leaves == [4] and kept.path(4) == [number, 4]
    assert kept.passed_over == {other: number for other in (1, 2, 3) if other != number}


def test_what_is_asked_at_once_has_its_place_before_it_is_answered():
    """By hand: the same question twice is one of two siblings, another behind the same turn begins a branch; a request
    that is given up is as if it had not been asked, and its number is not given again.
    """
    both, _ = sampled(*STEPS[:1])
    assert both.open(SECOND, both.locate(SECOND)) == 2
    assert both.locate(SECOND) == ChatPosition(Move.RETRIES, 1, (T2,), question=2, again=1)
    assert both.locate(asked(U1, A1, T3)) == ChatPosition(Move.BRANCHES, 1, (T3,), Why.EDITED)
    with pytest.raises(BadRequest, match="nothing answers them"):
        both.locate(FIRST.__class__((U1, A1)))
    assert both.all_leaves == [2]
    both.drop(2)
    both.drop(2)
    assert both.locate(SECOND) == ChatPosition(Move.EXTENDS, 1, (T2,)) and both.all_leaves == [1]
    assert [both.open(SECOND, both.locate(SECOND)) for _ in range(2)] == [3, 4]
    both.answer(4, B)
    both.answer(3, A)
    assert both.leaves == [4] and both.passed_over == {3: 4} and both.all_leaves == [3, 4]
    follows = both.locate(asked(U1, A1, T2, A, T3))
    assert follows == ChatPosition(Move.EXTENDS, 3, (T3,)) and both.history(3) == (U1, A1, T2, A)
    both.open(asked(U1, A1, T2, A, T3), follows)
    both.drop_unanswered()
    assert both.all_leaves == [3, 4]


def test_of_equal_answers_the_newest_question_is_gone_on_with_whichever_came_first():
    kept, _ = sampled(*STEPS[:1])
    for _ in range(2):
        kept.open(SECOND, kept.locate(SECOND))
    kept.answer(3, A2)
    kept.answer(2, A2)
    assert kept.locate(THIRD) == ChatPosition(Move.EXTENDS, 3, (T3,))


def test_a_question_whose_beginning_was_given_up_is_no_longer_known():
    """By hand: other tools, another first message, an answer of the model's, each of a request that was taken back."""
    kept, _ = sampled(*STEPS[:1])
    for given in (asked(user("u9")), asked(U1, tools=TOOLS), asked(U1, A1, T3)):
        before = kept.locate(given)
        kept.drop(kept.open(given, before))
        assert kept.locate(given) == before
    assert kept.locate(asked(U1, A1, T3, said("x"), T2)).move is Move.EXTENDS


def test_what_is_given_up_leaves_nothing_behind():
    """A client may send megabytes that are refused, again and again."""
    kept, _ = sampled(*STEPS[:2])
    before = dict(kept._nodes)
    for messages in ((user("long"), said("x"), user("longer")), (U1, A1, T3), (U1, A1, T2), (U1, A1, T2, A2, T3)):
        kept.drop(kept.open(asked(*messages), kept.locate(asked(*messages))))
        assert kept._nodes == before
    assert kept.locate(THIRD) == ChatPosition(Move.EXTENDS, 2, (T3,))


def test_a_prompt_and_tools_that_are_given_up_are_not_kept():
    kept, _ = sampled(*STEPS)
    before = sizes(kept)
    for number in range(3):
        other = asked(user(f"x{number}" * 1000), tools=({"name": f"f{number}"},))
        kept.drop(kept.open(other, kept.locate(other)))
        again = asked(U1, tools=({"name": f"f{number}"},))
        kept.drop(kept.open(again, kept.locate(again)))
    assert sizes(kept) == before


def sizes(kept: KeptTurns) -> dict[str, int]:
    return {name: len(value) for name, value in vars(kept).items() if hasattr(value, "__len__")}


def test_what_is_given_up_takes_nothing_of_what_was_said_meanwhile():
    kept = KeptTurns()
    number = kept.open(FIRST, kept.locate(FIRST))
    forged = kept.open(SECOND, kept.locate(SECOND))  # before the model has said it
    kept.answer(number, A1)
    kept.drop(forged)
    assert kept.locate(SECOND) == ChatPosition(Move.EXTENDS, number, (T2,))


def test_several_answers_of_one_question_that_are_gone_on_from_are_branches():
    kept, positions = sampled(*BEST_OF, (asked(U1, A, T2), D), (asked(U1, B, T2), E), (asked(U1, A, T2, D, T3), C))
    assert (positions[4].move, positions[4].why, positions[4].parent) == (Move.BRANCHES, Why.ASKED_AGAIN, 2)
    assert positions[5].move is Move.EXTENDS
    assert kept.leaves == [5, 6] and kept.passed_over == {3: 2}


def test_an_answer_that_was_asked_for_again_after_all_stays_unless_the_conversation_leaves_it():
    steps = [(FIRST, A), (asked(U1, A, T2), D), (FIRST, B)]
    kept, positions = sampled(*steps)
    assert (positions[2].move, positions[2].why) == (Move.BRANCHES, Why.ASKED_AGAIN) and kept.leaves == [2, 3]
    assert sampled(*steps, (FIRST, C))[0].leaves == [2, 4]
    assert sampled(*steps, (asked(U1, A, T2, D, T3), E))[0].leaves == [4]
    kept, positions = sampled(*steps, (asked(U1, B, T2), E))
    assert positions[3].move is Move.EXTENDS and kept.leaves == [2, 4]


def test_questions_of_other_tools_are_others():
    kept, _ = sampled((FIRST, A), (asked(U1, tools=TOOLS), B))
    assert kept.leaves == [1, 2] and not kept.passed_over


MANY = 10_000
LARGE = {  # a session of MANY requests: each request and its answer, then how many leaves, and turns passed over
    "siblings": (lambda i: ((U1,), said(f"a{i}")), MANY, MANY - 1),
    "equal siblings, each gone on from": (lambda i: ((U1, A1, T2) if i % 2 else (U1,), A1), MANY // 2, 0),
    "one question for each": (lambda i: ((user(f"u{i}"),), A1), MANY, 0),
    "many behind one turn": (lambda i: ((U1, A1, tool(f"t{i}")) if i else (U1,), A1), MANY - 1, 0),
    "forged": (lambda i: ((U1, said(f"x{i}"), T2) if i else (U1,), A1), MANY, 0),
}


@pytest.mark.parametrize("shape", LARGE)
def test_ten_thousand_requests_are_placed_in_no_time(shape):
    """Ten times more than it takes on a laptop. An index that looks at all turns would take minutes."""
    step, leaves, passed_over = LARGE[shape]
    kept = KeptTurns()
    began = time.process_time()
    for i in range(MANY):
        messages, answer = step(i)
        answered(kept, asked(*messages), answer)
    found = (len(kept.all_leaves), len(kept.passed_over))
    assert time.process_time() - began < 5
    assert found == (leaves, passed_over)


def test_a_conversation_of_thousands_of_turns_is_no_deeper_than_python_may_go():
    kept = KeptTurns()
    messages = []
    for i in range(2_000):
        messages.append(user(f"u{i}"))
        position = answered(kept, asked(*messages), A1)
        messages.append(A1)
    assert position == ChatPosition(Move.EXTENDS, 1_999, (user("u1999"),))
    assert kept.path(2_000) == list(range(1, 2_001)) and kept.leaves == [2_000]
    assert kept.history(2_000) == tuple(messages)


def test_of_turns_that_said_the_same_the_newest_is_gone_on_with():
    again, _ = sampled(*STEPS[:2], (FIRST, A1))  # asked again behind which turn 2 stands, and said the same
    assert again.locate(asked(U1, A1, T3)) == ChatPosition(Move.EXTENDS, 3, (T3,))
    assert again.locate(THIRD) == ChatPosition(Move.EXTENDS, 2, (T3,)), "but the one that holds more of the request"


def test_a_client_goes_back_to_a_line_that_it_left():
    branch = asked(U1, A1, tool("t2'"))
    both, _ = sampled(*STEPS[:2], (branch, said("b2")))
    assert both.locate(THIRD) == ChatPosition(Move.EXTENDS, 2, (T3,))
    assert both.locate(asked(*branch.messages, said("b2"), T3)) == ChatPosition(Move.EXTENDS, 3, (T3,))


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
        self.check(request, self.kept.locate(request))
        answer = said(f"a{self.kept.asked}", *rng.sample("fg", rng.randint(0, 2)))
        answered(self.kept, request, answer)
        self.lines.append((*request.messages, answer))

    def check(self, request: ChatRequest, position: ChatPosition) -> None:
        """What is kept and what is new are the request, whole, in order."""
        before = self.line(position.parent)
        assert [each.key for each in (*before, *position.messages)] == [each.key for each in request.messages]
        assert (position.why is None) == (position.move is not Move.BRANCHES)
        assert (position.move is Move.BEGINS) == (not self.kept.turns)
        children = [turn for turn in self.kept.turns if turn.parent == position.parent]
        if position.move is Move.EXTENDS:
            assert position.parent is not None and not children
        same = [turn for turn in children if [e.key for e in turn.messages] == [e.key for e in position.messages]]
        assert {turn.question for turn in same} == {position.question} - {None}
        followed = {turn.parent for turn in self.kept.turns}
        if position.move is Move.RETRIES:
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
        locate = KeptTurns.locate

        def noted(kept, request, locate=locate):
            found = locate(kept, request)
            moves.add(found.move)
            reasons.add(found.why)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KeptTurns, "locate", noted)
            for _ in range(20):
                client.step()
    assert moves == set(Move) and reasons >= {Why.EDITED, Why.FORGED, Why.ASKED_AGAIN, Why.OTHER}
