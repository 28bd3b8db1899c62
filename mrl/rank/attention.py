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

from mrl.model.computed_sizes import ATTENTION_LENGTHS
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
