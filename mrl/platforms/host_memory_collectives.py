"""Collectives of CPU ranks on one host, through memory that they share.

gloo passes every message through a socket and four threads, each of which has to be woken. This takes 1 to 2 ms after
the last rank has arrived, and the sum itself 0.1 ms. An update of the tiny model over two ranks has some 90 of them.
Here each rank writes its data into its own memory, which the others map, and announces it by a number. It reads the
others' data as soon as they have announced it:

  rank 0   | round 7 | ends 0 4 8 | bytes for 0 | bytes for 1 |      each rank has two such slots: round 8 is written
  rank 1   | round 7 | ends 0 2 9 | bytes for 0 | bytes for 1 |      into the other while round 7 is still read

A rank in round 9 has seen all others in round 8. So all have read round 7, whose slot it now overwrites. A waiting rank
polls, so this needs a core for each rank. gloo serves all other runs, groups over several hosts, and messages larger
than a slot; all ranks of a group decide this from the same numbers. gloo also serves collectives that torch coalesces:
gradients and parameters of data-parallel ranks. Sums are computed in the order of ranks.

An asynchronous call returns when all ranks have arrived. Therefore all ranks must call the collectives of all groups in
the same order. A group's calls must come from one thread.
"""

import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from mrl.platforms.memory_fence import memory_fence
from mrl.units import MIB

SLOT_BYTES = 4 * MIB  # resident as far as it has been written
MOST_RANKS = 16
HEADER_BYTES = 4096
SPIN_S = 0.5e-3  # afterwards a waiting rank yields its core for an eighth of the time that it has waited
NAP_S = 5e-3  # at most
LOOK_S = 1.0  # between checks whether the other ranks are alive
_COMBINES: tuple[tuple[Any, Callable[..., Tensor]], ...] = (
    (ReduceOp.SUM, torch.add),
    (ReduceOp.MAX, torch.maximum),
    (ReduceOp.MIN, torch.minimum),
)


class SharedSlots:
    """Two slots of one rank, in memory without a name. Other processes of the host open it through the owner's
    descriptor.

    Each process that maps it holds an open file. The memory lasts while one of these files is open.
    """

    def __init__(self, path: str):
        """`path` names a descriptor of the owner. Raises OSError if it cannot be opened."""
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 2 * (HEADER_BYTES + SLOT_BYTES))
        halves = [slice(i * HEADER_BYTES, (i + 1) * HEADER_BYTES) for i in (0, 1)]
        self.headers = [memoryview(memory)[half].cast("q") for half in halves]  # round, ends[0] ... ends[n]
        data = torch.frombuffer(memory, dtype=torch.uint8)[2 * HEADER_BYTES :]
        self.slots = data.view(2, SLOT_BYTES).unbind()

    @property
    def token(self) -> int:
        """A number that identifies the owner's memory."""
        return self.headers[0][-1]

    @token.setter
    def token(self, value: int) -> None:
        self.headers[0][-1] = value

    @staticmethod
    def make() -> int:
        """Returns a descriptor of new memory, zeros. Raises OSError, or AttributeError in a Python without it."""
        descriptor = os.memfd_create("mrl-collectives")
        os.ftruncate(descriptor, 2 * (HEADER_BYTES + SLOT_BYTES))
        return descriptor


