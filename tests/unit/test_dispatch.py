"""Which response goes to which engine, how many at once, and who is late: numbers worked by hand.
test_fleet.py has all of it at work.
"""

import pytest

from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.dispatch import Dispatcher
from mrl.schedule.engine_loads import EngineLoads
from mrl.schedule.progress import ProgressWatch
from mrl.schedule.rate import Observation, Rate, RateRules
from mrl.schedule.staleness import Schedule


def schedule(**rules) -> Schedule:
    """Two groups a step, of two responses of at most 10 tokens, one update behind at most."""
    return Schedule(**{**dict(batch=2, responses=2, max_tokens=10, max_staleness=1), **rules})


# ---------------------------------------------------------------- dispatch


def dispatcher(rules: Schedule, engines: tuple[str, ...] = ("a", "b")) -> Dispatcher:
    """One with all its groups admitted, of prompts of 5 tokens."""
    made = Dispatcher(GroupBuffer(rules), list(engines))
    admit(made)
    return made


def admit(made: Dispatcher) -> None:
    for group in made.buffer.reserve():
        group.prompt_tokens = 5
        made.admit(group)


def test_a_response_waits_at_its_border_and_goes_on_with_the_next_weights():
    made = dispatcher(schedule(batch=1, responses=1, partial_rollouts=True, segment_tokens=4))
    first, second = made.assignments()
    assert (first.number, first.max_tokens) == (0, 4) and (second.number, second.max_tokens) == (1, 4)
    assert not made.may_change_weights
    made.answered(first.request, 4, stopped=False)
    (first,) = made.assignments()  # its step trains next, and the rest is of this version
    assert (first.kept, first.max_tokens) == (4, 4)
    made.answered(first.request, 3, stopped=True)
    made.buffer.finish(0)
    made.buffer.take()
    assert not made.may_change_weights  # 1 is not at its border
    made.answered(second.request, 4, stopped=False)
    assert made.may_change_weights and made.assignments() == []
    made.advance()
    (again,) = made.assignments()
    assert (again.number, again.kept, again.max_tokens, again.tokens) == (1, 4, 4, 13)


@pytest.mark.parametrize("cause", ["filtered", "quarantined"])
def test_in_order_who_takes_the_place_of_one_that_is_dropped_goes_on_at_once(cause):
    made = dispatcher(schedule(batch=1, responses=1, max_staleness=2, partial_rollouts=True, segment_tokens=4))
    sent = {each.number: each for each in made.assignments()}
    for number in (1, 2):
        made.answered(sent[number].request, 4, stopped=False)
    assert made.assignments() == []
    if cause == "filtered":
        assert [each.request for each in made.evict(0, cause)] == [sent[0].request]
    else:
        assert made.lose(sent[0].engine) == [sent[0]] and made.evict(0, cause) == []
    assert made.buffer.counts.dropped[cause].groups == 1
    assert [(each.number, each.kept) for each in made.assignments()] == [(1, 4)]


def test_the_budget_of_a_continuation_is_what_is_left_of_it():
    made = dispatcher(schedule(batch=1, responses=1, order="ready_first", partial_rollouts=True))
    sent = made.assignments()[0]
    made.answered(sent.request, 7, stopped=False)
    again = next(each for each in made.assignments() if each.number == sent.number)
    assert (again.kept, again.max_tokens) == (7, 3)
    assert made.answered(again.request, 3, stopped=False).is_whole
    with pytest.raises(ValueError, match="tokens"):
        dispatched = dispatcher(schedule())
        dispatched.answered(dispatched.assignments()[0].request, 11, stopped=True)


def test_in_order_half_a_segment_is_refused_and_none_of_it_begins_again():
    made = dispatcher(schedule(batch=1, responses=1, partial_rollouts=True, segment_tokens=4))
    sent = made.assignments()[1]
    with pytest.raises(ValueError, match="neither all nor none of 4"):
        made.answered(sent.request, 3, stopped=False)
    made = dispatcher(schedule(batch=1, responses=1, partial_rollouts=True, segment_tokens=4))
    sent = made.assignments()[1]
    made.answered(sent.request, 0, stopped=False)
    (again,) = made.assignments()
    assert (again.number, again.kept, again.max_tokens) == (sent.number, 0, 4)
    assert made.answered(again.request, 3, stopped=True).is_whole


