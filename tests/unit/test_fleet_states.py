"""Engines that are lost, started again and brought back: no event but the commit of proven current weights makes one
READY.
"""

import random

import pytest

from mrl.schedule.fleet import DEAD, READY, RETIRED, STALE, STARTING, SUSPECT, WINDOW, EngineStatus, Fleet

A, B = "engine 0", "engine 1"
NOW = 7  # version
# what leads from READY with version NOW to each status; one more than the limit of 1 to the last
WAYS = {
    READY: "",
    STALE: "verified",
    SUSPECT: "error",
    DEAD: "error exit",
    STARTING: "error exit start",
    RETIRED: "error exit start error exit start",
}
EVENTS = ("progress", "error", "exit", "started", "verified", "committed", "start")
# status and event of the engine's own epoch -> the next status, where it is another one
EDGES = {
    (READY, "error"): SUSPECT,
    (READY, "exit"): DEAD,
    (READY, "verified"): STALE,
    (STALE, "error"): SUSPECT,
    (STALE, "exit"): DEAD,
    (STALE, "committed"): READY,
    (SUSPECT, "exit"): DEAD,
    (DEAD, "start"): STARTING,
    (STARTING, "error"): SUSPECT,
    (STARTING, "exit"): DEAD,
    (STARTING, "started"): STALE,
}


def happen(fleet: Fleet, engine: str, event: str, epoch: int, version: int) -> None:
    """One event; what is no event of a status raises ValueError, or changes nothing."""
    if event == "start":
        fleet.start(engine)
    elif event in ("verified", "committed"):
        getattr(fleet, event)(engine, epoch, version)
    else:
        getattr(fleet, event)(engine, epoch)


def fleet_in(status: EngineStatus) -> Fleet:
    fleet = Fleet([A, B], limit=1, version=NOW)
    for event in WAYS[status].split():
        happen(fleet, A, event, fleet.epoch(A), NOW)
    assert fleet.status(A) is status
    return fleet


@pytest.mark.parametrize("status", EngineStatus)
def test_every_event_leads_where_the_drawing_has_it(status):
    for event in EVENTS:
        fleet = fleet_in(status)
        if event == "start" and status is not DEAD:
            with pytest.raises(ValueError, match=f"{A} is {status.name}, not DEAD"):
                happen(fleet, A, event, fleet.epoch(A), NOW)
        else:
            happen(fleet, A, event, fleet.epoch(A), NOW)
        assert fleet.status(A) is EDGES.get((status, event), status), event
        assert fleet.status(B) is READY and fleet.version == NOW


@pytest.mark.parametrize("status", EngineStatus)
def test_what_another_epoch_says_changes_nothing(status):
    for event in EVENTS[:-1]:
        fleet = fleet_in(status)
        for epoch in (fleet.epoch(A) - 1, fleet.epoch(A) + 1):
            happen(fleet, A, event, epoch, NOW)
            assert fleet.status(A) is status, event
        assert fleet.counts["late"] == (2 if event == "progress" else 0)


def test_a_commit_needs_the_proof_of_the_same_version_since_it_last_served():
    fleet = fleet_in(STARTING)
    fleet.started(A, 1)
    with pytest.raises(ValueError, match="committed version 7, and None was verified"):
        fleet.committed(A, 1, NOW)
    fleet.verified(A, 1, NOW)
    with pytest.raises(ValueError, match="committed version 8, and 7 was verified"):
        fleet.committed(A, 1, NOW + 1)
    assert fleet.status(A) is STALE and fleet.serving() == {B: 0}
    assert fleet.committed(A, 1, NOW) and fleet.serving() == {A: 1, B: 0}
    fleet.verified(A, 1, NOW + 1)
    fleet.error(A, 1)
    fleet.exit(A, 1)
    with pytest.raises(ValueError, match="brought to version 6, but version 7 is current"):
        fleet.verified(B, 0, NOW - 1)


def test_who_missed_a_version_is_stale_and_still_has_its_requests():
    fleet = Fleet([A, B], limit=1)
    for name in (A, B):
        fleet.verified(name, 0, 1)
    fleet.committed(A, 0, 1)
    assert (fleet.status(A), fleet.status(B), fleet.version) == (READY, STALE, 1)
    assert fleet.serving() == {A: 0, B: 0}
    fleet.verified(A, 0, 2), fleet.committed(A, 0, 2)
    with pytest.raises(ValueError, match="comes after 2"):
        fleet.committed(B, 0, 1)
    assert fleet.status(B) is STALE


