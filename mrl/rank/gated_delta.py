"""Gated delta attention (Qwen3-Next, Qwen3.5) in plain torch, over packs of sequences and tensor-parallel over heads.

Megatron's own layer takes no packs. A head's state S [key dim, value dim] passes from token to token of a sequence. It
is zero at the sequence's beginning. With decay a and rate b:

    S = a S;   S = S + k (b (v - S^T k))^T;   out = S^T q

Tokens are computed in chunks of 64, in which the updates are one triangular system (arXiv:2412.06464). Chunks end with
their sequence, so that no chunk has two sequences. Sequences are computed together, the longest first:

    pack of lengths 3, 2, 5 in chunks of 2    a a a b b c c c c c
    chunks in the order of steps              c c | a a | b b      c c | a .      c .
                                              step 0               step 1         step 2
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.model.computed_sizes import DELTA_CHUNK
from mrl.platforms.packs import lengths_of
from mrl.rank.host_arrays import brought

_NORM_EPS = 1e-6  # for queries and keys, independent of the model's norms


@dataclass(frozen=True)
class Chunks:
    """A pack cut into chunks."""

    # int64 [chunks * DELTA_CHUNK]: token of the pack; after a sequence's end, the index after the pack's last token
    tokens: Tensor
    positions: Tensor  # int64 [tokens of the pack]: position of each token in `tokens`
    counts: tuple[int, ...]  # chunks of each step, which belong to the first sequences of the previous step


class GatedDelta(MegatronModule):
    """Gated delta attention, in place of a layer's attention.

    Projections are ordered as in the checkpoint. Qwen3-Next's are ordered by key head, so a tensor rank has consecutive
    rows. Qwen3.5's are ordered by kind, and so are a rank's: its queries, its keys, its values, their gates. The
    convolution's channels are queries, keys, then values.
    """

    kernel = "torch"  # model.gated_delta

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection=None, by_kind: bool = False, **_):
        """`by_kind`: whether projections are ordered by kind instead of by key head."""
        super().__init__(config)
        self.by_kind = by_kind
        ranks = pg_collection.tp.size()
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        self.key_heads = config.linear_num_key_heads // ranks
        self.values_a_key = config.linear_num_value_heads // config.linear_num_key_heads
        self.value_heads = self.key_heads * self.values_a_key
        keys = config.linear_num_key_heads * self.key_dim
        values = config.linear_num_value_heads * self.value_dim
        column = {"config": config, "init_method": config.init_method, "gather_output": False, "bias": False}
        column |= {"tp_group": pg_collection.tp}
        self.in_proj_qkvz = ColumnParallelLinear(config.hidden_size, 2 * (keys + values), **column)
        self.in_proj_ba = ColumnParallelLinear(config.hidden_size, 2 * config.linear_num_value_heads, **column)
        self.out_proj = RowParallelLinear(
            values, config.hidden_size, config=config, init_method=config.output_layer_init_method, bias=False,
            input_is_parallel=True, skip_bias_add=True, tp_group=pg_collection.tp,
        )  # fmt: skip
        channels = (2 * keys + values) // ranks
        self.conv1d = _Convolution(channels, config.linear_conv_kernel_dim, config.params_dtype)
        self.dt_bias = _of_heads(torch.ones(self.value_heads), config.params_dtype)
        self.A_log = _of_heads(torch.zeros(self.value_heads), config.params_dtype)
        self.norm = _GatedNorm(self.value_dim, config)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params=None, **_):
        """Takes `hidden_states` [seq, batch, hidden]. Returns the same shape, and no bias.

        Under sequence parallelism seq is this rank's part. Padded rows have their pads at the end, where they affect no
        real token.
        """
        mixed, _ = self.in_proj_qkvz(hidden_states)
        rates, _ = self.in_proj_ba(hidden_states)
        length, rows = mixed.shape[:2]
        lengths = (length,) * rows
        if packed_seq_params is not None:
            lengths = lengths_of(packed_seq_params)
        mixed, rates = (x.transpose(0, 1).flatten(0, 1) for x in (mixed, rates))
        out = self._of_pack(mixed, rates, lengths)
        return self.out_proj(out.unflatten(0, (rows, length)).transpose(0, 1))

    def _of_pack(self, mixed: Tensor, rates: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Returns the output of this rank's heads for each token: [tokens, heads * dim]."""
        query, key, value, gate, rate, step = self._by_kind(mixed, rates)
        channels = torch.cat([x.flatten(1) for x in (query, key, value)], dim=1)
        sizes = [x[0].numel() for x in (query, key, value)]
        query, key, value = self.conv1d(channels, lengths).split(sizes, dim=1)
        value = value.unflatten(1, (-1, self.value_dim))
        query, key = (x.unflatten(1, (-1, self.key_dim)) for x in (query, key))
        query, key = (x.repeat_interleave(self.values_a_key, dim=1) for x in (query, key))
        decay = -self.A_log.float().exp() * F.softplus(step.float() + self.dt_bias)
        out = _RULES[self.kernel](query, key, value, decay, rate.sigmoid(), lengths)
        return self.norm(out, gate).flatten(1)

    def _by_kind(self, mixed: Tensor, rates: Tensor) -> tuple[Tensor, ...]:
        """Returns queries, keys, values and gates [tokens, heads, dim]; rates and steps [tokens, heads]."""
        if self.by_kind:
            return self._of_all_heads(mixed, rates)
        wide = self.values_a_key * self.value_dim
        by_head = mixed.unflatten(1, (self.key_heads, -1))
        query, key, value, gate = by_head.split([self.key_dim, self.key_dim, wide, wide], dim=2)
        value, gate = (x.reshape(len(x), self.value_heads, self.value_dim) for x in (value, gate))
        rate, step = rates.unflatten(1, (self.key_heads, -1)).split(self.values_a_key, dim=2)
        return query, key, value, gate, rate.flatten(1), step.flatten(1)

    def _of_all_heads(self, mixed: Tensor, rates: Tensor) -> tuple[Tensor, ...]:
        """Returns the same as `_by_kind`, for projections that are ordered by kind."""
        keys = self.key_heads * self.key_dim
        values = self.value_heads * self.value_dim
        query, key, value, gate = mixed.split([keys, keys, values, values], dim=1)
        query, key = (x.unflatten(1, (-1, self.key_dim)) for x in (query, key))
        value, gate = (x.unflatten(1, (-1, self.value_dim)) for x in (value, gate))
        rate, step = rates.chunk(2, dim=1)
        return query, key, value, gate, rate, step


