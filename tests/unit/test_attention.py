"""Plain attention over a pack gives what each sequence gives alone:
the reference is one call of torch's attention for each sequence.
"""

import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GptOssConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import mrl.rank.attention as attention_module
from mrl.model.computed_sizes import ATTENTION_LENGTHS
from mrl.platforms.packs import Pack, tie
from mrl.rank.attention import CausalAttention, SinkAttention
from mrl.rank.packing import kept_positions

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


# ---------------------------------------------------------------- latent attention: narrower values, a scale of its own

WIDE, NARROW, SCALE = 12, 7, 0.31  # dims of keys and values; the scale is not 1 / sqrt(12)


def latent(context: int = 1, rank: int = 0) -> CausalAttention:
    group = SimpleNamespace(size=lambda: context, rank=lambda: rank)
    return CausalAttention(None, 1, None, "self", softmax_scale=SCALE, pg_collection=SimpleNamespace(cp=group))


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(scale q k^T) v over earlier positions (arXiv:1706.03762, eq. 1), float64, of one sequence."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    scores = SCALE * q @ k.repeat_interleave(len(q) // len(k), 0).transpose(1, 2)
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, float("-inf")).softmax(-1)
    return (shares @ v.repeat_interleave(len(q) // len(v), 0)).transpose(0, 1).flatten(1)


def latent_inputs(length: int, groups: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    sizes = ((HEADS, WIDE), (groups, WIDE), (groups, NARROW))
    return [torch.randn(length, *size, generator=drawn, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("groups", [HEADS, GROUPS])
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_narrower_values_and_a_scale_are_computed_as_defined(lengths, groups):
    results = []
    for function in ("packed", "defined"):
        tensors = latent_inputs(sum(lengths), groups)
        if function == "packed":
            starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            out = latent()(*tensors, packed_seq_params=SimpleNamespace(cu_seqlens_q_padded=starts))
        else:
            out = torch.cat([by_definition(*qkv) for qkv in zip(*(t.split(lengths) for t in tensors), strict=True)])
        assert out.shape == (sum(lengths), HEADS * NARROW)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out.detach().double(), *(tensor.grad.double() for tensor in tensors)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_padded_rows_are_computed_as_defined():
    rows = [[x.detach() for x in latent_inputs(9, GROUPS)], [x.detach() + 1 for x in latent_inputs(9, GROUPS)]]
    out = latent()(*(torch.stack(parts, 1) for parts in zip(*rows, strict=True)))
    for row, tensors in enumerate(rows):
        torch.testing.assert_close(out[:, row].double(), by_definition(*tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("context", [2, 4])
def test_ranks_that_share_sequences_compute_them_together(context, is_packed, monkeypatch):
    """Each rank has two opposite parts of every sequence (zigzag); together they are the whole, gradients too."""
    lengths = [24, 40, 8] if is_packed else [24]
    tensors = latent_inputs(sum(lengths), GROUPS)
    given = tensors if is_packed else [x[:, None] for x in tensors]
    places = [torch.as_tensor(kept_positions(np.array(lengths), context, rank)) for rank in range(context)]
    assert sorted(torch.cat(places).tolist()) == list(range(sum(lengths)))

    def gathered(x, group):
        """Every rank's part of keys or values, one behind the other."""
        return torch.cat([given[1 if x.shape[-1] == WIDE else 2][own] for own in places])

    monkeypatch.setattr(attention_module, "gather_from_sequence_parallel_region", gathered)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    pack = {"packed_seq_params": SimpleNamespace(cu_seqlens_q_padded=starts)} if is_packed else {}
    whole = torch.zeros(sum(lengths), HEADS * NARROW)
    for rank, own in enumerate(places):
        out = latent(context, rank)(*(x[own] for x in given), **pack)
        whole = whole.index_copy(0, own, out.reshape(len(own), -1))
    results = [whole.detach().double()]
    (whole * torch.linspace(-1, 1, whole.numel()).view_as(whole)).sum().backward()
    results += [tensor.grad.double() for tensor in tensors]
    again = latent_inputs(sum(lengths), GROUPS)
    out = torch.cat([by_definition(*qkv) for qkv in zip(*(t.split(lengths) for t in again), strict=True)])
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    for ours, expected in zip(results, [out.detach(), *(t.grad.double() for t in again)], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- sinks and windows: gpt-oss

WINDOW = 20
SINK_PACKS = {**PACKS, "longer than the window by one": [WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1]}


def with_sinks(window: int, context: int = 1, rank: int = 0) -> SinkAttention:
    config = SimpleNamespace(num_attention_heads=HEADS, tensor_model_parallel_size=1, params_dtype=torch.float32)
    group = SimpleNamespace(size=lambda: context, rank=lambda: rank)
    made = SinkAttention(config, 2, None, "self", windows=(-1, window), pg_collection=SimpleNamespace(cp=group))
    made.softmax_offset.data = torch.tensor([-2.0, 0.0, 1.5, 4.0])
    return made


def by_transformers(tensors: list[torch.Tensor], sinks: torch.Tensor, lengths: list[int], window: int) -> torch.Tensor:
    """What gpt-oss' class in transformers computes of each sequence alone, by its own mask."""
    config = GptOssConfig(sliding_window=window or None, layer_types=["full_attention"], num_hidden_layers=1)
    config._attn_implementation = "eager"
    module = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=sinks, training=False)
    make = create_sliding_window_causal_mask if window else create_causal_mask
    outputs = []
    for q, k, v in zip(*(tensor.split(lengths) for tensor in tensors), strict=True):
        known = {"past_key_values": None, "attention_mask": torch.ones(1, len(q), dtype=torch.bool)}
        mask = make(config=config, inputs_embeds=torch.zeros(1, len(q), 1), **known)
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        outputs.append(eager_attention_forward(module, *heads, mask, DIM**-0.5)[0][0].flatten(1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [0, WINDOW, 1, 200])
@pytest.mark.parametrize("lengths", SINK_PACKS.values(), ids=SINK_PACKS)
def test_sinks_and_windows_are_those_of_transformers(lengths, window):
    results = []
    for is_ours in (True, False):
        tensors = inputs(lengths)
        layer = with_sinks(window)
        if is_ours:
            starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            out = layer(*tensors, packed_seq_params=SimpleNamespace(cu_seqlens_q_padded=starts))
        else:
            out = by_transformers(tensors, layer.softmax_offset, lengths, window)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), layer.softmax_offset.grad, *(tensor.grad for tensor in tensors)])
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("window", [0, 3])
def test_context_ranks_attend_with_sinks_as_one_does(window, monkeypatch):
    length = 16
    tensors = [tensor.detach() for tensor in inputs([length])]
    starts = SimpleNamespace(cu_seqlens_q_padded=torch.tensor([0, length], dtype=torch.int32))
    whole = with_sinks(window)(*tensors, packed_seq_params=starts)
    parts = [kept_positions(np.array([length]), 2, rank) for rank in range(2)]
    for rank, own in enumerate(parts):
        order = torch.from_numpy(np.concatenate(parts))
        gathered = iter([tensors[1][order], tensors[2][order]])
        monkeypatch.setattr(
            attention_module, "gather_from_sequence_parallel_region", lambda x, group, known=gathered: next(known)
        )
        mine = [tensor[torch.from_numpy(own)] for tensor in tensors]
        out = with_sinks(window, 2, rank)(*mine, packed_seq_params=starts)
        assert (out - whole[torch.from_numpy(own)]).abs().max() < 1e-6


def test_a_sequences_bits_do_not_depend_on_the_pack_with_windows():
    lengths = [33, 47, 20, 16, 5, 64]
    tensors = [tensor.detach() for tensor in inputs(lengths)]

    def of(some: list[torch.Tensor], sizes: list[int]) -> torch.Tensor:
        starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        return with_sinks(WINDOW)(*some, packed_seq_params=SimpleNamespace(cu_seqlens_q_padded=starts))

    together = of(tensors, lengths).split(lengths)
    for number, length in enumerate(lengths):
        alone = of([tensor.split(lengths)[number] for tensor in tensors], [length])
        assert torch.equal(alone, together[number])
