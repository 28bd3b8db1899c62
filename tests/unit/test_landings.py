"""A worker keeps between syncs where blocks go in its parameters, and none of the parameters' memory."""

import torch
from reshard_world import World, expected, hf_weights, setup_for, shards_of
from torch.multiprocessing.reductions import StorageWeakRef

from mrl.model.boxes import Box
from mrl.reshard.copies import Landings
from mrl.reshard.messages import Copy

TRAIN = dict(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=2)


def copied(rows: tuple[int, int], columns: tuple[int, int] = (0, 6)) -> tuple[Copy, torch.Tensor]:
    """A copy into rows and columns of the parameter, and its block of random values."""
    target = Box((rows, columns))
    origin = Box.whole(target.shape)
    return Copy("w", origin, "s", 0, origin, "m.weight", target, (0, 1)), torch.randn(target.shape)


def test_a_second_sync_brings_new_values_into_parameters_that_lie_elsewhere():
    setup = setup_for(TRAIN, {})
    weights = hf_weights(setup)
    later = {name: tensor + 1 for name, tensor in weights.items()}
    with World(setup, weights) as world:
        assert world.sync(1).errors() == []
        (receiver,) = world.receivers.values()
        kept = dict(receiver._landings)
        for rank, shards in world.held.items():
            for key, new in shards_of(setup, rank, later).items():
                shards[key].copy_(new)
        tensors = world.sync(2).writers[0].tensors
        assert kept and receiver._landings == kept, "the same objects, which have no other equality"
    wanted = expected(setup, 0, later)
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, wanted[name])] == []


def test_no_memory_of_a_parameter_outlives_it():
    copies = [copied((0, 2)), copied((2, 4)), copied((4, 5), (1, 4))]
    tensors = {"m.weight": torch.zeros(5, 6)}
    landings = Landings(tensors, copies)
    landings.run(tensors)
    memory = StorageWeakRef(tensors["m.weight"].untyped_storage())
    assert not memory.expired()
    tensors.clear()
    assert memory.expired()


def test_blocks_go_to_the_same_places_of_a_parameter_inside_other_memory():
    copies = [copied((0, 2)), copied((2, 4)), copied((4, 5), (1, 4))]
    landings = Landings({"m.weight": torch.zeros(5, 6)}, copies)
    moved = {"m.weight": torch.zeros(100)[17:47].view(5, 6)}
    assert landings.fit(moved, copies)
    landings.run(moved)
    wanted = torch.zeros(5, 6)
    for copy, block in copies:
        wanted[copy.target_box.slices] = block
    assert torch.equal(moved["m.weight"], wanted)


def test_parameters_of_another_form_and_other_blocks_do_not_fit():
    copies = [copied((0, 2)), copied((2, 4))]
    landings = Landings({"m.weight": torch.zeros(5, 6)}, copies)
    assert landings.fit({"m.weight": torch.zeros(5, 6)}, copies)
    others = [torch.zeros(6, 5).t(), torch.zeros(5, 6, dtype=torch.bfloat16), torch.zeros(6, 6)]
    assert [landings.fit({"m.weight": other}, copies) for other in others] == [False] * 3
    assert not landings.fit({"m.weight": torch.zeros(5, 6)}, copies[:1])
    assert not landings.fit({"m.weight": torch.zeros(5, 6)}, [copies[0], copied((2, 4))])
