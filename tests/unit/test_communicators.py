"""Pairs of a rank and a worker that NCCL or HCCL serves have a communicator each;
the plan leaves room for those of the fullest device.
"""

from pathlib import Path

import pytest
from test_memory_host import inputs_of

from mrl.config.load import load_config
from mrl.plan.communicators import most_pairs
from mrl.plan.devices import find_device
from mrl.platforms.hosting import get_hosting
from mrl.units import MIB

ROOT = Path(__file__).parents[2]


def pairs(preset: str, *settings: str) -> int:
    return most_pairs(load_config(ROOT / "parallel_configs" / f"{preset}.yaml", None, list(settings)).config)


# Counted by hand: a device has one rank and one worker, each with a peer on every device that shared memory does not
# reach
COUNTED = {
    ("qwen3-30b-a3b/h100-1x8",): 0,  # one node, whose devices open each other's memory
    ("qwen3-30b-a3b/h100-4x8",): 2 * 24,
    ("qwen3-30b-a3b/h100-4x8", "reshard.transport=p2p"): 2 * 32,
    ("qwen3-30b-a3b/h100-4x8", "reshard.path=slow"): 0,
    ("qwen3-30b-a3b/h100-4x8-separate",): 16,  # 16 ranks on two nodes, 16 workers on the other two
    ("qwen3-30b-a3b/a3-1x16",): 2 * 15,  # of a neighbour an NPU opens nothing
    ("qwen3-30b-a3b/a3-1x16", "reshard.transport=ipc"): 0,
    ("qwen3-235b-a22b/h100-16x8",): 2 * 120,
}


@pytest.mark.parametrize("asked", COUNTED, ids=" ".join)
def test_the_fullest_device_has_a_pair_for_each_peer_that_is_out_of_reach(asked):
    assert pairs(*asked) == COUNTED[asked]


def test_what_they_take_is_not_planned_with_and_is_counted_once():
    inputs, device = inputs_of("qwen3-235b-a22b/h100-16x8"), find_device("h100-80g")
    assert inputs.device.usable == device.usable - 240 * 16 * MIB
    again = type(inputs).of(inputs.config, inputs.model, inputs.device)
    assert again.device == inputs.device


@pytest.mark.parametrize("name", ["ascend-910b-64g", "ascend-a3-64g"])
def test_on_npus_a_pair_takes_what_mrl_sets(name):
    """Each of a pair's communicators has two buffers of that many MB."""
    for environment in (get_hosting("npu").actor_environment(), get_hosting("npu").engine_environment(0, 1, 1, 1)):
        assert find_device(name).pair == 2 * int(environment["P2P_HCCL_BUFFSIZE"]) * MIB
