"""Layers that are written one after the other share one piece of memory, and none keeps it."""

import pytest
import torch
from torch import nn

from mrl.engine.load_layout import ModuleBuffers, check_same_shapes

LEAVES = ("w13_weight", "w2_weight")


def layer(experts: int, width: int = 24, dtype: torch.dtype = torch.float32) -> nn.Module:
    made = nn.Module()
    made.w13_weight = nn.Parameter(torch.empty(experts, width, 7, dtype=dtype), requires_grad=False)
    made.w2_weight = nn.Parameter(torch.empty(experts, 7, width // 2, dtype=dtype), requires_grad=False)
    return made


def lent(buffers: ModuleBuffers, to: nn.Module) -> tuple[int, int]:
    buffers.lend(to, LEAVES)
    return tuple(getattr(to, leaf).data_ptr() for leaf in LEAVES)


def test_parameters_lie_apart_and_aligned_and_keep_their_shapes():
    buffers, one = ModuleBuffers(), layer(3)
    places = lent(buffers, one)
    assert (one.w13_weight.shape, one.w2_weight.shape) == ((3, 24, 7), (3, 7, 12))
    assert (places[1] - places[0]) % 64 == 0 and places[1] - places[0] >= one.w13_weight.nbytes
    one.w13_weight.data.fill_(1), one.w2_weight.data.fill_(2)
    assert bool((one.w13_weight == 1).all()) and bool((one.w2_weight == 2).all())


def test_what_was_given_back_is_lent_again_and_not_before():
    buffers, one, two, three = ModuleBuffers(), layer(3), layer(3), layer(2, dtype=torch.bfloat16)
    first, second = lent(buffers, one), lent(buffers, two)
    assert not set(first) & set(second), "two modules may be open"
    buffers.take_back(one)
    buffers.take_back(one)
    assert lent(buffers, three)[0] == first[0], "a smaller layer fits as well"


def test_a_larger_layer_gets_memory_of_its_own_and_the_smaller_one_is_not_kept_beside_it():
    buffers, one, two = ModuleBuffers(), layer(3), layer(30)
    lent(buffers, one)
    buffers.take_back(one)
    lent(buffers, two)
    two.w13_weight.data.fill_(1), two.w2_weight.data.fill_(2)
    assert buffers._free == []
    buffers.take_back(two)
    buffers.clear()
    assert not buffers._free and not buffers._lent


def test_experts_are_packed_into_a_kernel_of_their_own_shapes_and_into_no_other():
    loaded = {name: torch.empty(2, *shape) for name, shape in zip(LEAVES, ((24, 7), (7, 12)), strict=True)}
    check_same_shapes(loaded, {name: tensor.clone() for name, tensor in loaded.items()})
    with pytest.raises(RuntimeError, match=r"'w2_weight': \(2, 7, 32\)"):
        check_same_shapes(loaded, loaded | {"w2_weight": torch.empty(2, 7, 32)})
    with pytest.raises(RuntimeError, match=r"'w13_bias': \(2, 24\)}; reshard.path: slow can load them"):
        check_same_shapes(loaded, loaded | {"w13_bias": torch.empty(2, 24)})
