"""What ranks send arrives where the plan says, bit for bit, over every transport;
what goes wrong on the way is noticed and named.
"""

from pathlib import Path

import pytest
import torch
from reshard_world import DictWriter, World, expected, hf_weights, setup_for, shards_of, sums_of
from torch.multiprocessing.reductions import StorageWeakRef

from mrl.errors import EnvironmentFault
from mrl.reshard.setup import p2p_members, route
from mrl.reshard.transport_shm import SharedMemoryReceiver, SharedMemorySender, arena_files, arena_path

FOUR = dict(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=2)
TWO = dict(world_size=2, tensor_model_parallel_size=2, expert_model_parallel_size=2)
CASES = {
    "tp2pp2ep2-to-tp1": (FOUR, {}, {}),
    "tp2ep2-to-two-engines-of-tp2": (TWO, dict(num_engines=2, tensor=2), {}),
    "tp2pp2ep2-to-tp2-with-expert-parallelism": (FOUR, dict(tensor=2, expert=2), {}),
    "transposed-experts": (FOUR, dict(tensor=2), {"dialect": "npu"}),
    "dp2-replicas-to-tp2": (dict(world_size=2), dict(tensor=2), {}),
    "fp32-ranks-to-a-bf16-engine": (TWO, {}, {"dtype": "bfloat16"}),
}


def check_engines(world: World, outcome, weights) -> None:
    """Every worker holds exactly its slices, and both sides' digests agree."""
    assert outcome.errors() == []
    for worker, writer in outcome.writers.items():
        wanted = expected(world.setup, worker, weights)
        assert writer.tensors.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(writer.tensors[name], wanted[name])] == []
        assert writer.digests == sums_of(outcome.sends.values(), worker)


@pytest.mark.parametrize("transport", ["shm", pytest.param("p2p", marks=pytest.mark.long)])
@pytest.mark.parametrize(("train", "rollout", "changes"), CASES.values(), ids=CASES)
def test_every_element_arrives_where_it_belongs_sync_after_sync(transport, train, rollout, changes, monkeypatch):
    monkeypatch.setattr("mrl.platforms.transfer._TRANSFERS", _cpu_for_all())
    setup = setup_for(train, rollout, transport, **changes)
    first, second = hf_weights(setup, 1), hf_weights(setup, 2)
    with World(setup, first) as world:
        check_engines(world, world.sync(1), first)
        for rank, held in world.held.items():
            for key, tensor in shards_of(setup, rank, second).items():
                held[key].copy_(tensor)
        check_engines(world, world.sync(2), second)


def _cpu_for_all() -> dict:
    """Ascend's layout of experts can be moved by any device; here it is moved by the CPU."""
    from mrl.platforms.transfer import CpuTransfer

    return dict.fromkeys(("cpu", "npu"), CpuTransfer)


def test_neighbours_use_shared_memory_and_hosts_point_to_point_in_one_sync():
    where = {"ranks": (0, 1, 0, 1), "workers": (0, 1)}
    setup = setup_for(FOUR, dict(num_engines=2), "auto", nodes=lambda side, i: where[side][i])
    weights = hf_weights(setup)
    with World(setup, weights) as world:
        kinds = [[type(end).__name__ for end in receiver.end._ends] for receiver in world.receivers.values()]
        assert kinds == [["SharedMemoryReceiver", "PointToPointReceiver"]] * 2
        check_engines(world, world.sync(1), weights)


def test_device_ipc_goes_through_shared_memory_where_the_device_shares_none():
    setup = setup_for(TWO, {}, "ipc")
    weights = hf_weights(setup)
    with World(setup, weights) as world:
        assert type(world.receivers[0].end).__name__ == "SharedMemoryReceiver"
        check_engines(world, world.sync(1), weights)


def test_bytes_are_counted_once_on_each_side_and_are_what_the_workers_need():
    setup = setup_for(FOUR, dict(num_engines=2, tensor=2))
    weights = hf_weights(setup)
    with World(setup, weights) as world:
        outcome = world.sync(1)
    needed = sum(p.numel() * 4 for w in range(4) for p in expected(setup, w, weights).values())
    assert sum(r.bytes_moved for r in outcome.sends.values()) == needed
    assert sum(r.bytes_moved for r in outcome.receives.values()) == needed
    assert sum(r.bytes_local for r in outcome.receives.values()) == 0


def test_what_stays_on_a_device_does_not_count_as_moved():
    setup = setup_for(TWO, dict(tensor=2))
    setup.topology["workers"][0] = setup.topology["ranks"][0]
    with World(setup, hf_weights(setup)) as world:
        outcome = world.sync(1)
    sent, received = outcome.sends.values(), outcome.receives.values()
    local = sum(r.bytes_local for r in sent)
    assert local > 0
    assert local == sum(r.bytes_local for r in received) == outcome.receives[0].bytes_local
    assert sum(r.bytes_moved for r in sent) == sum(r.bytes_moved for r in received) == world.setup.plan().bytes_required


@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_staging_is_two_budgets_and_at_most_two_modules_are_open(transport, monkeypatch):
    """Beside little ones, all of which are little here."""
    monkeypatch.setattr("mrl.reshard.execute.LITTLE_BYTES", 0)
    setup = setup_for(FOUR, dict(tensor=2), transport)
    slack = 4 * 2 * 128  # a header and a cache line for each message
    with World(setup, hf_weights(setup)) as world:
        outcome = world.sync(1)
        assert setup.plan().num_rounds > 4
    for report in [*outcome.sends.values(), *outcome.receives.values()]:
        assert report.staging_bytes <= 2 * setup.budget_bytes + slack
    assert max(writer.most_begun for writer in outcome.writers.values()) <= 2


