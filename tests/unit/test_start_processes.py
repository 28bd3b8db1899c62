"""What a start of processes has made when one of them fails is ended, last first, and all that was reserved is free."""

from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.cluster import actor_group, rollout_group
from mrl.cluster.actor_group import ActorGroup, RankOrder
from mrl.cluster.rollout_group import EngineOrder, RolloutGroup
from mrl.cluster.seats import Seat, Seats
from mrl.config.load import load_config
from mrl.driver import assemble_processes
from mrl.driver.assemble_processes import ProcessOrder, start_processes
from mrl.model import known_spec
from mrl.reward.items import RewardSpec

TINY = Path(__file__).resolve().parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"
MODEL = known_spec("Qwen3-30B-A3B")


class Fails(Exception):
    pass


class World:
    """Stands in for all that a start makes: notes what is made and ended, and fails where it is told."""

    def __init__(self, monkeypatch, fails: str):
        self.events, self.fails = [], fails
        for name, made in (
            ("RolloutGroup", lambda order, seats, *_: self.group("engines")),
            ("ActorGroup", lambda order, seats, *_: self.group("ranks")),
            ("engine_seats", lambda deployment: self.note("engines' seats")),
            ("actor_seats", lambda cluster, layout: self.note("ranks' seats")),
            ("shared_seats", self.shared_seats),
            ("start_scorers", self.start_scorers),
            ("with_log_tails", lambda logs: nullcontext()),
        ):
            monkeypatch.setattr(assemble_processes, name, made)

    def note(self, event: str) -> None:
        self.events.append(event)
        if event == self.fails:
            raise Fails(event)

    def shared_seats(self, deployment):
        self.note("shared seats")
        return SimpleNamespace(ranks=None, engines=None, release=lambda: self.note("seats released"))

    def group(self, kind: str):
        def start(*_, meanwhile=lambda: None):
            self.note(f"{kind} start")
            meanwhile()

        return SimpleNamespace(
            nodes={}, start=start, stop=lambda: self.note(f"{kind} end"), call=lambda verb: self.note(verb),
            wait_started=lambda: self.note("engines serve"),
        )  # fmt: skip

    @contextmanager
    def start_scorers(self, order, nodes):
        self.note("scorers start")
        try:
            yield None
        finally:
            self.note("scorers end")


def start(placement: str) -> None:
    config = load_config(TINY, None, [f"cluster.placement={placement}"]).config
    order = ProcessOrder.of(config, MODEL, RewardSpec("exact_match"), Path("logs"))
    run_dir = SimpleNamespace(path=Path("run"), logs=Path("logs"))
    files = SimpleNamespace(run_dir=run_dir, poll=None, beginning=SimpleNamespace(checkpoint=None))
    with ExitStack() as kept, ExitStack() as own:
        start_processes(kept, own, order, files)


@pytest.mark.parametrize(
    ("placement", "fails", "ended"),
    [
        ("separate", "engines start", ["engines end"]),
        ("separate", "ranks' seats", ["engines end"]),
        ("separate", "ranks start", ["ranks end", "engines end"]),
        ("separate", "scorers start", ["ranks end", "engines end"]),
        ("separate", "engines serve", ["ranks end", "scorers end", "engines end"]),
        ("colocated", "engines start", ["engines end", "seats released"]),
        ("colocated", "sleep", ["scorers end", "engines end", "seats released"]),
        ("colocated", "ranks start", ["ranks end", "scorers end", "engines end", "seats released"]),
    ],
)
def test_what_stands_is_ended_wherever_a_start_fails(monkeypatch, placement, fails, ended):
    world = World(monkeypatch, fails)
    with pytest.raises(Fails):
        start(placement)
    assert world.events[world.events.index(fails) + 1 :] == ended


@pytest.fixture
def seats():
    """Two seats, and a list that tells whether they were released."""
    released = []
    return Seats((Seat({}, {}, None),) * 2, lambda: released.append(True)), released


@pytest.fixture
def second_fails(monkeypatch):
    """Ray makes one actor and fails at the second; a list of those that are killed."""
    made, killed = [], []

    def remote(*_):
        if made:
            raise Fails
        made.append("the first")
        return made[-1]

    kind = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote))
    for module in (actor_group, rollout_group):
        monkeypatch.setattr(module.ray, "remote", lambda *_, **__: kind if _ else lambda worker: kind)
        monkeypatch.setattr(module.ray, "kill", killed.append)
    return killed


def ranks(seats: Seats, tmp_path: Path) -> ActorGroup:
    return ActorGroup(RankOrder.of(load_config(TINY).config, MODEL), seats, tmp_path)


def engines(seats: Seats, tmp_path: Path) -> RolloutGroup:
    config = load_config(TINY, None, ["rollout.num_engines=2", "cluster.n_gpus_per_node=4"]).config
    return RolloutGroup(EngineOrder.of(config, MODEL, tmp_path), seats)


@pytest.mark.parametrize("make", [ranks, engines])
def test_what_was_never_started_gives_its_seats_back(seats, tmp_path, make):
    group = make(seats[0], tmp_path)
    assert group.workers == []
    group.stop()
    assert seats[1] == [True]


@pytest.mark.parametrize("make", [ranks, engines])
def test_processes_that_were_made_before_one_that_fails_are_ended(seats, second_fails, tmp_path, make):
    group = make(seats[0], tmp_path)
    with pytest.raises(Fails):
        group.start(*[None] * (make is ranks))
    group.stop()
    assert second_fails == ["the first"] and seats[1] == [True]
