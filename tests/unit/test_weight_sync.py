"""Faults of a weight sync: each is noticed and named, no engine serves a mixture, and the sync is done again once or
the run stops.

The driver, the plan, the transports and the digests are the real ones; ranks and engines are threads with plain
tensors.
"""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import RayTaskError
from reshard_world import DictWriter, World, end_of, expected, hf_weights, setup_for, shards_of

from mrl.cluster import engine_fleet, weight_sync
from mrl.cluster.calls import Late, LostPeer
from mrl.cluster.engine_fleet import EngineFleet
from mrl.cluster.process_logs import concerning, processes_of
from mrl.cluster.weight_sync import WeightSync
from mrl.engine.requests import VersionServed, rank_name
from mrl.errors import EnvironmentFault, Interrupted, LostProcess
from mrl.process.free_ports import free_port
from mrl.reshard.setup import SyncSetup
from mrl.reshard.transport import TransferError, sequence_number

TRAIN = dict(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=2)
REPLICAS = dict(world_size=2)


@dataclass
class Engine:
    """What VllmEngine is to the driver: it holds weights, and a version only after a commit."""

    number: int
    writer: DictWriter | None = None
    version: int | None = 0


class FakeCluster:
    """Ranks and engines behind the two group interfaces that WeightSync uses.

    Faults are put in by replacing its methods.
    """

    def __init__(self, setup: SyncSetup, weights: dict):
        self.setup, self.weights = setup, weights
        self.world: World | None = None
        self.agreed: list[SyncSetup] = []  # connections that are to be opened
        self.connecting = threading.Lock()
        self.connected: list[set[int]] = []  # workers, each time
        self.ranks = setup.rollout_layout.data  # of an engine, one worker each
        self.engines = [Engine(i) for i in range(setup.rollout_layout.num_engines * self.ranks)]
        self.held = {rank: shards_of(setup, rank, weights) for rank in range(setup.train_layout.world_size)}
        self.met_at: list[int] = []
        self.flip_storage = None  # engine whose storage is spoilt after the write
        names = [rank_name(*divmod(i, self.ranks), self.ranks) for i in range(len(self.engines))]
        self.ended: list[int] = []
        self.stopped: dict[str, str] = {}
        self.silent: set[str] = set()  # ranks that answer nothing
        self.given_up: list[str] = []  # by which rank, once for each connection
        processes = SimpleNamespace(
            names=names, workers=[None] * len(names), engine_ranks=self.ranks, end=self.ended.append,
            start_again=lambda engine: {"a start": "to come"}, note_devices=lambda engine: None,
        )  # fmt: skip
        self.fleet = EngineFleet(processes, 60.0)
        self.process_devices = {name: [("node", None)] for name in names}

    def actor(self) -> SimpleNamespace:
        return SimpleNamespace(refs=self._rank_refs, meeting_point=self.meeting_point)

    def group(self) -> SimpleNamespace:
        return SimpleNamespace(
            refs=self._engine_refs, commit=self.commit, call=lambda method, engines: None,
            check_there=lambda what, engines: None, fleet=self.fleet, process_devices=self.process_devices,
            names_of=lambda engines: [f"engine {engine}" for engine in sorted(engines)],
            not_running=lambda late: {name: reason for name, reason in self.stopped.items() if name in late},
        )  # fmt: skip

    def meeting_point(self, rank: int) -> str:
        self.met_at.append(rank)
        return f"127.0.0.1:{free_port()}"

    def _rank_refs(self, method, *arguments):
        if method == "connect_sync":  # ranks and engines meet together: see below
            return {}
        return {f"rank {r}": partial(getattr(self, method), r, *arguments) for r in self.held}

    def _engine_refs(self, method, *arguments, engines=None):
        chosen = [i for i in range(len(self.engines)) if engines is None or i // self.ranks in engines]
        if method == "connect_sync":
            return {"engine 0": partial(getattr(self, method), *arguments)} if chosen else {}
        return {
            rank_name(*divmod(i, self.ranks), self.ranks): partial(getattr(self, method), i, *arguments) for i in chosen
        }

    def devices(self, number):
        return [("node", None)]

    def agree_on_sync(self, number, data, plan_hash, keep=None) -> int | None:
        if keep is not None:  # a rank
            self.agreed = [SyncSetup.from_json(setup) for setup in data]
            if self.world:
                self.world.senders[number].keep(keep)
            return None
        setup = SyncSetup.from_json(data)
        setup.check_hash(plan_hash, "engine 0")
        return sum(p.numel() * 4 for p in expected(setup, number, self.weights).values())

    def connect_sync(self) -> None:
        with self.connecting:  # once for all engines
            if self.agreed:
                self.connected.append({worker for setup in self.agreed for worker in setup.workers})
                if self.world is None:
                    self.world = World(self.agreed[0], self.weights)
                    self.world.held = self.held
                    self.agreed.pop(0)
                self.world.connect(self.agreed)
                self.agreed = []

    def give_up_connecting(self, rank, names) -> None:
        assert names == [setup.transport["name"] for setup in self.agreed]
        self.given_up.append(f"rank {rank}")

    def write_stacks(self, rank) -> None:
        """Answers, as a rank that runs."""

    def answered(self, calls: dict) -> dict:
        return {name: call() for name, call in calls.items() if name not in self.silent}

    def send_weights(self, rank, update, workers, check_replicas) -> dict:
        return vars(self.world.senders[rank].send(update, workers, check_replicas))

    def receive_weights(self, engine, update, read_back) -> list:
        self.engines[engine].version = None
        worker = engine  # one worker an engine
        writer = self.engines[engine].writer = DictWriter(self.setup, worker)
        report = self.world.receivers[worker].receive(writer, update)
        if engine == self.flip_storage:
            self.flip_storage = None
            writer.tensors["model.norm.weight"].view(torch.int32)[5] ^= 1 << 20
        held = {name: writer.digest(spec) for name, spec in writer.parameters.items()} if read_back else None
        return [vars(report) | {"received": writer.digests, "held": held}]

    def commit(self, version, engines) -> VersionServed:
        for engine in self.engines:
            if engine.number // self.ranks in engines:
                engine.version = version
        self.fleet.committed(engines, version)
        return VersionServed(0, 0.5, 3 * version)

    def versions(self) -> list:
        return [engine.version for engine in self.engines]


def run_all(calls: dict, *_) -> dict:
    """As mrl.cluster.calls.settle: errors are answers."""

    def caught(call):
        try:
            return call()
        except EnvironmentFault:
            raise
        except Exception as error:
            return RuntimeError(str(error))

    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        return dict(zip(calls, pool.map(caught, calls.values()), strict=True))


@pytest.fixture
def cluster(monkeypatch):
    """A maker of (cluster, sync) whose transports are closed in the end."""
    made = []
    monkeypatch.setattr(weight_sync, "settle", run_all)
    monkeypatch.setattr(weight_sync, "gather", run_all)
    monkeypatch.setattr(engine_fleet.ray, "wait", lambda refs, num_returns, timeout: ([], refs))

    def make(
        engines=2, train=TRAIN, transport="shm", timeout_s=30.0, verify_every=1, **sizes
    ) -> tuple[FakeCluster, WeightSync]:
        setup = setup_for(train, dict(num_engines=engines, **sizes), transport, timeout_s=timeout_s)
        found = FakeCluster(setup, hf_weights(setup))
        reshard = SimpleNamespace(path="fast", transport=transport, verify_every=verify_every, timeout_s=timeout_s)
        deployment = SimpleNamespace(
            rollout=SimpleNamespace(num_engines=engines),
            layout=SimpleNamespace(world_size=train["world_size"]),
            cluster=SimpleNamespace(start_timeout_s=60.0, step_timeout_s=3600.0, model_fields_set=()),
        )
        sync = WeightSync(None, deployment, reshard, found.actor(), found.group())
        sync._setup = lambda topology: replace(setup, topology=topology)
        monkeypatch.setattr(weight_sync, "answered", found.answered)
        made.append(found)
        return found, sync

    yield make
    for one in made:
        if one.world:
            one.world.close()


def test_a_sync_has_all_the_time_once_and_then_what_its_peers_wait_for_each_other_and_a_minute(cluster, monkeypatch):
    world, sync = cluster(timeout_s=30.0)
    given, settled = [], weight_sync.settle

    def noting(calls, timeout_s, phase):
        given.append(timeout_s)
        return settled(calls)

    monkeypatch.setattr(weight_sync, "settle", noting)
    world.flip_storage = 1
    for version in (1, 2):
        sync.bring_to(version)
    assert given == [3600.0, 90.0, 90.0]
    sync._deadlines.ended(weight_sync.PHASE, 20.0)
    sync.bring_to(3)
    assert given[-1] == 200.0


@pytest.mark.parametrize("late", [("engine 1",), ("rank 0",), ("engine 0", "rank 1")])
def test_ranks_are_asked_where_they_are_only_if_one_of_them_is_late(cluster, monkeypatch, late):
    _, sync = cluster()
    sync.bring_to(1)
    asked = []

    def missed(*_):
        raise concerning(Late("weight sync: no answer"), *late)

    def told(error, refs):
        asked.append(processes_of(error))
        return error

    monkeypatch.setattr(weight_sync, "settle", missed)
    monkeypatch.setattr(weight_sync, "with_cause", told)
    with pytest.raises(Late) as raised:
        sync._move({0, 1}, read_back=False)
    assert raised.value.processes == late
    assert asked == [late] * any(name.startswith("rank ") for name in late)


def test_where_all_wait_for_an_engine_that_is_stopped_it_alone_is_lost_and_the_others_are_synced(cluster, monkeypatch):
    world, sync = cluster()
    world.fleet.restart(3, 1)
    sync.bring_to(1)
    settled = weight_sync.settle

    def all_are_late(calls, *_):
        monkeypatch.setattr(weight_sync, "settle", settled)
        raise concerning(Late("weight sync: no answer"), *calls)

    monkeypatch.setattr(weight_sync, "settle", all_are_late)
    monkeypatch.setattr(weight_sync, "with_cause", lambda *_: pytest.fail("no rank is the cause"))
    world.stopped = {"engine 1": "VLLM::EngineCore (process 7) is stopped", "engine 7": "it does not answer"}
    assert sync.bring_to(2)["reshard/engines"] == 1
    assert world.ended == [1] and world.fleet.states.why("engine 1").endswith(
        "; engine 1: VLLM::EngineCore (process 7) is stopped"
    )
    assert world.fleet.serving().keys() == {"engine 0"} and holds(world, 0)


@pytest.fixture
def connecting(cluster, monkeypatch):
    """A maker of (cluster, sync) whose next connection is given up, with the error."""

    def make(error: Exception, **sizes) -> tuple[FakeCluster, WeightSync]:
        world, sync = cluster(**sizes)
        world.fleet.restart(3, 1)

        def fails_once(calls, timeout_s, phase):
            if phase != "connecting the weight sync":
                return run_all(calls)
            monkeypatch.setattr(weight_sync, "gather", run_all)
            raise error

        monkeypatch.setattr(weight_sync, "gather", fails_once)
        return world, sync

    return make


NO_ARENA = RayTaskError("connect_sync", "Traceback ...", TransferError("worker 1 did not make its arena within 300 s"))
BY_P2P = EnvironmentFault("engine 0 cannot take weights by the plan: it did not connect; reshard.path: slow goes")
NOT_MET = LostPeer("connecting the weight sync: the ranks lost each other, as rank 0 saw (connection refused)")
EVERYBODY = concerning(Late("connecting the weight sync: no answer"), *(f"rank {i}" for i in range(4)), "engine 1")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NO_ARENA, "connecting the weight sync: worker 1 did not make its arena within 300 s"),
        *((error, str(error)) for error in (BY_P2P, NOT_MET, EVERYBODY)),
    ],
    ids=["shm", "p2p", "gloo", "all are late"],
)
def test_an_engine_that_stops_as_it_connects_is_lost_whatever_its_peers_say_of_it(connecting, monkeypatch, error, said):
    monkeypatch.setattr(weight_sync, "with_cause", lambda *_: pytest.fail("no rank is the cause"))
    world, sync = connecting(error)
    world.stopped = {"engine 1": "it does not answer"}
    assert sync.bring_to(2)["reshard/engines"] == 1
    assert world.ended == [1] and holds(world, 0) and world.versions() == [2, 0]
    assert world.fleet.states.why("engine 1") == f"{said}; engine 1: it does not answer"
    assert world.given_up == [f"rank {rank}" for rank in range(4)], "no rank waits on"


