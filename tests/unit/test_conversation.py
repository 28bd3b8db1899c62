"""The conversation as a state machine: all states and events, and random ones."""

import random
from dataclasses import replace

import pytest

from mrl.schedule.conversation import Budgets, Conversation, Stop, shortened
from mrl.schedule.conversation import ConversationState as State

BUDGETS = Budgets(tokens=60, turns=3, calls=2, seconds=10.0, characters=40)
START = Conversation(BUDGETS)
ACTING = START.sampled(9, 101.0, [None, None])
ANSWERED = ACTING.answered(1, 0, "408", 102.0).answered(1, 1, "17", 103.0)
ENDED = START.sampled(9, 101.0)


def test_the_example_of_the_module():
    budgets = replace(BUDGETS, turns=2)
    acting = Conversation(budgets).sampled(9, 101.0, [None, "not JSON"])
    assert (acting.state, acting.open_calls, acting.answers) == (State.ACTING, (0,), (None, "not JSON"))
    answered_talk = acting.answered(1, 0, "408", 104.0)
    assert (answered_talk.state, answered_talk.answers, answered_talk.acting_s) == (
        State.ANSWERED,
        ("408", "not JSON"),
        3.0,
    )
    sampling = answered_talk.appended(12)
    assert (sampling.state, sampling.turn, sampling.max_tokens) == (State.SAMPLING, 2, 39)
    assert sampling.sampled(4, 105.0).stop is Stop.STOP


# state -> event -> state and reason after it; an event that cannot be now is None
EVENTS = {
    "answers by itself": lambda c: c.sampled(5, 101.5),
    "calls": lambda c: c.sampled(5, 101.5, [None]),
    "calls, all malformed": lambda c: c.sampled(5, 101.5, ["no"]),
    "calls, after hours in the engine's line": lambda c: c.sampled(5, 9000.0, [None]),
    "is cut off": lambda c: c.sampled(5, 101.5, cut_off=True),
    "fills the rest": lambda c: c.sampled(c.max_tokens, 101.5, cut_off=True),
    "an answer": lambda c: c.answered(1, 0, "408", 102.5),
    "an answer, late": lambda c: c.answered(1, 0, "408", 111.0),
    "an answer of another turn": lambda c: c.answered(7, 0, "408", 102.5),
    "context": lambda c: c.appended(5),
    "context without end": lambda c: c.appended(51),
    "time": lambda c: c.passed(110.9),
    "too much time": lambda c: c.passed(111.0),
    "is given back": lambda c: c.held(),
    "the environment's end": lambda c: c.closed(),
    "the environment's failure": lambda c: c.failed(),
}
ENDS = {"the environment's end": Stop.CLOSED, "the environment's failure": Stop.ENVIRONMENT}
TABLE = {
    State.SAMPLING: {
        "answers by itself": Stop.STOP, "calls": State.ACTING, "calls, all malformed": State.ANSWERED,
        "calls, after hours in the engine's line": State.ACTING, "is cut off": State.HELD, "is given back": State.HELD,
        "fills the rest": Stop.LENGTH, 
        "an answer": State.SAMPLING, "an answer, late": State.SAMPLING, "an answer of another turn": State.SAMPLING,
        "time": State.SAMPLING, "too much time": State.SAMPLING, **ENDS,
    },
    State.ACTING: {
        "an answer": State.ACTING, "an answer, late": Stop.SECONDS, "an answer of another turn": State.ACTING,
        "time": State.ACTING, "too much time": Stop.SECONDS, **ENDS,
    },
    State.ANSWERED: {
        "an answer": State.ANSWERED, "an answer, late": State.ANSWERED, "an answer of another turn": State.ANSWERED,
        "context": State.SAMPLING, "context without end": Stop.CONTEXT, 
        "time": State.ANSWERED, "too much time": State.ANSWERED, **ENDS,
    },
    State.HELD: {
        "an answer": State.HELD, "an answer, late": State.HELD, "an answer of another turn": State.HELD,
        "time": State.HELD, "too much time": State.HELD, **ENDS,
    },
    State.ENDED: {
        "an answer": Stop.STOP, "an answer, late": Stop.STOP, "an answer of another turn": Stop.STOP,
        "time": Stop.STOP, "too much time": Stop.STOP, "the environment's end": Stop.STOP,
        "the environment's failure": Stop.ENVIRONMENT,
    },
}  # fmt: skip
AT = {
    State.SAMPLING: START, State.ACTING: ACTING, State.ANSWERED: ANSWERED, State.HELD: START.held(), State.ENDED: ENDED,
}  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", State)
def test_every_event_in_every_state(state, event):
    before, wanted = AT[state], TABLE[state].get(event)
    assert before.state is state
    if wanted is None:
        with pytest.raises(ValueError, match=f"a conversation that is {state} got"):
            EVENTS[event](before)
        return
    after = EVENTS[event](before)
    assert (after.stop or after.state) is wanted
    assert (after.state is State.ENDED) == (after.stop is not None)


