"""Writes an engine's parameters in load layout, module by module, and hands each finished module to vLLM.

Load layout is the form in which vLLM's `load_weights` fills parameters, before kernels pack or shuffle them. After that
they can no longer be written. vLLM's layerwise reload brings single modules back into it. A module goes through these
states in one update:

    kernel layout --enter--> empty --materialise--> load layout --(written, digests taken)--process--> kernel layout

Experts that CPU packs take the last two steps part by part: each part is packed right after its digest was taken.

`Adapter` hides the differences between generations of vLLM. vLLM itself is not imported here.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mrl.engine.read_back import has_padding, parameter_digest, what_reading_shows
from mrl.model.vllm_parameters import TargetParameter
from mrl.reshard.execute import LITTLE_BYTES
from mrl.reshard.streams import ITEM_BYTES
from mrl.units import round_up

MAX_OPEN = 2  # large modules in load layout at any moment
_ALIGN = 64  # bytes, as torch aligns its own memory


class Adapter(Protocol):
    """One generation of vLLM: its layerwise reload, and how the contents of its kernels are read back."""

    def plan_name(self, name: str) -> str:
        """Returns the name in plans of a module or parameter."""

    def enter(self, model: nn.Module) -> None:
        """Sets the kernels' tensors of every module aside and leaves empty (meta) ones in load layout."""

    def leave_out(self, layer: nn.Module) -> None:
        """Gives one module its kernel's tensors back at once. It takes no part in the reload that was entered."""

    def load_tensor(self, layer: nn.Module, leaf: str) -> Tensor:
        """Returns a parameter in load layout, possibly without data, when the reload was not entered."""

    def open_loaders(self, layer: nn.Module) -> None:
        """Gives a materialised module its own weight loaders again, which fill parameters at once, instead of the
        reload's.
        """

    def materialise(self, layer: nn.Module) -> None:
        """Gives one module's empty parameters memory."""

    def packing_parts(self, layer: nn.Module, leaf: str) -> Iterator[Tensor] | None:
        """Yields a written parameter in parts along its first dimension, each in load layout.

        A part is packed into the kernel's memory when the next one is taken, while it is in the cache. Returns None
        where only `process` can convert the parameter.
        """

    def process(self, layer: nn.Module, packed: Collection[str] = ()) -> None:
        """Converts one written module to the layout of its kernel, in the kernel's own memory. Buffers stay as they
        were.

        `packed` are leaves of which all `packing_parts` were taken.
        """

    def prepare_experts(self, layer: nn.Module) -> None:
        """Does what a layer's experts still need after vLLM itself processed them. Does nothing for other layers."""

    def finish(self, model: nn.Module, model_config: Any) -> None:
        """Leaves the reload when all parameters have been processed."""

    def abandon(self, model: nn.Module) -> None:
        """Leaves the reload at any point. Modules that were not processed get their kernels' tensors back.

        Safe to call twice.
        """

    def moe_backends(self, model: nn.Module) -> set[str]:
        """Returns the names of the MoE kernels in use; empty for a dense model."""

    def fp8_backends(self, model: nn.Module) -> set[str]:
        """Returns the names of the kernels of FP8 linear layers; empty where there are none."""

    def attention_backends(self, model: nn.Module) -> set[str]:
        """Returns the names of the attention kernels in use."""

    def final_parts(self, model: nn.Module, layer: nn.Module, target: TargetParameter) -> Iterator[Tensor]:
        """Yields what the kernel computes with, read back into the target's layout, in parts along the first dimension.

        A part is valid until the next is taken. Only experts come in several parts.
        """

    def is_derived(self, leaf: str) -> bool:
        """Returns whether parameters of this name are made from others when a reload ends, so that no plan brings
        them.
        """

    def reads_by_identity(self, layer: nn.Module, target: TargetParameter) -> bool:
        """Returns whether `final_parts` reads through an identity matrix. That shows `what_reading_shows`, not every
        value.
        """


