"""Core attention in plain torch, where there is no Transformer Engine: causal, grouped-query, padded or packed, context-parallel."""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.megatron.packing import kept_positions


class CausalAttention(torch.nn.Module):
    """Every pad stands at its sequence's end, so no real token can see one.

    Under context parallelism keys and values of all ranks are gathered and each rank attends with its own queries; the
    backward of the gathering sums what all ranks' queries want of a key.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type, attention_type: str,
        cp_comm_type: str | None = None, softmax_scale: float | None = None, pg_collection=None,
    ):  # fmt: skip
        super().__init__()
        self.group, self.softmax_scale = pg_collection.cp, softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, attn_mask_type=None,
        attention_bias: Tensor | None = None, packed_seq_params=None,
    ) -> Tensor:  # fmt: skip
        """`query` [seq, batch, heads, dim], `key` and `value` [seq, batch, groups, dim] -> [seq, batch, heads * dim].

        Packed sequences come without the batch dimension; seq is this context-parallel rank's part.
        """
        packed = packed_seq_params is not None
        q, k, v = (x[:, None] if packed else x for x in (query, key, value))
        lengths = _lengths(packed_seq_params) if packed else [q.shape[0] * self.group.size()]
        if self.group.size() > 1:
            k, v = (self._in_order(x, lengths) for x in (k, v))
        parts, start, local = [], 0, 0
        for length in lengths:
            own = length // self.group.size()
            parts.append(self._one(q[local : local + own], k[start : start + length], v[start : start + length]))
            start, local = start + length, local + own
        out = torch.cat(parts)
        return out[:, 0] if packed else out

    def _in_order(self, x: Tensor, lengths: list[int]) -> Tensor:
        """All positions of all sequences, in order, from every rank's zigzag part."""
        gathered = gather_from_sequence_parallel_region(x.contiguous(), group=self.group)
        return gathered[_sequence_order(tuple(lengths), self.group.size(), x.device)]

    def _one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One sequence, or equally long ones: this rank's queries against all keys -> [seq, batch, heads * dim]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped, mask = q.shape[1] != k.shape[1], self._mask(k.shape[2], q.device)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _mask(self, length: int, device: torch.device) -> Tensor | None:
        """bool [this rank's positions, length]; None where it is the plain causal one."""
        if self.group.size() == 1:
            return None
        own = _held((length,), self.group.size(), self.group.rank(), device)
        return own[:, None] >= torch.arange(length, device=device)[None]


@lru_cache(maxsize=64)  # every layer of a micro-batch asks, and its backward again
def _sequence_order(lengths: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Where among the zigzag parts of all ranks, one after the other, each position of the sequences stands."""
    return torch.cat([_held(lengths, size, rank, device) for rank in range(size)]).argsort()


@lru_cache(maxsize=64)
def _held(lengths: tuple[int, ...], size: int, rank: int, device: torch.device) -> Tensor:
    """Positions that a rank holds, see kept_positions."""
    return torch.from_numpy(kept_positions(np.array(lengths), size, rank)).to(device)


def _lengths(packed_seq_params) -> list[int]:
    starts = packed_seq_params.cu_seqlens_q_padded
    return (starts[1:] - starts[:-1]).tolist()
