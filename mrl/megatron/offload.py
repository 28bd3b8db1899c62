"""What of the actor is on its device and what on the host; the reference's weights, which change places with its own.

Storages are emptied and filled again under the tensors that lie on them, as verl and slime do, so every view stays
valid: parameters in Megatron's buffers, gradients, shards that the optimizer updates. Host buffers are made at a
storage's first departure and used for good.
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
from mrl.megatron.adam_state import AdamState
from mrl.platforms import Platform
from mrl.units import MIB

# Allocators of pinned memory round a request up to a power of two: asked for as a whole, 33 GB would take 64.
PIECE = 256 * MIB  # bytes


@dataclass(frozen=True)
class StorageBuffer:
    """Room for the bytes of one storage, on the host or in a second copy on the device: uint8 pieces,
    one after the other.
    """

    pieces: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces, which are uint8."""
        return sum(piece.numel() for piece in self.pieces)

    def copy_from(self, source: Tensor) -> None:
        """Copies `source` here, uint8 [nbytes]. The caller synchronizes before either side is touched again."""
        for piece, part in self._pairs(source):
            piece.copy_(part, non_blocking=True)

    def copy_to(self, target: Tensor) -> None:
        """Copies what lies here into `target`; else as `copy_from`."""
        for piece, part in self._pairs(target):
            part.copy_(piece, non_blocking=True)

    def exchange(self, other: Tensor) -> None:
        """Puts what lies here into `other` and what lies there here,
        through a piece's worth of memory beside `other`.
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
    """A buffer for each size, in bytes above 0.

    `allocate(n)` makes a uint8 tensor of n; none is larger than `piece_bytes`.
    """
    total = sum(sizes)
    free = [allocate(min(piece_bytes, total - begin)) for begin in range(0, total, piece_bytes)][::-1]
    return [StorageBuffer(tuple(_first_pieces(free, size))) for size in sizes]


def _first_pieces(free: list[Tensor], size: int) -> Iterator[Tensor]:
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
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
    return storages


@dataclass(frozen=True)
class _EmptiedStorage:
    """A storage that leaves the device, and how it comes back: from its buffer, or as zeros."""

    storage: UntypedStorage
    nbytes: int
    buffer: StorageBuffer | None

    def empty(self) -> None:
        self.storage.resize_(0)

    def make_room(self) -> None:
        self.storage.resize_(self.nbytes)

    def fill(self) -> None:
        whole = bytes_of(self.storage)
        if self.buffer is None:
            whole.zero_()
        else:
            self.buffer.copy_to(whole)


class Residence:
    """Keeps on the device what is in use, and lets the rest leave where the configuration says so.

    `using` is what code that touches weights, gradients or optimizer states runs in. Nothing moves without a switch.
    """

    def __init__(
        self,
        platform: Platform,
        chunks: Sequence[Module],
        optimizer: MegatronOptimizer | None,
        switched: Collection[str],
        section: str = "actor",
    ):
        """`switched`: the kinds that may leave the device; without an optimizer parameters alone. `section`: of the
        configuration, which says so.
        """
        self._section = section
        self._platform = platform
        self._chunks = chunks
        self._optimizer = optimizer
        self.switched = tuple(kind for kind in SWITCHES if kind in switched)
        self._buffers: dict[str, StorageBuffer] = {}  # by the name of what lies there
        self._emptied: dict[str, list[_EmptiedStorage]] = {}  # by kind
        self._arriving: set[str] = set()  # kinds of those whose copies are under way
        self._used: Counter[str] = Counter()
        self.left_bytes: Counter[str] = Counter()  # by kind, of the newest departure
        for chunk in chunks if PARAMETERS in self.switched else ():
            chunk.register_forward_pre_hook(lambda *_: self.require(PARAMETERS))

    @contextmanager
    def using(self, *kinds: str) -> Iterator[None]:
        """Holds these kinds on the device until the block ends.

        Others that are switched and in nobody's use leave it first.
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
        """Waits for what is on its way to the device, so that it can leave again."""
        for kind in tuple(self._arriving):
            self._come_back(kind)

    def prefetch(self, *kinds: str) -> None:
        """Begins to bring these kinds back beside what computes; they are there once `using` has waited for them.

        Nobody may touch them before. Kinds that are on the device stay as they are.
        """
        for kind in kinds:
            if kind in self._emptied and kind not in self._arriving:
                self._refill(self._emptied[kind], beside=True)
                self._arriving.add(kind)

    @property
    def on_host(self) -> Iterator[Tensor]:
        """The places on the host, of what has left the device at least once."""
        return (piece for buffer in self._buffers.values() for piece in buffer.pieces)

    def require(self, *kinds: str) -> None:
        """Raises RuntimeError when one of them is not on the device:
        what computes on emptied storages crashes or is wrong.
        """
        if gone := [kind for kind in kinds if kind in self._emptied]:
            keys = ", ".join(f"{self._section}.{SWITCHES[kind]}" for kind in gone)
            raise RuntimeError(
                f"{', '.join(gone)}: not on the device ({keys}), and may be touched within Residence.using only"
            )

    def _leave(self, kinds: Iterable[str]) -> None:
        if leaving := [kind for kind in kinds if not self._used[kind] and kind not in self._emptied]:
            self._platform.synchronize()  # other streams may still read or write what leaves
            self._emptied |= {kind: self._depart(kind) for kind in leaving}
            self._platform.synchronize()
            for kind in leaving:
                self.left_bytes[kind] = sum(storage.nbytes for storage in self._emptied[kind])
                for storage in self._emptied[kind]:
                    storage.empty()
            self._platform.release_cache()

    def _depart(self, kind: str) -> list[_EmptiedStorage]:
        """Copies what has to be kept to the host; nothing is emptied yet."""
        if kind == GRADIENTS:  # they are cleared before every use
            self._optimizer.zero_grad()  # else its own references would keep copies in other formats alive
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
        for name, storage in storages.items():
            self._buffers[name].copy_from(bytes_of(storage))
        return [_EmptiedStorage(storage, storage.nbytes(), self._buffers[name]) for name, storage in storages.items()]

    def _come_back(self, kind: str) -> None:
        if (emptied := self._emptied.get(kind)) and kind not in self._arriving:
            self._refill(emptied, beside=False)
        if emptied:
            self._platform.synchronize()
        self._arriving.discard(kind)
        self._emptied.pop(kind, None)

    def _refill(self, emptied: list[_EmptiedStorage], beside: bool) -> None:
        """All of it or, when memory runs out, nothing: what came back in part would be taken for gone, and its next
        state be lost.

        Memory is taken on the stream that computes, which will use and free it; only copies may be enqueued beside it.
        """
        try:
            for storage in emptied:
                storage.make_room()
            with self._platform.beside() if beside else nullcontext():
                for storage in emptied:
                    storage.fill()
        except BaseException:
            self._platform.synchronize()  # copies into what came back may be under way
            for storage in emptied:
                storage.empty()
            self._platform.release_cache()
            raise

    def _named(self, kind: str) -> dict[str, UntypedStorage]:
        """Storages by names that stay the same when a tensor is made anew,
        as moments are by a checkpoint that is loaded.
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

    def _gradients(self) -> dict[int, UntypedStorage]:
        """Storages of gradients; those of experts lie in buffers of their own."""
        return storages_of(
            [b.grad_data for chunk in self._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        )

    def _optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number, part in enumerate(self._optimizer.chained_optimizers):
            if not getattr(part, "is_stub_optimizer", False):
                yield from ((f"{number}/{name}", tensor) for name, tensor in AdamState(part.optimizer).on_device())


def switched(actor: ActorConfig) -> tuple[str, ...]:
    """The kinds that the configuration lets leave the device."""
    return tuple(kind for kind, key in SWITCHES.items() if key in actor.offloaded)


def needs(*kinds: str) -> Callable:
    """Decorates a method of what has a `residence`: it runs with these on the device."""

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def resident(self: Any, *arguments: Any, **named: Any) -> Any:
            with self.residence.using(*kinds):
                return method(self, *arguments, **named)

        return resident

    return decorate


def check_resident(what: str, tensors: Iterable[Tensor]) -> None:
    """Raises RuntimeError when one has been emptied; torch itself would read at address 0."""
    if any(t.numel() and not t.untyped_storage().nbytes() for t in tensors):
        raise RuntimeError(f"{what}: not on the device, and may be touched within Residence.using only")


class FrozenWeights:
    """The reference model of a KL term: a copy of this rank's weights as they are now, which can compute in their
    stead.

    Only contents change places, through a piece's worth of scratch memory. Parameters, gradient buffers and optimizer
    states stay where they are, and the actor's weights come back bit for bit.
    """

    def __init__(self, chunks: list[Module], allocate: Callable[[int], Tensor], synchronize: Callable[[], None]):
        """`allocate(n)` makes uint8 memory for the copy, on the host or on the device;
        `synchronize` waits for the device.
        """
        self._synchronize = synchronize
        self._storages = list(storages_of([parameter for chunk in chunks for parameter in chunk.parameters()]).values())
        self._buffers = reserve([storage.nbytes() for storage in self._storages], allocate)
        for storage, buffer in zip(self._storages, self._buffers, strict=True):
            buffer.copy_from(bytes_of(storage))
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
        for storage, buffer in zip(self._storages, self._buffers, strict=True):
            buffer.exchange(bytes_of(storage))
        self._synchronize()

    @property
    def pieces(self) -> Iterator[Tensor]:
        """What the copy consists of, on the host or on the device."""
        return (piece for buffer in self._buffers for piece in buffer.pieces)

    def digest(self) -> str:
        """SHA-256 of the frozen weights' storages, padding included."""
        digest = hashlib.sha256()
        for buffer in self._buffers:
            for piece in buffer.pieces:
                digest.update(piece.cpu().numpy())
        return digest.hexdigest()