def test_in_order_context_that_stands_at_a_border_goes_beyond_it_and_nothing_else_does():
    """By hand, segments of 3 tokens of 10: 2 sampled and 3 of context are 5, of the version after, up to 6."""
    rules = schedule(batch=1, responses=1, max_staleness=3, partial_rollouts=True, segment_tokens=3)
    made = dispatcher(rules)
    sent = made.assignments()[1]
    made.answered(sent.request, 5, stopped=False, context=3)
    assert sent.number not in [each.number for each in made.assignments()], "it waits for the next weights"
    for tokens, context, why in ((4, 0, "of 3 asked for"), (7, 3, "of 3 asked for"), (2, 0, "neither all nor none")):
        made = dispatcher(rules)
        with pytest.raises(ValueError, match=why):
            made.answered(made.assignments()[1].request, tokens, stopped=False, context=context)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"max_staleness": 0}, 4),
        ({"max_staleness": 0, "order": "ready_first"}, 0),
        ({}, 0),
        ({"partial_rollouts": True, "segment_tokens": 6}, 4),
        ({"order": "ready_first"}, 0),
        ({"order": "ready_first", "partial_rollouts": True}, 4),
    ],
)
def test_a_conversation_of_a_lost_engine_goes_on_after_its_last_turn_where_tokens_may_be_kept(rules, kept):
    """By hand: 3 sampled tokens and 1 of context, of 10, or of 6 up to the border."""
    made = dispatcher(schedule(batch=1, responses=1, **rules))
    sent = made.assignments()[0]
    group = made.answered(sent.request, 4, stopped=False, context=1)
    assert group.lengths == [kept] and not group.ended[0]
    again = next(each for each in made.assignments() if each.number == sent.number)
    assert (again.kept, again.max_tokens) == (kept, (6 if "segment_tokens" in rules else 10) - kept)


def test_who_was_handed_over_by_a_lost_engine_is_suspected_like_who_was_generating_there():
    """Group 0 is handed over between two turns, 1 is at its border, and 2 is still generating."""
    made = dispatcher(schedule(batch=1, responses=1, partial_rollouts=True, segment_tokens=6, max_staleness=2))
    sent = {each.number: each for each in made.assignments()}
    assert [sent[number].engine for number in range(3)] == ["a", "b", "a"]
    made.answered(sent[0].request, 4, stopped=False, context=1)
    made.answered(sent[1].request, 6, stopped=False)
    assert made.at(["a"]) == [0, 2] and made.at(["b"]) == [] and made.at(["a", "b"]) == [0, 2]
    made.lose("a")
    assert made.at(["a"]) == []


def test_who_was_handed_over_for_an_update_is_not_suspected_after_it():
    made = dispatcher(schedule(batch=1, responses=1, order="ready_first", partial_rollouts=True))
    sent = {each.engine: each for each in made.assignments()}
    made.answered(sent["a"].request, 6, stopped=False)
    assert made.at(["a"]) == [sent["a"].number]
    made.answered(sent["b"].request, 3, stopped=True)
    made.buffer.finish(sent["b"].number)
    made.take()
    made.advance()
    assert sent["a"].number in made.buffer.groups
    assert made.at(["a"]) == []


def test_no_more_than_the_window_is_under_way_and_who_is_due_first_goes_first():
    made = dispatcher(schedule(concurrency=3))
    sent = made.assignments()
    assert [(each.number, each.index) for each in sent] == [(0, 0), (0, 1), (1, 0)] and made.assignments() == []
    made.answered(sent[2].request, 1, stopped=True)
    assert [(each.number, each.index) for each in made.assignments()] == [(1, 1)]


def test_of_responses_that_are_due_together_the_longest_goes_on_first():
    made = dispatcher(schedule(batch=1, responses=3, partial_rollouts=True, order="ready_first"), ("a",))
    for each, tokens in zip(made.assignments(), (2, 6, 4), strict=False):
        made.answered(each.request, tokens, stopped=False)
    assert [(each.index, each.kept) for each in made.assignments()] == [(1, 6), (2, 4), (0, 2)]


def test_a_lost_engine_costs_the_tokens_that_had_not_come_back():
    made = dispatcher(schedule(batch=1, responses=1, order="ready_first", partial_rollouts=True))
    sent = {each.engine: each for each in made.assignments()}
    made.answered(sent["a"].request, 6, stopped=False)
    (on_a,) = made.assignments()
    assert made.lose(on_a.engine) == [on_a], "what is made again"
    again = made.assignments()
    assert {(each.number, each.kept) for each in again} >= {(on_a.number, 6)}
    assert made.answered(on_a.request, 4, stopped=True) is None, "the dead engine's answer came late"
    assert {each.engine for each in again} == {"b" if on_a.engine == "a" else "a"}
    made.lose("a"), made.lose("b")
    assert made.assignments() == []
    made.join("a")
    assert {each.engine for each in made.assignments()} <= {"a"}


def test_all_that_a_lost_engine_had_is_made_again_in_the_order_of_its_groups():
    made = dispatcher(schedule(batch=1, responses=3, max_staleness=0), ("a", "b"))
    sent = made.assignments()
    lost = [each for each in sent if each.engine == "a"]
    assert made.lose("a") == lost and not made.lacks_engines
    assert [(each.number, each.index, each.engine) for each in made.assignments()] == [
        (0, each.index, "b") for each in lost
    ]
    assert len(made.lose("b")) == 3 and made.lacks_engines and made.assignments() == []
    made.join("b")
    assert len(made.assignments()) == 3 and made.buffer.counts.dropped == {}


