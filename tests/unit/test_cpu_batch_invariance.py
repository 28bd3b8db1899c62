"""Sigmoids of the CPU engine: the bits of a token do not depend on how many are beside it.

Linears: tests/real/test_cpu_patches.py.
"""

import pytest
import torch

from mrl.engine.cpu_batch_invariance import ROWS, of_blocks, of_whole_registers

sigmoid = of_whole_registers(torch.Tensor.sigmoid)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 8, 24, 128])
def test_a_token_has_the_same_bits_beside_any_number_of_others(width, dtype):
    torch.manual_seed(width)
    values = torch.randn(200, width).to(dtype)
    whole = sigmoid(values)
    assert whole.shape == values.shape and whole.dtype == dtype
    torch.testing.assert_close(whole, torch.sigmoid(values), rtol=1e-6, atol=1e-7)
    for first, tokens in ((0, 1), (0, 35), (7, 13), (100, 99), (3, 9)):
        assert torch.equal(sigmoid(values[first : first + tokens]), whole[first : first + tokens])


@pytest.mark.parametrize("width", [1, 8])
def test_a_view_has_the_bits_of_its_copy_where_it_fills_registers_too(width):
    torch.manual_seed(0)
    values = torch.randn(64, 2 * width)[:, :width]
    assert not values.is_contiguous()
    assert torch.equal(sigmoid(values), torch.cat([sigmoid(row) for row in values.clone()]).view(64, width))


def test_strides_are_minded_and_nothing_is_fine():
    values = torch.randn(9, 6)
    assert torch.equal(sigmoid(values.T), sigmoid(values).T)
    assert sigmoid(values[:0]).shape == (0, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_16_bits_are_multiplied_in_blocks_of_one_size(dtype):
    seen = []

    def product(weight, rows, bias):
        seen.append(len(rows))
        return rows @ weight + bias

    weight = torch.randn(6, 5).to(dtype)
    bias = torch.randn(5).to(dtype)
    for shape in ((1, 6), (2, 20, 6), (ROWS, 6), (0, 6)):
        rows = torch.randn(shape).to(dtype)
        torch.testing.assert_close(of_blocks(product)(weight, rows, bias), rows @ weight + bias)
    assert dtype is torch.float32 or set(seen) <= {ROWS, 0}
