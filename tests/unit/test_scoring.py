"""Responses judged where they lie: decoded there, each once, and the driver gets what it got when texts came to it."""

from dataclasses import replace
from math import nan
from types import SimpleNamespace

import pytest
from replicas import InMemory, scorers, stored

from mrl.cluster import scoring
from mrl.cluster.calls import Late
from mrl.cluster.process_logs import processes_of
from mrl.cluster.scoring import scorer_nodes
from mrl.data.samples import Sample, Turn, TurnCall
from mrl.errors import EnvironmentFault
from mrl.reward.builtin_rules import environment
from mrl.reward.items import LEFT_OUT, NOT_FINITE, OK, Question, RewardItem, RewardSpec, check_failures
from mrl.reward.pool import RewardPool
from mrl.store.reward_texts import SHORT, with_texts

WHOLE = ["acc", "count", "more", "pred", "why"]
CHARS = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids)))


def samples(texts: list[str], first: int = 0) -> InMemory:
    made = [
        Sample(0, 0, first + i, 0, (1, 2), tuple(map(ord, t)), (0.0,) * len(t), "stop", 0) for i, t in enumerate(texts)
    ]
    return stored(made)


def questions(truths: list[str], first: int = 0) -> list[Question]:
    return [Question(first + i, "exact_match", truth) for i, truth in enumerate(truths)]


def test_scores_are_those_of_the_texts_whatever_block_and_row_a_response_lies_in():
    texts, truths = ["a", "b", "c", "d", "e"], ["a", "x", "c", "d", "x"]
    with RewardPool(RewardSpec("exact_match"), 2) as pool:
        expected = pool.score(
            [
                RewardItem(i, "exact_match", text, truth)
                for i, (text, truth) in enumerate(zip(texts, truths, strict=True))
            ]
        )
        group = scorers(pool, CHARS)
        parts = InMemory.joined([samples(texts[:3]), samples(texts[3:], 3)])
        order = [4, 0, 3, 2, 1]
        asked = questions(truths)
        group.submit(parts.take(order[:2]), [asked[i] for i in order[:2]], "engine 0")
        group.forward()
        group.submit(parts.take(order[2:]), [asked[i] for i in order[2:]], "engine 0")
        assert group.drain() == expected
        assert group.drain() == group.collect() == []


def test_what_is_collected_is_not_drained_again_and_every_response_has_one_result():
    with RewardPool(RewardSpec("exact_match"), 1) as pool:
        group, found = scorers(pool, CHARS), []
        for number in range(20):
            group.submit(samples([chr(97 + number)], number), questions(["a"], number), "engine 0")
            found += group.collect(at_once=bool(number % 3))
        found += group.drain()
    assert sorted(r.sample_id for r in found) == list(range(20)) and sum(r.score for r in found) == 1.0


OUTCOME = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    "    outcome = extra_info['outcome']\n"
    "    turns = [turn['reward'] for turn in extra_info['turns']]\n"
    "    return {'score': outcome['reward'], **outcome['parts'], 'turns': len(turns), 'last': turns[-1],\n"
    "            'own': extra_info['own'], 'num_turns': extra_info['num_turns']}\n"
)


def of_turns(number: int, reason: str, call: TurnCall) -> Sample:
    turns = (Turn(0, "stop", 1, 0.1, 0.25), Turn(3, "stop", 1, 0.1, 0.5))
    given = (0, 0, number, 0, (1, 2), tuple(map(ord, "a?!b")), (0.0,) * 4)
    return Sample(
        *given, reason, 0, sampled=(1, 0, 0, 1), turns=turns, calls=(TurnCall("guess", "ok"), call), parts={"won": 1.0}
    )


def test_a_reward_function_is_told_of_turns_and_nobody_judges_where_the_environment_failed(tmp_path):
    (tmp_path / "judge.py").write_text(OUTCOME)
    rows = stored([
        of_turns(0, "closed", TurnCall("guess", "ok")),
        of_turns(1, "environment", TurnCall("guess", "timeout", 2.0)),
        of_turns(2, "stop", TurnCall("", "unread")),
    ])  # fmt: skip
    asked = [replace(question, extra_info={"own": 7}) for question in questions(["", "", ""])]
    with RewardPool(RewardSpec(path=str(tmp_path / "judge.py")), 1) as pool:
        group = scorers(pool, CHARS)
        group.submit(rows, asked, "engine 0")
        closed, failed, stopped = group.drain()
    told = {"won": 1.0, "turns": 2.0, "last": 0.5, "own": 7.0, "num_turns": 2.0}
    assert closed.score == stopped.score == 0.75 and closed.parts == stopped.parts == told
    assert (failed.reason, failed.score, failed.parts, failed.detail) == (LEFT_OUT, 0.0, {}, "guess: timeout")


