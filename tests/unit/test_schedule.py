"""Which groups are issued, by which weights, what becomes of them: numbers worked by hand.
test_fleet.py has all of it at work.
"""

import json
import random

import pytest

from mrl.errors import DataError
from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.groups import Counts, State, Tally
from mrl.schedule.ledger import Ledger, begun_at, check_goes_on, reissued, restored, snapshot
from mrl.schedule.staleness import Schedule, request_end, version_of, violations


def schedule(**rules) -> Schedule:
    """Two groups a step, of two responses of at most 10 tokens, one update behind at most."""
    return Schedule(**{**dict(batch=2, responses=2, max_tokens=10, max_staleness=1), **rules})


def respond(buffer: GroupBuffer, number: int, *lengths: int) -> None:
    """A group gets all its responses."""
    buffer.start(number)
    for index, length in enumerate(lengths or (3, 4)):
        buffer.add(number, index, length, ended=True)


def complete(buffer: GroupBuffer, number: int, *lengths: int) -> None:
    """A group gets all its responses and their rewards."""
    respond(buffer, number, *lengths)
    buffer.finish(number)


def numbers(groups) -> list[int]:
    return [group.number for group in groups]


# ---------------------------------------------------------------- staleness


def test_the_limit_counts_trained_groups():
    rules = schedule(batch=4, max_staleness=2)
    assert [rules.issue_limit(step) for step in (0, 1, 10)] == [12, 16, 52]
    assert rules.admitted == 12


@pytest.mark.parametrize(
    ("rules", "quota"),
    [(dict(max_staleness=0), 10), (dict(max_staleness=1, partial_rollouts=True), 10),
        (dict(max_staleness=3, partial_rollouts=True), 4),
     (dict(max_staleness=3), 10), (dict(max_staleness=2, partial_rollouts=True, segment_tokens=3), 3)],
)  # fmt: skip
def test_by_default_the_last_weights_have_nothing_left_to_make(rules, quota):
    assert schedule(**rules).quota == quota


REFUSED = {
    "buffer_groups": dict(buffer_groups=1),
    "buffer_groups in_order": dict(buffer_groups=3),
    "concurrency": dict(concurrency=0),
    "partial_rollouts": dict(max_staleness=0, partial_rollouts=True),
    "segment_tokens": dict(partial_rollouts=True, segment_tokens=0),
}


