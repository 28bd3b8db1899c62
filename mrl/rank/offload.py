"""Moves the actor's states between its device and the host, and exchanges its weights with the reference's.

Storages are emptied and filled again under their tensors, as in verl and slime. So all views stay valid: parameters in
Megatron's buffers, gradients, shards that the optimizer updates. Host buffers are allocated at a storage's first
departure and reused for the whole run. Storages of frozen parameters are copied to them once.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage
from torch.nn import Module

from mrl.config.schema import ActorConfig
from mrl.config.schema_actor import GRADIENTS, PARAMETERS, SWITCHES
from mrl.platforms import Platform
from mrl.rank.adam_state import AdamState
from mrl.units import MIB

# Allocators of pinned memory round a request up to a power of two: one request for 33 GB would take 64 GB.
PIECE = 256 * MIB  # bytes


@dataclass(frozen=True)
class StorageBuffer:
    """Memory for one storage, on the host or as a second copy on the device, in consecutive uint8 pieces."""

    pieces: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces, which are uint8."""
        return sum(piece.numel() for piece in self.pieces)

    def copy_from(self, source: Tensor) -> None:
        """Copies `source`, uint8 [nbytes], into the buffer.

        The caller synchronizes before either side is used again.
        """
        for piece, part in self._pairs(source):
            piece.copy_(part, non_blocking=True)

    def copy_to(self, target: Tensor) -> None:
        """Copies the buffer into `target`. The caller synchronizes, as for `copy_from`."""
        for piece, part in self._pairs(target):
            part.copy_(piece, non_blocking=True)

    def exchange(self, other: Tensor) -> None:
        """Exchanges the contents of the buffer and of `other`, with scratch memory of one piece on the device of
        `other`.
        """
        for piece, part in self._pairs(other):
            scratch = part.clone()
            part.copy_(piece, non_blocking=True)
            piece.copy_(scratch, non_blocking=True)

    def _pairs(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if whole.numel() != self.nbytes:
            raise RuntimeError(f"{whole.numel()} bytes do not fit a buffer of {self.nbytes}")
        yield from zip(self.pieces, whole.split([piece.numel() for piece in self.pieces]), strict=True)


def reserve(sizes: Sequence[int], allocate: Callable[[int], Tensor], piece_bytes: int = PIECE) -> list[StorageBuffer]:
    """Returns a buffer for each size, in bytes above 0.

    `allocate(n)` makes a uint8 tensor of n. No tensor is larger than `piece_bytes`.
    """
    total = sum(sizes)
    free = [allocate(min(piece_bytes, total - begin)) for begin in range(0, total, piece_bytes)][::-1]
    return [StorageBuffer(tuple(_first_pieces(free, size))) for size in sizes]


def _first_pieces(free: list[Tensor], size: int) -> Iterator[Tensor]:
    """Takes the first `size` bytes from the free pieces. The next free piece is the last of the list."""
    while size:
        piece = free.pop()
        if piece.numel() > size:
            free.append(piece[size:])
            piece = piece[:size]
        size -= piece.numel()
        yield piece


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Returns the whole storage as uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages_of(tensors: Sequence[Tensor]) -> dict[int, UntypedStorage]:
    """Returns the storages under `tensors`, each once and in their order.

    Keys identify a storage as long as it exists.
    """
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
    return storages


@dataclass(frozen=True)
class _EmptiedStorage:
    """A storage that has left the device. It comes back from its buffer, or as zeros."""

    storage: UntypedStorage
    nbytes: int
    buffer: StorageBuffer | None

    def empty(self) -> None:
        self.storage.resize_(0)

    def make_space(self) -> None:
        self.storage.resize_(self.nbytes)

    def fill(self) -> None:
        whole = bytes_of(self.storage)
        if self.buffer is None:
            whole.zero_()
        else:
            self.buffer.copy_to(whole)


class Residence:
    """Keeps states in use on the device, and moves others off it if the configuration allows that.

    Code that uses weights, gradients or optimizer states runs within `using`. Nothing moves unless it is switched.
    """

    def __init__(
        self,
        platform: Platform,
        chunks: Sequence[Module],
        optimizer: MegatronOptimizer | None,
        switched: Collection[str],
        section: str = "actor",
    ):
        """`switched`: the kinds that may leave the device; without an optimizer only parameters.

        `section`: the configuration section that switches them.
        """
        self._section = section
        self._platform = platform
        self._chunks = chunks
        self._optimizer = optimizer
        self.switched = tuple(kind for kind in SWITCHES if kind in switched)
        self._buffers: dict[str, StorageBuffer] = {}  # by the name of the storage
        self._copied: dict[str, UntypedStorage] = {}  # frozen ones, whose buffers have their contents; by name
        self._emptied: dict[str, list[_EmptiedStorage]] = {}  # by kind
        self._arriving: set[str] = set()  # kinds whose copies are under way
        self._used: Counter[str] = Counter()
        self.left_bytes: Counter[str] = Counter()  # by kind, at the newest departure
        for chunk in chunks if PARAMETERS in self.switched else ():
            chunk.register_forward_pre_hook(lambda *_: self.require(PARAMETERS))

    @contextmanager
    def using(self, *kinds: str) -> Iterator[None]:
        """Holds these kinds on the device until the block ends.

        Other switched kinds that nothing uses leave it first.
        """
        self._used.update(kinds)
        try:
            self._leave(self.switched)
            for kind in kinds:
                self._come_back(kind)
            yield
        finally:
            self._used.subtract(kinds)

    def offload(self) -> None:
        """Moves everything that is switched off the device. Raises RuntimeError while some of it is in use."""
        if busy := [kind for kind in self.switched if self._used[kind]]:
            raise RuntimeError(f"{', '.join(busy)} cannot leave the device: in use")
        self.settle()
        self._leave(self.switched)

    def settle(self) -> None:
        """Waits for states on their way to the device, so that they can leave again."""
        for kind in tuple(self._arriving):
            self._come_back(kind)

    def forget_copies(self) -> None:
        """Copies frozen parameters to the host again when they next leave. Call it after something has changed them."""
        self._copied.clear()

    def prefetch(self, *kinds: str) -> None:
        """Begins to bring these kinds back while other work computes. They are there once `using` has waited for them.

        They must not be used before. Kinds that are on the device stay unchanged.
        """
        for kind in kinds:
            if kind in self._emptied and kind not in self._arriving:
                self._refill(self._emptied[kind], beside=True)
                self._arriving.add(kind)

    @property
    def on_host(self) -> Iterator[Tensor]:
        """Yields the host buffers of states that have left the device at least once."""
        return (piece for buffer in self._buffers.values() for piece in buffer.pieces)

    def require(self, *kinds: str) -> None:
        """Raises RuntimeError if one of these kinds is not on the device. Computing on emptied storages crashes or
        gives wrong results.
        """
        if gone := [kind for kind in kinds if kind in self._emptied]:
            keys = ", ".join(f"{self._section}.{SWITCHES[kind]}" for kind in gone)
            raise RuntimeError(
                f"{', '.join(gone)}: not on the device ({keys}), and may be touched within Residence.using only"
            )

    def _leave(self, kinds: Iterable[str]) -> None:
        if leaving := [kind for kind in kinds if not self._used[kind] and kind not in self._emptied]:
            self._platform.synchronize()  # other streams may still read or write the storages that leave
            self._emptied |= {kind: self._depart(kind) for kind in leaving}
            self._platform.synchronize()
            for kind in leaving:
                self.left_bytes[kind] = sum(storage.nbytes for storage in self._emptied[kind])
                for storage in self._emptied[kind]:
                    storage.empty()
            self._platform.release_cache()

    def _depart(self, kind: str) -> list[_EmptiedStorage]:
        """Copies contents that must be kept to the host. Nothing is emptied yet."""
        if kind == GRADIENTS:  # cleared before every use
            self._optimizer.zero_grad()  # otherwise its own references would keep copies in other formats alive
            return [_EmptiedStorage(s, s.nbytes(), None) for s in self._gradients().values()]
        storages = {f"{kind}/{name}": s for name, s in self._named(kind).items() if s.nbytes()}
        new = [
            name
            for name, s in storages.items()
            if name not in self._buffers or self._buffers[name].nbytes != s.nbytes()
        ]
        self._buffers |= zip(
            new, reserve([storages[name].nbytes() for name in new], self._platform.host_memory), strict=True
        )
        trained = self._trained()
        for name, storage in storages.items():
            is_frozen = kind == PARAMETERS and storage._cdata not in trained
            if is_frozen and name not in new and self._has_copy(name, storage):
                continue
            self._buffers[name].copy_from(bytes_of(storage))
            self._copied.pop(name, None)
            if is_frozen:
                self._copied[name] = storage
        return [_EmptiedStorage(storage, storage.nbytes(), self._buffers[name]) for name, storage in storages.items()]

    def _come_back(self, kind: str) -> None:
        if (emptied := self._emptied.get(kind)) and kind not in self._arriving:
            self._refill(emptied, beside=False)
        if emptied:
            self._platform.synchronize()
        self._arriving.discard(kind)
        self._emptied.pop(kind, None)

    def _refill(self, emptied: list[_EmptiedStorage], beside: bool) -> None:
        """Refills all storages, or none if memory runs out.

        Storages that came back alone would be taken for emptied, and their next state be lost. Memory is allocated on
        the stream that computes, which will use and free it. Only copies may be enqueued on another stream.
        """
        try:
            for storage in emptied:
                storage.make_space()
            with self._platform.beside() if beside else nullcontext():
                for storage in emptied:
                    storage.fill()
        except BaseException:
            self._platform.synchronize()  # copies into refilled storages may be under way
            for storage in emptied:
                storage.empty()
            self._platform.release_cache()
            raise

    def _named(self, kind: str) -> dict[str, UntypedStorage]:
        """Returns storages by names that stay the same when a tensor is made anew.

        Loading a checkpoint, for example, makes new moments.
        """
        if kind == PARAMETERS:
            return {str(number): storage for number, storage in enumerate(self._parameters().values())}
        others = self._parameters() | self._gradients()  # float32 weights are their own master weights
        named: dict[int, tuple[str, UntypedStorage]] = {}
        for name, tensor in self._optimizer_tensors():
            storage = tensor.untyped_storage()
            if storage._cdata not in others:
                named.setdefault(storage._cdata, (name, storage))
        return dict(named.values())

    def _parameters(self) -> dict[int, UntypedStorage]:
        return storages_of([parameter for chunk in self._chunks for parameter in chunk.parameters()])

    def _has_copy(self, name: str, storage: UntypedStorage) -> bool:
        copied = self._copied.get(name)
        return copied is not None and copied._cdata == storage._cdata

    def _trained(self) -> dict[int, UntypedStorage]:
        """Returns storages of parameters that an optimizer changes. One of these may have a frozen parameter, too."""
        return storages_of([p for chunk in self._chunks for p in chunk.parameters() if p.requires_grad])

    def _gradients(self) -> dict[int, UntypedStorage]:
        """Returns storages of gradients. Those of experts are separate buffers."""
        return storages_of(
            [b.grad_data for chunk in self._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        )

    def _optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number, part in enumerate(self._optimizer.chained_optimizers):
            if not getattr(part, "is_stub_optimizer", False):
                yield from ((f"{number}/{name}", tensor) for name, tensor in AdamState(part.optimizer).on_device())


def switched(actor: ActorConfig) -> tuple[str, ...]:
    """Returns the kinds that the configuration allows to leave the device."""
    return tuple(kind for kind, key in SWITCHES.items() if key in actor.offloaded)


def needs(*kinds: str) -> Callable:
    """Decorates a method of an object with a `residence`: the method runs with these kinds on the device."""

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def resident(self: Any, *arguments: Any, **named: Any) -> Any:
            with self.residence.using(*kinds):
                return method(self, *arguments, **named)

        return resident

    return decorate


def check_resident(what: str, tensors: Iterable[Tensor]) -> None:
    """Raises RuntimeError if a tensor has been emptied. torch itself would read at address 0."""
    if any(t.numel() and not t.untyped_storage().nbytes() for t in tensors):
        raise RuntimeError(f"{what}: not on the device, and may be touched within Residence.using only")


class FrozenWeights:
    """The reference model of a KL term: a copy of this rank's current weights, which can compute in their place.

    Only contents are exchanged, with scratch memory of one piece. Parameters, gradient buffers and optimizer states
    stay at their addresses. The actor's weights come back bit for bit.
    """

    def __init__(self, chunks: list[Module], allocate: Callable[[int], Tensor], synchronize: Callable[[], None]):
        """Copies the current weights.

        `allocate(n)` makes uint8 memory for the copy, on the host or on the device. `synchronize` waits for the device.
        """
        self._synchronize = synchronize
        self._storages = list(storages_of([parameter for chunk in chunks for parameter in chunk.parameters()]).values())
        self._buffers = reserve([storage.nbytes() for storage in self._storages], allocate)
        for storage, buffer in zip(self._storages, self._buffers, strict=True):
            buffer.copy_from(bytes_of(storage))
        self._synchronize()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the frozen weights in place until the block ends. The parameters must be on the device."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for storage, buffer in zip(self._storages, self._buffers, strict=True):
            buffer.exchange(bytes_of(storage))
        self._synchronize()

    @property
    def pieces(self) -> Iterator[Tensor]:
        """Yields the memory of the copy, on the host or on the device."""
        return (piece for buffer in self._buffers for piece in buffer.pieces)

    def digest(self) -> str:
        """Returns SHA-256 of the frozen weights' storages, with padding."""
        digest = hashlib.sha256()
        for buffer in self._buffers:
            for piece in buffer.pieces:
                digest.update(piece.cpu().numpy())
        return digest.hexdigest()