class _Convolution(torch.nn.Module):
    """Convolves each channel over earlier tokens of the same sequence, then applies silu."""

    def __init__(self, channels: int, kernel: int, dtype: torch.dtype):
        super().__init__()
        self.weight = _of_heads(torch.zeros(channels, 1, kernel), dtype)

    def forward(self, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Takes `x` [tokens, channels] and returns the same shape."""
        weight = self.weight[:, 0]
        position = _positions(lengths, x.device)
        out = x * weight[:, -1]
        for back in range(1, weight.shape[1]):
            earlier = F.pad(x, (0, 0, back, 0))[: len(x)]
            out = out + torch.where(position[:, None] >= back, earlier, 0) * weight[:, -1 - back]
        return F.silu(out)


class _GatedNorm(torch.nn.Module):
    """Applies RMSNorm to each head, then its gate. The weight is not zero-centred, unlike the model's other norms."""

    def __init__(self, size: int, config: TransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        # each tensor rank sees its own heads; this asks for their sum over tensor ranks
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = config.layernorm_epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = self.weight * F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype)
        return (normed * F.silu(gate.float())).to(x.dtype)


def _of_heads(values: Tensor, dtype: torch.dtype) -> torch.nn.Parameter:
    """Makes a parameter of which each tensor rank has its own heads."""
    parameter = torch.nn.Parameter(values.to(dtype))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def set_delta_kernel(chunks: Iterable[torch.nn.Module], kernel: str) -> None:
    """Makes all gated delta layers compute with this kernel, a value of `model.gated_delta`."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, GatedDelta):
                module.kernel = kernel


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """Returns the value that each token reads from its sequence's state: [tokens, heads, value dim], in the dtype of
    `value`.

    `query`, `key` [tokens, heads, key dim] are normalised to length one here. `decay` and `rate` are [tokens, heads].
    `decay` is the logarithm of the factor of the state, and `rate` the share of a value that is written. `lengths` are
    those of the sequences.
    """
    chunks = _chunks(lengths, query.device)
    query, key = (_unit(x.float()) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    query, key, value32, decay, rate = (
        _chunked(x.float(), chunks) for x in (query, key, value, decay[..., None], rate[..., None])
    )
    decay = _running_sums(decay)
    later = torch.ones(DELTA_CHUNK, DELTA_CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (decay - decay.transpose(2, 3)).masked_fill(later, float("-inf")).exp()  # [.., to, from]
    system = (key * rate) @ key.transpose(2, 3) * between
    written = torch.cat([value32 * rate, key * rate * decay.exp()], dim=3)
    solved = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    new, read = solved.split([value32.shape[3], key.shape[3]], dim=3)
    scores = query @ key.transpose(2, 3) * between
    end = decay[:, :, -1:]
    out = _stepwise(chunks.counts, query * decay.exp(), scores, new, read, key * (end - decay).exp(), end.exp())
    return out.transpose(1, 2).flatten(0, 1).index_select(0, chunks.positions).to(value.dtype)


def gated_delta_of_fla(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """Returns what `gated_delta` returns, computed by flash-linear-attention's chunked kernel (fla-core 0.6)."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, _ = chunk_gated_delta_rule(
        *(x[None] for x in (query, key, value, decay, rate)),
        use_qk_l2norm_in_kernel=True,
        **_bounds(lengths, query.device),
    )
    return out[0].to(value.dtype)


