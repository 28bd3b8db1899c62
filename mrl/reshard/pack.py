"""Between tensors and messages: the boxes of a message, one after the other and each contiguous, as views that are copied in one call.

Views of what stays where it is (shards, staging) are made once and kept; making them costs more than copying a small box.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mrl.reshard.messages import Copy, Message

Shards = Callable[[str, int], Tensor]  # (megatron name, model chunk) -> this rank's parameter


def wire_views(message: Message, buffer: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Each copy's block, in Hugging Face orientation, in a uint8 `buffer` that holds the message from its first byte on."""
    flat, at, views = buffer[: message.nbytes].view(dtype), 0, []
    for copy in message.copies:
        volume = copy.hf_box.volume
        views.append(flat[at : at + volume].view(copy.hf_box.shape))
        at += volume
    if at * dtype.itemsize != message.nbytes:
        raise RuntimeError(f"round {message.round}, rank {message.source} to worker {message.worker}: copies do not add up to nbytes")
    return views


def source_view(shard: Tensor, copy: Copy) -> Tensor:
    """The copy's block of a Megatron parameter, which has Hugging Face orientation. Raises RuntimeError when it is no such shard."""
    view = shard[copy.source_box.slices]
    if view.shape != copy.hf_box.shape:
        raise RuntimeError(f"{copy.source_name} is {tuple(shard.shape)}: it does not hold {copy.source_box.ranges} of {copy.hf_name}")
    return view


def target_view(parameter: Tensor, copy: Copy) -> Tensor:
    """The copy's block of an engine's parameter, turned to Hugging Face orientation.

    Hugging Face dimension d lies along the parameter's dimension `axes[d]`; the others, an expert's number, have extent 1.
    """
    block = parameter[copy.target_box.slices]
    view = block.as_strided(copy.hf_box.shape, [block.stride(axis) for axis in copy.axes])
    if view.numel() != block.numel():
        raise RuntimeError(f"{copy.parameter} is {tuple(parameter.shape)}: it has no {copy.target_box.ranges} for {copy.hf_name}")
    return view


class ShardViews:
    """The blocks that one rank sends. They are made again when a parameter has moved in memory, so that none is stale."""

    def __init__(self, shards: Shards):
        self._shards = shards
        self._bases: dict[tuple[str, int], Tensor] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}

    def refresh(self) -> None:
        """Looks every parameter up again. Call once before each sync."""
        for (name, chunk), known in self._bases.items():
            if not _same_memory(known, self._shards(name, chunk)):
                self._bases.clear()
                self._views.clear()
                return

    def of(self, message: Message) -> list[Tensor]:
        """One view per copy; kept from the second sync on."""
        key = (message.round, message.worker)
        if key not in self._views:
            self._views[key] = [source_view(self._base(copy), copy) for copy in message.copies]
        return self._views[key]

    def _base(self, copy: Copy) -> Tensor:
        key = (copy.source_name, copy.vp_chunk)
        if key not in self._bases:
            self._bases[key] = self._shards(*key).detach()
        return self._bases[key]


def _same_memory(one: Tensor, other: Tensor) -> bool:
    def place(t: Tensor) -> tuple:
        return t.data_ptr(), t.dtype, t.shape, t.stride()

    return place(one) == place(other)


class WireViews:
    """Blocks of messages in staging memory, kept for as long as a message keeps its place in memory that outlives it."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._views: dict[tuple[int, int, int], tuple[int, list[Tensor]]] = {}

    def of(self, message: Message, buffer: Tensor, lasting: bool) -> list[Tensor]:
        """`lasting`: the buffer lies in the transport's own staging. Views of another are not kept, since they would keep its memory."""
        if not lasting:
            return wire_views(message, buffer, self._dtype)
        key, place = (message.round, message.source, message.worker), buffer.data_ptr()
        known, views = self._views.get(key, (None, []))
        if known != place:
            views = wire_views(message, buffer, self._dtype)
            self._views[key] = place, views
        return views


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, converting the dtype where they differ."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def by_module(
    messages: Sequence[Message], blocks: Sequence[Sequence[Tensor]], begun: Iterable[str]
) -> Iterator[tuple[str, list[tuple[Copy, Tensor]]]]:
    """(module, its copies with their blocks) of the messages of one round, so that modules are written one at a time.

    Those that were `begun` in an earlier round come first, the others in the order of the messages.
    """
    modules: dict[str, list[tuple[Copy, Tensor]]] = {module: [] for module in begun}
    for message, views in zip(messages, blocks, strict=True):
        for copy, view in zip(message.copies, views, strict=True):
            modules.setdefault(module_of(copy.parameter), []).append((copy, view))
    yield from ((module, copies) for module, copies in modules.items() if copies)


def module_of(parameter: str) -> str:
    """The module that a parameter belongs to: what vLLM processes as one."""
    return parameter.rpartition(".")[0]
