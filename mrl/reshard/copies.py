"""Copies of blocks: grouped into few launches, merged on their way, or into parameters that lie elsewhere in each sync.

A block is a view in Hugging Face orientation, of a shard, of staging memory or of an engine's parameter.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mrl.model.boxes import Box
from mrl.reshard.digest import Merge
from mrl.reshard.messages import Copy

# From this many elements on, a copy by itself is one launch, while a list would need several: one launch for a list
# handles a limited number of chunks (ATen/native/cuda/MultiTensorApply.cuh).
LARGE = 320 * 65536

Copies = list[tuple[Copy, Tensor]]  # with the blocks to copy
Pair = tuple[Tensor, Tensor]  # target and source


def target_view(parameter: Tensor, copy: Copy) -> Tensor:
    """Returns the copy's block of an engine's parameter, in Hugging Face orientation.

    Raises RuntimeError when the parameter does not contain that block.
    """
    view = hf_view(parameter, copy.target_box, copy.axes)
    if view.shape != copy.hf_box.shape:
        raise RuntimeError(
            f"{copy.parameter} is {tuple(parameter.shape)}: it has no {copy.target_box.ranges} for {copy.hf_name}"
        )
    return view


def hf_view(parameter: Tensor, box: Box, axes: Sequence[int]) -> Tensor:
    """Returns the `box` of an engine's parameter, turned to Hugging Face orientation.

    Hugging Face dimension d is the parameter's dimension `axes[d]`; the other dimensions have extent 1.
    """
    block = parameter[box.slices]
    return block.as_strided([block.shape[axis] for axis in axes], [block.stride(axis) for axis in axes])


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target. Converts the dtype where they differ."""
    BlockCopies(targets, sources).run()


class BlockCopies:
    """Copies blocks with few launches. On a device each copy is a launch, and most blocks are small.

    Blocks that are adjacent on both sides become one copy. Of the others, those that are contiguous with equal dtype
    are copied together by torch's kernel for lists.
    """

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]):
        self.targets = targets
        self.sources = sources
        self.large: list[Pair] = []
        self.alike: list[Pair] = []
        self.other: list[Pair] = []
        run: list[Pair] = []
        end: tuple = ()
        for pair in zip(targets, sources, strict=True):
            if not _alike(*pair):
                self.other.append(pair)
                continue
            target, source = pair
            begin = target.dtype, target.storage_offset(), source.storage_offset()
            if begin != end or _memories(run[-1]) != _memories(pair):
                self._add(run)
                run = []
            run.append(pair)
            elements = target.numel()
            end = target.dtype, begin[1] + elements, begin[2] + elements
        self._add(run)

    def _add(self, run: list[Pair]) -> None:
        if not run:
            return
        target, source = run[0]
        elements = sum(target.numel() for target, _ in run)
        if len(run) > 1:
            target = target.as_strided((elements,), (1,))
            source = source.as_strided((elements,), (1,))
        (self.large if elements >= LARGE else self.alike).append((target, source))

    def run(self) -> None:
        """Copies. May be repeated with new values in the sources."""
        copy_pairs(self.large, self.alike, self.other)


def copy_pairs(large: Iterable[Pair], *together: Sequence[Pair]) -> None:
    """Copies each source into its target: `large` ones alone, each list of the others in few launches."""
    for target, source in large:
        target.copy_(source)
    for pairs in together:
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def warm_up(dtype: torch.dtype, device: torch.device) -> None:
    """Loads the kernels of unpacking, as `Sender.warm_up` does for packing.

    `dtype` is that of the wire. Engines may hold float32.
    """
    for of_target in {dtype, torch.float32}:
        targets = torch.zeros(4, 8, dtype=of_target, device=device)
        sources = torch.zeros(8, 8, dtype=dtype, device=device)
        copy_all([targets[0], targets[2]], [sources[0], sources[2]])
        copy_all([targets[:, :3]], [sources[:4, :3]])
        copy_all([targets.t()], [sources[:, :4]])
        copy_pairs([(targets, sources[:4])])


class Landing(NamedTuple):
    """A block of a parameter, told by its distance from the parameter's first element."""

    parameter: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, parameter: str, tensor: Tensor, block: Tensor) -> "Landing":
        """`block` is a view of `tensor`."""
        return cls(parameter, block.shape, block.stride(), block.storage_offset() - tensor.storage_offset())

    def view(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the block, wherever the parameter is now."""
        tensor = tensors[self.parameter]
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


class Landings:
    """Copies of one group of blocks into an engine's parameters, kept between syncs.

    A module is in load layout for a moment, each time perhaps elsewhere. So where a block goes is kept as a `Landing`,
    which keeps no memory alive. Sources are views of staging memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor], copies: Copies):
        """`tensors` are the parameters by name."""
        self._blocks = [block for _, block in copies]
        self._forms = {name: _form(tensor) for name, tensor in tensors.items()}
        self._large: list[tuple[Landing, Tensor]] = []
        self._alike: list[tuple[Landing, Tensor]] = []
        self._other: list[tuple[Landing, Tensor]] = []
        of_parameter: dict[str, list[tuple[Copy, Tensor]]] = {}
        for copy, block in copies:
            of_parameter.setdefault(copy.parameter, []).append((copy, block))
        for name, own in of_parameter.items():
            made = BlockCopies([target_view(tensors[name], copy) for copy, _ in own], [block for _, block in own])
            for landings, pairs in ((self._large, made.large), (self._alike, made.alike), (self._other, made.other)):
                landings += [(Landing.of(name, tensors[name], target), source) for target, source in pairs]

    def fit(self, tensors: Mapping[str, Tensor], copies: Copies) -> bool:
        """Tells whether these are the same copies, into parameters of the same form."""
        return (
            len(copies) == len(self._blocks)
            and all(known is block for known, (_, block) in zip(self._blocks, copies, strict=True))
            and self._forms == {name: _form(tensor) for name, tensor in tensors.items()}
        )

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies all blocks."""
        large, alike, other = (
            [(landing.view(tensors), source) for landing, source in landings]
            for landings in (self._large, self._alike, self._other)
        )
        copy_pairs(large, alike, other)


def _form(tensor: Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.stride()


class MergedCopies:
    """Copies blocks and merges adapters into those that have them."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor], copies: Sequence[Copy], merge: Merge):
        self.targets = targets
        self.sources = sources
        self._merge = merge
        entries = list(zip(copies, targets, sources, strict=True))
        self._merged = [entry for entry in entries if merge.adapts(entry[0].hf_name)]
        plain = [entry for entry in entries if not merge.adapts(entry[0].hf_name)]
        self._plain = BlockCopies([target for _, target, _ in plain], [source for _, _, source in plain])

    def run(self) -> None:
        """Copies. May be repeated, as BlockCopies.run."""
        self._plain.run()
        for copy, target, source in self._merged:
            self._merge.merge(copy.hf_name, copy.hf_box, source, target)


def _alike(target: Tensor, source: Tensor) -> bool:
    return target.dtype is source.dtype and target.is_contiguous() and source.is_contiguous()


def _memories(pair: Pair) -> list[int]:
    return [block.untyped_storage()._cdata for block in pair]