def test_restarts_are_counted_within_the_last_steps_and_the_run_ends_below_the_least():
    fleet, versions = Fleet([A, B], limit=2, least=1), (5, 50, 106)
    for version in versions:
        fleet.advance(version)
        fleet.exit(A, fleet.epoch(A), "killed")
        assert fleet.start(A) is not None, "the one at 5 is more than WINDOW steps before 106"
    assert fleet.epoch(A) == 3 and versions[-1] - versions[0] > WINDOW > versions[-1] - versions[1]
    fleet.exit(A, 3, "killed once more")
    assert fleet.start(A) is None and fleet.shortage() is None
    fleet = Fleet([A, B], limit=0, least=2)
    fleet.exit(B, 0, "its node is gone")
    assert fleet.start(B) is None
    assert "1 of 2 engines are left, fewer than rollout.min_engines 2" in fleet.shortage()
    assert "more than 0 times in 100 steps (rollout.restart_limit); engine 1: its node is gone" in fleet.shortage()


@pytest.mark.parametrize("seed", range(20))
def test_random_events_make_nobody_ready_but_by_a_proven_commit(seed):
    """A ledger beside the machine knows what each engine's process holds."""
    rng = random.Random(seed)
    fleet = Fleet([A, B], limit=rng.randint(0, 3), version=0)
    proven: dict[str, int | None] = {A: 0, B: 0}
    for _ in range(1000):
        engine, event = rng.choice((A, B)), rng.choice(EVENTS)
        epoch = fleet.epoch(engine) - (rng.random() < 0.2)
        version = fleet.version + rng.choice((0, 0, 1))
        before = fleet.status(engine), fleet.status(B if engine == A else A)
        try:
            happen(fleet, engine, event, epoch, version)
        except ValueError:
            assert (fleet.status(engine), fleet.status(B if engine == A else A)) == before, "refused, and changed"
            continue
        if event == "verified" and epoch == fleet.epoch(engine) and before[0] in (READY, STALE):
            proven[engine] = version
        if fleet.status(engine) in (SUSPECT, DEAD, STARTING):
            proven[engine] = None
        if before[0] is not READY and fleet.status(engine) is READY:
            assert event == "committed" and epoch == fleet.epoch(engine)
        for name in fleet.those(READY):
            assert proven[name] == fleet.version
        assert set(fleet.those(READY)) <= set(fleet.serving()) <= set(fleet.those(READY, STALE))


@pytest.mark.parametrize("status", EngineStatus)
def test_ranks_that_go_back_leave_nobody_serving_and_nobody_a_further_restart(status):
    fleet = fleet_in(status)
    restarts, epochs = list(fleet._engines[A].restarts), fleet.epoch(A)
    fleet.rewind(NOW - 2)
    assert fleet.version == NOW - 2 and fleet.serving() == {} and not fleet.those(READY)
    assert fleet.status(A) is (STALE if status is READY else status) and fleet.status(B) is STALE
    assert (fleet._engines[A].restarts, fleet.epoch(A)) == (restarts, epochs)
    with pytest.raises(ValueError, match="committed version 5, and None was verified"):
        fleet.committed(B, 0, NOW - 2)
    assert fleet.verified(B, 0, NOW - 2) and fleet.committed(B, 0, NOW - 2) and fleet.serving() == {B: 0}


def test_ranks_go_back_to_a_checkpoint_that_no_engine_has_served():
    """It was saved behind an update, and the only engine was lost before the sync."""
    fleet = fleet_in(DEAD)
    fleet.rewind(NOW + 1)
    assert fleet.version == NOW + 1 and fleet.serving() == {} and fleet.status(B) is STALE
    assert fleet.verified(B, 0, NOW + 1) and fleet.committed(B, 0, NOW + 1) and fleet.serving() == {B: 0}


def test_engines_in_the_place_of_others_have_no_restart_more():
    before = fleet_in(STARTING)
    again = Fleet([A, B], limit=1)
    again.spent_before(before)
    for name in (A, B):
        again.exit(name, 0)
    assert again.start(A) is None and again.status(A) is RETIRED, "it was started once before"
    assert again.start(B) == 1
    assert before.status(A) is STARTING


def test_who_was_given_up_stays_so_in_the_place_of_before():
    again = Fleet([A, B], limit=1)
    again.spent_before(fleet_in(RETIRED))
    assert again.those(RETIRED) == [A] and again.serving() == {B: 0}


def test_restarts_of_an_earlier_start_of_the_run_are_spent():
    fleet = Fleet([A, B], limit=2, version=150)
    for version in (40, 120, 149):
        fleet.spent_at(A, version)
    fleet.exit(A, 0)
    assert fleet.start(A) is None, "two in the last hundred steps"
    for version in (40, 149):
        fleet.spent_at(B, version)
    fleet.exit(B, 0)
    assert fleet.start(B) == 1, "the other one is too long ago"


@pytest.mark.parametrize("status", EngineStatus)
def test_a_start_with_everything_else_is_one_of_an_engines_restarts(status):
    fleet = fleet_in(status)
    spent = len(fleet._engines[A].restarts)
    if status is RETIRED:
        assert not fleet.charge(A, "silent")
    elif status is STARTING:
        assert fleet.charge(A, "silent") and len(fleet._engines[A].restarts) == spent, "it was charged as it was lost"
    else:
        left = fleet.limit - spent
        assert fleet.charge(A, "silent") is (left > 0)
