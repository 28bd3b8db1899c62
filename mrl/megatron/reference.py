"""The reference model of a KL term: frozen weights of the actor's architecture, on the actor's own ranks."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module

from mrl.megatron.host_buffers import bytes_of, reserve, storages_of


class FrozenWeights:
    """A copy of this rank's weights as they are now. It takes the model's place for the length of a forward.

    Only contents change places, through a piece's worth of scratch memory: parameters, gradient buffers and optimizer states stay
    where they are, and the actor's weights come back bit for bit.
    """

    def __init__(self, chunks: list[Module], allocate: Callable[[int], Tensor], synchronize: Callable[[], None]):
        """`allocate(n)` makes uint8 memory for the copy, on the host or on the device; `synchronize` waits for the device."""
        self._synchronize = synchronize
        self._storages = list(storages_of([parameter for chunk in chunks for parameter in chunk.parameters()]).values())
        self._places = reserve([storage.nbytes() for storage in self._storages], allocate)
        for storage, place in zip(self._storages, self._places, strict=True):
            place.keep(bytes_of(storage))
        self._synchronize()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The frozen weights compute, until the block ends. The parameters have to be on the device."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for storage, place in zip(self._storages, self._places, strict=True):
            place.exchange(bytes_of(storage))
        self._synchronize()

    def digest(self) -> str:
        """SHA-256 of the frozen weights' storages, padding included."""
        found = hashlib.sha256()
        for place in self._places:
            for piece in place.pieces:
                found.update(piece.cpu().numpy())
        return found.hexdigest()