def test_no_rank_waits_for_an_engine_that_is_killed_as_it_connects(connecting):
    world, sync = connecting(concerning(LostProcess("connecting the weight sync: engine 1 died"), "engine 1"))
    assert sync.bring_to(2)["reshard/engines"] == 1
    assert world.given_up == [f"rank {rank}" for rank in range(4)]
    assert world.ended == [1] and holds(world, 0)


@pytest.mark.parametrize("error", [NO_ARENA, BY_P2P])
def test_a_rank_that_stops_as_it_connects_is_named_and_no_engine_falls_for_it(connecting, error):
    world, sync = connecting(error)
    world.silent = {"rank 2"}
    with pytest.raises(Late, match=r"did not .*; rank 2: it did not even write its stacks$") as raised:
        sync.bring_to(2)
    assert raised.value.processes == ("rank 2",) and world.ended == []


@pytest.mark.parametrize("error", [NO_ARENA, BY_P2P])
def test_where_all_run_that_cannot_connect_the_error_is_what_it_was(connecting, error):
    world, sync = connecting(error)
    with pytest.raises(type(error)) as raised:
        sync.bring_to(2)
    assert raised.value is error and world.ended == []


@pytest.mark.parametrize(("transport", "wait_s"), [("shm", 0.0), ("p2p", 30.0)])
def test_engines_are_known_to_wait_for_ranks_that_are_gone_where_no_shared_memory_tells_them(
    cluster, transport, wait_s
):
    _, sync = cluster(engines=1, transport=transport, timeout_s=30.0)
    sync.bring_to(1)
    assert sync.engines.peers_wait_s == wait_s