class HostExchange:
    """Exchanges data between the ranks of one group. All ranks make the same calls in the same order."""

    def __init__(self, rank: int, slots: Sequence[SharedSlots], processes: Sequence[int], timeout_s: float):
        self._rank = rank
        self._slots = slots
        self._processes = processes
        self._timeout_s = timeout_s
        self._round = 0

    def parts(self, sent: Tensor, ends: Sequence[int]) -> list[Tensor] | None:
        """Returns the bytes that each rank has for this one, to be read before the next call.

        Returns None if one of them has more than a slot holds. `sent`: bytes for all ranks, [bytes]; rank i gets those
        from ends[i] to ends[i + 1]. With two ends all ranks get everything. Raises RuntimeError when a rank is gone, or
        does not arrive within the group's time.
        """
        self._round += 1
        half = self._round % 2
        own = self._slots[self._rank]
        for i, end in enumerate(ends):
            own.headers[half][1 + i] = end
        if len(sent) <= SLOT_BYTES:
            own.slots[half][: len(sent)] = sent
        memory_fence()
        own.headers[half][0] = self._round
        headers = [self._header(rank, half) for rank in range(len(self._slots))]
        memory_fence()
        if any(header[len(ends)] > SLOT_BYTES for header in headers):
            return None
        here = 0
        if len(ends) > 2:
            here = self._rank
        pairs = zip(self._slots, headers, strict=True)
        return [slots.slots[half][header[1 + here] : header[2 + here]] for slots, header in pairs]

    def _header(self, rank: int, half: int) -> memoryview:
        """Waits for a rank to reach this round, and returns its header."""
        header = self._slots[rank].headers[half]
        began = time.monotonic()
        looked = began
        while header[0] != self._round:
            now = time.monotonic()
            if now - began < SPIN_S:
                os.sched_yield()
                continue
            time.sleep(min(NAP_S, (now - began) / 8))
            if now - looked > LOOK_S:
                looked = now
                self._check(rank, now - began)
        return header

    def _check(self, rank: int, waited_s: float) -> None:
        if not _lives(self._processes[rank]):
            raise RuntimeError(f"rank {rank} of a group of {len(self._slots)} has ended: the collective cannot finish")
        if waited_s > self._timeout_s:
            raise RuntimeError(
                f"rank {rank} of a group of {len(self._slots)} did not arrive within {self._timeout_s} s"
            )


def _lives(process: int) -> bool:
    """Tells whether a process runs. An ended one stays in the table until its parent collects it."""
    try:
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


_exchanges: WeakKeyDictionary[ProcessGroup, HostExchange | None] = WeakKeyDictionary()


def exchange_of(group: ProcessGroup) -> HostExchange | None:
    """Returns the group's exchange, or None if gloo must serve it. The first call is collective."""
    if group not in _exchanges:
        fits = 1 < group.size() <= MOST_RANKS and group.name() == "gloo"
        _exchanges[group] = _open(group) if fits else None
    return _exchanges[group]


@torch.inference_mode(False)
def _open(group: ProcessGroup) -> HostExchange | None:
    """Opens an exchange for a group.

    Returns None on all ranks if one cannot open the others' memory, or has no core of its own.
    """
    memory = _own_memory()
    try:
        own = torch.tensor(memory or (0, 0, 0, 0))
        of_all = [torch.empty_like(own) for _ in range(group.size())]
        group.allgather([of_all], [own]).wait()
        rows = torch.stack(of_all).tolist()
        together = len({row[0] for row in rows}) == 1 and dist.get_world_size() <= len(os.sched_getaffinity(0))
        slots = None
        if together:
            slots = _slots_of(rows)
        opened = [torch.empty(1) for _ in rows]
        group.allgather([opened], [torch.tensor([float(slots is not None)])]).wait()
    finally:
        if memory:
            os.close(memory[2])  # every rank has opened it
    if slots is None or not all(map(bool, opened)):
        return None
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return HostExchange(group.rank(), slots, [row[1] for row in rows], timeout.total_seconds())


def _own_memory() -> tuple[int, int, int, int] | None:
    """Returns (host, process, descriptor, token) of new memory; None if Python or the system lacks such memory."""
    try:
        host = _host()
        descriptor = SharedSlots.make()
        token = secrets.randbits(62)
    except (OSError, AttributeError):
        return None
    try:
        SharedSlots(f"/proc/self/fd/{descriptor}").token = token
    except (OSError, ValueError):
        os.close(descriptor)
        return None
    return host, os.getpid(), descriptor, token


def _slots_of(rows: Sequence[Sequence[int]]) -> list[SharedSlots] | None:
    """Opens the slots of all ranks from their `_own_memory`. None if one cannot be opened or belongs to another
    process.
    """
    try:
        slots = [SharedSlots(f"/proc/{process}/fd/{descriptor}") for _, process, descriptor, _ in rows]
    except (OSError, ValueError):
        return None
    if [each.token for each in slots] == [row[3] for row in rows]:
        return slots
    return None


