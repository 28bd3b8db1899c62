"""Checks before the first sync that vLLM holds what the plan assumes: degrees, names, shapes, dtypes, and its loader.

The loader is checked with numbered tensors. One module of each kind is brought into load layout. The model's own
`load_weights` gets Hugging Face tensors whose elements say where they come from. The result is compared with the plan's
boxes. Elements are numbered in digits of base 256, which every dtype holds exactly, one pass a digit. The engine's
weights are not touched.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from mrl.engine.load_layout import Adapter, layers_of, leaf_of, parameter_of, written_in_place
from mrl.engine.read_back import held_digests, hf_block
from mrl.model import ModelSpec
from mrl.model.quantised import FP8, WORD, with_scales
from mrl.model.registry import for_loader
from mrl.model.vllm_parameters import TargetParameter
from mrl.reshard.setup import SyncSetup

BASE = 256
_WORD_BASE = 16  # FP8 values hold these digits exactly
UNTOUCHED = -1.0
SHOWN = 8  # names in one message
# vLLM's MoE kernels that keep experts as a dialect describes them; others swap halves or shuffle rows
_KEEPING = ("CPU", "TRITON", "BATCHED_TRITON")
_TRANSPOSING = ("OOT",)  # kernels outside vLLM's tree, like Ascend's
# kernels of linear layers that keep FP8 values and scales as loaded; others repack them, or round scales
_KEEPING_FP8 = ("CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel")


class HandshakeError(RuntimeError):
    """vLLM and the plan disagree about the engine's parameters."""


@dataclass(frozen=True)
class EngineDegrees:
    """The settings of a running engine, as vLLM reports them."""

    tensor: int
    pipeline: int
    data: int
    spreads_experts: bool  # expert parallelism is on
    linear_placement: bool  # experts are placed in order, and none is repeated
    quantization: str | None
    dtype: str
    position: int  # of this worker in its engine: by data-parallel rank, then by tensor rank


def check_degrees(setup: SyncSetup, degrees: EngineDegrees) -> None:
    """Raises HandshakeError when the engine was started with other settings than the plan assumes."""
    layout = setup.rollout_layout
    rows = [
        ("tensor_parallel_size", degrees.tensor, layout.tensor),
        ("data_parallel_size", degrees.data, layout.data),
        ("pipeline_parallel_size", degrees.pipeline, 1),
        ("enable_expert_parallel", degrees.spreads_experts, layout.expert > 1),
        ("dtype", degrees.dtype, setup.dtype),
        ("quantization", degrees.quantization, FP8 if setup.fp8_block else None),
        ("experts placed in order, none repeated", degrees.linear_placement, True),
    ]
    faults = [
        f"{name} is {actual} in vLLM, {planned} in the plan" for name, actual, planned in rows if actual != planned
    ]
    if faults:
        raise HandshakeError("; ".join(faults))


def check_engine(
    model: nn.Module, setup: SyncSetup, targets: Sequence[TargetParameter], adapter: Adapter, holds_weights: bool = True
) -> None:
    """Compares vLLM's parameters and its loader with the plan's targets. Raises HandshakeError naming what differs.

    `holds_weights`: false for an engine that slept, whose memory holds no numbers to read back.
    """
    in_place = written_in_place(targets)
    for backend in sorted(adapter.moe_backends(model)):
        check_backend(backend, _TRANSPOSING if in_place else _KEEPING)
    for backend in sorted(adapter.fp8_backends(model)):
        check_fp8_backend(backend)
    check_parameters(model, targets, adapter)
    loaded = [t for t in targets if t.name not in in_place]
    check_loader(model, setup.model, loaded, adapter, setup.fp8_block)
    if holds_weights:
        layers = layers_of(model, adapter)
        # checks that everything can be read back
        held_digests(targets, lambda t: adapter.final_parts(model, layers[t.module], t))


