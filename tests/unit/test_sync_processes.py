"""Syncs between processes whose sends and receives wait as NCCL's do, with workers fed by device memory and by the
network.
"""

import nccl_like
import pytest
from reshard_world import setup_for
from sync_simulation import each_transport_two_rounds_ahead

from mrl.reshard import execute
from mrl.reshard.digest import MODULUS
from mrl.reshard.setup import route

# two nodes of two devices, a rank and a worker on each; a pipeline stage on either node
PP2 = dict(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=2)
PLACES = [[0, 0], [0, 1], [1, 2], [1, 3]]


def two_nodes(timeout_s: float, **changes):
    topology = {"ranks": PLACES, "workers": PLACES}
    return setup_for(PP2, dict(num_engines=4), "auto", topology=topology, timeout_s=timeout_s, **changes)


@pytest.fixture
def devices(monkeypatch, tmp_path):
    nccl_like.use(monkeypatch, tmp_path)


def synced(setup, updates, timeout_s):
    calls = {("rank", r): lambda r=r: nccl_like.send_all(setup, r, updates) for r in range(4)}
    calls |= {("worker", w): lambda w=w: nccl_like.receive_all(setup, w, updates) for w in range(4)}
    return nccl_like.at_once(calls, timeout_s)


def test_a_pipeline_over_two_nodes_is_synced_to_workers_beside_its_ranks(devices):
    setup = two_nodes(60.0)
    assert {route(setup, r, 0, "node") for r in range(4)} == {"ipc", "p2p"}
    assert setup.plan().num_rounds > 4
    found = synced(setup, 2, 120.0)
    assert {name: answer for name, answer in found.items() if not isinstance(answer, list)} == {}
    for update in range(2):
        for worker in range(4):
            sent: dict[str, int] = {}
            for rank in range(4):
                for name, digest in found["rank", rank][update].get(worker, {}).items():
                    sent[name] = (sent.get(name, 0) + digest) % MODULUS
            assert found["worker", worker][update] == sent


def test_the_order_before_deadlocks_there(devices, monkeypatch):
    """So the processes of this file would tell it."""
    monkeypatch.setattr(execute, "receiving", each_transport_two_rounds_ahead)
    found = synced(two_nodes(2.0), 1, 60.0)
    assert "got no room for its message within 2 s" in found["rank", 0]