class LayerwiseWriter:
    """The `Writer` of mrl.reshard.execute for a vLLM model, for one update.

    A module is completed once, and only after all its copies.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: Any,
        targets: Sequence[TargetParameter],
        adapter: Adapter,
        by_identity: frozenset[str] = frozenset(),
    ):
        """`targets`: all parameters of this worker.

        `by_identity`: names of those that are read back through an identity matrix.
        """
        self._model = model
        self._config = model_config
        self._adapter = adapter
        self._by_identity = by_identity
        self._in_place = written_in_place(targets)
        self._layers = layers_of(model, adapter)
        self._targets = {t.name: t for t in targets}
        self._modules: dict[str, list[TargetParameter]] = {}
        for target in targets:
            self._modules.setdefault(target.module, []).append(target)
        self._open: set[str] = set()
        self._complete: set[str] = set()
        self.received: dict[str, int] = {}  # parameter -> digest in load layout, just before vLLM processes it
        self.shown: dict[str, int] = {}  # the same, of the values that reading back can show (`what_reading_shows`)
        self.seconds = {"digest": 0.0, "process": 0.0}

    def begin(self) -> None:
        """Enters the reload. From here to `finish` the engine must not generate."""
        self._adapter.enter(self._model)
        for module in self._modules:
            if self._written_in_place(module):
                self._adapter.leave_out(self._layers[module])

    def tensor(self, parameter: str) -> Tensor:
        """Returns the parameter in load layout. Raises RuntimeError for an unknown one, or if its module is
        complete.
        """
        target = self._targets.get(parameter)
        if target is None:
            raise RuntimeError(f"the update brings {parameter}, which this engine does not have")
        if target.module in self._complete:
            raise RuntimeError(f"the update brings {parameter} again: its module is complete, so a round was repeated")
        self._materialise(target.module)
        return self._tensor(target)

    def complete(self, module: str) -> None:
        """Takes the digests of a written module and hands it to vLLM.

        Raises RuntimeError when nothing was written into it.
        """
        if module not in self._open:
            raise RuntimeError(f"module {module} cannot be completed: it is not open for writing")
        packed = []
        for target in self._modules[module]:
            if target.pieces and self._take_digest(target):
                packed.append(leaf_of(target))
        if not self._written_in_place(module):
            with self._timed("process"):
                self._adapter.process(self._layers[module], packed)
        self._open.remove(module)
        self._complete.add(module)

    def _take_digest(self, target: TargetParameter) -> bool:
        """Digests a written parameter. Returns True where it was packed for its kernel meanwhile."""
        parts = None
        if not self._written_in_place(target.module):
            parts = self._adapter.packing_parts(self._layers[target.module], leaf_of(target))
        tensor = self._tensor(target)
        with self._timed("digest"):
            digest = parameter_digest([tensor] if parts is None else self._packed_meanwhile(parts), target)
            self.received[target.name] = digest
            rounded = what_reading_shows(tensor) if target.name in self._by_identity else tensor
            self.shown[target.name] = digest if rounded is tensor else parameter_digest([rounded], target)
        return parts is not None

    def _packed_meanwhile(self, parts: Iterator[Tensor]) -> Iterator[Tensor]:
        """Passes the parts on. Taking one packs the one before, which counts as processing."""
        while True:
            began = time.perf_counter()
            part = next(parts, None)
            seconds = time.perf_counter() - began
            self.seconds["process"] += seconds
            self.seconds["digest"] -= seconds  # of the time around it
            if part is None:
                return
            yield part

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - began

    def finish(self) -> None:
        """Leaves the reload. Raises RuntimeError naming the modules that the update did not complete."""
        for module, targets in self._modules.items():
            if module not in self._complete and not any(t.pieces for t in targets):  # only vocabulary padding
                self._materialise(module)
                self.complete(module)
        if missing := [module for module in self._modules if module not in self._complete]:
            raise RuntimeError(
                f"the update left {len(missing)} of {len(self._modules)} modules incomplete: {', '.join(missing[:8])}"
            )
        self._adapter.finish(self._model, self._config)

    def abandon(self) -> None:
        """Leaves the reload at any point. The engine then holds a mixture and has to be synced again."""
        self._adapter.abandon(self._model)
        self._open.clear()

    def _materialise(self, module: str) -> None:
        if module in self._open:
            return
        large = sorted(filter(self._is_large, self._open))
        if self._is_large(module) and len(large) == MAX_OPEN:
            raise RuntimeError(
                f"{module} would be the third module in load layout beside {', '.join(large)}: the plan is out of order"
            )
        if not self._written_in_place(module):
            self._adapter.materialise(self._layers[module])
        self._open.add(module)
        for target in self._modules[module]:
            if has_padding(target):
                self._tensor(target).zero_()

    def _is_large(self, module: str) -> bool:
        targets = self._modules[module]
        return sum(prod(t.local_shape) * ITEM_BYTES[t.dtype] for t in targets) >= LITTLE_BYTES

    def _tensor(self, target: TargetParameter) -> Tensor:
        return parameter_of(self._layers[target.module], target)

    def _written_in_place(self, module: str) -> bool:
        return any(target.name in self._in_place for target in self._modules[module])


def layers_of(model: nn.Module, adapter: Adapter) -> dict[str, nn.Module]:
    """Returns all modules by their names in plans."""
    return {adapter.plan_name(name): layer for name, layer in model.named_modules()}


def parameter_of(layer: nn.Module, target: TargetParameter) -> Tensor:
    """Returns the layer's parameter in its current form: in load layout, or as the kernel keeps it."""
    return getattr(layer, leaf_of(target)).data


