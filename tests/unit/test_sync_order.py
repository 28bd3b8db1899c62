"""No preset's weight sync can deadlock where the first use of a pair waits for the peer and a wait is for the whole
device, as with NCCL and HCCL. The order before, which gloo let pass, does.
"""

import pytest
from seldom import seldom
from sync_simulation import (
    LARGEST,
    PRESETS,
    Simulation,
    check_completes,
    check_deadlock_before,
    each_transport_two_rounds_ahead,
    planned,
)

# one worker gets weights both by device memory and over the network
MIXED = [
    "qwen3-235b-a22b/h100-16x8", "qwen3-235b-a22b/h200-8x8", "qwen3-235b-a22b/h100-2x8-lora",
    "qwen3-235b-a22b/a3-8x16", "qwen3-next-80b-a3b/h100-4x8", "minimax-m2/h200-8x8", "glm-4.6/h200-16x8",
    "glm-4.7/h200-16x8",
]  # fmt: skip
# the two largest: tests/real/test_presets_verified.py
SMALLER = [preset for preset in PRESETS if preset not in LARGEST]
# others of their model, of their devices or of such a layout are quicker
SLOW = ("qwen3-235b-a22b/h100-16x8", "qwen3-30b-a3b/a2-4x8", "glm-4.6/h200-16x8", "glm-4.7/h200-16x8")
# what a user may set: nobody ships it
SET = {
    "pp2": ["actor.layout.pipeline_model_parallel_size=2"],
    "pp4": ["actor.layout.pipeline_model_parallel_size=4"],
    "ep16": ["actor.layout.expert_model_parallel_size=16"],
}


@pytest.mark.parametrize("preset", seldom(SMALLER, *(preset for preset in SMALLER if preset not in SLOW)))
def test_the_sync_of_a_preset_completes(preset):
    check_completes(preset)


@pytest.mark.parametrize("preset", seldom(MIXED, "qwen3-next-80b-a3b/h100-4x8"))
def test_receives_two_rounds_of_each_transport_ahead_deadlock(preset):
    check_deadlock_before(preset)


@pytest.mark.parametrize("change", SET)
def test_layouts_across_nodes_that_users_set_complete(change):
    check_deadlock_before("qwen3-30b-a3b/h100-4x8", *SET[change], causes=[(True, True)])
    check_completes("qwen3-30b-a3b/h100-4x8", *SET[change])


def test_devices_of_one_kind_of_route_completed_before():
    """So it is the mixture that the simulation tells."""
    for preset in ("qwen3-30b-a3b/h100-4x8", "qwen3-30b-a3b/h100-4x8-separate"):
        notes, route, _ = planned(preset)
        assert len({route(note.source, note.worker) for note in notes}) == 1
        assert not Simulation(notes, route, receiving=each_transport_two_rounds_ahead).stuck()
