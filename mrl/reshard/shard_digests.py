"""What a rank's shards hold, as digests: of the boxes that it sends, and of what it has in common with other ranks.

Boxes are found through the description of the shards (mrl.model.megatron_shards), not where the plan says they lie, so that a box taken
from the wrong place shows.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mrl.model.boxes import Box
from mrl.model.megatron_shards import Piece, Shard
from mrl.reshard.digest import MODULUS, partial_digests
from mrl.reshard.messages import Copy, Message
from mrl.reshard.pack import Shards


class ShardDigests:
    """Of one rank; places are looked up once."""

    def __init__(self, described: Sequence[Shard], shards: Shards, dtype: torch.dtype):
        """`dtype`: the engine's, in which weights travel."""
        self._described = {(s.megatron_name, s.vp_chunk): s for s in described}
        self._shards, self._dtype = shards, dtype
        self._boxes: dict[Copy, Box] = {}

    def sent(self, messages: Iterable[Message]) -> dict[int, dict[str, int]]:
        """Worker -> parameter -> digest of what this rank sends of it. A box that goes to several workers is read once."""
        messages = list(messages)
        known = self._digests(copy for message in messages for copy in message.copies)
        found: dict[int, dict[str, int]] = {}
        for message in messages:
            sums = found.setdefault(message.worker, {})
            for copy in message.copies:
                sums[copy.parameter] = (sums.get(copy.parameter, 0) + known[copy.hf_name, copy.hf_box]) % MODULUS
        return found

    def shared(self) -> dict[str, int]:
        """Digest of each parameter that other ranks hold too, under the name and place of its first piece: theirs must be the same."""
        return {
            f"{shard.pieces[0].hf_name} {shard.pieces[0].hf_box.ranges}": self._whole(shard)
            for shard in self._described.values()
            if len(shard.replicas) > 1 and shard.pieces
        }

    def _whole(self, shard: Shard) -> int:
        local = self._shards(shard.megatron_name, shard.vp_chunk).detach()
        blocks = (partial_digests([local[p.local_box.slices]], [p.hf_name], p.hf_box.origin, self._dtype) for p in shard.pieces)
        return sum(digest for (digest,) in blocks) % MODULUS

    def _digests(self, copies: Iterable[Copy]) -> dict[tuple[str, Box], int]:
        """(name, box) -> digest. The same box of several tensors, as of a layer's experts, is taken together."""
        groups: dict[Box, dict[str, Copy]] = {}
        for copy in copies:
            groups.setdefault(copy.hf_box, {}).setdefault(copy.hf_name, copy)
        found = {}
        for box, by_name in groups.items():
            digests = partial_digests([self._block(copy) for copy in by_name.values()], list(by_name), box.origin, self._dtype)
            found |= {(name, box): digest for name, digest in zip(by_name, digests, strict=True)}
        return found

    def _block(self, copy: Copy) -> Tensor:
        if copy not in self._boxes:
            self._boxes[copy] = _local_box(self._described[copy.source_name, copy.vp_chunk].pieces, copy)
        return self._shards(copy.source_name, copy.vp_chunk).detach()[self._boxes[copy].slices]


def _local_box(pieces: Sequence[Piece], copy: Copy) -> Box:
    for piece in pieces:
        if piece.hf_name == copy.hf_name and piece.hf_box.contains(copy.hf_box):
            return copy.hf_box.shift([local - hf for local, hf in zip(piece.local_box.origin, piece.hf_box.origin, strict=True)])
    raise RuntimeError(f"{copy.source_name} does not hold {copy.hf_name} {copy.hf_box.ranges}, which the plan sends from it")
