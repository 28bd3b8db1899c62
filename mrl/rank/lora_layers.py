"""Low-rank adapters in Megatron's linear layers.

They are trained while the weights are frozen, and left out for the reference model. Readers of weights get them merged.

A layer computes as usual, and a hook adds `scale * B A x` to its output. Tensor ranks communicate `A x`, whose width is
only the adapters' rank:

    cut by rows        x, the same or a part of the tokens     A whole, B cut     A x is shared, then B
    cut by columns     x, a part of each token                 A cut, B whole     A x is summed, then B
    whole              x, a part of the tokens                 both whole         nothing
    experts, and shared experts that overlap: other modules exchange their inputs and outputs, so an output is a
    part or a summand, and the gradient of the whole factor is summed over tensor ranks by itself

Dropout applies to x, in updates only. Tensor ranks with the same x drop the same elements.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.layers import (
    copy_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module, Parameter

from mrl.model.adapters import ADAPTER, FACTORS, FIRST, SECOND, Adapted, AdaptedLayer, Lora, add_factors, tiles
from mrl.model.boxes import Box
from mrl.model.hf_config import ModelSpec
from mrl.model.megatron_shards import Shard
from mrl.model.peft_files import WEIGHTS, name_in_file
from mrl.rank.grouped_linear import grouped_linear
from mrl.rank.local_parameters import LocalParameters
from mrl.rank.torch_spec import normed

_TILE = {"cpu": 1 << 17}  # elements that are merged at once, by kind of device: as many as fit a cache
_LARGE_TILE = 1 << 22


class Adapter(Module):
    """The factors of one linear layer."""

    def __init__(
        self, layer: AdaptedLayer, lora: Lora, config: TransformerConfig, is_outside: bool, dropout: float = 0.0
    ):
        """`is_outside`: tokens are exchanged over tensor ranks outside of the layer, not inside."""
        super().__init__()
        self.is_on = True
        self._dropout = dropout
        self._layer = layer
        self._lora = lora
        self._is_outside = is_outside
        self._by_columns = layer.targets[0].is_cut_by_columns
        self._is_whole = layer.targets[0].is_whole
        self._sequence_parallel = config.sequence_parallel
        for adapted in layer.targets:
            for factor in FACTORS:
                shape = adapted.shape(factor, lora.rank)
                self.register_parameter(f"{adapted.target}_{factor}", self._parameter(shape, factor, config))

    def _parameter(self, shape: tuple[int, int], factor: str, config: TransformerConfig) -> Parameter:
        parameter = Parameter(torch.zeros(shape, dtype=config.params_dtype))
        if (factor == FIRST) == self._by_columns and not self._is_whole:
            set_tensor_model_parallel_attributes(parameter, True, int(self._by_columns), 1)
        elif not self._is_outside:
            # then each tensor rank has its own tokens, and the factor's gradients must be summed
            parameter.sequence_parallel = config.sequence_parallel
        return parameter

    def forward(self, x: Tensor, output: Tensor, tokens: Sequence[int] | None) -> Tensor:
        """Returns the layer's `output` plus the factors' product with its input `x`.

        `tokens`: number of each local expert's tokens, which `x` has in order; None for a layer without experts.
        """
        x = self._dropped(x)
        first = torch.cat(self._of_experts(FIRST), 1)
        low = self._product(x, first, tokens) * self._lora.scale
        # Megatron only sums contiguous tensors
        parts = self._exchanged(low.contiguous()).split(self._lora.rank, -1)
        seconds = self._of_experts(SECOND)
        return output + self._placed([self._product(*pair, tokens) for pair in zip(parts, seconds, strict=True)])

    def _product(self, x: Tensor, factors: Tensor, tokens: Sequence[int] | None) -> Tensor:
        """Returns x times `factors` [experts, out, in], of all experts at once."""
        if tokens is None:
            return F.linear(x, factors[0])
        return grouped_linear(x, factors, tokens)

    def _dropped(self, x: Tensor) -> Tensor:
        if not (self.training and self._dropout):
            return x
        with get_cuda_rng_tracker().fork(_drawer(self._layer.is_expert, self._has_same_input)):
            return F.dropout(x, self._dropout)

    @property
    def _has_same_input(self) -> bool:
        """Tells whether all tensor ranks get the same input."""
        return not self._by_columns and (self._is_outside or not self._sequence_parallel)

    def _of_experts(self, factor: str) -> list[Tensor]:
        """Returns each target's factor, [experts, out, in]."""
        experts = len(self._layer.targets[0].weights)
        parameters = [getattr(self, f"{adapted.target}_{factor}") for adapted in self._layer.targets]
        if self._is_outside and (factor == FIRST) != self._by_columns:
            parameters = [copy_to_tensor_model_parallel_region(p, group=self._group) for p in parameters]
        return [parameter.view(experts, -1, parameter.shape[1]) for parameter in parameters]

    @property
    def _group(self) -> torch.distributed.ProcessGroup:
        if self._layer.is_expert:
            return mpu.get_expert_tensor_parallel_group()
        return mpu.get_tensor_model_parallel_group()

    def _exchanged(self, low: Tensor) -> Tensor:
        """Returns the complete A x for all tokens of the layer's output."""
        if self._is_outside or self._is_whole:
            return low
        if self._by_columns:
            if self._sequence_parallel:
                return reduce_scatter_to_sequence_parallel_region(low)
            return reduce_from_tensor_model_parallel_region(low)
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(low)
        return copy_to_tensor_model_parallel_region(low)

    def _placed(self, products: Sequence[Tensor]) -> Tensor:
        """Returns B A x of each target at its rows of the layer's output, and zero at rows without target."""
        segments = [
            (at, product.narrow(-1, first, rows))
            for product, adapted in zip(products, self._layer.targets, strict=True)
            for at, first, rows in adapted.segments
        ]
        parts: list[Tensor] = []
        end = 0
        for at, segment in [*sorted(segments, key=lambda each: each[0]), (self._layer.rows, None)]:
            if at > end:
                parts.append(products[0].new_zeros(*products[0].shape[:-1], at - end))
            if segment is not None:
                parts.append(segment)
                end = at + segment.shape[-1]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        """Initialises A as PEFT does, and B with zeros. A weight's values depend only on its name and the seed."""
        for adapted in self._layer.targets:
            first = getattr(self, f"{adapted.target}_{FIRST}")
            values = [_begun(name, seed, self._lora.rank, adapted) for name in adapted.weights]
            first.copy_(torch.from_numpy(np.concatenate(values)))
            getattr(self, f"{adapted.target}_{SECOND}").zero_()

    def factors(self) -> Iterator[tuple[str, "WeightFactors"]]:
        """Yields each checkpoint weight with adapters in this layer, and the location of its factors."""
        rank = self._lora.rank
        for adapted in self._layer.targets:
            names = [self._layer.parameter(adapted.target, factor) for factor in FACTORS]
            for number, weight in enumerate(adapted.weights):
                yield weight, WeightFactors(*names, self._layer.vp_chunk, number, rank, adapted)