def test_stale_groups_requests_are_taken_back():
    made = dispatcher(schedule(batch=1, responses=1, max_staleness=0, order="ready_first"))
    (only,) = made.assignments()
    made.answered(only.request, 2, stopped=True)
    made.buffer.finish(0)
    made.buffer.take()
    made.advance()
    assert made.buffer.reserve()[0].number == 1

    made = dispatcher(schedule(batch=1, responses=1, order="ready_first", partial_rollouts=True, buffer_groups=2))
    slow, *_ = made.assignments()
    for step in range(2):
        quick = next(sent for sent in made.under_way.values() if sent.number != slow.number)
        made.answered(quick.request, 1, stopped=True)
        made.buffer.finish(quick.number)
        made.buffer.take()
        ended = made.advance()
        assert [each.request for each in ended] == ([slow.request] if step else [])
        admit(made)
        made.assignments()
    again = [sent for sent in made.under_way.values() if sent.number == slow.number]
    assert len(again) == 1 and again[0].request != slow.request and made.buffer.groups[slow.number].begun == 2


def test_with_new_weights_a_response_goes_on_where_least_waits_not_where_its_prefix_was():
    made = dispatcher(schedule(batch=1, responses=1, order="ready_first", partial_rollouts=True))
    first, second = made.assignments()
    assert (first.engine, second.engine) == ("a", "b")
    made.answered(first.request, 4, stopped=False)
    made.answered(second.request, 4, stopped=True)
    made.buffer.finish(second.number)
    made.buffer.take()
    made.advance()
    made.loads.tokens.update(a=1)
    assert [(each.number, each.engine) for each in made.assignments()] == [(first.number, "b")]


def test_weights_do_not_change_under_a_response_of_one_version():
    made = dispatcher(schedule(batch=1, responses=1, order="ready_first"))
    sent = made.assignments()
    made.is_open = False
    assert not made.may_change_weights
    for each in sent:
        made.answered(each.request, 2, stopped=True)
    assert made.may_change_weights
    with pytest.raises(ValueError, match="batch"):
        made.advance()


# ---------------------------------------------------------------- engines


def test_responses_of_a_prompt_stay_together_until_their_engine_has_half_as_much_again():
    loads = EngineLoads(["a", "b"])
    waiting = [10] * 10
    placed = []
    while waiting:
        placed.append(loads.assign(0, waiting[-1], sum(waiting)))
        waiting.pop()
    # the mean is 50: engine a has 75 or less before each of its first eight
    assert placed == ["a"] * 8 + ["b"] * 2


def test_a_new_prompt_goes_to_the_least_loaded_and_the_first_of_several():
    loads = EngineLoads(["a", "b", "c"])
    assert [loads.assign(prefix, tokens, tokens) for prefix, tokens in enumerate((5, 5, 3, 1, 1))] == [
        "a",
        "b",
        "c",
        "c",
        "c",
    ]
    loads.done("a", 5)
    assert loads.assign(9, 1, 1) == "a"
    loads.lose("a")
    assert loads.assign(9, 1, 1) in ("b", "c") and EngineLoads([]).assign(0, 1, 1) is None


def test_new_weights_leave_no_prefix_anywhere():
    loads = EngineLoads(["a", "b"])
    loads.assign(0, 6, 6)
    loads.assign(1, 2, 2)
    loads.forget_prefixes()
    assert loads.assign(0, 1, 1) == "b"


# ---------------------------------------------------------------- rate and progress


RULES = RateRules(lowest=2, highest=100)


def test_the_window_shrinks_at_once_and_grows_only_while_it_is_what_limits():
    full = Rate.start(RULES)
    shrunk = full.after(Observation(0.9, 0, 100))
    assert (full.window, shrunk.window) == (100, 80)
    assert full.after(Observation(0.1, 3, 100)).window == 80
    assert full.after(Observation(0.9, 0, 50)).window == 40, "of what is under way, not of what might be"
    assert shrunk.after(Observation(0.5, 0, 80)).window == 85
    assert shrunk.after(Observation(0.5, 0, 79)).window == 80
    assert shrunk.after(Observation(0.8, 0, 80)).window == 80
    assert Rate(RULES, 2.0).after(Observation(1.0, 9, 1)).window == 2


def test_a_cache_that_holds_60_keeps_the_window_about_there():
    rate, windows = Rate.start(RULES), []
    for _ in range(200):
        seen = Observation(min(1.0, rate.window / 60), int(rate.window > 60), rate.window)
        rate = rate.after(seen)
        windows.append(rate.window)
    assert min(windows[20:]) >= 30 and max(windows[20:]) <= 60


def test_a_long_generation_is_not_late_and_a_stopped_one_is():
    watch = ProgressWatch(limit_s=10)
    for now in range(0, 100, 5):
        watch.note("long", now, True, now)
        watch.note("stopped", min(now, 50), True, now)
        watch.note("idle", 7, False, now)
        assert watch.late(now) == (["stopped"] if now > 60 else [])
    watch.excuse(95)
    assert watch.late(100) == []
    watch.forget("stopped")
    assert watch.late(1000) == ["idle", "long"]
