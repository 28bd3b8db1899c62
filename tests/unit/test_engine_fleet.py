"""Engines as processes: every start of one that was lost is written down, so that no resume gives it another one."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from mrl.cluster import engine_fleet, rollout_group
from mrl.cluster.engine_fleet import EngineFleet
from mrl.cluster.process_logs import concerning
from mrl.cluster.rollout_group import EngineOrder, RolloutGroup
from mrl.cluster.seats import Seat, Seats
from mrl.config.deployment import Deployment
from mrl.config.load import load_config
from mrl.errors import EnvironmentFault, LostProcess
from mrl.record.attempts import attempt, read_attempts
from mrl.schedule.fleet import DEAD, READY, RETIRED, STALE, STARTING

A, B = "engine 0", "engine 1"


class World:
    """Two engines of one process each, without processes; an attempt of a run notes their starts."""

    def __init__(self, monkeypatch, notes, limit=3):
        self.ended, self.failures, self.now = [], [], 0.0
        processes = SimpleNamespace(
            names=[A, B], workers=[None, None], engine_ranks=1, end=self.ended.append,
            start_again=lambda engine: {f"engine {engine}": "started"}, note_devices=lambda engine: None,
        )  # fmt: skip
        monkeypatch.setattr(engine_fleet, "unwrap", self.unwrap)
        monkeypatch.setattr(engine_fleet.ray, "wait", lambda refs, num_returns, timeout: (self.there(refs), []))
        self.is_slow = False
        self.fleet = EngineFleet(processes, 60.0, clock=lambda: self.now)
        self.fleet.restart(limit, 1, notes.engine_restarted)
        self.states = self.fleet.states

    def there(self, refs):
        return [] if self.is_slow else refs

    def unwrap(self, ref, name, phase):
        if self.failures:
            raise self.failures.pop()

    def loses(self, engine):
        assert self.fleet.loses(lost(engine), self.fleet.epochs())

    def serve(self, version):
        """All that have started are brought to a version."""
        self.fleet.collect()
        engines = self.fleet.reached()
        self.fleet.proven(engines, version)
        self.fleet.committed(engines, version)


def lost(engine):
    return concerning(LostProcess(f"{engine} died"), engine)


def dies_as_it_serves(world):
    world.loses(A)


def dies_as_it_starts(world):
    world.loses(A)
    world.failures = [lost(A)]
    world.fleet.collect()


def is_too_slow_to_start(world):
    world.loses(A)
    world.is_slow = True
    world.now = 61.0
    world.fleet.collect()


def dies_before_it_serves(world):
    world.loses(A)
    world.fleet.collect()
    assert world.states.status(A) is STALE
    world.loses(A)


def dies_while_ranks_have_the_devices(world):
    world.fleet.hold_starts(lambda: None)
    world.loses(A)
    assert world.states.status(A) is DEAD
    world.fleet.allow_starts()
    world.fleet.collect()


def is_started_with_everything_else(world):
    world.fleet.charge(lost(A))


WAYS = {
    dies_as_it_serves: 1,
    dies_as_it_starts: 2,
    is_too_slow_to_start: 2,
    dies_before_it_serves: 2,
    dies_while_ranks_have_the_devices: 1,
    is_started_with_everything_else: 1,
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_resume_gives_no_restart_back(monkeypatch, tmp_path, way):
    with attempt(tmp_path, 0, {}) as notes:
        world = World(monkeypatch, notes, limit=WAYS[way])
        world.serve(7)
        way(world)
        assert len(world.states._engines[A].restarts) == WAYS[way], "the limit is spent"
    (first,) = read_attempts(tmp_path)
    assert first.engines_restarted == ((A, 7),) * WAYS[way]
    with attempt(tmp_path, 7, {}) as notes:
        resumed = World(monkeypatch, notes, limit=WAYS[way])
        resumed.fleet.spent_at(first.engines_restarted)
        resumed.serve(8)
        resumed.loses(A)
        assert resumed.states.status(A) is RETIRED and resumed.states.status(B) is READY
    assert read_attempts(tmp_path)[1].engines_restarted == (), "it was not started again"


def test_why_an_engine_was_started_again_is_written(monkeypatch, tmp_path):
    told = []
    world = World(monkeypatch, SimpleNamespace(engine_restarted=lambda *given: told.append(given)))
    world.serve(4)
    is_too_slow_to_start(world)
    assert told == [(A, 4, "engine 0 died"), (A, 4, "it did not start within 60 s")]
    assert world.states.status(A) is STARTING and world.ended == [0, 0]


class Group(RolloutGroup):
    """Engines whose actors stand for processes: they note what they are asked, and are on a node of their number."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def _worker(self, number):
        self.asked.append((self.names[number], "made"))
        return Actor(self.names[number], self.asked)


