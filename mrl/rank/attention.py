"""Core attention in plain torch, for installations without Transformer Engine.

It is causal and grouped-query, padded or packed, and context-parallel.

Sequences of a pack attend in a few calls, not one by one. Short ones are padded to one of a few lengths, here 4:

    pack of lengths 3, 2, 3      a a a b b c c c
    one call of 3 sequences      a a a . | b b . . | c c c .     a pad (.) stands behind its sequence: no token sees it

A sequence's length alone decides its padded length. So its numbers do not depend on the other sequences of the pack.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.model.computed_sizes import ATTENTION_LENGTHS, SINK_COLUMNS
from mrl.platforms.packs import lengths_of
from mrl.rank.host_arrays import brought
from mrl.rank.packing import kept_positions


class CausalAttention(torch.nn.Module):
    """Causal attention. Every pad stands at its sequence's end, so no real token can see one.

    Under context parallelism keys and values of all ranks are gathered, and each rank attends with its own queries. The
    backward of the gathering sums the gradients of a key from all ranks' queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection=None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ):
        super().__init__()
        self.group = pg_collection.cp
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type=None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        """Takes `query` [seq, batch, heads, dim], `key` and `value` [seq, batch, groups, dim]. Returns [seq, batch,
        heads * dim].

        Values may have another dim than keys (latent attention), and the result then has the values' dim. Packed
        sequences have no batch dimension. seq is this context-parallel rank's part.
        """
        if packed_seq_params is None:
            return self._padded(query, key, value)
        return self._packed(query, key, value, lengths_of(packed_seq_params))

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[0] * self.group.size()
        key, value = (self._in_order(x, (length,)) for x in (key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        key, value = (self._in_order(x, lengths) for x in (key, value))
        calls, order = _calls(lengths, self.group.size(), query.device)
        return torch.cat([self._one_call(call, query, key, value) for call in calls]).index_select(0, order)

    def _one_call(self, call: "Call", query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the attention output at the real positions of the call's sequences, sequence after sequence:
        [positions, heads * dim].
        """
        q, k, v = (
            x.index_select(0, index).unflatten(0, (call.sequences, -1)).transpose(1, 2)
            for x, index in ((query, call.queries), (key, call.keys), (value, call.keys))
        )
        out = self._attend(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)
        if call.real is None:
            return out
        return out.index_select(0, call.real)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Takes `q` [sequences, heads, this rank's positions, dim], `k` and `v` [sequences, groups, positions, dim].
        Returns the shape of `q`.
        """
        grouped = q.shape[1] != k.shape[1]
        mask = self._mask(k.shape[2], q.device)
        narrower = q.shape[-1] - v.shape[-1]
        if narrower > 0:  # with different dims the CPU uses another kernel, which keeps every score
            v = F.pad(v, (0, narrower))
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=grouped
        )
        if narrower > 0:
            return out[..., :-narrower]
        return out

    def _in_order(self, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Joins every rank's zigzag part into all positions of all sequences, in order."""
        if self.group.size() == 1:
            return x
        gathered = gather_from_sequence_parallel_region(x.contiguous(), group=self.group)
        return gathered[_sequence_order(lengths, self.group.size(), x.device)]

    def _mask(self, length: int, device: torch.device) -> Tensor | None:
        """Returns the mask, bool [this rank's positions, length]; None if it is the plain causal one."""
        if self.group.size() == 1:
            return None
        own = _rank_positions((length,), self.group.size(), self.group.rank(), device)
        return own[:, None] >= torch.arange(length, device=device)[None]


class SinkAttention(CausalAttention):
    """Causal attention in which every head has a sink, and which may attend within a window (gpt-oss).

    A sink is a learned logit beside those of the keys. It takes its share of the softmax, and no value. Here it is the
    product of a query and a key in further columns, so that the same kernels compute it, and its gradient:

        query i   q_i, sink       key 0   0,   1 / scale       value 0   0
                                  key j   k_j, 0               value j   v_j

    A query before all others sees the sink's key alone. So the others are as far behind the keys as they see.

    Within a window of w tokens, a block of w queries attends to its own keys and those of the block before.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args,
        windows: tuple[int, ...],
        pg_collection=None,
        **kwargs,
    ):
        """`windows`: for each layer, how many tokens a token attends to, itself included; 0: all before it."""
        super().__init__(config, layer_number, *args, pg_collection=pg_collection, **kwargs)
        self.window = windows[layer_number - 1]
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = k.shape[2]
        size = q.shape[-1]
        scale = size**-0.5 if self.softmax_scale is None else self.softmax_scale
        q = torch.cat([q, self._sink_columns(q)], dim=-1)
        k, v = (F.pad(x, (0, q.shape[-1] - x.shape[-1])) for x in (k, v))
        sink = k.new_zeros(k.shape[-1])
        sink[size] = 1 / scale
        if self.group.size() > 1:
            out = _attended(q, *_behind_sink(k, v, sink), scale, self._mask(length, q.device))
        elif 0 < self.window < length:
            out = _in_blocks(q, k, v, sink, scale, self.window)
        else:
            out = _attended(F.pad(q, (0, 0, 1, 0)), *_behind_sink(k, v, sink), scale)[:, :, 1:]
        return out[..., :size]

    def _sink_columns(self, q: Tensor) -> Tensor:
        """Returns the further columns of the queries, the first of which is the head's sink."""
        sinks = self.softmax_offset.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
        return F.pad(sinks, (0, SINK_COLUMNS - 1))

    def _mask(self, length: int, device: torch.device) -> Tensor:
        """Returns the mask, bool [this rank's positions, sink and length]."""
        own = _rank_positions((length,), self.group.size(), self.group.rank(), device)[:, None]
        keys = torch.arange(length, device=device)[None]
        seen = own >= keys
        if self.window:
            seen &= keys > own - self.window
        return F.pad(seen, (1, 0), value=True)


def _behind_sink(k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values [..., positions, dim] with the sink's before them."""
    return torch.cat([sink.expand(*k.shape[:-2], 1, -1), k], dim=-2), F.pad(v, (0, 0, 1, 0))


def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Attends by torch's kernels: within `mask` [..., queries, keys], or causally without one.

    Kernels that take a mask want as many heads of keys as of queries, so the queries of heads that share keys are put
    one behind the other.
    """
    each = q.shape[1] // k.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=each > 1)
    q = q.unflatten(1, (-1, each)).flatten(2, 3)
    mask = mask.repeat(*[1] * (mask.dim() - 2), each, 1)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return out.unflatten(2, (each, -1)).flatten(1, 2)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, scale: float, window: int) -> Tensor:
    """Attends within a window that is shorter than the sequences. Takes and returns [sequences, heads, positions,
    dim].
    """
    length = q.shape[2]
    q, k, v = (F.pad(x, (0, 0, 0, -length % window)).unflatten(2, (-1, window)) for x in (q, k, v))
    blocks = q.shape[2]
    # keys and values of the block before; of the first there is none
    k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x], dim=3) for x in (k, v))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    mask = _window_mask(blocks, window, q.device).repeat(len(q) // blocks, 1, 1, 1)
    out = _attended(q, *_behind_sink(k, v, sink), scale, mask)
    return out.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


@lru_cache(maxsize=64)
def _window_mask(blocks: int, window: int, device: torch.device) -> Tensor:
    """Returns which keys a query sees, bool [blocks, 1, window, sink and two blocks of keys]."""
    query = torch.arange(window, device=device)[:, None]
    key = torch.arange(-window, window, device=device)[None]  # from the beginning of the query's block
    seen = (key <= query) & (key > query - window)
    seen = seen.expand(blocks, 1, -1, -1).clone()
    seen[0] &= key >= 0
    return F.pad(seen, (1, 0), value=True)


@dataclass(frozen=True)
class Call:
    """Sequences of a pack that attend together, each padded at its end to the same length."""

    sequences: int
    # int64 [sequences * padded length / context]: positions in this rank's part of the pack; a pad repeats the first
    queries: Tensor
    keys: Tensor  # int64 [sequences * padded length]: positions in the whole pack, likewise
    real: Tensor | None  # int64: the queries that are not pads; None: all


@lru_cache(maxsize=64)  # every layer of a micro-batch asks for it, and its backward again
def _calls(lengths: tuple[int, ...], context: int, device: torch.device) -> tuple[list[Call], Tensor]:
    """Returns the calls for a pack of these lengths.

    Also returns, for each position of this rank's part, the index of its output among those of the calls. Under context
    parallelism a mask follows from the length, so only sequences of one length share a call.
    """
    of_length = defaultdict(list)
    starts = np.cumsum([0, *lengths])
    for row, length in enumerate(lengths):
        fitting = (padded for padded in ATTENTION_LENGTHS if length <= padded and context == 1)
        of_length[next(fitting, length)].append(row)
    calls = []
    positions = []
    for padded, rows in of_length.items():
        first = starts[rows]
        size = np.array([lengths[row] for row in rows])
        queries, real = _padded_ranges(first // context, size // context, padded // context)
        keys, _ = _padded_ranges(first, size, padded)
        positions.append(queries[real])
        index = [brought(x, device) for x in (queries.ravel(), keys.ravel(), np.flatnonzero(real))]
        calls.append(Call(len(rows), index[0], index[1], None if real.all() else index[2]))
    return calls, brought(np.concatenate(positions).argsort(), device)


def _padded_ranges(first: np.ndarray, size: np.ndarray, padded: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ranges of integers as rows of equal length, and which elements are not pads; both [ranges, padded].

    A row has `size` integers from `first` on, then `first` again for pads.
    """
    offset = np.arange(padded)[None]
    real = offset < size[:, None]
    return first[:, None] + offset * real, real


@lru_cache(maxsize=64)
def _sequence_order(lengths: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Returns the index of each position of the sequences among the concatenated zigzag parts of all ranks."""
    return torch.cat([_rank_positions(lengths, size, rank, device) for rank in range(size)]).argsort()


@lru_cache(maxsize=64)
def _rank_positions(lengths: tuple[int, ...], size: int, rank: int, device: torch.device) -> Tensor:
    """Returns the positions that a rank holds, as kept_positions."""
    return brought(kept_positions(np.array(lengths), size, rank), device)
