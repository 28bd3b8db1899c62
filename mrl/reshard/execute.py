"""Executes a plan: a rank packs and sends its messages round by round, a worker unpacks them module by module.

A message is the boxes of its copies one after the other, each contiguous. They are copied as views, adjacent ones
together. Views of memory that does not move (shards, staging) are kept: making them costs more than copying a small
box.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mrl.model.quantised_shards import sent_shards
from mrl.record.metrics import PhaseTimer
from mrl.reshard.actions import receiving, sending
from mrl.reshard.copies import LARGE, BlockCopies, Copies, Landings, MergedCopies
from mrl.reshard.digest import Merge, ShardDigests, Shards
from mrl.reshard.messages import Copy, Message, by_round, module_of
from mrl.reshard.plan import ReshardPlan
from mrl.reshard.quantise import Quantiser
from mrl.reshard.setup import SyncSetup
from mrl.reshard.sync_report import ReceiveReport, SendReport
from mrl.reshard.transport import ReceivingEnd, SendingLinks
from mrl.units import MIB

LITTLE_BYTES = MIB  # bytes of modules that are written together; only the last of them may be larger by itself


class Writer(Protocol):
    """An engine's parameters in load layout."""

    def tensor(self, parameter: str) -> Tensor:
        """Returns the parameter. Creates its module on first use."""

    def complete(self, module: str) -> None:
        """Says that the whole module has been written."""