def _begun(weight: str, seed: int, rank: int, adapted: Adapted) -> np.ndarray:
    """Returns the initial A [rank, columns] in float32, uniform as torch initialises a linear layer."""
    generator = np.random.default_rng([seed, zlib.crc32(weight.encode())])
    limit = 1 / sqrt(adapted.width)
    whole = generator.uniform(-limit, limit, (rank, adapted.width)).astype(np.float32)
    return whole[:, slice(*adapted.columns)]


@dataclass(frozen=True)
class WeightFactors:
    """The location of one weight's factors on this rank."""

    first: str  # Megatron's parameter names
    second: str
    vp_chunk: int
    number: int  # index among the experts in these parameters
    rank: int
    adapted: Adapted

    def of_block(self, shards: LocalParameters, box: Box) -> tuple[Tensor, Tensor]:
        """Returns A [rank, columns] and B [rows, rank] for a box of the weight, in float32."""
        (row, last_row), (column, last_column) = box.ranges
        begin = self.adapted.columns[0]
        firsts = shards(self.first, self.vp_chunk)[self.number * self.rank :][: self.rank]
        top = self.number * self.adapted.height + self.adapted.local_row(row)
        seconds = shards(self.second, self.vp_chunk)[top : top + last_row - row]
        return firsts[:, column - begin : last_column - begin].float(), seconds.float()


