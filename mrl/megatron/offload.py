"""What of the actor is on its device, and what is on the host until it is needed again.

Storages are emptied and filled again under the tensors that lie on them, as verl and slime do, so every view stays valid: parameters in
Megatron's buffers, gradients, shards that the optimizer updates. Host places are made at a storage's first departure and used for good.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage
from torch.nn import Module

from mrl.config.schema import ActorConfig
from mrl.megatron.adam_state import AdamState
from mrl.megatron.host_buffers import Place, bytes_of, reserve, storages_of
from mrl.platforms import Platform

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
SWITCHES = {PARAMETERS: "param_offload", GRADIENTS: "grad_offload", OPTIMIZER: "optimizer_offload"}  # kind -> key of `actor`


@dataclass(frozen=True)
class _Gone:
    """A storage that is empty, and how it comes back: from its place, or as zeros."""

    storage: UntypedStorage
    nbytes: int
    place: Place | None

    def come_back(self) -> None:
        self.storage.resize_(self.nbytes)
        whole = bytes_of(self.storage)
        if self.place is None:
            whole.zero_()
        else:
            self.place.give(whole)


class Residence:
    """Keeps on the device what is in use, and lets the rest leave where the configuration says so.

    `using` is what code that touches weights, gradients or optimizer states runs in. Nothing moves without a switch.
    """

    def __init__(self, platform: Platform, chunks: Sequence[Module], optimizer: MegatronOptimizer, switched: Collection[str]):
        """`switched`: the kinds that may leave the device."""
        self._platform, self._chunks, self._optimizer = platform, chunks, optimizer
        self.switched = tuple(kind for kind in SWITCHES if kind in switched)
        self._places: dict[str, Place] = {}  # by the name of what lies there
        self._gone: dict[str, list[_Gone]] = {}  # by kind
        self._used: Counter[str] = Counter()
        for chunk in chunks if PARAMETERS in self.switched else ():
            chunk.register_forward_pre_hook(lambda *_: self.require(PARAMETERS))

    @property
    def host_bytes(self) -> int:
        """Host memory that was made so far."""
        return sum(place.nbytes for place in self._places.values())

    @contextmanager
    def using(self, *kinds: str) -> Iterator[None]:
        """These are on the device until the block ends; others that are switched and in nobody's use leave it first."""
        self._used.update(kinds)
        try:
            self._leave(self.switched)
            for kind in kinds:
                self._come_back(kind)
            yield
        finally:
            self._used.subtract(kinds)

    def offload(self) -> None:
        """Everything that is switched leaves the device. Raises RuntimeError while some of it is in use."""
        if busy := [kind for kind in self.switched if self._used[kind]]:
            raise RuntimeError(f"{', '.join(busy)} cannot leave the device: in use")
        self._leave(self.switched)

    def require(self, *kinds: str) -> None:
        """Raises RuntimeError when one of them is not on the device: what computes on emptied storages crashes or is wrong."""
        if gone := [kind for kind in kinds if kind in self._gone]:
            keys = ", ".join(f"actor.{SWITCHES[kind]}" for kind in gone)
            raise RuntimeError(f"{', '.join(gone)}: not on the device ({keys}), and may be touched within Residence.using only")

    def _leave(self, kinds: Iterable[str]) -> None:
        if leaving := [kind for kind in kinds if not self._used[kind] and kind not in self._gone]:
            self._platform.synchronize()  # other streams may still read or write what leaves
            self._gone |= {kind: self._depart(kind) for kind in leaving}
            self._platform.synchronize()
            for gone in (gone for kind in leaving for gone in self._gone[kind]):
                gone.storage.resize_(0)
            self._platform.release_cache()

    def _depart(self, kind: str) -> list[_Gone]:
        """Copies what has to be kept to the host; nothing is emptied yet."""
        if kind == GRADIENTS:  # they are cleared before every use
            self._optimizer.zero_grad()  # else its own references would keep copies in other formats alive
            return [_Gone(s, s.nbytes(), None) for s in self._gradients().values()]
        held = {f"{kind}/{name}": s for name, s in self._named(kind).items() if s.nbytes()}
        new = [name for name, s in held.items() if name not in self._places or self._places[name].nbytes != s.nbytes()]
        self._places |= zip(new, reserve([held[name].nbytes() for name in new], self._platform.host_memory), strict=True)
        for name, storage in held.items():
            self._places[name].keep(bytes_of(storage))
        return [_Gone(storage, storage.nbytes(), self._places[name]) for name, storage in held.items()]

    def _come_back(self, kind: str) -> None:
        """All of it or, when memory runs out, nothing: what came back in part would be taken for gone, and its next state be lost."""
        if gone := self._gone.get(kind):
            try:
                for one in gone:
                    one.come_back()
            except BaseException:
                self._platform.synchronize()  # copies into what came back may be under way
                for one in gone:
                    one.storage.resize_(0)
                self._platform.release_cache()
                raise
            self._platform.synchronize()
        self._gone.pop(kind, None)

    def _named(self, kind: str) -> dict[str, UntypedStorage]:
        """Storages by names that stay the same when a tensor is made anew, as moments are by a checkpoint that is loaded."""
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
        """Those of experts lie in buffers of their own."""
        return storages_of([b.grad_data for chunk in self._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)])

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