def check_backend(backend: str, allowed: Sequence[str]) -> None:
    """Raises HandshakeError when the MoE kernels in use keep experts in a layout that no dialect describes."""
    if backend not in allowed:
        raise HandshakeError(
            f"vLLM's MoE backend is {backend}, which stores experts in a layout of its own; allowed: "
            f"{', '.join(allowed)} (rollout.engine_kwargs.vllm.moe_backend, e.g. triton)"
        )


def check_fp8_backend(backend: str) -> None:
    """Raises HandshakeError when an FP8 linear layer would change the FP8 values or scales that it gets."""
    if backend not in _KEEPING_FP8:
        raise HandshakeError(
            f"vLLM's kernel of linear layers in FP8 is {backend}, which keeps FP8 values or scales in a form of its "
            f"own; allowed: {', '.join(_KEEPING_FP8)} (rollout.engine_kwargs.vllm.linear_backend, e.g. triton)"
        )


def check_parameters(model: nn.Module, targets: Sequence[TargetParameter], adapter: Adapter) -> None:
    """Compares names, dtypes and shapes in load layout; parameters written in place have the kernel's shapes.

    Raises HandshakeError naming what differs.
    """
    planned = {t.name: t for t in targets}
    in_place = written_in_place(targets)
    held = (name for name, _ in model.named_parameters(remove_duplicate=False))
    actual = {adapter.plan_name(name) for name in held if not adapter.is_derived(name.rpartition(".")[2])}
    aliases = actual - {adapter.plan_name(name) for name, _ in model.named_parameters()}
    faults = [
        f"{name} is a parameter of vLLM that the plan does not know"
        for name in sorted(actual - planned.keys() - aliases)
    ]
    faults += [f"vLLM has no {name}" for name in sorted(planned.keys() - actual)]
    layers = layers_of(model, adapter)
    for name in sorted(actual & planned.keys()):
        target = planned[name]
        layer = layers[target.module]
        leaf = leaf_of(target)
        tensor = getattr(layer, leaf) if name in in_place else adapter.load_tensor(layer, leaf)
        if tuple(tensor.shape) != target.local_shape:
            faults.append(f"{name} is {list(tensor.shape)} in vLLM, {list(target.local_shape)} in the plan")
        elif tensor.dtype != getattr(torch, target.dtype) and not name.endswith(".bias"):
            # kernels keep some biases in float32
            faults.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')} in vLLM, {target.dtype} in the plan")
    if faults:
        more = ""
        if len(faults) > SHOWN:
            more = f"; and {len(faults) - SHOWN} more"
        raise HandshakeError("; ".join(faults[:SHOWN]) + more)


def check_loader(
    model: nn.Module, spec: ModelSpec, targets: Sequence[TargetParameter], adapter: Adapter, fp8_block: int = 0
) -> int:
    """Runs vLLM's loader on numbered tensors, one module of each kind; returns the number of modules tried.

    `fp8_block` is SyncSetup's. Raises HandshakeError naming the first parameter that the loader fills differently from
    the plan.
    """
    shapes = {t.name: t.shape for t in with_scales(spec, fp8_block)}
    layers = layers_of(model, adapter)
    modules = _one_of_each_kind(layers, targets)
    adapter.enter(model)
    try:
        for group in modules:
            with torch.no_grad():
                _check_module(model, layers[group[0].module], group, shapes, adapter)
    finally:
        adapter.abandon(model)
    return len(modules)


def _one_of_each_kind(layers: dict[str, nn.Module], targets: Sequence[TargetParameter]) -> list[list[TargetParameter]]:
    """Returns the parameters of one module of each kind. Modules that differ only in the layer's number are of one
    kind.
    """
    modules: dict[str, list[TargetParameter]] = {}
    for target in targets:
        modules.setdefault(target.module, []).append(target)
    kinds = {}
    for module, group in modules.items():
        kind = (
            re.sub(r"\blayers\.\d+\.", "layers.N.", module),
            type(layers[module]),
            tuple((t.local_shape, t.dtype) for t in group),
        )
        kinds.setdefault(kind, group)
    return [group for group in kinds.values() if any(t.pieces for t in group)]