def attach(
    chunk: Module,
    layers: Iterable[AdaptedLayer],
    lora: Lora,
    config: TransformerConfig,
    seed: int,
    dropout: float = 0.0,
) -> None:
    """Gives a chunk's linear layers their adapters, and switches off the gradients of all checkpoint weights.

    `dropout`: share of their inputs that updates drop. It must be called before Megatron wraps the chunk. So Megatron's
    buffers and optimizer contain the adapters only.
    """
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)
    if chunk.pre_process:
        # otherwise nothing before the first adapter has a gradient, and recomputed layers there would be left out of
        # the backward pass
        chunk.embedding.register_forward_hook(lambda *given: given[-1].requires_grad_())
    for layer in layers:
        module = chunk.get_submodule(layer.module)
        adapter = Adapter(layer, lora, config, _is_outside(module, layer), dropout)
        adapter.begin(seed)
        module.add_module(ADAPTER, adapter)
        module.register_forward_hook(_hook(config, layer.is_expert))


def _is_outside(module: Module, layer: AdaptedLayer) -> bool:
    """Tells whether tokens are exchanged over tensor ranks before and after the layer.

    Dispatchers do so, and shared experts that overlap with them. Down projections of latent attention exchange nothing.
    """
    return not layer.targets[0].is_whole and (
        layer.is_expert
        or getattr(module, "explicit_expert_comm", False)
        or getattr(module, "parallel_mode", "") is None
    )


