"""Collectives of CPU ranks on one host, through memory that they share.

gloo passes every message through a socket and four threads, each of which has to be woken: 1 to 2 ms after the last
rank has come, some 90 times in an update of the tiny model over two ranks, where the sum itself takes 0.1 ms. Here each
rank writes what it gives into memory of its own that the others map, says so by a number, and reads what it needs from
the others' as soon as they have said so:

    rank 0   | round 7 | ends 0 4 8 | bytes for 0 | bytes for 1 |      two such slots a rank: round 8 is written
    rank 1   | round 7 | ends 0 2 9 | bytes for 0 | bytes for 1 |      into the other while round 7 is still read

A rank that is in round 9 has seen all others in round 8, so all have read round 7, whose slot it writes. Groups over
several hosts and what is larger than a slot go by gloo; all ranks of a group see that from the same numbers. Sums are
taken in the order of ranks.
"""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from mrl.units import MIB

SLOT_BYTES = 4 * MIB  # resident as far as it has been written
MOST_RANKS = 16
HEADER_BYTES = 4096
SPIN_S = 0.5e-3  # then a rank that waits leaves its core to others
NAP_S = 50e-6
LOOK_S = 1.0  # between looks whether the others still run
_COMBINES: tuple[tuple[Any, Callable[..., Tensor]], ...] = (
    (ReduceOp.SUM, torch.add), (ReduceOp.MAX, torch.maximum), (ReduceOp.MIN, torch.minimum),
)  # fmt: skip


class SharedSlots:
    """Two slots of one rank, in memory without a name, which others of the host open by the owner's descriptor."""

    def __init__(self, path: str):
        """`path`: of a descriptor of the owner's. Raises OSError where it cannot be opened."""
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 2 * (HEADER_BYTES + SLOT_BYTES))
        halves = [slice(i * HEADER_BYTES, (i + 1) * HEADER_BYTES) for i in (0, 1)]
        self.headers = [memoryview(memory)[half].cast("q") for half in halves]  # round, ends...
        data = torch.frombuffer(memory, dtype=torch.uint8)[2 * HEADER_BYTES :]
        self.slots = data.view(2, SLOT_BYTES).unbind()

    @staticmethod
    def make() -> int:
        """Descriptor of a rank's own memory, zeros, which lasts as long as this process."""
        descriptor = os.memfd_create("mrl-collectives")
        os.ftruncate(descriptor, 2 * (HEADER_BYTES + SLOT_BYTES))
        return descriptor


class HostExchange:
    """What the ranks of one group give each other. All of them make the same calls in the same order."""

    def __init__(self, rank: int, slots: Sequence[SharedSlots], processes: Sequence[int], timeout_s: float):
        self._rank, self._slots, self._processes, self._timeout_s = rank, slots, processes, timeout_s
        self._round = 0

    def parts(self, sent: Tensor, ends: Sequence[int]) -> list[Tensor] | None:
        """Bytes that each rank has for this one, to be read before the next call; None where one of them has more than
        a slot holds.

        `sent`: bytes for all ranks, [bytes]; rank i gets those from ends[i] to ends[i + 1]. With two ends all get all.
        Raises RuntimeError when a rank is gone or does not come within the group's time.
        """
        self._round += 1
        half = self._round % 2
        own = self._slots[self._rank]
        for i, end in enumerate(ends):
            own.headers[half][1 + i] = end
        if len(sent) <= SLOT_BYTES:
            own.slots[half][: len(sent)] = sent
        _fence()
        own.headers[half][0] = self._round
        headers = [self._header(rank, half) for rank in range(len(self._slots))]
        _fence()
        if any(header[len(ends)] > SLOT_BYTES for header in headers):
            return None
        here = self._rank if len(ends) > 2 else 0
        pairs = zip(self._slots, headers, strict=True)
        return [slots.slots[half][header[1 + here] : header[2 + here]] for slots, header in pairs]

    def _header(self, rank: int, half: int) -> memoryview:
        """Of a rank that has come to this round."""
        header = self._slots[rank].headers[half]
        began = time.monotonic()
        looked = began
        while header[0] != self._round:
            now = time.monotonic()
            if now - began < SPIN_S:
                os.sched_yield()
                continue
            time.sleep(NAP_S)
            if now - looked > LOOK_S:
                looked = now
                self._check(rank, now - began)
        return header

    def _check(self, rank: int, waited_s: float) -> None:
        if not os.path.exists(f"/proc/{self._processes[rank]}"):
            raise RuntimeError(f"rank {rank} of a group of {len(self._slots)} is gone: a collective cannot end")
        if waited_s > self._timeout_s:
            raise RuntimeError(f"rank {rank} of a group of {len(self._slots)} did not come within {self._timeout_s} s")


def _fence() -> None:
    """Orders what was written or read before against what comes after, on every architecture."""
    for _ in range(2):
        with _LOCK:
            pass


