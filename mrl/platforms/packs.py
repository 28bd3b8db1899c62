"""Lengths of a pack of sequences on the host, attached to the tensor that tells the device where sequences begin.

Megatron passes that tensor to attention and to the rotary embedding of every layer. Both would read it back from the
device, and so wait for everything computed before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NAME = "mrl_pack"


@dataclass(frozen=True)
class Pack:
    """Sequences that are concatenated."""

    lengths: tuple[int, ...]  # tokens in memory for each sequence, before the cut for context parallelism
    positions: Tensor  # int64, on the device: for each token of this rank, its position in its sequence


def tie(starts: Tensor, pack: Pack) -> Tensor:
    """Attaches the pack to `starts`, int32 [sequences + 1], and returns it. `pack_of` reads the pack."""
    setattr(starts, _NAME, pack)
    return starts


def pack_of(starts: Tensor) -> Pack | None:
    """Returns the pack attached to the tensor, or None."""
    return getattr(starts, _NAME, None)


def lengths_of(packed_seq_params: Any) -> tuple[int, ...]:
    """Returns the tokens in memory of each sequence. Reads them from the device if no pack is attached."""
    starts = packed_seq_params.cu_seqlens_q_padded
    pack = pack_of(starts)
    if pack is not None:
        return pack.lengths
    return tuple(starts.diff().tolist())


def for_attention(starts: Tensor) -> Tensor:
    """Returns the starts that attention gets.

    MindSpeed's attention makes a list of them in every layer (core_r0.16.0:
    te/pytorch/attention/dot_product_attention/backend.py, core/context_parallel/ring_context_parallel.py). That does
    not wait if they are on the host. Some of its paths accept a list, but DotProductAttention needs a shape.
    """
    pack = pack_of(starts)
    if pack is None or starts.device.type != "npu":
        return starts
    ends = torch.tensor((0, *pack.lengths), dtype=torch.int64).cumsum(0)
    return tie(ends.to(starts.dtype), pack)


def rotated_from_table(original: Callable) -> Callable:
    """Rotates a pack [tokens, heads, dim] by `freqs` [longest, 1, 1, rotated dim], by positions within sequences.

    Positions are looked up in the cosines of one sequence, with the same bits as Megatron's. Megatron slices and joins
    the angles of each sequence, in every layer, for queries and keys. It computes the cosines of all tokens.
    """
    from megatron.core.models.common.embeddings.rope_utils import _rotate_half

    whole = rotated_by_angles(original)

    def rotated(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:
        pack = pack_of(cu_seqlens)
        if pack is None or multi_latent_attention:
            return whole(t, cu_seqlens, freqs, rotary_interleaved, multi_latent_attention, mscale, cp_group)
        cos, sin = ((f(freqs) * mscale).to(t.dtype)[pack.positions] for f in (torch.cos, torch.sin))
        turned = t[:, None, :, : freqs.shape[-1]]
        rest = t[..., freqs.shape[-1] :]
        turned = (turned * cos + _rotate_half(turned, rotary_interleaved) * sin)[:, 0]
        if rest.shape[-1]:
            return torch.cat((turned, rest), dim=-1)
        return turned

    return rotated


def rotated_by_angles(original: Callable) -> Callable:
    """Rotates packs through Megatron's rotation of rows, which MindSpeed has replaced by its kernel."""
    from megatron.core.models.common.embeddings import rope_utils

    def rotated(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:
        pack = pack_of(cu_seqlens)
        if pack is None:
            return original(t, cu_seqlens, freqs, rotary_interleaved, multi_latent_attention, mscale, cp_group)
        turned = rope_utils._apply_rotary_pos_emb_bshd(
            t[:, None],
            freqs[pack.positions],
            rotary_interleaved=rotary_interleaved,
            multi_latent_attention=multi_latent_attention,
            mscale=mscale,
        )
        return turned[:, 0]

    return rotated
