"""Writes an engine's parameters in load layout, module by module, and hands each finished module to vLLM.

Load layout is how vLLM's `load_weights` fills parameters, before kernels pack or shuffle them; after that they can no longer be written.
vLLM's layerwise reload brings single modules back into it. What differs between vLLM generations is behind `Reload`, in one adapter each.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

from mrl.model.vllm_parameters import TargetParameter, TargetPiece
from mrl.reshard.digest import add, combine, lane_sums, lane_sums_of_each

MAX_OPEN = 2  # modules in load layout at any moment


class Reload(Protocol):
    """vLLM's layerwise reload, in the words of one generation of vLLM."""

    def plan_name(self, name: str) -> str:
        """What a plan calls a module or parameter of this name."""
        ...

    def enter(self, model: nn.Module) -> None:
        """Sets the kernels' tensors of every module aside and leaves empty (meta) ones in load layout."""
        ...

    def leave_out(self, layer: nn.Module) -> None:
        """Gives one module its kernel's tensors back at once: it takes no part in the reload that was entered."""
        ...

    def load_tensor(self, layer: nn.Module, leaf: str) -> Tensor:
        """A parameter in load layout, maybe without data, when the reload was not entered."""
        ...

    def open_loaders(self, layer: nn.Module) -> None:
        """Gives a materialised module its own weight loaders, which fill its parameters at once, instead of the reload's."""
        ...

    def materialise(self, layer: nn.Module) -> None:
        """Gives one module's empty parameters memory."""
        ...

    def process(self, layer: nn.Module) -> None:
        """Turns one written module into what its kernel reads, in the kernel's own memory. Buffers stay as they were."""
        ...

    def finish(self, model: nn.Module, model_config) -> None:
        """Leaves the reload when all parameters have been processed."""
        ...

    def abandon(self, model: nn.Module) -> None:
        """Leaves the reload from any point: modules that were not processed get their kernels' tensors back. Safe to call twice."""
        ...


class LayerwiseWriter:
    """The `Writer` of mrl.reshard.execute for a vLLM model, for one update. A module is complete once, and only after all its copies."""

    def __init__(
        self,
        model: nn.Module,
        model_config,
        targets: Sequence[TargetParameter],
        reload: Reload,
        in_place: frozenset[str] = frozenset(),
        by_identity: frozenset[str] = frozenset(),
    ):
        """`targets`: all parameters of this worker. `in_place`: those that are written straight into the kernel's memory. `by_identity`:
        those that are read back through an identity matrix."""
        self._model, self._config, self._reload, self._in_place, self._by_identity = model, model_config, reload, in_place, by_identity
        self._layers = layers_of(model, reload)
        self._targets = {t.name: t for t in targets}
        self._modules: dict[str, list[TargetParameter]] = {}
        for target in targets:
            self._modules.setdefault(target.module, []).append(target)
        self._open: set[str] = set()
        self._done: set[str] = set()
        self.received: dict[str, int] = {}  # parameter -> digest in load layout, just before vLLM processes it
        self.shown: dict[str, int] = {}  # the same of what reading the kernel back can show, see `what_reading_shows`
        self.seconds = {"digest": 0.0, "process": 0.0}

    def begin(self) -> None:
        """Enters the reload; from here to `finish` the engine must not generate."""
        self._reload.enter(self._model)
        for module in self._modules:
            if self._written_in_place(module):
                self._reload.leave_out(self._layers[module])

    def tensor(self, parameter: str) -> Tensor:
        """The parameter in load layout. Raises RuntimeError for an unknown one and for one whose module is complete."""
        target = self._targets.get(parameter)
        if target is None:
            raise RuntimeError(f"the update brings {parameter}, which this engine does not have")
        if target.module in self._done:
            raise RuntimeError(f"the update brings {parameter} again: its module is complete, so a round was repeated")
        self._materialise(target.module)
        return self._tensor(target)

    def complete(self, module: str) -> None:
        """Takes the digests of a written module and hands it to vLLM. Raises RuntimeError when nothing was written into it."""
        if module not in self._open:
            raise RuntimeError(f"module {module} is said to be complete, but it is not being written")
        began = time.perf_counter()
        self._take_digests(module)
        taken = time.perf_counter()
        if not self._written_in_place(module):
            self._reload.process(self._layers[module])
        self.seconds["digest"] += taken - began
        self.seconds["process"] += time.perf_counter() - taken
        self._open.remove(module)
        self._done.add(module)

    def _take_digests(self, module: str) -> None:
        for target in self._modules[module]:
            if not target.pieces:
                continue
            tensor = self._tensor(target)
            rounded = what_reading_shows(tensor) if target.name in self._by_identity else tensor
            self.received[target.name] = digest = parameter_digest([tensor], target)
            self.shown[target.name] = digest if rounded is tensor else parameter_digest([rounded], target)

    def finish(self) -> None:
        """Leaves the reload. Raises RuntimeError naming the modules that the update did not complete."""
        for module, targets in self._modules.items():
            if module not in self._done and not any(t.pieces for t in targets):  # nothing but vocabulary padding
                self._materialise(module)
                self.complete(module)
        if missing := [module for module in self._modules if module not in self._done]:
            raise RuntimeError(f"the update left {len(missing)} of {len(self._modules)} modules incomplete: {', '.join(missing[:8])}")
        self._reload.finish(self._model, self._config)

    def abandon(self) -> None:
        """Leaves the reload with whatever was written; the engine then holds a mixture and must be synced again."""
        self._reload.abandon(self._model)
        self._open.clear()

    def _materialise(self, module: str) -> None:
        if module in self._open:
            return
        if len(self._open) == MAX_OPEN:
            raise RuntimeError(
                f"{module} would be the third module in load layout beside {', '.join(sorted(self._open))}: the plan is out of order"
            )
        if not self._written_in_place(module):
            self._reload.materialise(self._layers[module])
        self._open.add(module)
        for target in self._modules[module]:
            if has_padding(target):
                self._tensor(target).zero_()

    def _tensor(self, target: TargetParameter) -> Tensor:
        return getattr(self._layers[target.module], target.name.rpartition(".")[2]).data

    def _written_in_place(self, module: str) -> bool:
        return any(target.name in self._in_place for target in self._modules[module])


