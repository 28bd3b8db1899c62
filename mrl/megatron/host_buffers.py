"""Memory of fixed places for whole storages: what lies elsewhere for a while, on the host or in a second copy on the device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

# Allocators of pinned memory round a request up to a power of two: asked for as a whole, 33 GB would take 64.
PIECE = 256 * 1024**2  # bytes


@dataclass(frozen=True)
class Place:
    """Where one storage lies: uint8 pieces that hold its bytes one after the other."""

    pieces: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def keep(self, source: Tensor) -> None:
        """Copies `source` here, uint8 [nbytes]. The caller synchronizes before either side is touched again."""
        for piece, part in self._beside(source):
            piece.copy_(part, non_blocking=True)

    def give(self, target: Tensor) -> None:
        """Copies what was kept into `target`; else as `keep`."""
        for piece, part in self._beside(target):
            part.copy_(piece, non_blocking=True)

    def exchange(self, other: Tensor) -> None:
        """Puts what lies here into `other` and what lies there here, through a piece's worth of memory beside `other`."""
        for piece, part in self._beside(other):
            scratch = part.clone()
            part.copy_(piece, non_blocking=True)
            piece.copy_(scratch, non_blocking=True)

    def _beside(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if whole.numel() != self.nbytes:
            raise RuntimeError(f"{whole.numel()} bytes do not fit a place of {self.nbytes}")
        yield from zip(self.pieces, whole.split([piece.numel() for piece in self.pieces]), strict=True)


def reserve(sizes: Sequence[int], allocate: Callable[[int], Tensor], piece_bytes: int = PIECE) -> list[Place]:
    """A place for each size, in bytes above 0. `allocate(n)` makes a uint8 tensor of n; none is larger than `piece_bytes`."""
    total = sum(sizes)
    free = [allocate(min(piece_bytes, total - begin)) for begin in range(0, total, piece_bytes)][::-1]
    return [Place(tuple(_taken(free, size))) for size in sizes]


def _taken(free: list[Tensor], size: int) -> Iterator[Tensor]:
    """The first `size` bytes of what is free, whose next piece stands last; takes them away there."""
    while size:
        piece = free.pop()
        if piece.numel() > size:
            free.append(piece[size:])
            piece = piece[:size]
        size -= piece.numel()
        yield piece


def bytes_of(storage: UntypedStorage) -> Tensor:
    """The whole storage as uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages_of(tensors: Sequence[Tensor]) -> dict[int, UntypedStorage]:
    """The storages under `tensors`, each once and in their order, by an identity that lasts as long as the storage."""
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