def test_nobody_judges_a_response_with_log_probs_that_are_no_numbers():
    rows = stored([Sample(3, 0, i, 0, (1,), (97,), (log_prob,), "stop", 7) for i, log_prob in enumerate((-1.0, nan))])
    with RewardPool(RewardSpec("exact_match"), 1) as pool:
        group = scorers(pool, CHARS)
        group.submit(rows, questions(["a", "a"]), "engine 0")
        judged, left_out = group.drain()
    assert (judged.reason, judged.score) == (OK, 1.0)
    assert (left_out.reason, left_out.score) == (NOT_FINITE, 0.0)
    assert left_out.detail == "of prompt 3 under weight version 7"


@pytest.mark.parametrize(
    ("calls", "detail"),
    [
        ((("guess", "raised"), ("", "unread")), "it did not begin"),  # a turn before the last
        ((("guess", "ok"), ("guess", "not_called")), "it did not begin"),
        ((("guess", "ok"), ("guess", "fell"), ("", "unread"), ("guess", "not_called")), "guess: fell"),
        ((("", "unread"), ("guess", "fell"), ("lookup", "raised")), "guess: fell"),  # and not the tool's failure
        ((("", "unread"), ("lookup", "raised"), ("guess", "died")), "guess: died"),
    ],
)
def test_the_cause_of_a_failed_environment_is_no_call_that_was_not_made(calls, detail):
    turns = (Turn(0, "stop", 1), Turn(3, "stop", len(calls) - 1))
    one = replace(of_turns(0, "environment", TurnCall("", "unread")), turns=turns, calls=[TurnCall(*c) for c in calls])
    group = scorers(SimpleNamespace(collect=lambda wait_s: []), CHARS)
    group.submit(stored([one]), questions([""]), "engine 0")
    assert [result.detail for result in group.drain()] == [detail]


def test_failed_environments_end_the_wait_as_failed_rewards_do():
    rows = stored([of_turns(i, "environment", TurnCall("guess", "died")) for i in range(4)])
    with RewardPool(RewardSpec("exact_match"), 1) as pool:
        group = scorers(pool, CHARS)
        group.submit(rows, questions([""] * 4), "engine 0")
        found = group.drain(max_failures=1)
    assert len(found) == 4
    check_failures(found, 1.0)
    said = r"the environment failed in 4 of 4 responses, more than reward.max_failure_share \(0.5\) .*\n  4 guess: died"
    with pytest.raises(EnvironmentFault, match=said):
        check_failures(found, 0.5)


def test_the_environments_own_reward_is_a_rule():
    outcome = {"outcome": {"reward": 0.5, "parts": {"won": 1.0}}}
    assert environment("games", "", "", outcome) == {"score": 0.5, "acc": 0.5, "won": 1.0}
    assert environment("games", "", "", {"outcome": {"reward": 0.5, "parts": {}}}) == 0.5
    with pytest.raises(ValueError, match="acted on no environment"):
        environment("games", "", "", {})


def test_long_texts_stay_with_the_scorer_and_are_there_where_they_are_written_down(tmp_path):
    """What the driver holds of a reward is bounded; what is recorded of it is all that the function gave."""
    function = tmp_path / "judge.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    long = 'because ' * 40 if solution_str == 'b' else 'short'\n"
        "    return {'score': 1.0, 'acc': 1.0, 'pred': 'p' * 400, 'why': long, 'more': long, 'count': 3}\n"
    )
    with RewardPool(RewardSpec(path=str(function)), 1) as pool:
        texts = ["a", "b", "a", "b"]
        expected = pool.score([RewardItem(i, "source", text, None, {}) for i, text in enumerate(texts)])
        group = scorers(pool, CHARS)
        for first in (0, 2):
            asked = [Question(first + i, "source", None) for i in range(2)]
            group.submit(samples(texts[first : first + 2], first), asked, "engine 0")
            group.forward(at_once=True)
        found = group.drain()
    assert [sorted(each.parts) for each in found[:2]] == [WHOLE, ["acc", "count", "pred"]]
    held = [
        len(part) for each in found for name, part in each.parts.items() if isinstance(part, str) and name != "pred"
    ]
    assert max(held) < SHORT and all(each.texts is None for each in found[::2])
    assert with_texts(found, list) == expected and len(expected[1].parts["why"]) == 320
    renumbered = [replace(each, sample_id=7) for each in found]
    assert [each.parts for each in with_texts(renumbered, list)] == [each.parts for each in expected]