class Sender:
    """The sending side of one rank. It lives as long as the run, so its views are made once."""

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        shards: Shards,
        end: SendingLinks,
        dtype: torch.dtype,
        local: Collection[int] = (),
        free_bytes: Callable[[], int | None] = lambda: None,
        merge: Merge | None = None,
    ):
        """`local` are workers on this rank's own device; what goes to them does not count as moved.

        `free_bytes` returns that device's free memory. `merge` merges adapters into blocks while they are packed. Where
        the plan's engines hold words, blocks are quantised while they are packed, after adapters were merged.
        """
        described = sent_shards(plan.model, plan.train, rank, plan.fp8_block)
        self._quantiser: Quantiser | None = None
        if plan.fp8_block:
            self._quantiser = merge = Quantiser(described, shards, plan.fp8_block, merge)
            shards = self._quantiser.shard
        self._free_bytes = free_bytes
        self.plan = plan
        self.rank = rank
        self.end = end
        self._local = set(local)
        self._messages = list(plan.sends(rank))
        self._sources = ShardViews(shards)
        self._wire = WireViews(dtype)
        if merge is not None:
            described = (*described, *merge.described)
        self._digests = ShardDigests(described, shards, dtype, merge)
        self._merge = merge
        self._packings: dict[tuple[int, int], BlockCopies | MergedCopies] = {}  # by round and worker

    def send(self, update: int, workers: Collection[int], check_replicas: bool = True) -> SendReport:
        """Sends everything for `workers` once.

        Raises TransferError, after telling the peers that the rest will not come.
        """
        messages, timer = self.transfer(update, workers, self._digests)
        with timer("digest"), torch.no_grad():
            digests = self._digests.sent(messages)
            shared = {}
            if check_replicas:
                shared = self._digests.shared()
        nbytes = Counter()
        for message in messages:
            nbytes[message.worker] += message.nbytes
        moved = {worker: sent for worker, sent in nbytes.items() if worker not in self._local}
        local = {worker: sent for worker, sent in nbytes.items() if worker in self._local}
        return SendReport(
            self.rank, digests, shared, moved, local, self.end.staging_bytes, dict(timer.seconds), self._free_bytes()
        )

    @torch.no_grad()
    def warm_up(self) -> None:
        """Packs and digests a message for each kind of block, into memory of its own.

        The first launch of a kernel loads it, for which it waits for the whole device. In a sync it would so wait for
        messages of later rounds.
        """
        seen: set[tuple] = set()
        if self._quantiser is not None:
            self._quantiser.begin()
        for message in self._messages:
            sources = self._sources.of(message)
            kinds = {self._kind(*pair) for pair in zip(message.copies, sources, strict=True)}
            if kinds <= seen:
                continue
            seen |= kinds
            memory = torch.empty(message.nbytes, dtype=torch.uint8, device=sources[0].device)
            packing = self._copies(message, self._wire.of(message, memory, lasting=False), sources)
            packing.run()
            self._digests.packed(message, packing.targets)
            self._digests.sent([message])
        self._digests.begin()

    def _kind(self, copy: Copy, source: Tensor) -> tuple:
        """Returns what decides which kernels pack and digest a block."""
        is_merged = self._merge is not None and self._merge.adapts(copy.hf_name)
        is_large = source.numel() >= LARGE
        return copy.dtype, source.dtype, source.is_contiguous(), source.dim(), is_large, is_merged

    def connect(self, setup: SyncSetup, check_wanted: Callable[[], None] = lambda: None) -> None:
        """Connects to the workers of `setup`, which connect now. Connections to other workers stay as they are.

        `check_wanted` is called while it waits, and raises once nobody wants this connection any more. Raises
        TransferError.
        """
        self._forget(setup.workers)
        self.end.open(setup, check_wanted)

    def keep(self, workers: Collection[int]) -> None:
        """Closes the connections to all other workers."""
        gone = self.end.workers - set(workers)
        self._forget(gone)
        self.end.drop(gone)

    def _forget(self, workers: Collection[int]) -> None:
        """Forgets views of memory that belongs to these workers, before it is closed."""
        self._packings = {key: known for key, known in self._packings.items() if key[1] not in workers}
        self._wire.forget(workers)

    def close(self) -> None:
        """Releases memory and connections, beginning with views of memory that belongs to peers."""
        self._packings.clear()
        self._wire.clear()
        self._sources.clear()
        self.end.close()

    def transfer(
        self, update: int, workers: Collection[int], digests: ShardDigests | None = None
    ) -> tuple[list[Message], PhaseTimer]:
        """Sends. Returns the messages and the time taken. Raises what `send` raises.

        `digests` are shown what is packed.
        """
        timer = PhaseTimer()
        messages = [message for message in self._messages if message.worker in workers]
        if self._sources.refresh():
            self._packings.clear()  # they would keep memory alive that the parameters no longer use
        try:
            with torch.no_grad():
                self._transfer(update, messages, timer, digests)
        except BaseException:
            self.end.abandon()
            raise
        return messages, timer

    def _transfer(self, update: int, messages: list[Message], timer: PhaseTimer, digests: ShardDigests | None) -> None:
        if digests is not None:
            digests.begin()
        if self._quantiser is not None:
            with timer("pack"):
                self._quantiser.begin()
        self.end.begin(update, {message.worker for message in messages})
        for step, these in sending(messages, self.end.is_remote):
            if step == "slot":
                self._fill(these[0], timer, digests)
            elif step == "post":
                with timer("pack"):
                    self.end.post(these[0])
            else:
                with timer("wait"):
                    self.end.wait(these)

    def _fill(self, message: Message, timer: PhaseTimer, digests: ShardDigests | None) -> None:
        """Packs the message into its slot."""
        with timer("wait"):
            slot = self.end.slot(message)
        with timer("pack"):
            packing = self._packing(message, slot)
            packing.run()
        if digests is not None:
            with timer("digest"):
                digests.packed(message, packing.targets)

    def _packing(self, message: Message, slot: Tensor) -> "BlockCopies | MergedCopies":
        """Returns the copies of the message into its slot. Kept while none of its blocks moves in memory."""
        lasting = self.end.lasting(message)
        targets = self._wire.of(message, slot, lasting)
        sources = self._sources.of(message)
        key = (message.round, message.worker)
        known = self._packings.get(key)
        if known is not None and known.targets is targets and known.sources is sources:
            return known
        copies = self._copies(message, targets, sources)
        if lasting:
            self._packings[key] = copies
        return copies

    def _copies(self, message: Message, targets: list[Tensor], sources: list[Tensor]) -> "BlockCopies | MergedCopies":
        if self._merge is None:
            return BlockCopies(targets, sources)
        return MergedCopies(targets, sources, message.copies, self._merge)