def holds(cluster: FakeCluster, engine: int) -> bool:
    """The engine holds exactly the trainer's weights."""
    wanted = expected(cluster.setup, engine, cluster.weights)
    return all(torch.equal(cluster.engines[engine].writer.tensors[name], wanted[name]) for name in wanted)


def once(method, spoil):
    """`method` whose first call goes through `spoil(method, *arguments)`."""
    calls = []

    def replaced(*arguments):
        calls.append(arguments)
        return spoil(method, *arguments) if len(calls) == 1 else method(*arguments)

    return replaced


def be_impatient(world: World) -> None:
    """Until transports are opened again nobody waits long, receivers least:
    so they complain before the sender that they wait for.
    """
    for sides, seconds in ((world.senders, 1.6), (world.receivers, 0.6)):
        for side in sides.values():
            for end in getattr(side.end, "_ends", [side.end]):
                if hasattr(end, "_group"):
                    end._group._timeout_s = seconds
                end._timeout = seconds


def flip_a_byte(take, messages):
    buffers = [buffer.clone() for buffer in take(messages)]
    buffers[0][3] ^= 16
    return buffers


def test_a_clean_sync_moves_what_is_required_and_serves_the_version_everywhere(cluster):
    world, sync = cluster()
    metrics = sync.bring_to(7)
    assert world.versions() == [7, 7]
    assert holds(world, 0) and holds(world, 1)
    assert metrics["reshard/bytes_moved"] == metrics["reshard/bytes_required"] > 0
    assert (metrics["reshard/verified"], metrics["reshard/resynced"], metrics["reshard/weight_version"]) == (1, 0, 7)
    meters = ("rollout/stale_prefix_tokens", "perf/kv_cache_peak", "perf/preemptions")
    assert [metrics[name] for name in meters] == [0, 0.5, 21]
    assert sync.bring_to(8)["perf/preemptions"] == 24 - 21, "since the sync before"