def layers_of(model: nn.Module, reload: Reload) -> dict[str, nn.Module]:
    """Modules by the names that plans use."""
    return {reload.plan_name(name): layer for name, layer in model.named_modules()}


def hf_block(tensor: Tensor, piece: TargetPiece) -> Tensor:
    """The piece as a view of a parameter, turned to Hugging Face orientation."""
    others = [d for d in range(tensor.dim()) if d not in piece.axes]
    block = tensor[piece.local_box.slices].permute(*piece.axes, *others)
    return block[(..., *[0] * len(others))]


def parameter_digest(parts: Iterable[Tensor], target: TargetParameter) -> int:
    """Digest of a parameter in load layout: the sum over its pieces, in the engine's dtype (kernels may keep a bias in fp32).

    `parts`: what the parameter consists of along its first dimension, in order. Only experts come in more than one.
    """
    digests, first, groups = [], 0, _alike(target.pieces)
    for part in parts:
        digests += _part_digests(part, first, groups, getattr(torch, target.dtype))
        first += len(part)
    return add(digests)


def _part_digests(part: Tensor, first: int, groups: Sequence[Sequence[TargetPiece]], dtype: torch.dtype) -> list[int]:
    """Digests of the pieces in `part`, which begins at `first` of the parameter."""
    found = []
    for pieces in groups:
        one = pieces[0]
        if len(pieces) > 1:
            pieces = pieces[first : first + len(part)]
            experts = part[(slice(None), *one.local_box.slices[1:])].permute(0, *one.axes)
            sums = lane_sums_of_each(experts, one.hf_box.origin, dtype)
        elif _is_expert(one) and not first <= one.local_box.origin[0] < first + len(part):
            continue
        else:
            block = hf_block(part, replace(one, local_box=one.local_box.shift([-first if _is_expert(one) else 0] + [0] * (part.dim() - 1))))
            sums = lane_sums(block.to(dtype), one.hf_box.origin)[None]
        found += [combine(lanes, piece.hf_name) for lanes, piece in zip(sums.tolist(), pieces, strict=True)]
    return found


