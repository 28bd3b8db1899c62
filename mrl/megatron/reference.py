"""The reference model of a KL term: frozen weights of the actor's architecture, on the actor's own ranks."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class FrozenWeights:
    """A copy of this rank's weights as they are now, in host memory. It takes the model's place for the length of a forward.

    Only contents change places, through one parameter's worth of scratch memory: parameters, gradient buffers and optimizer states stay
    where they are, and the actor's weights come back bit for bit.
    """

    def __init__(self, chunks: list[torch.nn.Module]):
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._held = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The frozen weights compute, until the block ends."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, held in zip(self._parameters, self._held, strict=True):
            current = parameter.detach().to("cpu", copy=True)
            parameter.copy_(held)
            held.copy_(current)

    def digest(self) -> str:
        """SHA-256 of the frozen weights, in the order of the parameters."""
        found = hashlib.sha256()
        for held in self._held:
            found.update(held.contiguous().flatten().view(torch.uint8).numpy())
        return found.hexdigest()