def lose(world: FakeCluster, engine: int) -> None:
    """Ends an engine and starts it again, as an error of it would."""
    name = f"engine {engine}"
    error = concerning(LostProcess(f"{name} died"), name)
    assert world.fleet.loses(error, world.fleet.epochs()) and world.ended[-1] == engine
    world.engines[engine] = Engine(engine, version=None)


def come_back(world: FakeCluster, engine: int) -> None:
    name = f"engine {engine}"
    del world.fleet._starts[name]
    assert world.fleet.states.started(name, world.fleet.states.epoch(name))


def workers_of(world: FakeCluster) -> set[int]:
    """That ranks have open transports to."""
    (open_to,) = {frozenset(sender.end.workers) for sender in world.world.senders.values()}
    return set(open_to)


@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_a_lost_engine_is_left_out_brought_back_beside_the_others_and_takes_part_again(cluster, transport):
    world, sync = cluster(transport=transport)
    world.fleet.restart(3, 1)
    sync.bring_to(1)
    lose(world, 1)
    metrics = sync.bring_to(2)
    assert world.versions() == [2, None] and workers_of(world) == {0} and metrics["reshard/engines"] == 1
    assert metrics["reshard/bytes_moved"] == metrics["reshard/bytes_required"] > 0
    sync.mend()
    assert world.versions() == [2, None], "it has not started"
    come_back(world, 1)
    held = world.engines[0].writer
    sync.mend()
    assert world.versions() == [2, 2] and holds(world, 1) and workers_of(world) == {0, 1}
    assert world.connected == [{0, 1}, {1}], "the other's transports stayed open"
    assert world.engines[0].writer is held, "the other was left alone"
    assert world.fleet.serving().keys() == {"engine 0", "engine 1"} and world.fleet.serving()["engine 1"].epoch == 1
    metrics = sync.bring_to(3)
    assert world.versions() == [3, 3] and metrics["reshard/engines"] == 2
    assert world.connected == [{0, 1}, {1}] and metrics["reshard/seconds_connecting"] == 0.0