class Actor:
    def __init__(self, name, asked):
        self.name, self.asked = name, asked

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *arguments: self.answer(method))

    def answer(self, method):
        self.asked.append((self.name, method))
        return [(f"node of {self.name}", 0)] if method == "devices" else None


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Makes the engines of a run of two, and those in the place of `before`."""
    monkeypatch.setattr(rollout_group, "gather", lambda refs, *_: refs)
    monkeypatch.setattr(rollout_group, "check_same", lambda software: None)
    monkeypatch.setattr(Group, "asked", [])
    root = Path(__file__).parents[2]
    overrides = ["rollout.num_engines=2", "cluster.n_gpus_per_node=4"]
    config = load_config(root / "parallel_configs" / "tiny-moe" / "cpu.yaml", None, overrides).config
    settings = tuple(SimpleNamespace(name=name) for name in (A, B))
    order = EngineOrder(Deployment.of(config), settings, None, tmp_path)
    seats = Seats((Seat({}, {}, None),) * 2, lambda: None)

    def make(before=None):
        made = Group(order, seats, before=before)
        made.start()
        made.wait_started()
        return made

    return make


def test_an_engine_that_was_given_up_is_not_started_with_everything_else(groups):
    before = groups()
    before.end = lambda engine: None
    assert before.nodes == {A: f"node of {A}", B: f"node of {B}"}
    before.fleet.restart(0, 1)
    before.fleet.states.exit(A, 0, "killed")
    assert before.fleet.states.start(A) is None
    Group.asked.clear()
    again = groups(before)
    assert {name for name, _ in Group.asked} == {B}, "nobody waits for A, and no device is asked for it"
    assert again.fleet.states.those(RETIRED) == [A] and again.names_of(again.fleet.reached()) == [B]
    assert again.nodes == before.nodes, "plans of syncs know all seats"
    assert again.call("sleep") == [None]


def test_an_engine_that_came_back_on_a_node_with_other_software_is_lost_again_for_that(groups, monkeypatch):
    group = groups()
    monkeypatch.setattr(rollout_group.ray, "kill", lambda worker: None)
    monkeypatch.setattr(group, "_end_below", lambda name, processes: None)
    monkeypatch.setattr(engine_fleet.ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    monkeypatch.setattr(engine_fleet, "unwrap", lambda ref, name, phase: ref)
    checked = []

    def other_software(answers):
        checked.append(list(answers))
        raise EnvironmentFault("the nodes do not run the same software: mrl's sources is 1 on b and 2 here")

    monkeypatch.setattr(rollout_group, "check_same", other_software)
    group.fleet.restart(1, 1)
    group.fleet.loses(concerning(LostProcess("engine 0 died"), A), group.fleet.epochs())
    group.fleet.collect()
    assert checked == [[A]] and group.fleet.states.those(RETIRED) == [A]
    assert "mrl's sources is 1 on b" in group.fleet.states.why(A)


def test_restarts_of_engines_count_on_where_all_are_started_anew(groups):
    before = groups()
    before.fleet.restart(1, 1)
    before.fleet.states.exit(A, 0, "killed")
    before.fleet.states.start(A)
    again = groups(before)
    again.fleet.restart(1, 1)
    again.fleet.states.exit(A, 0, "killed again")
    assert again.fleet.states.start(A) is None
