"""Weights that engines hold in FP8, by blocks, while the actor trains them in bfloat16 (rollout.quantization: fp8).

A matrix becomes FP8 values (e4m3) of the same shape, and one float32 scale for each block of FP8 values. Blocks are
counted from the first row and column of the checkpoint's matrix. The last ones may be smaller. Words and scales are
separate tensors, as in checkpoints that vLLM loads. They are planned, sent, digested and read back like other weights.

    q_proj.weight             [2048, 1024] FP8 values
    q_proj.weight_scale_inv   [16, 8]      one for 128 x 128 FP8 values

A block's scale depends on all its elements. So no rank or worker may hold a part of a block: each cut of a quantised
weight lies between blocks. quantised_shards.py names the first cut that does not.

Linear layers and experts multiply with FP8 values. Embeddings, output layers, norms, biases and routers are not
quantised. vLLM's own loader expects the same of these families.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from mrl.model.boxes import Box
from mrl.model.hf_config import ModelSpec
from mrl.model.registry import weight_map
from mrl.model.tensors import TensorSpec, tensor_specs
from mrl.model.trained_tower import MODULE, TRAINED, TrainedTower
from mrl.model.weight_map import Slice, Weight, per_expert

FP8 = "fp8"  # the name that vLLM and verl use
WORD = "float8_e4m3fn"
SCALE = "float32"
SCALES = "_scale_inv"  # the suffix after the weight's name in the checkpoint, in vLLM and on mrl's ranks
BLOCK = 128  # rows and columns of a block in official checkpoints and the devices' kernels
OF_TEXT = "language_model."  # prefix of the text model's modules in vLLM's whole model
_MATRIX = 2  # dimensions
_CUT = ("heads", "rows", "columns")  # splits of linear layers and experts; routers and gates are never split


def is_quantised(weight: Weight) -> bool:
    """Tells whether FP8 engines hold a weight as FP8 values and scales."""
    return (weight.vllm_split or weight.split) in _CUT and all(
        part.matmul and len(part.shape) == 2 for part in weight.parts
    )


def quantised_faults(model: ModelSpec) -> Iterator[str]:
    """Yields the reasons why a model cannot be held in FP8."""
    if model.is_latent:
        yield "decoding multiplies with copies of latent projections, which no read-back compares with FP8 values"
    if model.clamped_experts:
        yield "experts with biases have no form in FP8 here"
    if model.is_hybrid:
        yield "projections of gated delta attention have no form in FP8 here"


@cache
def quantised_tensors(model: ModelSpec) -> frozenset[str]:
    """Returns names of the checkpoint's matrices that engines hold as FP8 values."""
    names: set[str] = set()
    for layer in range(model.all_layers):
        for weight, expert in per_expert(weight_map(model).layer(layer).hf, range(model.num_experts)):
            if is_quantised(weight):
                names |= {part.name.format(layer=layer, expert=expert) for part in weight.parts}
    return frozenset(names)


def with_scales(model: ModelSpec, block: int) -> tuple[TensorSpec, ...]:
    """Returns the tensors of an FP8 checkpoint: all tensors of the model, then the scales of those that are FP8 values.

    `block` 0: nothing is quantised.
    """
    specs = tensor_specs(model)
    if not block:
        return specs
    quantised = quantised_tensors(model)
    scales = (replace(s, name=s.name + SCALES, shape=blocks(s.shape, block)) for s in specs if s.name in quantised)
    return (*specs, *scales)


def engine_quantisation(model: ModelSpec, block: int, sees: bool = False) -> dict[str, Any]:
    """Returns the `quantization_config` that vLLM reads for such a checkpoint. It names linear layers that are not
    quantised: with `sees`, in the whole model, all of the vision tower's.
    """
    inside = OF_TEXT if sees else ""
    kept = [
        inside + weight.vllm.format(layer=layer).removesuffix(".weight")
        for layer in range(model.num_layers)
        for weight in weight_map(model).layer(layer).vllm
        if weight.parts[0].matmul and not is_quantised(weight)
    ]
    if sees:
        shapes = TrainedTower(TRAINED, model.tower).shapes()
        kept += [MODULE + name.removesuffix(".weight") for name, shape in shapes if len(shape) == _MATRIX]
    return {
        "quant_method": FP8,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": kept,
    }


# ---------------------------------------------------------------- boxes of scales


def blocks(shape: Sequence[int], block: int) -> tuple[int, ...]:
    """Returns `shape` with the last two dimensions counted in blocks. Other dimensions are unchanged."""
    *before, rows, columns = shape
    return (*before, -(-rows // block), -(-columns // block))


def in_blocks(box: Box, block: int) -> Box:
    """Returns `box` counted in blocks. It must contain complete blocks along its last two dimensions."""
    *before, rows, columns = box.ranges
    return Box((*before, *((start // block, -(-stop // block)) for start, stop in (rows, columns))))


# ---------------------------------------------------------------- cuts


def slice_fault(local: Slice, block: int) -> str:
    """Describes the part of a slice that begins or ends within a block; empty if there is none."""
    for each in local.blocks:
        if not has_whole_blocks(each.hf_box, each.part.shape, each.local_box, local.shape, block):
            return cut_text(each.part.name, each.hf_box)
    return ""


def has_whole_blocks(hf_box: Box, shape: Sequence[int], local_box: Box, local_shape: Sequence[int], block: int) -> bool:
    """Tells whether a piece of a matrix consists of complete blocks, in the checkpoint's matrix and in the local
    parameter.
    """
    sides = zip(hf_box.ranges, shape, local_box.ranges, local_shape, strict=True)
    return all(_is_whole(*side, block) for side in sides)


def cut_text(name: str, hf_box: Box) -> str:
    """Describes the part of a matrix that a cut produces."""
    rows, columns = hf_box.ranges
    return f"{name} is cut to rows {rows[0]} to {rows[1]} and columns {columns[0]} to {columns[1]}"


def _is_whole(held: tuple[int, int], size: int, local: tuple[int, int], local_size: int, block: int) -> bool:
    """Tells whether a piece, along one dimension, begins and ends with a block or at the ends of both tensors."""
    begins = held[0] % block == 0 and local[0] % block == 0
    return begins and (held[1] % block == 0 or (held[1] == size and local[1] == local_size))