def test_an_engine_that_is_lost_in_a_sync_does_not_keep_the_others_from_it(cluster, monkeypatch):
    world, sync = cluster()
    world.fleet.restart(3, 1)
    sync.bring_to(1)
    settled = weight_sync.settle

    def settle_with_a_loss(calls, *given):
        monkeypatch.setattr(weight_sync, "settle", settled)
        lose(world, 1)
        raise concerning(LostProcess("weight sync: engine 1 died"), "engine 1")

    monkeypatch.setattr(weight_sync, "settle", settle_with_a_loss)
    metrics = sync.bring_to(2)
    assert world.versions() == [2, None] and holds(world, 0) and metrics["reshard/engines"] == 1
    assert metrics["reshard/bytes_moved"] == metrics["reshard/bytes_required"] > 0
    assert world.fleet.serving().keys() == {"engine 0"}


def test_an_engine_that_comes_back_in_the_middle_of_a_sync_is_brought_in_after_it_with_one_message(
    cluster, monkeypatch, capsys
):
    world, sync = cluster()
    world.fleet.restart(3, 1)
    sync.bring_to(1)
    lose(world, 1)
    settled = weight_sync.settle

    def settle_with_a_return(calls, *given):
        monkeypatch.setattr(weight_sync, "settle", settled)
        come_back(world, 1)
        return settled(calls, *given)

    monkeypatch.setattr(weight_sync, "settle", settle_with_a_return)
    assert sync.bring_to(2)["reshard/engines"] == 1 and world.versions() == [2, None]
    capsys.readouterr()
    sync.mend()
    assert world.versions() == [2, 2] and holds(world, 1) and world.connected == [{0, 1}, {1}]
    said = capsys.readouterr()
    told = [line for line in (said.out + said.err).splitlines() if line.startswith("weight sync")]
    assert told == ["weight sync: connected to engine 1, while the other connections stayed open"]


def test_a_sync_that_fails_costs_no_connection_that_had_no_part_in_it(cluster, capsys):
    world, sync = cluster()
    world.fleet.restart(3, 1)
    sync.bring_to(1)
    lose(world, 1)
    come_back(world, 1)

    def gone(*arguments):
        world.receive_weights = receive
        raise MemoryError("no memory for a module")

    receive = world.receive_weights
    be_impatient(world.world)
    open_again, world.connect_sync = world.connect_sync, lambda: (open_again(), be_impatient(world.world))
    world.receive_weights = gone
    sync.mend()
    assert world.versions() == [1, 1] and world.connected == [{0, 1}, {1}, {1}]
    assert "engine 1 fenced and synced again" in capsys.readouterr().err


def test_the_time_of_connecting_is_not_the_syncs(cluster):
    world, sync = cluster()
    open_slowly, world.connect_sync = world.connect_sync, lambda: (time.sleep(1.5), open_slowly())
    first, second = sync.bring_to(1), sync.bring_to(2)
    assert first["reshard/seconds_connecting"] > 1.5 > first["reshard/seconds"] > 0
    assert second["reshard/seconds_connecting"] == 0.0 < second["reshard/seconds"]


def test_where_the_only_engine_is_lost_the_weights_are_current_all_the_same(cluster):
    world, sync = cluster(engines=1)
    world.fleet.restart(3, 1)
    sync.bring_to(1)
    lose(world, 0)
    assert sync.bring_to(2)["reshard/engines"] == 0
    come_back(world, 0)
    sync.mend()
    assert world.versions() == [2] and holds(world, 0) and world.fleet.version == 2


def test_transports_are_opened_to_an_engine_that_started_again_between_two_syncs(cluster):
    world, sync = cluster(engines=1)
    world.fleet.restart(3, 1)
    sync.bring_to(1)
    lose(world, 0)
    come_back(world, 0)
    met = []
    sync._open = (lambda plain: lambda engines: met.append(set(engines)) or plain(engines))(sync._open)
    metrics = sync.bring_to(1)
    assert met == [{0}] and metrics["reshard/resynced"] == 0 and metrics["reshard/engines"] == 1
    assert world.versions() == [1] and holds(world, 0)
    sync.bring_to(2)
    assert met == [{0}], "those who have met go on"