def leaf_of(target: TargetParameter) -> str:
    """Returns the parameter's name within its module."""
    return target.name.rpartition(".")[2]


def written_in_place(targets: Sequence[TargetParameter]) -> frozenset[str]:
    """Returns the names of experts that are stored transposed.

    Their kernel reads them as they are, so they are written in its own memory.
    """
    return frozenset(t.name for t in targets if any(piece.axes != tuple(sorted(piece.axes)) for piece in t.pieces))


def weight_bytes(model: nn.Module, adapter: Adapter, dtype: torch.dtype) -> int:
    """Returns the bytes that an update has to bring: vLLM's own parameters, without vocabulary padding.

    `dtype` is the engine's. Biases come in it, though kernels keep some of them in float32.
    """
    total = 0
    counted = set()
    for layer in model.modules():
        for leaf, parameter in layer._parameters.items():
            # a tied head shares the embedding's parameter
            if parameter is None or id(parameter) in counted or adapter.is_derived(leaf):
                continue
            counted.add(id(parameter))
            tensor = adapter.load_tensor(layer, leaf)
            rows = getattr(layer, "shard_indices", None)  # only layers with a vocabulary have it
            padding = 0
            if rows is not None:
                padding = rows.num_elements_padded - rows.num_org_elements - rows.num_added_elements
            item = (dtype if leaf == "bias" else tensor.dtype).itemsize
            total += (tensor.numel() - padding * tensor.shape[-1]) * item
    return total


class ModuleBuffers:
    """Memory for modules in load layout, lent from one module to the next during an update.

    Fresh pages of the operating system cost several times as much as writing into them.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[nn.Module, Tensor] = {}

    def lend(self, layer: nn.Module, leaves: tuple[str, ...]) -> None:
        """Puts the parameters of a layer into memory that an earlier layer gave back.

        Their own memory must still be untouched.
        """
        tensors = [getattr(layer, leaf) for leaf in leaves]
        starts = []
        size = 0
        for tensor in tensors:
            starts.append(size)
            size += round_up(tensor.nbytes, _ALIGN)
        block = self._block(size)
        self._lent[layer] = block
        for tensor, start in zip(tensors, starts, strict=True):
            tensor.data = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def take_back(self, layer: nn.Module) -> None:
        """Ends a loan; does nothing if there is none. The layer's parameters must not be used any more."""
        if (block := self._lent.pop(layer, None)) is not None:
            self._free.append(block)

    def clear(self) -> None:
        """Gives all memory back to the operating system."""
        self._free.clear()
        self._lent.clear()

    def _block(self, size: int) -> Tensor:
        for number, block in enumerate(self._free):
            if block.numel() >= size:
                return self._free.pop(number)
        self._free.clear()  # too small ones are not kept beside a larger one
        return torch.empty(size, dtype=torch.uint8)


def check_same_shapes(loaded: Mapping[str, Tensor], kernels: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError unless `loaded` are all of a layer's `kernels` tensors, in their shapes.

    The handshake refuses engines whose kernels pad experts, so no update with one gets here.
    """
    loaded_shapes = {name: tuple(tensor.shape) for name, tensor in loaded.items()}
    kernel_shapes = {name: tuple(tensor.shape) for name, tensor in kernels.items()}
    if loaded_shapes != kernel_shapes:
        raise RuntimeError(
            f"experts of shapes {loaded_shapes} cannot be packed into the kernel's {kernel_shapes}; reshard.path: slow "
            "can load them"
        )
