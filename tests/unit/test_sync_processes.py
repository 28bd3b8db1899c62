"""Syncs between processes whose sends and receives wait as NCCL's do, with workers fed by device memory and by the
network.
"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from nccl_like import (
    at_once,
    receive_after_restart,
    receive_again,
    receive_all,
    receive_until_restart,
    send_again,
    send_all,
    send_to_all_and_one_again,
    stop_while_connecting,
)
from reshard_world import setup_for

from mrl.process.free_ports import free_port
from mrl.reshard.digest import MODULUS
from mrl.reshard.setup import route

# two nodes of two devices, a rank and a worker on each; a pipeline stage on either node
PP2 = dict(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=2)
PLACES = [[0, 0], [0, 1], [1, 2], [1, 3]]
FOUR = range(4)


def two_nodes(folder: Path, timeout_s: float, kind: str = "auto"):
    """The processes are killed, so what they share lies in `folder`."""
    topology = {"ranks": PLACES, "workers": PLACES}
    setup = setup_for(PP2, dict(num_engines=4), kind, topology=topology, timeout_s=timeout_s)
    return replace(setup, transport=setup.transport | {"folder": str(folder)})


def both(send, receive, workers=FOUR):
    return {("rank", r): partial(send, rank=r) for r in FOUR} | {
        ("worker", w): partial(receive, worker=w) for w in workers
    }


def sent_to(worker, of_ranks):
    sent: dict[str, int] = {}
    for digests in of_ranks:
        for name, digest in digests.get(worker, {}).items():
            sent[name] = (sent.get(name, 0) + digest) % MODULUS
    return sent


@pytest.mark.parametrize("kind", ["auto", "p2p"])
def test_a_pipeline_over_two_nodes_is_synced_to_workers_beside_its_ranks(tmp_path, kind):
    setup = two_nodes(tmp_path, 60.0, kind)
    assert {route(setup, r, 0, "node") for r in FOUR} == {"ipc", "p2p"}
    assert setup.plan().num_rounds > 4
    found = at_once(both(partial(send_all, setup, updates=2), partial(receive_all, setup, updates=2)), tmp_path)
    assert {name: answer for name, answer in found.items() if not isinstance(answer, list)} == {}
    for update in range(2):
        for worker in FOUR:
            assert found["worker", worker][update] == sent_to(worker, [found["rank", r][update] for r in FOUR])


@pytest.mark.long
def test_the_order_before_deadlocks_there(tmp_path):
    """So the processes of this file would tell it."""
    setup = two_nodes(tmp_path, 3.0)
    calls = both(partial(send_all, setup, updates=1), partial(receive_all, setup, updates=1))
    found = at_once(calls, tmp_path, order_before=True)
    assert all(isinstance(answer, str) for answer in found.values()), found
    assert any("within 3 s" in answer for answer in found.values()), found


@pytest.mark.long
def test_a_worker_that_is_lost_in_a_sync_costs_the_others_a_retry_with_the_same_bits(tmp_path):
    setup = two_nodes(tmp_path, 15.0)
    where = setup.transport | {"name": f"{setup.transport['name']}-2", "workers": [0, 1, 2]}
    second = replace(setup, timeout_s=60.0, transport=where | {"address": f"127.0.0.1:{free_port()}"})
    found = at_once(both(partial(send_again, setup, second), partial(receive_again, setup, second)), tmp_path)
    assert found.pop(("worker", 3)) is None
    assert {name: answer for name, answer in found.items() if not isinstance(answer, tuple)} == {}
    assert all(found["rank", rank][0] for rank in (2, 3)), "they noticed"
    for worker in (0, 1, 2):
        assert found["worker", worker][1] == sent_to(worker, [found["rank", r][1] for r in FOUR])


def test_an_engine_that_starts_again_is_connected_beside_the_others(tmp_path):
    """Each engine has a connection. Only the pairs of the one that started again are made anew."""
    setup = two_nodes(tmp_path, 60.0)

    def connection(worker, name):
        where = {"name": f"{setup.transport['name']}-{name}", "workers": [worker]}
        return replace(setup, transport=setup.transport | where | {"address": f"127.0.0.1:{free_port()}"})

    engines = [connection(worker, worker) for worker in FOUR]
    again = connection(3, "3-again")
    calls = {("rank", r): partial(send_to_all_and_one_again, engines, again, rank=r) for r in FOUR}
    for worker in FOUR:
        updates = 1 if worker == 3 else 2
        calls["worker", worker] = partial(receive_until_restart, engines[worker], worker, updates)
    calls["worker", "3 again"] = partial(receive_after_restart, again, 3)
    found = at_once(calls, tmp_path)
    assert {name: answer for name, answer in found.items() if not isinstance(answer, list | dict)} == {}
    for rank in FOUR:
        (made, staging, _), (made_later, same_staging, _) = found["rank", rank]
        to_last = route(setup, rank, 3, "node") == "p2p"
        assert (made, made_later) == (2, 2 + to_last), "of two workers on the other node"
        assert staging == same_staging <= 2 * setup.budget_bytes + 4 * 2 * 128, "one for all engines"
    for worker in (0, 1, 2):
        assert [made for made, _ in found["worker", worker]] == [2, 2]
        assert found["worker", worker][1][1] == sent_to(worker, [found["rank", r][1][2] for r in FOUR])
    assert found["worker", "3 again"] == sent_to(3, [found["rank", r][1][2] for r in FOUR])


@pytest.mark.long
def test_a_peer_that_stops_while_it_connects_ends_it_for_all_within_the_deadline(tmp_path):
    setup = two_nodes(tmp_path, 10.0)
    calls = both(partial(send_all, setup, updates=1), partial(receive_all, setup, updates=1), workers=[0, 1, 2])
    calls["worker", 3] = partial(stop_while_connecting, setup, worker=3)
    began = time.monotonic()
    found = at_once(calls, tmp_path, stopped=[("worker", 3)])
    assert time.monotonic() - began < 60
    assert found.pop(("worker", 3)) is None
    assert found["rank", 0] == "TransferError: rank 0 did not connect to worker 3 within 10 s"
    assert all(isinstance(answer, str) and answer.startswith("TransferError") for answer in found.values()), found