_LOCK = Lock()
_exchanges: WeakKeyDictionary[ProcessGroup, HostExchange | None] = WeakKeyDictionary()


def exchange_of(group: ProcessGroup) -> HostExchange | None:
    """The group's exchange, None where it has to go by gloo. Collective the first time."""
    if group not in _exchanges:
        fits = 1 < group.size() <= MOST_RANKS and group.name() == "gloo"
        _exchanges[group] = _open(group) if fits else None
    return _exchanges[group]


def _open(group: ProcessGroup) -> HostExchange | None:
    """None on all ranks where one of them cannot see the others' memory."""
    descriptor = SharedSlots.make()
    told = torch.tensor([_host(), os.getpid(), descriptor])
    of_all = [torch.empty_like(told) for _ in range(group.size())]
    group.allgather([of_all], [told]).wait()
    hosts, processes, descriptors = torch.stack(of_all).t().tolist()
    slots = _slots_of(processes, descriptors) if len(set(hosts)) == 1 else None
    opened = [torch.empty(1) for _ in processes]
    group.allgather(
        [opened], [torch.tensor([float(slots is not None)])]
    ).wait()  # and all are done with the descriptors
    os.close(descriptor)
    if slots is None or not all(map(bool, opened)):
        return None
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return HostExchange(group.rank(), slots, processes, timeout.total_seconds())


def _slots_of(processes: Sequence[int], descriptors: Sequence[int]) -> list[SharedSlots] | None:
    """None where the system forbids it."""
    try:
        paths = [f"/proc/{pair[0]}/fd/{pair[1]}" for pair in zip(processes, descriptors, strict=True)]
        return [SharedSlots(path) for path in paths]
    except OSError:
        return None


def _host() -> int:
    """Equal for processes that see each other: of one start of one machine, one container, one network."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = int(file.read().replace("-", ""), 16)
    spaces = [os.stat(f"/proc/self/ns/{space}").st_ino for space in ("pid", "net")]
    return hash((boot, os.getuid(), *spaces))


class _Done(dist.Work):
    """A collective that has ended."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def all_gather(original: Any) -> Any:
    """ProcessGroup.all_gather_single."""

    def gather(group: ProcessGroup, output: Tensor, input: Tensor, *options: Any, **named: Any) -> Any:
        exchange = exchange_of(group) if output.is_contiguous() else None
        parts = exchange.parts(_bytes(input), (0, input.nbytes)) if exchange else None
        if parts is None:
            return original(group, output, input, *options, **named)
        torch.cat(parts, out=_bytes(output))
        return _Done()

    return gather


def reduce_scatter(original: Any) -> Any:
    """ProcessGroup.reduce_scatter_single."""

    def scatter(group: ProcessGroup, output: Tensor, input: Tensor, options: Any = None) -> Any:
        combine = _combine(options)
        exchange = exchange_of(group) if combine and output.is_contiguous() else None
        ends = [rank * output.nbytes for rank in range(group.size() + 1)]
        parts = exchange.parts(_bytes(input), ends) if exchange else None
        if parts is None:
            return original(group, output, input, *([options] if options else []))
        output.detach().view(-1).copy_(reduce(combine, [part.view(output.dtype) for part in parts]))
        return _Done()

    return scatter


def all_reduce(original: Any) -> Any:
    """ProcessGroup.allreduce."""

    def reduced(group: ProcessGroup, tensors: Any, options: Any = None, *rest: Any, **named: Any) -> Any:
        combine = _combine(options) if isinstance(tensors, list) and len(tensors) == 1 else None
        exchange = exchange_of(group) if combine else None
        parts = exchange.parts(_bytes(tensors[0]), (0, tensors[0].nbytes)) if exchange else None
        if parts is None:
            return original(group, tensors, *([options] if options else []), *rest, **named)
        (tensor,) = tensors
        tensor.detach().copy_(reduce(combine, [part.view(tensor.dtype) for part in parts]).view(tensor.shape))
        return _Done()

    return reduced


def all_to_all(original: Any) -> Any:
    """ProcessGroup.all_to_all_single."""

    def exchanged(
        group: ProcessGroup, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any, *options: Any
    ) -> Any:
        exchange = exchange_of(group) if output.is_contiguous() else None
        ranks = group.size()
        row = input.nbytes // len(input) if len(input) else 0
        sizes = input_sizes or [len(input) // ranks] * ranks
        ends = list(accumulate((size * row for size in sizes), initial=0))
        parts = exchange.parts(_bytes(input), ends) if exchange else None
        if parts is None:
            return original(group, output, input, output_sizes, input_sizes, *options)
        torch.cat(parts, out=_bytes(output))
        return _Done()

    return exchanged


def _combine(options: Any) -> Callable[..., Tensor] | None:
    return next((function for kind, function in _COMBINES if options is not None and options.reduceOp == kind), None)