@pytest.mark.parametrize(("name", "rules"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_the_reason_and_one_value_that_can(name, rules):
    found = list(violations(schedule(**rules)))
    assert [violation.field for violation in found] == [name.split()[0]] and found[0].why
    assert not list(violations(schedule(**{**rules, found[0].field: found[0].allowed[0]})))


def test_ready_first_needs_no_more_places_than_a_batch():
    assert not list(violations(schedule(order="ready_first", buffer_groups=2)))


def test_the_bound_is_told_with_what_exists_at_once():
    text = schedule(batch=32, responses=8, max_staleness=2, concurrency=4096).bound()
    assert (
        "(2 + s + 1) x 32" in text and "96 exist at once (768 responses, of 4,096 that engines have room for)" in text
    )


# ---------------------------------------------------------------- borders


def test_every_quota_of_tokens_is_of_the_next_version_until_the_step_that_trains():
    assert [version_of(token, 5, 7, 4) for token in range(14)] == [5] * 4 + [6] * 4 + [7] * 6
    assert [version_of(token, 5, 5, 4) for token in range(14)] == [5] * 14


def test_requests_end_at_multiples_of_the_quota_whichever_weights_make_them():
    assert [request_end(kept, 4, 14) for kept in (0, 3, 4, 8, 12, 13)] == [4, 4, 8, 12, 14, 14]
    assert request_end(0, 14, 14) == 14


# ---------------------------------------------------------------- buffer


def live_step(buffer: GroupBuffer, rng: random.Random) -> None:
    """Something that may happen to a buffer: a response goes on or ends, a group is judged or lost, a step goes on."""
    if rng.random() < 0.1:
        buffer.evict(rng.choice(list(buffer.groups)), "failed")
    elif buffer.is_training:
        buffer.drop_rest()
        buffer.advance()
    elif not buffer.take() and (open_ones := [g for g in buffer.groups.values() if g.state is not State.FINISHED]):
        group = rng.choice(open_ones)
        buffer.start(group.number)
        index = rng.randrange(len(group.ended))
        if not group.ended[index]:
            buffer.add(group.number, index, 1, ended=rng.random() < 0.5 or group.lengths[index] == 9)
        elif group.is_whole:
            rng.choice([buffer.finish, buffer.finish, buffer.filter])(group.number)


@pytest.mark.parametrize(
    "rules",
    [dict(max_staleness=0), dict(), dict(max_staleness=2), dict(order="ready_first", buffer_groups=4),
     dict(order="ready_first", on_stale="requeue")],
    ids=str,
)  # fmt: skip
def test_what_has_arrived_is_counted_as_a_sum_over_all_groups_has_it(rules):
    buffer, rng = GroupBuffer(schedule(**rules)), random.Random(0)
    for _ in range(500):
        buffer.reserve()
        live_step(buffer, rng)
        groups = list(buffer.groups.values())
        first = groups if buffer.schedule.is_synchronous else groups[:2]
        assert (buffer.progress.size, buffer.progress.ended) == (len(first), sum(sum(group.ended) for group in first))
        trained = groups[:2] if buffer.schedule.order == "in_order" else groups
        assert buffer.lacks_responses == (sum(all(group.ended) for group in trained) < 2)
    assert buffer.step > 5, "else little was taken"


def issued(buffer: GroupBuffer) -> list[tuple[int, int]]:
    """(number, version it begins with)."""
    return [(group.number, group.begun) for group in buffer.reserve()]


def test_in_order_each_version_issues_a_batch_and_each_step_takes_the_next_numbers():
    buffer = GroupBuffer(schedule())
    assert issued(buffer) == [(0, 0), (1, 0), (2, 0), (3, 0)] and issued(buffer) == []
    for number in (3, 2, 1):
        complete(buffer, number)
    assert buffer.take() is None  # three are finished, and 0 is not
    complete(buffer, 0)
    assert [buffer.is_next(number) for number in range(4)] == [True, True, False, False]
    assert numbers(buffer.take()) == [0, 1] and issued(buffer) == []
    assert not any(map(buffer.is_next, range(4))), "whoever is not in this batch is made by later weights"
    assert buffer.advance() == []
    assert issued(buffer) == [(4, 1), (5, 1)]
    assert numbers(buffer.take()) == [2, 3]


def test_in_order_the_next_number_takes_the_place_of_one_that_is_dropped_and_a_later_version_issues_another():
    buffer = GroupBuffer(schedule())
    buffer.reserve()
    buffer.evict(0, "filtered")
    assert buffer.is_next(2) and not buffer.is_next(3) and issued(buffer) == []
    for number in (1, 2):
        complete(buffer, number)
    assert numbers(buffer.take()) == [1, 2]
    buffer.advance()
    assert issued(buffer) == [(4, 1), (5, 1), (6, 1)]
    assert buffer.is_next(3) and buffer.is_next(4) and not buffer.is_next(5)


def test_in_order_what_a_step_lacks_even_so_is_issued_at_once():
    buffer = GroupBuffer(schedule())
    buffer.reserve()
    for number in (2, 0, 3):
        buffer.evict(number, "filtered")
    assert issued(buffer) == [(4, 0)] and issued(buffer) == []
    for number in (4, 1):
        complete(buffer, number)
    assert numbers(buffer.take()) == [1, 4] and issued(buffer) == []


def draws(**changes) -> GroupBuffer:
    """Of a step of 2 groups, in two draws of 3 at most."""
    made = dict(max_staleness=0, whole_batches=True, draw=3, most_draws=2)
    return GroupBuffer(schedule(**made | changes))


def test_a_synchronous_step_that_lacks_groups_issues_whole_draws_and_drops_what_it_has_too_many():
    buffer = draws()
    assert issued(buffer) == [(0, 0), (1, 0), (2, 0)] and issued(buffer) == []
    for number in (0, 1):
        respond(buffer, number)
        assert buffer.filter(number) == [number]
    assert issued(buffer) == [(3, 0), (4, 0), (5, 0)] and issued(buffer) == []
    for number in (3, 2):
        complete(buffer, number)
    assert numbers(buffer.take()) == [2, 3] and not buffer.is_exhausted
    assert buffer.drop_rest() == [4, 5] and not buffer.groups
    assert {cause: tally.groups for cause, tally in buffer.counts.dropped.items()} == {"filtered": 2, "surplus": 2}
    assert buffer.advance() == [] and issued(buffer) == [(6, 1), (7, 1), (8, 1)]


@pytest.mark.parametrize(("on_exhausted", "trained"), [("error", None), ("partial", [4]), ("unfiltered", [4, 0])])
def test_a_step_whose_draws_are_used_up_makes_do_with_what_there_is(on_exhausted, trained):
    buffer = draws(on_exhausted=on_exhausted)
    buffer.reserve()
    gone = []
    for number in (2, 0, 1, 3, 5):
        buffer.reserve()
        assert buffer.take() is None and not buffer.is_exhausted
        respond(buffer, number)
        gone += buffer.filter(number)
    complete(buffer, 4)
    assert buffer.reserve() == [] and buffer.is_exhausted
    assert gone == ([2, 3, 5] if on_exhausted == "unfiltered" else [2, 0, 1, 3, 5]), "the first two may fill a step"
    taken = buffer.take()
    assert (taken and numbers(taken)) == trained
    if taken:
        assert not buffer.is_exhausted and buffer.is_training
        buffer.drop_rest()
        assert buffer.advance() == [] and [number for number, _ in issued(buffer)] == [6, 7, 8]
        assert buffer.frontier == 6 and not buffer.settled


def test_a_run_whose_checkpoint_knows_its_place_alone_goes_on_with_the_next_number():
    buffer = begun_at(3, 12, schedule(max_staleness=0))
    assert issued(buffer) == [(12, 3), (13, 3)] and buffer.frontier == 12
    for number in (12, 13):
        complete(buffer, number)
    assert numbers(buffer.take()) == [12, 13] and buffer.advance() == [] and buffer.step == 4


def test_ready_first_takes_what_is_ready_the_oldest_first_and_refills_exactly_what_was_evicted():
    buffer = GroupBuffer(schedule(order="ready_first"))
    assert numbers(buffer.reserve()) == [0, 1, 2, 3]
    buffer.start(0)
    buffer.evict(1, "failed")
    assert numbers(buffer.reserve()) == [4]
    for number in (4, 3):
        complete(buffer, number)
    assert numbers(buffer.take()) == [3, 4] and buffer.reserve() == []
    buffer.advance()
    assert numbers(buffer.reserve()) == [5, 6]
    for number in (5, 2, 0):
        complete(buffer, number)
    assert numbers(buffer.take()) == [0, 2]  # 0 was begun before the two of now


@pytest.mark.parametrize("on_stale", ["requeue", "drop"])
def test_what_is_too_old_is_dropped_or_begins_anew_under_its_number(on_stale):
    buffer = GroupBuffer(schedule(order="ready_first", on_stale=on_stale))
    for _ in range(2):
        buffer.reserve()
        buffer.start(0)
        buffer.add(0, 0, 4, ended=False)
        for number in sorted(set(buffer.groups) - {0})[:2]:
            complete(buffer, number)
        buffer.take()
        stale = buffer.advance()
    assert stale == [0]
    if on_stale == "drop":
        assert 0 not in buffer.groups and buffer.counts.dropped == {"stale": Tally(1, 1, 8)}
    else:
        assert buffer.groups[0].attempts == 1
        assert buffer.groups[0].begun is None and buffer.counts.requeued == Tally(1, 1, 8)
    buffer.reserve()
    assert len(buffer.groups) == 4


def test_a_group_that_is_always_slow_is_waited_for_when_it_comes_again():
    buffer = GroupBuffer(schedule(batch=1, order="ready_first"))
    for step in range(2):
        assert {group.number for group in buffer.reserve()} or step
        buffer.start(0)
        quick = max(buffer.groups)
        complete(buffer, quick)
        assert numbers(buffer.take()) == [quick]
        assert buffer.advance() == ([0] if step else [])
    buffer.reserve()
    buffer.start(0)
    complete(buffer, max(buffer.groups))
    buffer.take(), buffer.advance(), buffer.reserve()
    complete(buffer, max(buffer.groups))
    assert buffer.take() is None  # step 3, and 0 was begun at 2: it would be stale at 4
    buffer.add(0, 0, 1, True), buffer.add(0, 1, 1, True), buffer.finish(0)
    assert numbers(buffer.take()) == [0]


def test_ready_first_the_oldest_tokens_go_first_whatever_their_groups_numbers():
    buffer = GroupBuffer(schedule(batch=1, max_staleness=2, order="ready_first"))
    buffer.reserve()
    for number in (1, 3):
        if number == 3:
            buffer.start(2)
        complete(buffer, number)
        assert numbers(buffer.take()) == [number]
        buffer.advance()
        buffer.reserve()
    complete(buffer, 0)  # by version 2; group 2 began with version 1
    for index in range(2):
        buffer.add(2, index, 3, ended=True)
    buffer.finish(2)
    assert numbers(buffer.take()) == [2]


def test_a_batch_is_in_the_order_of_numbers_whichever_was_older():
    buffer = GroupBuffer(schedule(batch=2, max_staleness=2, order="ready_first"))
    buffer.reserve()
    buffer.start(5)
    for number in (1, 2):
        complete(buffer, number)
    assert numbers(buffer.take()) == [1, 2]
    buffer.advance()
    complete(buffer, 0)  # by version 1; group 5 began with version 0
    for index in range(2):
        buffer.add(5, index, 3, ended=True)
    buffer.finish(5)
    assert numbers(buffer.take()) == [0, 5]


def test_the_frontier_is_the_oldest_that_is_not_settled():
    buffer = GroupBuffer(schedule())
    buffer.reserve()
    assert buffer.frontier == 0
    buffer.evict(1, "failed")
    buffer.evict(2, "failed")
    assert (buffer.frontier, buffer.settled) == (0, {1, 2})
    buffer.evict(0, "failed")
    assert (buffer.frontier, buffer.settled) == (3, set())


def test_drops_are_counted_by_cause_with_their_length_beside_what_was_kept():
    buffer = GroupBuffer(schedule())
    buffer.reserve()
    complete(buffer, 0, 2, 4)
    buffer.start(1)
    buffer.add(1, 0, 9, ended=False)  # the other response has no token yet
    buffer.evict(1, "failed")
    complete(buffer, 2, 10, 10)
    buffer.evict(2, "filtered")
    complete(buffer, 3, 1, 1)
    assert numbers(buffer.take()) == [0, 3]
    assert buffer.counts == Counts(Tally(2, 4, 8), {"failed": Tally(1, 1, 9), "filtered": Tally(1, 2, 20)}, Tally())
    assert (buffer.counts.kept.mean_length, buffer.counts.dropped["filtered"].mean_length) == (2.0, 10.0)


ILLEGAL = {
    "finished without its responses": lambda buffer: (buffer.start(0), buffer.finish(0)),
    "tokens before it was started": lambda buffer: buffer.add(0, 0, 1, True),
    "more tokens than allowed": lambda buffer: (buffer.start(0), buffer.add(0, 0, 11, True)),
    "a token after the end": lambda buffer: (buffer.start(0), buffer.add(0, 0, 1, True), buffer.add(0, 0, 1, True)),
    "another version without a batch": lambda buffer: buffer.advance(),
    "two batches for a step": lambda buffer: [complete(buffer, n) for n in range(4)] and (buffer.take(), buffer.take()),
}


@pytest.mark.parametrize("act", ILLEGAL.values(), ids=ILLEGAL)
def test_what_makes_no_sense_is_an_error(act):
    buffer = GroupBuffer(schedule())
    buffer.reserve()
    with pytest.raises(ValueError):
        act(buffer)


# ---------------------------------------------------------------- ledger


def half_done() -> GroupBuffer:
    """After one step: 0 and 1 trained on, 2 dropped, 3 with tokens, 4 and 5 and 6 issued."""
    buffer = GroupBuffer(schedule())
    buffer.reserve()
    complete(buffer, 0)
    complete(buffer, 1)
    buffer.take()
    buffer.advance()
    buffer.reserve()
    buffer.start(3)
    buffer.add(3, 1, 5, ended=False)
    buffer.evict(4, "failed")
    return buffer


def test_a_ledger_goes_through_json_and_gives_the_same_run_again():
    buffer = half_done()
    ledger = Ledger.from_json(json.loads(json.dumps(snapshot(buffer).to_json())))
    assert (ledger.frontier, ledger.next_number, ledger.settled) == (2, 6, (4,))
    again = restored(ledger, schedule())
    assert again.groups[3].state is State.RESERVED and again.groups[3].lengths == [0, 5]
    for each in (buffer, again):
        complete(each, 2)
        each.start(3)
        each.add(3, 0, 1, ended=True)
        each.add(3, 1, 1, ended=True)
        each.finish(3)
        assert each.reserve() == [] and numbers(each.take()) == [2, 3]
        each.advance()
        assert issued(each) == [(6, 2), (7, 2), (8, 2)]
    assert again.counts == buffer.counts and again.settled == buffer.settled


def test_a_finished_group_stays_finished():
    buffer = half_done()
    complete(buffer, 2)
    again = restored(snapshot(buffer), schedule())
    complete(again, 3, 2, 0)
    assert numbers(again.take()) == [2, 3]


@pytest.mark.parametrize(("order", "begun"), [("in_order", 0), ("ready_first", 5)])
def test_a_group_that_was_sent_and_had_no_token_begins_with_the_weights_of_then(order, begun):
    """In order its first tokens are of version 0 whatever happens."""
    rules = schedule(order=order)
    buffer = GroupBuffer(rules)
    buffer.reserve()
    buffer.start(0)
    again = restored(snapshot(buffer), rules)
    again.step = 5
    again.start(0)
    assert again.groups[0].begun == begun


def judged(buffer: GroupBuffer, rng: random.Random) -> list[int]:
    """All that may be issued is judged until the step has its batch. Returns the numbers that were filtered."""
    filtered = []
    while True:
        buffer.reserve()
        for number in [n for n, group in buffer.groups.items() if group.state is State.RESERVED]:
            complete(buffer, number)
            if rng.random() < 0.4:
                filtered += buffer.filter(number)
        if buffer.take():
            return filtered


@pytest.mark.parametrize("order", ["in_order", "ready_first"])
def test_groups_that_were_dropped_for_rewards_of_before_live_again_and_none_is_lost_or_too_old(order):
    """A step of each buffer raises ValueError for a group in order that is too old for it."""
    seen = 0
    for seed in range(200):
        rng = random.Random(seed)
        rules = schedule(order=order, max_staleness=rng.randrange(1, 4), batch=rng.randrange(1, 5), max_tokens=10)
        buffer = GroupBuffer(rules)
        filtered: list[int] = []
        for _ in range(rng.randrange(1, 4)):
            filtered += judged(buffer, rng)
            last = buffer.next_number - 1
            buffer.advance()
        trained = set(range(last + 1)) - set(filtered) - set(buffer.groups)
        pending = [number for number in filtered if number > max(trained)]  # no step has reported them
        before = snapshot(buffer)
        ledger = Ledger.from_json(json.loads(json.dumps(reissued(before, pending).to_json())))
        live = [group.number for group in ledger.groups]
        assert len(live) <= max(rules.max_groups, len(before.groups)) and not set(live) & trained
        if order == "in_order":
            withdrawn = {number for number in [*pending, *buffer.groups] if number >= ledger.next_number}
            assert {*pending, *buffer.groups} - set(live) == withdrawn, "the data gives them again"
        seen += bool(pending)
        again = restored(ledger, rules)
        for _ in range(4):
            judged(again, rng)
            again.advance()
    assert seen > 20


def test_a_ledger_of_other_rules_is_refused_and_places_may_change():
    ledger = snapshot(half_done())
    with pytest.raises(DataError, match=r"max_staleness \(1 then, 2 now\)"):
        check_goes_on(ledger, schedule(max_staleness=2))
    check_goes_on(ledger, schedule(concurrency=7))
    assert restored(ledger, schedule(concurrency=7)).schedule.concurrency == 7


@pytest.mark.parametrize(
    "settled", [[], [4, 4], [4, 5], [4, 6]], ids=["lost", "twice", "settled and on its way", "never issued"]
)
def test_a_number_that_is_lost_or_doubled_in_the_file_is_found(settled):
    data = snapshot(half_done()).to_json() | {"settled": settled}
    with pytest.raises(DataError, match="damaged"):
        Ledger.from_json(data)


def test_no_ledger_is_taken_of_a_step_that_is_being_trained_on():
    buffer = half_done()
    complete(buffer, 2)
    complete(buffer, 3, 1, 1)
    buffer.take()
    with pytest.raises(ValueError, match="being trained on"):
        snapshot(buffer)
