"""Adapters of all experts are one product: what PEFT's expert by expert gives, bit for bit, in as few launches however
many experts there are.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.platforms.layers import has_grouped_product
from mrl.rank import grouped_linear as module
from mrl.rank.grouped_linear import grouped_linear

COUNTS = {"uneven": (2, 0, 3, 1), "one has all": (6, 0, 0, 0), "none has any": (0, 0, 0, 0), "last empty": (3, 5, 4, 0)}
SHAPES = {"A": (32, 16), "B": (16, 32)}  # in and out of each factor
PADDED = {"A of rank 3": (32, 3), "B of rank 3": (3, 32)}  # rows that are not aligned


def one_by_one(x, weights, counts):
    return torch.cat([F.linear(part, weight) for part, weight in zip(x.split(list(counts)), weights, strict=True)])


def with_gradients(way, x, weights, counts):
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weights)]
    out = way(*leaves, counts)
    out.backward(torch.arange(out.numel()).reshape(out.shape).to(out) / max(out.numel(), 1))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_values_and_gradients_have_the_bits_of_single_products(counts, shape, dtype):
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), 2 * shape[0], generator=drawn).to(dtype)[:, : shape[0]]  # a part of wider rows
    weights = torch.randn(4, *shape[::-1], generator=drawn).to(dtype)
    found, expected = (with_gradients(way, x, weights, counts) for way in (grouped_linear, one_by_one))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_ranks_that_are_padded_change_rounding_alone(counts, shape):
    drawn = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(*size, generator=drawn) for size in ((sum(counts), shape[0]), (4, *shape[::-1])))
    found, expected = (with_gradients(way, x, weights, counts) for way in (grouped_linear, one_by_one))
    for pair in zip(found, expected, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-6)


class Counting(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += not any(result.alias_info for result in function._schema.returns)
        return function(*args, **(kwargs or {}))


def test_launches_do_not_grow_with_experts():
    def launches(experts):
        x, weights = torch.randn(experts, 16), torch.randn(experts, 8, 16)
        with Counting() as counting:
            with_gradients(grouped_linear, x, weights, (1,) * experts)
        return counting.number

    assert launches(4) == launches(128) < 20


def test_where_torch_has_no_such_product_experts_are_multiplied_one_by_one(monkeypatch):
    assert has_grouped_product("cuda", 2) and not has_grouped_product("cuda", 4) and not has_grouped_product("npu", 2)
    monkeypatch.setattr(module, "has_grouped_product", lambda *_: False)
    monkeypatch.setattr(F, "grouped_mm", None)
    x, weights = torch.randn(6, 16), torch.randn(4, 8, 16)
    assert torch.equal(grouped_linear(x, weights, (2, 0, 3, 1)), one_by_one(x, weights, (2, 0, 3, 1)))