def test_the_last_turn_calls_nothing_and_calls_beyond_the_budget_are_answered():
    last = replace(START, turn=3)
    assert last.sampled(1, 101.0, [None]).stop is Stop.TURNS
    many = START.sampled(1, 101.0, [None, None, None, "malformed"])
    assert many.open_calls == (0, 1) and many.answers[2:] == ("not called: at most 2 calls at once", "malformed")


def test_at_its_border_it_is_held_and_context_alone_goes_beyond():
    """By hand: a border after 20 tokens of 60, answers of 5, 11 and 51 tokens behind 9 that were sampled."""
    talk = replace(START, version_boundary=20)
    assert talk.max_tokens == 20 and talk.sampled(20, 101.0, cut_off=True).state is State.HELD
    answered_talk = talk.sampled(9, 101.0, [None]).answered(1, 0, "408", 102.0)
    within, beyond, too_long = (answered_talk.appended(context) for context in (5, 11, 51))
    assert (within.state, within.max_tokens) == (State.SAMPLING, 6)
    assert (beyond.state, beyond.tokens, beyond.turn) == (State.HELD, 20, 2)
    assert too_long.stop is Stop.CONTEXT
    far = replace(talk, budgets=replace(BUDGETS, tokens=15))
    assert far.max_tokens == 15 and far.sampled(15, 101.0, cut_off=True).stop is Stop.LENGTH


def test_more_tokens_than_asked_for_are_refused():
    for added in (-1, 61):
        with pytest.raises(ValueError, match="at most 60 tokens"):
            START.sampled(added, 101.0)


def test_answers_are_as_long_as_they_may_be_and_say_what_is_left_out():
    assert shortened("a" * 40, 40) == "a" * 40
    long = shortened("a" * 500 + "b" * 500, 40)
    assert long == "a" * 20 + "\n[1000 characters, of which 40 are shown]\n" + "b" * 20
    assert ACTING.answered(1, 0, "x" * 10**6, 102.0).answers[0] == shortened("x" * 10**6, 40)
    assert shortened("abcdef", 3).startswith("ab\n") and shortened("abcdef", 3).endswith("\nf")


def one(seed: int, times: random.Random) -> tuple[Conversation, list[Conversation]]:
    """A conversation by random turns; `times`: when, and in which order, answers come."""
    rng, now = random.Random(seed), 0.0
    budgets = Budgets(rng.randint(1, 80), rng.randint(1, 5), rng.randint(1, 3), 1e6, rng.randint(1, 30))
    talk, seen = Conversation(budgets), []
    while talk.state is not State.ENDED:
        if talk.state is State.HELD:
            talk = replace(talk, state=State.SAMPLING)  # another goes on from its tokens
        seen.append(talk)
        assert len(seen) < 1000
        now += times.random()
        match talk.state:
            case State.SAMPLING:
                added = rng.randint(0, min(talk.max_tokens, 9))
                problems = [rng.choice([None, "malformed"]) for _ in range(rng.randint(0, 4))]
                talk = talk.sampled(added, now, problems, cut_off=added == talk.max_tokens or rng.random() < 0.2)
            case State.ACTING:
                answers = {number: f"{number} " * rng.randint(1, 40) for number in talk.open_calls}
                talk = in_some_order(talk, answers, now, times)
            case State.ANSWERED:
                talk = talk.appended(rng.randint(0, 12))
    return talk, seen