def test_a_byte_flipped_on_the_way_is_named_and_only_that_engine_is_synced_again(cluster, capsys):
    world, sync = cluster()
    sync.bring_to(1)
    end = world.world.receivers[1].end
    end.take = once(end.take, flip_a_byte)
    kept = world.engines[0]
    rounds = []
    world.receive_weights = (lambda plain: lambda engine, *a: rounds.append(engine) or plain(engine, *a))(
        world.receive_weights
    )
    metrics = sync.bring_to(2)
    assert sorted(rounds) == [0, 1, 1]
    assert metrics["reshard/resynced"] == 1 and metrics["reshard/bytes_moved"] == metrics["reshard/bytes_required"]
    assert world.versions() == [2, 2] and holds(world, 1) and kept.version == 2
    said = capsys.readouterr().err
    first = next(iter(sync.setup.plan().receives(1)))
    assert f"engine 1 worker 1: {first.copies[0].parameter} differs on the way" in said
    assert "rank" in said


def test_a_fault_that_stays_stops_the_run_and_no_engine_serves_a_mixture(cluster):
    world, sync = cluster()
    sync.bring_to(1)
    end = world.world.receivers[1].end
    end.take = partial(flip_a_byte, end.take)
    with pytest.raises(
        Interrupted,
        match=r"version 2: engine 1 could not be brought .* twice: engine 1 worker 1: .* differs on the way, sent by",
    ):
        sync.bring_to(2)
    assert world.versions() == [None, None]
    assert Interrupted.exit_code == 5


def test_a_bit_flipped_in_the_engines_storage_after_the_write_is_found_by_the_read_back(cluster, capsys):
    world, sync = cluster()
    world.flip_storage = 0
    assert sync.bring_to(1)["reshard/resynced"] == 1
    assert "engine 0 worker 0: model.norm.weight differs in the engine" in capsys.readouterr().err
    assert holds(world, 0) and world.versions() == [1, 1]


def test_ranks_of_an_engine_are_synced_as_one(cluster, capsys):
    """A rank that got something else takes the whole engine with it: its experts are the others' experts."""
    world, sync = cluster(engines=2, data=2, expert=2)
    metrics = sync.bring_to(1)
    assert world.versions() == [1] * 4 and all(holds(world, worker) for worker in range(4))
    assert metrics["reshard/bytes_moved"] == metrics["reshard/bytes_required"] > 0
    end = world.world.receivers[3].end
    end.take = once(end.take, flip_a_byte)
    received = []
    world.receive_weights = (lambda plain: lambda worker, *a: received.append(worker) or plain(worker, *a))(
        world.receive_weights
    )
    assert sync.bring_to(2)["reshard/resynced"] == 1
    assert sorted(received) == [0, 1, 2, 2, 3, 3]
    assert "engine 1 fenced and synced again: engine 1 worker 3: " in capsys.readouterr().err
    assert world.versions() == [2] * 4 and all(holds(world, worker) for worker in range(4))


def test_storage_is_read_back_every_so_many_syncs(cluster):
    world, sync = cluster(verify_every=2)
    seen = []
    world.receive_weights = (
        lambda plain: lambda engine, update, read: seen.append(read) or plain(engine, update, read)
    )(world.receive_weights)
    assert [sync.bring_to(version)["reshard/verified"] for version in range(4)] == [1, 0, 1, 0]
    assert seen == [True, True, False, False] * 2


def test_a_start_that_goes_back_reads_back_at_the_steps_of_the_undisturbed_run(cluster):
    """And at once, because nothing says what the engines hold."""
    _, sync = cluster(verify_every=2)
    assert [sync.bring_to(version)["reshard/verified"] for version in (3, 4, 5, 6)] == [1, 1, 0, 1]


def test_an_engine_that_has_started_again_is_read_back_out_of_turn(cluster, monkeypatch):
    _, sync = cluster(verify_every=9)
    sync.bring_to(1)
    assert sync.bring_to(2)["reshard/verified"] == 0
    monkeypatch.setattr(sync.engines.fleet, "stale", lambda: {0})
    assert sync.bring_to(3)["reshard/verified"] == 1


def test_an_engine_that_is_synced_again_is_read_back_out_of_turn(cluster):
    world, sync = cluster(verify_every=9)
    sync.bring_to(1)
    end = world.world.receivers[1].end
    end.take = once(end.take, flip_a_byte)
    seen = []
    plain = world.receive_weights
    world.receive_weights = lambda engine, update, read: seen.append((engine, read)) or plain(engine, update, read)
    metrics = sync.bring_to(2)
    assert sorted(seen) == [(0, False), (1, False), (1, True)]
    assert (metrics["reshard/resynced"], metrics["reshard/verified"]) == (1, 0), "engine 0 was not read back"