_RULES = {"torch": gated_delta, "fla": gated_delta_of_fla}


@lru_cache(maxsize=64)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """Returns the first token of each sequence and the end, int64 [sequences + 1], there and on the host.

    Without those of the host, the kernel would wait for the device.
    """
    bounds = np.cumsum([0, *lengths])
    return {"cu_seqlens": brought(bounds, device), "cu_seqlens_cpu": torch.from_numpy(bounds)}


def _stepwise(
    counts: tuple[int, ...], query: Tensor, scores: Tensor, new: Tensor, read: Tensor, key: Tensor, decay: Tensor
) -> Tensor:
    """Passes states from chunk to chunk, all sequences at once. Returns [chunks, heads, DELTA_CHUNK, value dim]."""
    state = query.new_zeros(counts[0], query.shape[1], query.shape[3], new.shape[3])
    outs = []
    # split once: the gradient of a slice would be a whole tensor for every step
    steps = zip(*(x.split(counts) for x in (query, scores, new, read, key, decay)), strict=True)
    for count, (q, score, n, r, k, d) in zip(counts, steps, strict=True):
        state = state[:count]  # finished sequences are the last ones
        value = n - r @ state
        outs.append(q @ state + score @ value)
        state = state * d + k.transpose(2, 3) @ value
    return torch.cat(outs)


def _running_sums(decay: Tensor) -> Tensor:
    """Sums `decay` [chunks, heads, DELTA_CHUNK, 1] from each chunk's beginning to each of its tokens.

    torch's own sums are used on the host alone. With deterministic algorithms it refuses them on other devices.
    """
    if decay.device.type == "cpu":
        return decay.cumsum(dim=2)
    return _summed_by_rows(decay)


def _summed_by_rows(decay: Tensor) -> Tensor:
    """Returns the same sums, each of a masked row. A matrix product might be computed with fewer bits."""
    upto = torch.ones(DELTA_CHUNK, DELTA_CHUNK, device=decay.device).tril()
    return (decay.transpose(2, 3) * upto).sum(dim=3, keepdim=True)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _NORM_EPS)


def _chunked(x: Tensor, chunks: Chunks) -> Tensor:
    """Rearranges `x` [tokens, heads, dim] as [chunks, heads, DELTA_CHUNK, dim]. Zeros after each sequence change no
    state.
    """
    with_zeros = F.pad(x, (0, 0, 0, 0, 0, 1))
    return with_zeros.index_select(0, chunks.tokens).unflatten(0, (-1, DELTA_CHUNK)).transpose(1, 2)


@lru_cache(maxsize=64)  # every layer of a micro-batch asks for it, and its backward again
def _chunks(lengths: tuple[int, ...], device: torch.device) -> Chunks:
    total = sum(lengths)
    starts = np.cumsum([0, *lengths])
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    tokens = []
    counts = []
    for step in range(-(-max(lengths) // DELTA_CHUNK)):
        rows = [row for row in order if lengths[row] > step * DELTA_CHUNK]
        at = step * DELTA_CHUNK + np.arange(DELTA_CHUNK)
        tokens += [np.where(at < lengths[row], starts[row] + at, total) for row in rows]
        counts.append(len(rows))
    index = np.concatenate(tokens)
    positions = np.flatnonzero(index < total)[index[index < total].argsort()]
    return Chunks(brought(index, device), brought(positions, device), tuple(counts))


@lru_cache(maxsize=64)
def _positions(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the position of each token in its sequence, int64 [tokens]."""
    return brought(np.concatenate([np.arange(length) for length in lengths]), device)
