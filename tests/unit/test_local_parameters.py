"""A rank's weights are found under their Megatron names, where training changes them,
and are as the plan describes them.
"""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel

from mrl.model.megatron_shards import Shard, local_shapes
from mrl.rank.local_parameters import LocalParameters


class Wrapped(DistributedDataParallel):
    """Megatron's wrapper as far as its weights go: `module.` in front of names."""

    def __init__(self, module: torch.nn.Module):
        torch.nn.Module.__init__(self)
        self.module = module


def chunk() -> Wrapped:
    inner = torch.nn.Module()
    inner.module = torch.nn.ModuleDict({"layer": torch.nn.Linear(3, 2)})  # Float16Module wraps a second time
    return Wrapped(inner)


def described(name: str, shape: tuple[int, ...], number: int = 0) -> Shard:
    return Shard(name, number, shape, (), False, (0,))


def test_names_are_the_models_own_and_numbers_those_of_the_chunks():
    chunks = [chunk(), chunk()]
    parameters = LocalParameters(chunks)
    for number, one in enumerate(chunks):
        assert parameters("layer.weight", number).data_ptr() == one.module.module["layer"].weight.data_ptr()


def test_storage_that_was_swapped_is_found_anew():
    one = chunk()
    parameters = LocalParameters([one])
    one.module.module["layer"].weight.data = torch.full((2, 3), 5.0)
    assert parameters("layer.weight", 0).eq(5.0).all()


def test_a_parameter_that_is_not_there_is_named():
    with pytest.raises(RuntimeError, match=r"model chunk 1 has no parameter layer\.weight"):
        LocalParameters([chunk()])("layer.weight", 1)


RIGHT = [described("layer.weight", (2, 3)), described("layer.bias", (2,))]


def test_a_model_as_it_is_described_passes():
    LocalParameters([chunk()]).check(local_shapes(RIGHT))


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        (RIGHT[:1], r"layer\.bias of chunk 0 is \(2,\), described as not there"),
        ([*RIGHT, described("layer.scale", (2,))], r"layer\.scale of chunk 0 is not there, described as \(2,\)"),
        ([*RIGHT, described("layer.bias", (2,), 1)], r"layer\.bias of chunk 1 is not there"),
        ([described("layer.weight", (1, 3)), RIGHT[1]], r"layer\.weight of chunk 0 is \(2, 3\), described as \(1, 3\)"),
    ],
)
def test_a_parameter_that_is_missing_unknown_or_of_another_shape_is_named(shards, said):
    with pytest.raises(RuntimeError, match=said):
        LocalParameters([chunk()]).check(local_shapes(shards))