def test_what_a_second_attempt_wrote_wrongly_is_not_served(cluster):
    world, sync = cluster(engines=1, verify_every=9)
    sync.bring_to(1)
    end = world.world.receivers[0].end
    end.take = once(end.take, flip_a_byte)
    receive = world.receive_weights

    def spoilt_the_second_time(engine, update, read):
        world.flip_storage = engine if update == 3 else None
        return receive(engine, update, read)

    world.receive_weights = spoilt_the_second_time
    with pytest.raises(Interrupted, match=r"twice: engine 0 worker 0: model\.norm\.weight differs in the engine"):
        sync.bring_to(2)
    assert world.versions() == [None]


@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_a_dropped_message_is_missed_by_its_receiver_which_names_rank_and_round(cluster, capsys, transport):
    world, sync = cluster(engines=1, transport=transport)
    sync.bring_to(1)
    be_impatient(world.world)
    end = end_of(world.world.senders[2])
    dropped = []
    end.post = once(
        end.post,
        lambda post, message: (
            dropped.append(message) or end._slots.pop(0, None) if transport == "p2p" else dropped.append(message)
        ),
    )
    assert sync.bring_to(2)["reshard/resynced"] == 1
    assert f"rank 2, round {dropped[0].round} of update 2 for worker 0: nothing came" in capsys.readouterr().err
    assert holds(world, 0) and world.versions() == [2]


def test_a_round_that_is_sent_twice_is_taken_by_nobody(cluster, capsys):
    """Between hosts; the receiver asks for each round once,
    so the repetition is never matched and its sender says so.
    """
    world, sync = cluster(engines=1, transport="p2p")
    sync.bring_to(1)
    be_impatient(world.world)
    end = end_of(world.world.senders[0])
    repeated = []

    def again(post, message):
        repeated.append(message)
        slot = end._slots[message.worker]
        post(message)
        end._slots[message.worker] = slot
        post(message)

    end.post = once(end.post, again)
    assert sync.bring_to(2)["reshard/resynced"] == 1
    assert f"rank 0: worker 0 did not take round {repeated[0].round} of update 2" in capsys.readouterr().err
    assert holds(world, 0) and world.versions() == [2]


def test_a_message_that_is_sent_twice_finds_no_room(cluster, capsys):
    world, sync = cluster(engines=1)
    sync.bring_to(1)
    be_impatient(world.world)
    end = end_of(world.world.senders[0])

    def again(post, message):
        post(message)
        end._wait_consumed(message)
        end.slot(message)

    end.post = once(end.post, again)
    assert sync.bring_to(2)["reshard/resynced"] == 1
    # it waits for room that no plan has, and its next message does not come
    assert "rank 0, round" in capsys.readouterr().err
    assert holds(world, 0)


def test_a_message_of_an_earlier_sync_is_not_taken_for_this_ones(cluster, capsys):
    world, sync = cluster(engines=1)
    sync.bring_to(1)
    end = end_of(world.world.senders[0])

    def old(post, message):
        words = end._arenas[0].words[:, end._index[0]]
        # word 0: granted, word 3: ready
        words[words[:, 0] == sequence_number(2, message), 3] = sequence_number(1, message)

    end.post = once(end.post, old)
    assert sync.bring_to(2)["reshard/resynced"] == 1
    assert "not the message that the plan expects" in capsys.readouterr().err
    assert holds(world, 0)


def test_gate_and_up_swapped_while_packing_do_not_pass(cluster, capsys):
    world, sync = cluster(engines=1)
    sync.bring_to(1)
    for sender in world.world.senders.values():
        for (number, worker), views in sender._sources._views.items():
            message = next(m for m in sender._messages if (m.round, m.worker) == (number, worker))
            at = {c.hf_name: i for i, c in enumerate(message.copies)}
            swapped = list(views)
            for name, gate in at.items():
                up = at.get(name.replace("gate_proj", "up_proj"))
                if "gate_proj" in name and up is not None and views[gate].shape == views[up].shape:
                    swapped[gate], swapped[up] = views[up], views[gate]
            sender._sources._views[number, worker] = swapped  # made anew, as after a parameter has moved
    with pytest.raises(Interrupted, match=r"w13_weight differs on the way"):
        sync.bring_to(2)
    assert world.versions() == [None]


def test_a_replica_left_with_old_weights_is_named_even_when_it_is_what_was_sent(cluster):
    world, sync = cluster(engines=1, train=REPLICAS)
    sync.bring_to(1)
    for rank, held in world.held.items():
        for (name, _), tensor in held.items():
            if rank == 0 or "linear_proj" not in name:
                tensor.mul_(2)
    with pytest.raises(Interrupted, match=r"self_attn\.o_proj\.weight .* differs between ranks 0 and 1"):
        sync.bring_to(2)
    assert world.versions() == [None]


