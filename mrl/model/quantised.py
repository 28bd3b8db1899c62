"""Weights that engines hold in FP8, by blocks, while the actor trains them in bfloat16 (rollout.quantization: fp8).

A matrix is words (e4m3) of its shape, and one float32 scale for each block of them. Blocks are counted from the first
row and column of the checkpoint's matrix, and those at its end may be smaller. Both are tensors of their own here, as
in checkpoints that vLLM loads: planned, sent, digested and read back like every other weight.

    q_proj.weight             [2048, 1024] words
    q_proj.weight_scale_inv   [16, 8]      one for 128 x 128 words

The scale of a block comes from all of the block. So no rank and no worker may have a part of one: every cut of a
quantised weight, on both sides, lies between two blocks. quantised_shards.py names the first that does not.

Words are what linear layers and experts multiply with. Embeddings, output layers, norms, biases and routers stay as
they are, which is what vLLM's own loader of such checkpoints expects of these families.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from mrl.model.boxes import Box
from mrl.model.hf_config import ModelSpec
from mrl.model.registry import weight_map
from mrl.model.tensors import TensorSpec, tensor_specs
from mrl.model.weight_map import Slice, Weight, per_expert

FP8 = "fp8"  # as vLLM and verl call it
WORD = "float8_e4m3fn"
SCALE = "float32"
SCALES = "_scale_inv"  # behind the name of the weight, in the checkpoint, in vLLM, and here on a rank
BLOCK = 128  # rows and columns, of official checkpoints and of the devices' kernels
_CUT = ("heads", "rows", "columns")  # how linear layers and experts are divided; routers and gates are whole everywhere


def is_quantised(weight: Weight) -> bool:
    """Whether engines in FP8 hold a weight as words and scales."""
    return weight.split in _CUT and all(part.matmul and len(part.shape) == 2 for part in weight.parts)


def quantised_faults(model: ModelSpec) -> Iterator[str]:
    """Why a model cannot be held in FP8, as a reason; nothing for one that can."""
    if model.is_latent:
        yield "decoding multiplies with copies of latent projections, which no read-back compares with words"
    if model.is_hybrid:
        yield "projections of gated delta attention have no form in FP8 here"


@cache
def quantised_tensors(model: ModelSpec) -> frozenset[str]:
    """Names of the checkpoint's matrices of which engines have words."""
    names: set[str] = set()
    for layer in range(model.num_layers):
        for weight, expert in per_expert(weight_map(model).layer(layer).hf, range(model.num_experts)):
            if is_quantised(weight):
                names |= {part.name.format(layer=layer, expert=expert) for part in weight.parts}
    return frozenset(names)


def with_scales(model: ModelSpec, block: int) -> tuple[TensorSpec, ...]:
    """The tensors of a checkpoint in FP8: all of the model's, and behind them the scales of those that are words.

    `block` 0: nothing is quantised.
    """
    specs = tensor_specs(model)
    if not block:
        return specs
    words = quantised_tensors(model)
    scales = (replace(s, name=s.name + SCALES, shape=blocks(s.shape, block)) for s in specs if s.name in words)
    return (*specs, *scales)


def engine_quantisation(model: ModelSpec, block: int) -> dict[str, Any]:
    """What vLLM reads as `quantization_config` of such a checkpoint; linear layers that stay are named there."""
    kept = [
        weight.vllm.format(layer=layer).removesuffix(".weight")
        for layer in range(model.num_layers)
        for weight in weight_map(model).layer(layer).vllm
        if weight.parts[0].matmul and not is_quantised(weight)
    ]
    return {
        "quant_method": FP8,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": kept,
    }


# ---------------------------------------------------------------- boxes of scales


def blocks(shape: Sequence[int], block: int) -> tuple[int, ...]:
    """How many blocks there are along the last two dimensions; the others stay."""
    *before, rows, columns = shape
    return (*before, -(-rows // block), -(-columns // block))


def in_blocks(box: Box, block: int) -> Box:
    """The blocks of `box`, of whose last two dimensions it has whole ones."""
    *before, rows, columns = box.ranges
    return Box((*before, *((start // block, -(-stop // block)) for start, stop in (rows, columns))))


# ---------------------------------------------------------------- cuts


def slice_fault(local: Slice, block: int) -> str:
    """What of a slice begins or ends within a block, in words; empty where nothing does."""
    for each in local.blocks:
        if not has_whole_blocks(each.hf_box, each.part.shape, each.local_box, local.shape, block):
            return cut_in_words(each.part.name, each.hf_box)
    return ""


def has_whole_blocks(hf_box: Box, shape: Sequence[int], local_box: Box, local_shape: Sequence[int], block: int) -> bool:
    """Whether a piece of a matrix of `shape` has whole blocks, as they are counted there and where it lies."""
    sides = zip(hf_box.ranges, shape, local_box.ranges, local_shape, strict=True)
    return all(_is_whole(*side, block) for side in sides)


def cut_in_words(name: str, hf_box: Box) -> str:
    """Says which part of a matrix a cut leaves."""
    rows, columns = hf_box.ranges
    return f"{name} is cut to rows {rows[0]} to {rows[1]} and columns {columns[0]} to {columns[1]}"


def _is_whole(held: tuple[int, int], size: int, local: tuple[int, int], local_size: int, block: int) -> bool:
    """Along one dimension: it begins with a block, and ends with one or with the matrix and with what holds it."""
    begins = held[0] % block == 0 and local[0] % block == 0
    return begins and (held[1] % block == 0 or (held[1] == size and local[1] == local_size))