def _check_module(
    model: nn.Module, layer: nn.Module, group: list[TargetParameter], shapes: dict, adapter: Adapter
) -> None:
    # biases stay in the kernel's memory, so they are saved and put back
    live = {t.name: parameter_of(layer, t) for t in group if not parameter_of(layer, t).is_meta}
    saved = {name: tensor.clone() for name, tensor in live.items()}
    adapter.materialise(layer)
    adapter.open_loaders(layer)
    names = list(dict.fromkeys(piece.hf_name for t in group for piece in t.pieces))
    try:
        for numbered in _passes(names, {name: shapes[name] for name in names}, _format(group)):
            for target in group:
                parameter_of(layer, target).fill_(UNTOUCHED)
            model.load_weights([for_loader(type(model).__name__, *item) for item in numbered.items()])
            for target in group:
                _compare(parameter_of(layer, target), target, numbered)
    finally:
        for name, tensor in saved.items():
            live[name].copy_(tensor)
        adapter.leave_out(layer)


@dataclass(frozen=True)
class _Format:
    """The form of the numbers for vLLM's loader: their dtype, and the base of their digits."""

    dtype: torch.dtype
    base: int

    def digit(self, number: Tensor, digit: int) -> Tensor:
        return (number // self.base**digit % self.base).to(self.dtype)

    def digits(self, count: int) -> int:
        """Returns how many digits numbers below `count` have."""
        bits = (max(count, 2) - 1).bit_length()
        return -(-bits // (self.base.bit_length() - 1))


def _format(group: Sequence[TargetParameter]) -> _Format:
    """Returns the format of a module. FP8 values take digits of a small base.

    Words and their scales come in one dtype, which the loader converts.
    """
    if any(target.dtype == WORD for target in group):
        return _Format(torch.float32, _WORD_BASE)
    return _Format(getattr(torch, group[0].dtype), BASE)


def _passes(names: list[str], shapes: dict[str, tuple[int, ...]], form: _Format) -> Iterator[dict[str, Tensor]]:
    """Yields tensors numbered by name, then by position along each dimension, digit by digit.

    They are expanded along all other dimensions, which takes no memory.
    """
    for digit in range(form.digits(len(names))):
        yield {name: form.digit(torch.tensor(i), digit).expand(shapes[name]) for i, name in enumerate(names)}
    for dim in range(max(map(len, shapes.values()))):
        having = [name for name in names if len(shapes[name]) > dim]
        for digit in range(form.digits(max(shapes[name][dim] for name in having))):
            yield {name: _along(shapes[name], dim, digit, form) for name in having}


def _along(shape: tuple[int, ...], dim: int, digit: int, form: _Format) -> Tensor:
    positions = form.digit(torch.arange(shape[dim]), digit)
    return positions.view(*[-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)


def _compare(loaded: Tensor, target: TargetParameter, numbered: dict[str, Tensor]) -> None:
    """Checks that every piece holds exactly its block of the numbered tensor, and that the rest is untouched or
    zero.
    """
    covered = 0
    for piece in target.pieces:
        if piece.hf_name not in numbered:
            return  # the tensor has fewer dimensions than the one that this pass numbers
        covered += piece.local_box.volume
        block = numbered[piece.hf_name][piece.hf_box.slices]
        if not torch.equal(hf_block(loaded, piece).to(block.device, block.dtype), block):
            raise HandshakeError(
                f"{target.name}: vLLM's loader does not put {piece.hf_name} {list(piece.hf_box.ranges)} at "
                f"{list(piece.local_box.ranges)} as the plan does"
            )
    if loaded.dtype == getattr(torch, WORD):
        loaded = loaded.float()  # torch cannot compare FP8 values
    written = (loaded != UNTOUCHED) & (loaded != 0)
    inside = sum(int((hf_block(loaded, piece) != 0).sum()) for piece in target.pieces)
    if covered < prod(target.local_shape) and int(written.sum()) != inside:
        raise HandshakeError(f"{target.name}: vLLM's loader writes elements that the plan takes for padding")