def test_one_engine_can_be_synced_again_while_the_other_is_left_alone():
    setup = setup_for(FOUR, dict(num_engines=2))
    weights = hf_weights(setup)
    with World(setup, weights) as world:
        outcome = world.sync(1, workers=[1])
        assert set(outcome.writers) == {1}
        check_engines(world, outcome, weights)


def test_a_parameter_that_moved_in_memory_is_not_sent_from_where_it_was():
    setup = setup_for(TWO, {})
    first, second = hf_weights(setup, 1), hf_weights(setup, 2)
    with World(setup, first) as world:
        world.sync(1)
        for rank in world.held:
            world.held[rank] = shards_of(setup, rank, second)  # new tensors, as after an optimizer that swaps storage
        check_engines(world, world.sync(2), second)


def test_no_file_is_left_and_none_is_needed_once_everybody_has_the_arena_open():
    setup = setup_for(TWO, dict(num_engines=2))
    weights = hf_weights(setup)
    with World(setup, weights) as world:
        for worker in (0, 1):
            assert arena_path(setup, worker).exists()
            for path in arena_files(setup, worker):
                path.unlink(missing_ok=True)
        assert not list(Path("/dev/shm").glob(f"*{setup.transport['name']}*"))
        check_engines(world, world.sync(1), weights)


def test_a_writer_is_told_of_each_module_once_when_all_of_it_is_there():
    setup = setup_for(FOUR, {})
    weights = hf_weights(setup)
    wanted, seen = expected(setup, 0, weights), []

    def whole(name, tensor):
        seen.append(name)
        assert torch.equal(tensor, wanted[name])

    with World(setup, weights) as world:
        outcome = world.sync(1, spoil=whole)
    assert outcome.errors() == []
    assert sorted(seen) == sorted(DictWriter(setup, 0).parameters)


PLACES = {"ranks": [[0, 0], [1, 0]], "workers": [[0, 0], [0, 1], [1, 0]]}
ROUTES = {
    # kind, how far device memory can be opened: rank 0 to the worker on its device, to a neighbour, to another host
    ("auto", "node"): ["ipc", "ipc", "p2p"],
    ("auto", "device"): ["ipc", "p2p", "p2p"],
    ("auto", "process"): ["shm", "shm", "p2p"],
    ("ipc", "node"): ["ipc", "ipc", "p2p"],
    ("ipc", "device"): ["ipc", "shm", "p2p"],
    ("ipc", "process"): ["shm", "shm", "p2p"],
    ("p2p", "node"): ["ipc", "p2p", "p2p"],  # two processes on a device have no communicator
    ("p2p", "device"): ["ipc", "p2p", "p2p"],
    ("p2p", "process"): ["p2p", "p2p", "p2p"],
    ("shm", "node"): ["shm", "shm", None],
}


@pytest.mark.parametrize("asked", ROUTES, ids=str)
def test_each_pair_gets_the_nearest_transport_that_connects_it(asked):
    kind, reach = asked
    setup = setup_for(dict(world_size=2), dict(num_engines=3), kind, topology=PLACES)
    wanted = [kind for kind in ROUTES[asked] if kind]
    assert [route(setup, 0, worker, reach) for worker in range(len(wanted))] == wanted


def test_a_transport_of_one_host_is_refused_for_a_pair_on_two():
    setup = setup_for(dict(world_size=2), dict(num_engines=3), "shm", topology=PLACES)
    assert [route(setup, 0, worker, "node") for worker in range(2)] == ["shm", "shm"]
    with pytest.raises(
        EnvironmentFault, match=r"reshard.transport: shm reaches no other host; rank 0 and worker 2 are on two"
    ):
        route(setup, 0, 2, "node")


def test_only_processes_with_a_peer_on_another_host_join_the_group():
    places = {"ranks": [[0, 0], [0, 1]], "workers": [[0, 2], [1, 0]]}
    setup = setup_for(dict(world_size=2), dict(num_engines=2), "auto", topology=places)
    assert p2p_members(setup) == [("rank", 0), ("rank", 1), ("worker", 1)]


def test_memory_made_for_one_message_is_given_back_when_the_message_is_through(monkeypatch):
    """As on an accelerator: messages pass through host memory,
    and each is staged on the device in a tensor of its own.
    """
    alive_at_most, made = 0, []

    def counted(buffer: torch.Tensor) -> torch.Tensor:
        nonlocal alive_at_most
        made.append(StorageWeakRef(buffer.untyped_storage()))
        alive_at_most = max(alive_at_most, sum(not one.expired() for one in made))
        return buffer

    for end in (SharedMemorySender, SharedMemoryReceiver):
        monkeypatch.setattr(end, "lasting", lambda self, message: False)
    setup = setup_for(dict(world_size=1), {})
    weights = hf_weights(setup)
    with World(setup, weights) as world:
        sender, receiver = world.senders[0].end, world.receivers[0].end
        slot, take = sender.slot, receiver.take
        sender.slot = lambda message: counted(slot(message))
        receiver.take = lambda messages: [counted(buffer.clone()) for buffer in take(messages)]
        for update in (1, 2):
            check_engines(world, world.sync(update), weights)
    rounds = setup.plan().num_rounds
    assert rounds >= 5 and len(made) == 2 * 2 * rounds
    assert alive_at_most <= 4  # on each side the round at hand, and the one before while its name is taken over
    assert all(one.expired() for one in made)