class Receiver:
    """The receiving side of one worker. It lives as long as the run."""

    def __init__(
        self,
        plan: ReshardPlan,
        worker: int,
        end: ReceivingEnd,
        dtype: torch.dtype,
        local: Collection[int] = (),
        remote: Collection[int] = (),
        free_bytes: Callable[[], int | None] = lambda: None,
    ):
        """`local` are ranks on this worker's own device, `remote` are ranks on other nodes.

        `free_bytes` returns the device's free memory.
        """
        self._free_bytes = free_bytes
        self.plan = plan
        self.worker = worker
        self.end = end
        self._local = set(local)
        self._remote = set(remote)
        self._rounds = by_round(plan.receives(worker))
        self._copies = Counter(module_of(c.parameter) for messages in self._rounds for m in messages for c in m.copies)
        self._wire = WireViews(dtype)
        self._landings: dict[tuple[int, int], Landings] = {}  # by round, and number of the group in it

    def close(self) -> None:
        """Releases memory and connections."""
        self._landings.clear()
        self._wire.clear()
        self.end.close()

    def receive(self, writer: Writer, update: int) -> ReceiveReport:
        """Receives everything for this worker.

        Raises TransferError, after telling the peers that it receives no more.
        """
        timer = PhaseTimer()
        try:
            with torch.no_grad():
                self._receive(writer, update, timer)
        except BaseException:
            self.end.abandon()
            raise
        messages = [message for of_round in self._rounds for message in of_round]
        local = sum(message.nbytes for message in messages if message.source in self._local)
        remote = sum(message.nbytes for message in messages if message.source in self._remote)
        moved = sum(m.nbytes for m in messages) - local
        return ReceiveReport(
            self.worker, moved, local, remote, self.end.staging_bytes, dict(timer.seconds), self._free_bytes()
        )

    def _receive(self, writer: Writer, update: int, timer: PhaseTimer) -> None:
        self.end.begin(update)
        missing: dict[str, int] = {}  # modules that have been started -> copies that are missing
        for step, messages in receiving(self._rounds, self.end.is_remote):
            if step == "take":
                self._unpack(writer, messages, missing, timer)
            elif step == "release":
                self.end.release(messages)
            else:
                with timer("wait"):
                    self.end.ask(messages)

    def _unpack(self, writer: Writer, messages: Sequence[Message], missing: dict[str, int], timer: PhaseTimer) -> None:
        """Takes one round and writes it into the engine's parameters. Brings `missing` up to date."""
        with timer("wait"):
            buffers = self.end.take(messages)
        pairs = zip(messages, buffers, strict=True)
        blocks = [self._wire.of(message, buffer, self.end.lasting(message)) for message, buffer in pairs]
        is_lasting = all(self.end.lasting(message) for message in messages)
        for number, modules in enumerate(_together(by_module(messages, blocks, list(missing)))):
            with timer("unpack"):
                copies = [copy for copies in modules.values() for copy in copies]
                self._write(writer, copies, (messages[0].round, number), is_lasting)
            for module, copies in modules.items():
                missing[module] = missing.get(module, self._copies[module]) - len(copies)
                if not missing[module]:
                    del missing[module]
                    with timer("complete"):
                        writer.complete(module)

    def _write(self, writer: Writer, copies: Copies, key: tuple[int, int], is_lasting: bool) -> None:
        """Copies the blocks into the engine's parameters. `key` names this group of copies among a sync's."""
        tensors = {name: writer.tensor(name) for name in dict.fromkeys(copy.parameter for copy, _ in copies)}
        landings = self._landings.get(key)
        if landings is None or not landings.fit(tensors, copies):
            landings = Landings(tensors, copies)
            if is_lasting:
                self._landings[key] = landings
        landings.run(tensors)


def _together(of_modules: Iterable[tuple[str, Copies]]) -> Iterator[dict[str, Copies]]:
    """Groups modules that are written together: norms and routers are too small for a launch of their own."""
    modules: dict[str, Copies] = {}
    nbytes = 0
    for module, copies in of_modules:
        modules[module] = copies
        nbytes += sum(block.nbytes for _, block in copies)
        if nbytes >= LITTLE_BYTES:
            yield modules
            modules = {}
            nbytes = 0
    if modules:
        yield modules