def test_calls_are_not_made_for_every_response_while_generation_goes_on():
    with RewardPool(RewardSpec("exact_match"), 1) as pool:
        group = scorers(pool, CHARS)
        calls, handle = [], group.channels[0].handle
        exchange = handle.exchange
        handle.exchange = lambda asked, *rest: calls.append(len(asked)) or exchange(asked, *rest)
        for number in range(50):
            group.submit(samples(["a"], number), questions(["a"], number), "engine 0")
            group.forward()
        assert len(group.drain()) == 50
    assert len(calls) < 10 and sum(calls) == 50


class Clock:
    """Seconds pass where they are waited for. `awake_s`: of the scorers, which answer nobody from then on."""

    def __init__(self, awake_s: float):
        self.now, self.awake_s = 0.0, awake_s

    def monotonic(self) -> float:
        return self.now

    def waited(self, channels, timeout_s: float) -> bool:
        self.now += timeout_s
        assert self.now < 10 * scoring.EXCHANGE_S, "waits for ever"
        return self.now < self.awake_s


@pytest.fixture
def clocked(monkeypatch):
    """A group of one scorer, the pool behind it and its clock."""
    monkeypatch.setattr(scoring, "time", clock := Clock(float("inf")))
    with RewardPool(RewardSpec("exact_match"), 1) as pool:
        group = scorers(pool, CHARS)
        group._finished = clock.waited
        yield group, clock


@pytest.mark.parametrize("wait", ["drain", "collect"])
def test_a_scorer_that_stands_still_is_named_once_no_exchange_can_take_so_long(clocked, wait):
    group, clock = clocked
    clock.awake_s = 0.0
    group.submit(samples(["a"]), questions(["a"]), "engine 0")
    with pytest.raises(Late, match=r"scoring: no answer from scorer 0 within 600 s") as raised:
        while wait == "collect":
            assert group.collect() == []
            clock.now += 7.0
        group.drain()
    assert processes_of(raised.value) == ("scorer 0",)
    assert scoring.EXCHANGE_S < clock.now < scoring.EXCHANGE_S + 10


def test_a_driver_that_stood_still_itself_takes_the_answer_that_it_has_not_heard_of(clocked):
    group, clock = clocked
    group.submit(samples(["a"]), questions(["a"]), "engine 0")
    group.forward(at_once=True)
    clock.now = 5 * scoring.EXCHANGE_S
    group._finished = lambda channels, timeout_s: clock.waited(channels, timeout_s) and timeout_s > 0
    assert [each.score for each in group.drain()] == [1.0]


def test_a_reward_function_may_take_longer_than_an_exchange(clocked):
    """Every exchange comes back, without the result."""
    group, clock = clocked
    exchange, calls = group.channels[0].handle.exchange, []

    def slow(asked, wait_s, *blocks):
        calls.append((asked, 60.0, *blocks))
        clock.now += 100.0
        return exchange(*calls[0]) if len(calls) > 9 else ([], [])

    group.channels[0].handle.exchange = slow
    group.submit(samples(["a"]), questions(["a"]), "engine 0")
    assert [each.score for each in group.drain()] == [1.0] and clock.now > scoring.EXCHANGE_S


@pytest.mark.parametrize(
    ("nodes", "workers", "hosts", "near"),
    [
        ("aa", 2, [("a", 2)], [0, 0]),
        ("ab", 5, [("a", 3), ("b", 2)], [0, 1]),
        ("abca", 2, [("a", 1), ("b", 1)], [0, 1, 0, 0]),
        ("abc", 1, [("a", 1)], [0, 0, 0]),
    ],
)
def test_scoring_processes_are_spread_over_the_nodes_of_engines(nodes, workers, hosts, near):
    assert scorer_nodes(dict(enumerate(nodes)), workers) == (hosts, dict(enumerate(near)))