def _hook(config: TransformerConfig, is_expert: bool) -> Callable[[Module, tuple, tuple], tuple]:
    def add(module: Module, given: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        if not module.adapter.is_on:
            return output
        x = given[0]
        weight = getattr(module, "layer_norm_weight", None)
        if weight is not None:
            x = normed(x, weight, config.layernorm_epsilon, config.layernorm_zero_centered_gamma)
        made, *rest = output
        return (module.adapter(x, made, given[1] if is_expert else None), *rest)

    return add


def _drawer(is_expert: bool, is_same: bool) -> str:
    """Names the generator that dropout draws from.

    `is_same`: for inputs that are equal on all ranks of a tensor group.
    """
    return f"lora dropout, expert {is_expert}, same {is_same}"


@contextmanager
def drawing_noise(dropout: float, seed: int, update: int, device: torch.device) -> Iterator[None]:
    """Makes dropout of adapters depend only on the seed and the update's number, until the block ends.

    Does nothing if `dropout` is 0. Generators are in Megatron's tracker, because recomputation resets those. No
    checkpoint contains them. Ranks of a tensor group share one generator for inputs that they share. For other inputs,
    each rank has its own.
    """
    if not dropout:
        yield
        return
    tracker = get_cuda_rng_tracker()
    own = dist.get_rank()
    first_of_tensor = mpu.get_tensor_model_parallel_src_rank()
    first_of_experts = dist.get_global_rank(mpu.get_expert_tensor_parallel_group(), 0)
    drawers = [(False, False, own), (False, True, first_of_tensor), (True, False, own), (True, True, first_of_experts)]
    states = {}
    for is_expert, is_same, rank in drawers:
        seeds = np.random.SeedSequence([seed, update, rank, is_expert, is_same]).generate_state(1, np.uint64)
        generator = torch.Generator(device).manual_seed(int(seeds[0] >> 1))
        states[_drawer(is_expert, is_same)] = generator.get_state()
    tracker.set_states(tracker.get_states() | states)
    try:
        yield
    finally:
        tracker.set_states({name: state for name, state in tracker.get_states().items() if name not in states})


@contextmanager
def hidden(chunks: Iterable[Module]) -> Iterator[None]:
    """Hides the adapters from code that walks the chunks' parameters by name, until the block ends."""
    removed = [
        (module, module._modules.pop(ADAPTER))
        for chunk in chunks
        for module in list(chunk.modules())
        if isinstance(module._modules.get(ADAPTER), Adapter)
    ]
    try:
        yield
    finally:
        for module, adapter in removed:
            module.add_module(ADAPTER, adapter)


class Adapters:
    """All adapters of a rank."""

    def __init__(self, chunks: list[Module], lora: Lora, described: Sequence[Shard]):
        """`described`: the factors of this rank."""
        self.lora = lora
        self.described = described
        self._adapters = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]
        self._shards = LocalParameters(chunks)
        self._factors = dict(each for adapter in self._adapters for each in adapter.factors())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes the weights compute without adapters, until the block ends.

        This is the reference model of a KL term.
        """
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def _switch(self, is_on: bool) -> None:
        for adapter in self._adapters:
            adapter.is_on = is_on

    def merging(self, described: Iterable[Shard]) -> Callable[[Tensor], Tensor]:
        """Returns a function that maps a parameter with adapters to a merged tensor, and any other parameter to itself.

        `described`: the weights of this rank. Parameters are not changed, and no merged tensor is kept.
        """
        adapted = {}
        for shard in described:
            pieces = [piece for piece in shard.pieces if self.adapts(piece.hf_name)]
            if pieces:
                adapted[self._shards(shard.megatron_name, shard.vp_chunk).data_ptr()] = pieces

        def merge(parameter: Tensor) -> Tensor:
            pieces = adapted.get(parameter.data_ptr())
            if pieces is None:
                return parameter
            whole = parameter.detach().clone()
            for piece in pieces:
                slices = piece.local_box.slices
                self.merge(piece.hf_name, piece.hf_box, parameter.detach()[slices], whole[slices])
            copy_tensor_model_parallel_attributes(whole, parameter)
            return whole

        return merge

    @property
    def pieces(self) -> Iterator[Tensor]:
        """Yields the reference model's memory beside the actor: nothing."""
        return iter(())

    @torch.no_grad()
    def read(self, folder: str | Path, model: ModelSpec) -> None:
        """Reads the initial adapters of `model` from a folder in PEFT's form, which was checked before."""
        with safe_open(Path(folder) / WEIGHTS, "pt") as stored:
            for shard in self.described:
                parameter = self._shards(shard.megatron_name, shard.vp_chunk)
                for piece in shard.pieces:
                    values = stored.get_slice(name_in_file(piece.hf_name, model))[piece.hf_box.slices]
                    parameter[piece.local_box.slices].copy_(values)

    def adapts(self, hf_name: str) -> bool:
        """Tells whether a checkpoint weight has adapters on this rank."""
        return hf_name in self._factors

    def merge(self, hf_name: str, box: Box, block: Tensor, out: Tensor) -> None:
        """Writes `block`, a box of a weight, into `out`, merged with its adapters.

        The sum is computed in float32 and rounded once to the block's dtype. If `out` has a wider one, it holds the
        same numbers, as exports do.
        """
        first, second = self._factors[hf_name].of_block(self._shards, box)
        second = second * self.lora.scale
        is_plain = block.dtype is out.dtype is torch.float32  # then sums need no memory of their own
        spans = list(tiles(*block.shape, _TILE.get(block.device.type, _LARGE_TILE)))
        highest, width = spans[0][1], block.shape[1]
        product, *own = first.new_empty((1 if is_plain else 2, highest, width))
        for start, stop in spans:
            total = own[0][: stop - start] if own else out[start:stop]
            add_factors(block[start:stop], first, second[start:stop], torch.mul, total, product[: stop - start])
            if own:
                out[start:stop] = total.to(block.dtype)