def _is_expert(piece: TargetPiece) -> bool:
    return len(piece.axes) < len(piece.local_box.shape)


@cache
def _alike(pieces: tuple[TargetPiece, ...]) -> tuple[tuple[TargetPiece, ...], ...]:
    """Pieces that are digested together: the same box of all experts, in the order of their slots; the others alone."""
    groups: dict[tuple, list[TargetPiece]] = {}
    for piece in pieces:
        key = (piece.hf_box, piece.axes, piece.local_box.ranges[1:]) if _is_expert(piece) else (piece,)
        groups.setdefault(key, []).append(piece)
    found: list[tuple[TargetPiece, ...]] = []
    slots = max((group[-1].local_box.ranges[0][1] for group in groups.values()), default=0)
    for group in groups.values():
        in_order = [piece.local_box.ranges[0] for piece in group] == [(slot, slot + 1) for slot in range(slots)]
        found += [tuple(group)] if in_order else [(piece,) for piece in group]
    return tuple(found)


def has_padding(target: TargetParameter) -> bool:
    """Whether some elements are under no piece."""
    return sum(piece.local_box.volume for piece in target.pieces) < torch.Size(target.local_shape).numel()


def padding_is_zero(tensor: Tensor, target: TargetParameter) -> bool:
    """Whether all elements under no piece are zero."""
    return int(tensor.count_nonzero()) == sum(int(hf_block(tensor, p).count_nonzero()) for p in target.pieces)


def what_reading_shows(tensor: Tensor) -> Tensor:
    """The tensor as an identity matrix through its kernel shows it: -0.0 comes out as 0.0, and bf16 instructions flush subnormals.

    Returns `tensor` itself where it has no such values.
    """
    tiny, words = torch.finfo(tensor.dtype).tiny, tensor.view(_WORDS[tensor.element_size()])
    for part, bits in zip(tensor.view(-1).split(_IN_CACHE), words.view(-1).split(_IN_CACHE), strict=True):
        small = part.abs() < tiny
        if bool(small.any()) and bool((small & (bits != 0)).any()):
            return tensor.masked_fill((tensor.abs() < tiny) & (words != 0), 0.0)
    return tensor


_IN_CACHE = 1 << 16  # elements
_WORDS = {2: torch.int16, 4: torch.int32}


def held_digests(targets: Sequence[TargetParameter], final: Callable[[TargetParameter], Iterable[Tensor]]) -> dict[str, int]:
    """Digests of what the engine finally holds. `final` reads one parameter back into load layout, in parts along its first dimension.

    Raises RuntimeError naming a parameter whose padding is not zero, or that has padding and comes in more than one part.
    """
    found = {}
    for target in targets:
        digest = parameter_digest(_checked(final(target), target), target)
        if target.pieces:
            found[target.name] = digest
    return found


def _checked(parts: Iterable[Tensor], target: TargetParameter) -> Iterator[Tensor]:
    if not has_padding(target):
        yield from parts
        return
    for number, part in enumerate(parts):
        if number:
            raise RuntimeError(f"{target.name}: padded, yet read back in several parts, in which its padding cannot be found")
        if not padding_is_zero(part, target):
            raise RuntimeError(f"{target.name}: the padding is not zero")
        yield part


def weight_bytes(model: nn.Module, reload: Reload, dtype: torch.dtype) -> int:
    """Bytes that an update has to bring: all parameters as vLLM itself has them, without vocabulary padding, in the engine's `dtype`."""
    total, seen = 0, set()
    for layer in model.modules():
        for leaf, parameter in layer._parameters.items():
            if parameter is None or id(parameter) in seen:  # a tied head has the embedding's
                continue
            seen.add(id(parameter))
            tensor = reload.load_tensor(layer, leaf)
            rows = getattr(layer, "shard_indices", None)  # of a vocabulary
            padding = rows.num_elements_padded - rows.num_org_elements - rows.num_added_elements if rows is not None else 0
            total += (tensor.numel() - padding * tensor.shape[-1]) * dtype.itemsize
    return total
