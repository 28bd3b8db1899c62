"""A rank's weights are found under their Megatron names, where training changes them, and brought up to date before a sync."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel

from mrl.megatron.shards import RankShards


class Wrapped(DistributedDataParallel):
    """Megatron's wrapper as far as its weights go: `module.` in front of names, and a gather that is counted."""

    def __init__(self, module: torch.nn.Module, overlap_param_gather: bool):
        torch.nn.Module.__init__(self)
        self.module, self.gathers = module, []
        self.ddp_config = SimpleNamespace(overlap_param_gather=overlap_param_gather)

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        self.gathers.append(force_sync)


def chunk(overlap_param_gather: bool = False) -> Wrapped:
    inner = torch.nn.Module()
    inner.module = torch.nn.ModuleDict({"layer": torch.nn.Linear(3, 2)})  # Float16Module wraps a second time
    return Wrapped(inner, overlap_param_gather)


def test_names_are_the_models_own_and_numbers_those_of_the_chunks():
    chunks = [chunk(), chunk()]
    shards = RankShards(chunks)
    for number, one in enumerate(chunks):
        assert shards("layer.weight", number).data_ptr() == one.module.module["layer"].weight.data_ptr()


def test_storage_that_was_swapped_is_found_anew():
    one = chunk()
    shards = RankShards([one])
    one.module.module["layer"].weight.data = torch.full((2, 3), 5.0)
    assert shards("layer.weight", 0).eq(5.0).all()


def test_a_parameter_that_is_not_there_is_named():
    with pytest.raises(RuntimeError, match=r"model chunk 1 has no parameter layer\.weight"):
        RankShards([chunk()])("layer.weight", 1)


def test_parameters_left_to_be_gathered_later_are_gathered_before_a_sync_and_at_once():
    late, current = chunk(overlap_param_gather=True), chunk()
    RankShards([late, current]).refresh()
    assert (late.gathers, current.gathers) == ([True], [])