def in_some_order(talk: Conversation, answers: dict[int, str], now: float, times: random.Random) -> Conversation:
    order = list(answers)
    times.shuffle(order)
    for number in order:
        talk = talk.answered(talk.turn, number, answers[number], now)
        twice = talk.answered(talk.turn, number, "another", now)
        assert twice == talk
    return talk


@pytest.mark.parametrize("seed", range(300))
def test_random_conversations_end_within_their_budgets_whatever_the_order_and_times(seed):
    talk, seen = one(seed, random.Random(1))
    assert talk.stop in (Stop.STOP, Stop.LENGTH, Stop.TURNS, Stop.CONTEXT)
    for each in [*seen, talk]:
        assert 0 <= each.tokens <= each.budgets.tokens and 1 <= each.turn <= each.budgets.turns
        assert each.state is State.ENDED or each.max_tokens > 0
    for before in seen:
        if before.state is State.ANSWERED:
            assert None not in before.answers and before.answers
    again, others = one(seed, random.Random(2))
    assert [timeless(each) for each in others] == [timeless(each) for each in seen]
    assert (again.tokens, again.turn, again.stop) == (talk.tokens, talk.turn, talk.stop)


def timeless(talk: Conversation) -> Conversation:
    return replace(talk, acting_since=0.0, acting_s=0.0, acted_s=0.0)


def test_seconds_of_all_turns_are_counted_together_and_those_of_the_engine_are_not():
    """Ten: six of the first turn, hours at the engine, and four that the second turn waits in vain."""
    first = START.sampled(9, 100.0, [None]).answered(1, 0, "408", 106.0)
    second = first.appended(5).sampled(9, 9000.0, [None])
    assert (first.deadline, second.deadline) == (110.0, 9004.0)
    assert second.passed(9003.9) is second
    late = second.passed(9004.0)
    assert (late.stop, late.acting_s, late.acted_s) == (Stop.SECONDS, 4.0, 6.0)
    assert second.answered(2, 0, "17", 9004.5).acting_s == 4.5


def test_each_turns_seconds_count_until_all_are_spent():
    """By hand: 10 seconds, of which turns take 2, 3 and 4; the fourth has one second from its calls on."""
    talk = Conversation(replace(BUDGETS, turns=9))
    for start, taken, left in ((100.0, 2.0, 10.0), (200.0, 3.0, 8.0), (300.0, 4.0, 5.0)):
        talk = talk.sampled(1, start, [None])
        assert talk.deadline == start + left
        talk = talk.answered(talk.turn, 0, "408", start + taken).appended(1)
    assert talk.acted_s == 9.0
    talk = talk.sampled(1, 400.0, [None])
    assert talk.deadline == 401.0
    assert talk.answered(4, 0, "408", 400.9).appended(1).state is State.SAMPLING
    late = talk.answered(4, 0, "408", 401.0)
    assert (late.stop, late.acting_s) == (Stop.SECONDS, 1.0)


def test_an_answer_of_an_earlier_turn_is_none_of_this_one():
    talk = ANSWERED.appended(1).sampled(1, 110.0, [None])
    assert (talk.turn, talk.state) == (2, State.ACTING)
    assert talk.answered(1, 0, "late", 110.5) is talk
    assert talk.answered(2, 0, "408", 110.5).answers == ("408",)