def test_an_engine_that_fails_in_the_middle_is_told_to_the_ranks_at_once(cluster, capsys):
    world, sync = cluster(engines=2, timeout_s=60.0)
    sync.bring_to(1)
    end = world.world.receivers[1].end

    def fail(take, messages):
        raise MemoryError("engine 1 worker 1: no memory for a module")

    end.take = once(end.take, fail)
    began = time.monotonic()
    assert sync.bring_to(2)["reshard/resynced"] == 2
    assert time.monotonic() - began < 20
    said = capsys.readouterr().err
    assert "no memory for a module" in said
    assert world.versions() == [2, 2] and holds(world, 0) and holds(world, 1)


def test_sides_that_counted_other_bytes_are_not_served(cluster):
    world, sync = cluster(engines=1)
    sync.bring_to(1)
    receive = world.receive_weights
    world.receive_weights = lambda *of: [report | {"bytes_moved": report["bytes_moved"] - 4} for report in receive(*of)]
    with pytest.raises(RuntimeError, match=r"ranks sent \d+ bytes, engines received \d+"):
        sync.bring_to(2)
    assert world.versions() == [None]


def test_when_peers_do_not_meet_again_the_run_stops_with_what_broke_the_first_attempt(cluster):
    world, sync = cluster(engines=1)
    sync.bring_to(1)
    end = world.world.receivers[0].end

    def fail(take, messages):
        raise MemoryError("no memory for a module")

    def refuse():
        raise EnvironmentFault("engine 0 cannot take weights by the plan")

    end.take = once(end.take, fail)
    world.connect_sync = refuse
    with pytest.raises(
        EnvironmentFault,
        match=r"version 2: .*no memory for a module.*; and connecting again failed: engine 0 cannot take",
    ):
        sync.bring_to(2)
    assert world.versions() == [None]


def test_a_side_with_another_plan_is_refused_before_the_first_byte(cluster):
    setup = setup_for(TRAIN, {})
    other = replace(setup, budget_bytes=setup.budget_bytes // 2)
    with pytest.raises(EnvironmentFault, match=r"rank 3 plans the weight sync as .* they do not run the same mrl"):
        other.check_hash(setup.plan().hash, "rank 3")


def test_the_group_meets_at_its_first_member_though_rank_0_has_no_peer_on_another_host(cluster):
    world, sync = cluster(engines=1, train=REPLICAS, transport="auto")
    world.devices = lambda number: [(("here", "there")[number], None)]  # rank 0 here, rank 1 there
    world.process_devices["engine 0"] = [("here", None)]
    sync.bring_to(1)
    assert world.met_at == [1]
    assert holds(world, 0) and world.versions() == [1]


def test_what_is_free_of_the_fullest_device_is_said_once_and_only_where_there_is_device_memory(
    cluster, capsys, monkeypatch
):
    """Communicators come with the first messages, so nobody can know before what they leave."""
    world, sync = cluster(engines=2)
    sync.bring_to(1)
    assert "GiB free" not in capsys.readouterr().out  # a CPU has none of its own
    world, sync = cluster(engines=2)
    real = world.send_weights
    free = itertools.count(5 << 30, 1 << 30)
    world.send_weights = lambda *arguments: real(*arguments) | {"free_bytes": next(free)}
    receive = world.receive_weights
    world.receive_weights = lambda *arguments: [
        report | {"kernels": {"attention": ["FLASH_ATTN"], "moe": ["TRITON"]}} for report in receive(*arguments)
    ]
    sync.bring_to(1)
    sync.bring_to(2)
    said = capsys.readouterr().out
    assert (
        said.count("after the first weight sync the fullest device has 5.0 GiB free\n")
        == said.count("engines: attention FLASH_ATTN; MoE kernels TRITON\n")
        == 1
    )


@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_a_run_says_once_which_transports_serve_its_pairs(cluster, capsys, transport):
    _, sync = cluster(engines=2, transport=transport)
    sync.bring_to(1)
    sync.bring_to(2)
    pairs = TRAIN["world_size"] * 2
    assert capsys.readouterr().out.count(f"weight sync: {pairs} pairs of rank and worker by {transport}\n") == 1


def test_the_plan_is_made_once_wherever_the_two_sides_meet():
    setup = setup_for(TRAIN, {})
    moved = replace(setup, timeout_s=setup.timeout_s + 1, transport=setup.transport | {"name": "another"})
    assert moved.plan() is setup.plan()
    assert replace(setup, budget_bytes=setup.budget_bytes // 2).plan() is not setup.plan()