def _host() -> int:
    """Returns a number that is equal for processes of the same boot, container and network."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = int(file.read().replace("-", ""), 16)
    spaces = [os.stat(f"/proc/self/ns/{space}").st_ino for space in ("pid", "net")]
    return hash((boot, os.getuid(), *spaces))


class _Done(dist.Work):
    """A finished collective. It has no future."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def all_gather(original: Any) -> Any:
    """Replaces ProcessGroup.all_gather_single."""

    def all_gather_single(group: ProcessGroup, output: Tensor, input: Tensor, *options: Any, **named: Any) -> Any:
        exchange = exchange_of(group)
        parts = None
        if exchange:
            parts = exchange.parts(_bytes(input), (0, input.nbytes))
        if parts is None:
            return original(group, output, input, *options, **named)
        _check(parts, [output.nbytes // group.size()] * group.size(), input, output, output.nbytes % group.size() == 0)
        _write(output, parts)
        return _Done()

    return all_gather_single


def reduce_scatter(original: Any) -> Any:
    """Replaces ProcessGroup.reduce_scatter_single."""

    def reduce_scatter_single(group: ProcessGroup, output: Tensor, input: Tensor, *options: Any, **named: Any) -> Any:
        combine = _combine(*options, **named)
        exchange = None
        if combine:
            exchange = exchange_of(group)
        ends = [rank * input.nbytes // group.size() for rank in range(group.size() + 1)]
        parts = None
        if exchange:
            parts = exchange.parts(_bytes(input), ends)
        if parts is None:
            return original(group, output, input, *options, **named)
        _check(parts, [output.nbytes] * group.size(), input, output)
        output.detach().copy_(reduce(combine, [part.view(output.dtype) for part in parts]).view(output.shape))
        return _Done()

    return reduce_scatter_single


def all_reduce(original: Any) -> Any:
    """Replaces ProcessGroup.allreduce."""

    def allreduce(group: ProcessGroup, tensors: Any, *options: Any, **named: Any) -> Any:
        combine = None
        if isinstance(tensors, list) and len(tensors) == 1:
            combine = _combine(*options, **named)
        exchange = None
        if combine:
            exchange = exchange_of(group)
        parts = None
        if exchange:
            parts = exchange.parts(_bytes(tensors[0]), (0, tensors[0].nbytes))
        if parts is None:
            return original(group, tensors, *options, **named)
        (tensor,) = tensors
        _check(parts, [tensor.nbytes] * group.size(), tensor, tensor)
        tensor.detach().copy_(reduce(combine, [part.view(tensor.dtype) for part in parts]).view(tensor.shape))
        return _Done()

    return allreduce


def all_to_all(original: Any) -> Any:
    """Replaces ProcessGroup.all_to_all_single."""

    def all_to_all_single(
        group: ProcessGroup,
        output: Tensor,
        input: Tensor,
        output_rows: Any,
        input_rows: Any,
        *options: Any,
        **named: Any,
    ) -> Any:
        exchange = exchange_of(group)
        sent, expected = (_row_bytes(*pair, group.size()) for pair in ((input, input_rows), (output, output_rows)))
        parts = None
        if exchange:
            parts = exchange.parts(_bytes(input), list(accumulate(sent, initial=0)))
        if parts is None:
            return original(group, output, input, output_rows, input_rows, *options, **named)
        _check(parts, expected, input, output, (sum(sent), sum(expected)) == (input.nbytes, output.nbytes))
        _write(output, parts)
        return _Done()

    return all_to_all_single


def _row_bytes(tensor: Tensor, rows: Sequence[int], ranks: int) -> list[int]:
    """Returns the bytes for each rank. Without `rows` all ranks get the same."""
    each = prod(tensor.shape[1:]) * tensor.element_size()
    return [count * each for count in rows or [len(tensor) // ranks] * ranks]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _check(
    parts: Sequence[Tensor], expected: Sequence[int], input: Tensor, output: Tensor, is_whole: bool = True
) -> None:
    """Raises RuntimeError for parts of unexpected size.

    `is_whole`: all of the input was sent, and the parts fill the output.
    """
    came = [len(part) for part in parts]
    if came != list(expected) or not is_whole or input.dtype != output.dtype:
        raise RuntimeError(
            f"ranks gave {came} bytes of {input.dtype} where {list(expected)} of {output.dtype} are expected, "
            f"for {output.nbytes} bytes in all: they are not in the same collective, or their shapes differ"
        )


def _write(output: Tensor, parts: Sequence[Tensor]) -> None:
    if output.is_contiguous():
        torch.cat(parts, out=_bytes(output))
    else:
        output.detach().copy_(torch.cat(parts).view(output.dtype).view(output.shape))


def _combine(opts: Any = None, *_: Any, **named: Any) -> Callable[..., Tensor] | None:
    """Returns the function that joins the parts of two ranks; None where gloo must serve the call."""
    return next((function for kind, function in _COMBINES if getattr(opts, "reduceOp", None) == kind), None)