def wire_views(message: Message, buffer: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Returns each copy's block, in Hugging Face orientation, as a view of the uint8 `buffer` that holds the message.

    `dtype` is used for copies that have none of their own.
    """
    start = 0
    views = {}
    formats = [dtype if copy.dtype is None else getattr(torch, copy.dtype) for copy in message.copies]
    for number in sorted(range(len(formats)), key=lambda number: -formats[number].itemsize):
        copy = message.copies[number]
        own = formats[number]
        stop = start + copy.hf_box.volume * own.itemsize
        views[number] = buffer[start:stop].view(own).view(copy.hf_box.shape)
        start = stop
    if start != message.nbytes:
        raise RuntimeError(
            f"round {message.round}, rank {message.source} to worker {message.worker}: copies do not add up to nbytes"
        )
    return [views[number] for number in range(len(views))]


def source_view(shard: Tensor, copy: Copy) -> Tensor:
    """Returns the copy's block of a source shard, which has Hugging Face orientation.

    Raises RuntimeError when the shard does not contain that block.
    """
    view = shard[copy.source_box.slices]
    if view.shape != copy.hf_box.shape:
        raise RuntimeError(
            f"{copy.source_name} is {tuple(shard.shape)}: it does not hold {copy.source_box.ranges} of {copy.hf_name}"
        )
    return view


class ShardViews:
    """Views of the blocks that one rank sends.

    They are made again after a parameter has moved in memory, so none is stale.
    """

    def __init__(self, shards: Shards):
        self._shards = shards
        self._bases: dict[tuple[str, int], Tensor] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}

    def refresh(self) -> bool:
        """Checks every parameter's address and tells whether one has moved. Call it once before each sync."""
        for (name, chunk), known in self._bases.items():
            if not _same_memory(known, self._shards(name, chunk)):
                self.clear()
                return True
        return False

    def clear(self) -> None:
        """Forgets all views."""
        self._bases.clear()
        self._views.clear()

    def of(self, message: Message) -> list[Tensor]:
        """Returns one view for each copy. Kept for the following syncs."""
        key = (message.round, message.worker)
        if key not in self._views:
            self._views[key] = [source_view(self._base(copy), copy) for copy in message.copies]
        return self._views[key]

    def _base(self, copy: Copy) -> Tensor:
        key = (copy.source_name, copy.vp_chunk)
        if key not in self._bases:
            self._bases[key] = self._shards(*key).detach()
        return self._bases[key]


def _same_memory(first: Tensor, second: Tensor) -> bool:
    def memory(tensor: Tensor) -> tuple:
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()

    return memory(first) == memory(second)


class WireViews:
    """Views of the blocks of messages in staging memory. Each is kept while its message stays at the same address."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._views: dict[tuple[int, int, int], tuple[int, list[Tensor]]] = {}

    def clear(self) -> None:
        """Forgets all views, each of which would keep a peer's memory mapped."""
        self._views.clear()

    def forget(self, workers: Collection[int]) -> None:
        """Forgets the views of messages to these workers."""
        self._views = {key: known for key, known in self._views.items() if key[2] not in workers}

    def of(self, message: Message, buffer: Tensor, lasting: bool) -> list[Tensor]:
        """Returns the views. `lasting` says that the buffer belongs to the transport's own staging memory.

        Views of other buffers are not kept, because they would keep the memory alive.
        """
        if not lasting:
            return wire_views(message, buffer, self._dtype)
        key = (message.round, message.source, message.worker)
        address = buffer.data_ptr()
        known_address, views = self._views.get(key, (None, []))
        if known_address != address:
            views = wire_views(message, buffer, self._dtype)
            self._views[key] = address, views
        return views


def by_module(
    messages: Sequence[Message], blocks: Sequence[Sequence[Tensor]], begun: Iterable[str]
) -> Iterator[tuple[str, Copies]]:
    """Yields (module, its copies with their blocks) of one round's messages, so that modules are written one at a time.

    Modules that were `begun` in an earlier round come first, the others in the order of the messages.
    """
    modules: dict[str, Copies] = {module: [] for module in begun}
    for message, views in zip(messages, blocks, strict=True):
        for copy, view in zip(message.copies, views, strict=True):
            modules.setdefault(module_of(copy.parameter), []).append((copy, view))
    yield from ((module, copies) for module, copies in modules.items() if copies)
