"""Plain attention over a pack gives what each sequence gives alone:
the reference is one call of torch's attention for each sequence.
"""

import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mrl.megatron.attention import CausalAttention
from mrl.model.computed_sizes import ATTENTION_LENGTHS
from mrl.platforms.packs import Pack, tie

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "hardware"))
from host_reads import HostReads

HEADS, GROUPS, DIM = 4, 2, 8
PACKS = {
    "short, of one length": [16] * 5,
    "short, of many lengths": [1, 2, 16, 7, 15, 3],
    "beside a padded length": [33, 47, 48, 20, 64],
    "longer than any padded length": [130, 5, 131, 130],
    "one": [9],
}


def attention() -> CausalAttention:
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return CausalAttention(None, 1, None, "self", pg_collection=SimpleNamespace(cp=group))


def inputs(lengths: list[int]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(sum(lengths), heads, DIM, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]


def packed(tensors: list[torch.Tensor], lengths: list[int], known: bool = False) -> torch.Tensor:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    if known:
        tie(starts, Pack(tuple(lengths), torch.zeros(0)))
    return attention()(*tensors, packed_seq_params=SimpleNamespace(cu_seqlens_q_padded=starts))


def one_by_one(tensors: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    sequences = zip(*(tensor.split(lengths) for tensor in tensors), strict=True)
    outputs = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in qkv), is_causal=True, enable_gqa=True)
        for qkv in sequences
    ]
    return torch.cat([out.transpose(0, 1).flatten(1) for out in outputs])


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_a_known_pack_is_attended_to_without_a_look_at_the_device(lengths):
    tensors = inputs(lengths)
    with HostReads() as reads:
        known = packed(tensors, lengths, known=True)
        known.sum().backward()
    assert not reads.sites
    assert torch.equal(known, packed(tensors, lengths))


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_outputs_and_gradients_are_those_of_each_sequence_alone(lengths):
    results = []
    for function in (packed, one_by_one):
        tensors = inputs(lengths)
        out = function(tensors, lengths)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), *(tensor.grad for tensor in tensors)])
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() <= 1e-6 * expected.norm()


def test_a_sequences_bits_do_not_depend_on_what_else_is_in_the_pack():
    lengths = [33, 47, 20, 16, 5, 64]
    tensors = [tensor.detach() for tensor in inputs(lengths)]
    together = packed(tensors, lengths).split(lengths)
    for number, length in enumerate(lengths):
        alone = packed([tensor.split(lengths)[number] for tensor in tensors], [length])
        assert torch.equal(alone, together[number])


def test_padded_lengths_waste_at_most_a_half_from_the_second_on():
    assert all(longer <= 1.5 * shorter for shorter, longer in pairwise(ATTENTION_LENGTHS))
