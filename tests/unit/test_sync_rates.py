"""What the plan of a sync counts with is what serves the pairs of its processes: rates by transport,
for every kind that can be asked.
"""

import itertools

import pytest
from test_memory_host import inputs_of

from mrl.plan.run_plan import link_of
from mrl.platforms.hosting import get_hosting
from mrl.reshard.setup import SyncSetup, route

PRESETS = {"cuda": "qwen3-30b-a3b/h100-4x8", "npu": "qwen3-30b-a3b/a3-1x16"}
NEIGHBOURS = {"ranks": [[0, 0]], "workers": [[0, 0], [0, 1]]}


def chosen(kind: str, device: str) -> list[str]:
    """The transports that a real sync would open for a worker on the rank's device, and for one beside it."""
    setup = SyncSetup(
        hf_config={}, train=dict(world_size=1), rollout=dict(num_engines=2, tensor=1, data=1, expert=1), dialect=device,
        dtype="bfloat16", topology=NEIGHBOURS, budget_bytes=1, timeout_s=1.0, transport={"kind": kind},
    )  # fmt: skip
    return [route(setup, 0, worker, get_hosting(device).memory_reach) for worker in range(2)]


@pytest.mark.parametrize(("kind", "platform"), list(itertools.product(("auto", "ipc", "shm", "p2p"), PRESETS)))
def test_a_plans_rates_are_those_of_the_transports_that_the_sync_opens(kind, platform):
    inputs = inputs_of(PRESETS[platform], f"reshard.transport={kind}")
    device, share = inputs.device, inputs.assumptions.link_share
    rate = {"p2p": device.node_rate, "ipc": device.node_rate, "shm": device.host_path_rate}
    here, beside = chosen(kind, platform)
    link = link_of(inputs)
    assert link.inside_node == rate[beside] * share
    assert link.inside_device == (device.memory_rate / 2 if here == "ipc" else rate[here]) * share


@pytest.mark.parametrize("platform", PRESETS)
def test_what_is_not_asked_for_goes_through_no_host_memory_of_an_accelerators_node(platform):
    """Every byte would cross it twice, at a fraction of what links the devices."""
    assert "shm" not in chosen("auto", platform)
    inputs = inputs_of(PRESETS[platform])
    assert link_of(inputs).inside_node > 2 * inputs.device.host_path_rate
