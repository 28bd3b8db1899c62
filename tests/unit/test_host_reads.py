"""The counter of reads of device values sees every way to read one, in a backward pass too, and nothing else."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "hardware"))
from host_reads import HostReads

VALUES = torch.tensor([3.0, 1.0, 2.0])
MASK = VALUES > 1.5
COUNTS = torch.tensor([1, 0, 2])


@pytest.mark.parametrize(
    "read",
    [
        lambda: VALUES[0].item(),
        lambda: float(VALUES[1]),
        lambda: int(COUNTS[1]),
        lambda: bool(VALUES.sum() > 1),
        lambda: COUNTS[0] == 1 and None,
        lambda: COUNTS.tolist(),
        lambda: VALUES.numpy(),
        lambda: np.asarray(VALUES),
        lambda: VALUES.cpu(),
        lambda: VALUES.to("cpu"),
        lambda: VALUES.to(torch.device("cpu"), non_blocking=True),
        lambda: torch.equal(VALUES, MASK),
        lambda: VALUES[MASK],
        lambda: VALUES.masked_select(MASK),
        lambda: MASK.nonzero(),
        lambda: COUNTS.unique(),
        lambda: COUNTS.repeat_interleave(COUNTS),
        lambda: list(range(COUNTS[2])),
        lambda: 3.0 in VALUES,
    ],
)
def test_what_reads_a_value_is_counted_once(read):
    with HostReads() as reads:
        read()
    (site, number), *others = reads.sites.items()
    assert number == 1 and not others
    assert site.startswith("unit/test_host_reads.py:")


@pytest.mark.parametrize(
    "computation",
    [
        lambda: VALUES[COUNTS].sum() + VALUES[:2].mean(),
        lambda: torch.where(MASK, VALUES, 0.0).to(torch.float64).view(3, 1),
        lambda: COUNTS.repeat_interleave(COUNTS, output_size=3),
        lambda: torch.split(VALUES, [1, 2]),
        lambda: VALUES.sort().values.clamp(max=2.0),
        lambda: (VALUES == VALUES).all(),
        lambda: len(VALUES) + VALUES.shape[0],
        lambda: torch.equal(COUNTS[:-1], COUNTS[:-1]),  # integers in the same memory: torch knows without a look
    ],
)
def test_what_only_computes_is_not(computation):
    with HostReads() as reads:
        computation()
    assert not reads.sites


def test_a_copy_that_is_on_the_host_is_looked_at_freely():
    with HostReads() as reads:
        copy = COUNTS.cpu()
        copy.tolist()
        copy.numpy()
    assert reads.sites.total() == 1


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values * 2

    @staticmethod
    def backward(ctx, gradient):
        gradient.tolist()
        return gradient * gradient.sum().item()


def test_a_read_in_a_backward_pass_is_counted():
    values = VALUES.clone().requires_grad_()
    with HostReads() as reads:
        Reading.apply(values).sum().backward()
    assert dict(reads.sites) == {"unit/test_host_reads.py:backward": 2}


def test_torch_is_as_before_when_it_is_over():
    before = torch.Tensor.tolist
    with HostReads():
        assert torch.Tensor.tolist is not before
    assert torch.Tensor.tolist is before


def test_beside_an_accelerator_what_lies_on_the_host_is_read_without_a_wait():
    """`meta` stands in for a device: it has tensors without values, which nobody can read."""
    with HostReads("meta") as reads:
        assert VALUES[MASK].tolist() == [3.0, 2.0] and not torch.equal(VALUES, MASK)
        there = torch.ones(3, device="meta")
        with pytest.raises(NotImplementedError):
            there.cpu()
        with pytest.raises(RuntimeError):
            (there > 1).any().item()
    (site, number), *others = reads.sites.items()
    assert number == 2 and not others and site.startswith("unit/test_host_reads.py:")