def test_what_took_long_waits_as_long_for_its_scorer_and_what_is_at_the_end_does_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(scoring.time, "monotonic", lambda: now[0])
    with RewardPool(RewardSpec("exact_match"), 1) as pool:
        group = scorers(pool, CHARS)
        for number, at in enumerate((100.0, 100.9, 101.6)):
            now[0] = at
            group.submit(samples(["a"], number), questions(["a"], number), "engine 0", held_s=1.5)
            group.forward()
            assert len(group.channels[0].queued) == (1 if number == 1 else 0)
        group.submit(samples(["a"], 3), questions(["a"], 3), "engine 0", held_s=1.5)
        assert [result.sample_id for result in group.drain()] == [0, 1, 2, 3]


def test_each_who_asks_gets_the_results_of_its_own_questions():
    """Validation asks while rewards of training are awaited, with ids that both use."""
    with RewardPool(RewardSpec("exact_match"), 2) as pool:
        training = scorers(pool, CHARS)
        validation = training.for_another()
        training.submit(samples(["a", "b", "c"]), questions(["a", "b", "c"]), "engine 0")
        training.forward(at_once=True)
        validation.submit(samples(["a", "b"]), questions(["x", "x"]), "engine 0")
        assert [(each.sample_id, each.score) for each in validation.drain()] == [(0, 0.0), (1, 0.0)]
        assert [(each.sample_id, each.score) for each in training.drain()] == [(0, 1.0), (1, 1.0), (2, 1.0)]


def test_a_question_that_is_withdrawn_has_no_result_wherever_it_is():
    """Not sent yet, being judged, or judged and not collected; asked again under the same id it has the new one."""
    with RewardPool(RewardSpec("exact_match"), 1) as pool:
        group = scorers(pool, CHARS)
        other = group.for_another()
        group.submit(samples(["a"]), questions(["a"]), "engine 0")
        other.submit(samples(["a"]), questions(["a"]), "engine 0")
        group.withdraw([0])
        group.submit(samples(["b"]), questions(["x"]), "engine 0")
        group.forward(at_once=True)
        group.withdraw([0])
        group.submit(samples(["a", "b"]), questions(["x", "b"]), "engine 0")
        while len(group._results) < 2:
            group.forward(at_once=True)
        group.withdraw([0])
        assert [(each.sample_id, each.score) for each in group.drain()] == [(1, 1.0)]
        assert [each.score for each in other.drain()] == [1.0]


def test_who_leaves_has_no_question_open_and_another_may_ask_under_the_same_ids():
    with RewardPool(RewardSpec("exact_match"), 1) as pool:
        group = scorers(pool, CHARS)
        before = group.for_another()
        before.submit(samples(["a"], 4), questions(["a"], 4), "engine 0")
        while not before._results:
            before.forward(at_once=True)
        before.submit(samples(["a"], 5), questions(["a"], 5), "engine 0")
        before.withdraw_all()
        after = group.for_another()
        after.submit(samples(["b"], 5), questions(["a"], 5), "engine 0")
        assert [(each.sample_id, each.score) for each in after.drain()] == [(5, 0.0)]
        assert before.drain() == [] and not group._exchange.askers


class Table(dict):
    """That nobody goes through."""

    def __iter__(self):
        raise AssertionError("all of it is gone through")

    items = values = keys = __iter__


class Queue(list):
    """The same."""

    __iter__ = Table.__iter__


def test_withdrawing_goes_through_nothing_but_what_is_withdrawn():
    with RewardPool(RewardSpec("exact_match"), 1) as pool:
        group = scorers(pool, CHARS)
        group.submit(samples(["a", "b", "c"]), questions(["a", "b", "c"]), "engine 0")
        exchange, channel = group._exchange, group.channels[0]
        exchange.askers = Table(dict(exchange.askers))
        channel.queued = Queue(channel.queued)
        group.withdraw([])
        group.withdraw([1, 7])
        exchange.askers, channel.queued = dict(dict.items(exchange.askers)), list.copy(channel.queued)
        assert [each.sample_id for each in group.drain()] == [0, 2]
