"""vLLM's view of the weight map: the fused parameters of each worker, as boxes in Hugging Face coordinates.

Names and shapes are those of vLLM 0.32's models in load layout, as `load_weights` fills them. No kernel has packed or
shuffled anything yet. The dialect tells how a device's build stores experts: as [expert, out, in], but transposed in
vllm-ascend. Experts are assigned as by vLLM's linear strategy. Sources: model_executor/layers/linear.py (queries are
divided, key/value heads repeated if there are fewer than workers) and vocab_parallel_embedding.py (rows are padded
first).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from mrl.errors import ConfigError
from mrl.model.boxes import Box
from mrl.model.hf_config import ModelSpec
from mrl.model.layout import RolloutLayout
from mrl.model.quantised import SCALE, SCALES, WORD, blocks, in_blocks, is_quantised, slice_fault
from mrl.model.registry import family_of, weight_map
from mrl.model.weight_map import Part, Slice, Weight, even_slice, sections_of, share, stacked

Dialect = Literal["cpu", "cuda", "npu"]
TRANSPOSED: Dialect = "npu"
VOCABULARY_MULTIPLE = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE: rows are padded to it before division


@dataclass(frozen=True)
class TargetPiece:
    """A block of a Hugging Face tensor and its position in a worker's parameter.

    Hugging Face dimension d is local dimension `axes[d]`. Local dimensions outside of `axes` have extent 1 in
    `local_box` (the number of an expert).
    """

    hf_name: str
    hf_box: Box
    local_box: Box
    axes: tuple[int, ...]


@dataclass(frozen=True)
class TargetParameter:
    """One parameter of one worker. Local elements outside of all pieces are padding, which must be zero."""

    name: str  # as in named_parameters()
    module: str  # the name without its last part: the unit that vLLM's layerwise reload creates and processes
    local_shape: tuple[int, ...]
    dtype: str
    pieces: tuple[TargetPiece, ...]

    def __hash__(self) -> int:
        """Hashes name and first piece. Layers of experts have hundreds of pieces, and are looked up at every sync."""
        return hash((self.name, self.pieces[:1]))


def target_parameters(
    model: ModelSpec, rollout: RolloutLayout, worker: int, dialect: Dialect, dtype: str, fp8_block: int = 0
) -> tuple[TargetParameter, ...]:
    """Returns the parameters of one worker in vLLM's module order. `dtype` is the engine's.

    `fp8_block`: rows and columns that share a scale where the engine holds words (mrl/model/quantised.py); 0: it holds
    none. Raises ConfigError for sizes that vLLM cannot divide over the workers.
    """
    return tuple(_Worker(model, rollout, worker, dialect == TRANSPOSED, dtype, fp8_block).parameters())


@cache
def worker_slice(weight: Weight, workers: int, index: int) -> Slice:
    """Returns the slice of worker `index` of the workers that share a weight (or one expert's weight).

    Sizes that do not divide are rounded. `target_parameters` refuses them, but a memory plan need not.
    """
    match weight.vllm_split or weight.split:
        case "heads":
            return _heads(weight, workers, index)
        case "key heads":
            return _key_heads(weight, workers, index)
        case "rows" | "copied" if weight.vllm_split:
            return even_slice(replace(weight, split=weight.vllm_split), workers, index)
        case "vocabulary":
            return _vocabulary(weight, workers, index)
    return even_slice(weight, workers, index)


def _heads(weight: Weight, workers: int, index: int) -> Slice:
    """Returns rows of queries, keys, values. With more workers than key/value heads, neighbours hold the same head."""
    (query, start, of_queries), *others = sections_of(weight)
    first, stop = share(of_queries, workers, index)
    of_others = [_of_own_heads(part, at, rows, weight.groups, workers, index) for part, at, rows in others]
    return stacked([(query, start + first, start + stop), *of_others])


def _of_own_heads(part: Part, start: int, rows: int, groups: int, workers: int, index: int) -> tuple[Part, int, int]:
    """Returns a worker's rows of keys or values, which begin at row `start` of a part."""
    heads = max(groups // workers, 1)
    copies = max(workers // groups, 1)
    own = rows // groups * heads
    first = start + index // copies * own
    return part, first, first + own


def _key_heads(weight: Weight, workers: int, index: int) -> Slice:
    """Returns the rows of a worker's key/value heads."""
    (part,) = weight.parts
    return stacked([_of_own_heads(part, 0, part.shape[0], weight.groups, workers, index)])


def _vocabulary(weight: Weight, workers: int, index: int) -> Slice:
    """Returns rows of the padded vocabulary. A worker may hold only padding."""
    (part,) = weight.parts
    vocab = part.shape[0]
    each = -(-_padded(vocab) // workers)
    return stacked([(part, index * each, min(index * each + each, vocab))], rows=each)


def _padded(vocab: int) -> int:
    return -(-vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def expert_range(num_experts: int, ranks: int, index: int) -> range:
    """Returns the numbers of a rank's experts. The first ranks get the remainder."""
    each, more = divmod(num_experts, ranks)
    first = index * each + min(index, more)
    return range(first, first + each + (index < more))


def fullest_numel(model: ModelSpec, rollout: RolloutLayout, weight: Weight) -> int:
    """Returns elements of a layer's parameter, with padding, on the worker with the most: the first one."""
    if weight.is_expert:
        experts = len(expert_range(model.num_experts, rollout.expert, 0))
        return experts * worker_slice(weight, rollout.expert_tensor, 0).numel
    return worker_slice(weight, rollout.tensor, 0).numel


@dataclass(frozen=True)
class _Worker:
    model: ModelSpec
    rollout: RolloutLayout
    worker: int
    transposed: bool
    dtype: str
    fp8_block: int

    def parameters(self) -> Iterator[TargetParameter]:
        weights = weight_map(self.model)
        # a tower is on the first pipeline stage, as what comes before the layers is
        yield from (self._parameter(weight, None) for weight in (weights.embedding, *weights.tower_in_vllm))
        for layer in range(self.model.all_layers):
            for weight in weights.layer(layer).vllm:
                parameter = self._parameter(weight, layer)
                if self.fp8_block and is_quantised(weight):
                    yield from self._fp8_and_scales(parameter, weight)
                else:
                    yield parameter
        yield from (self._parameter(weight, None) for weight in weights.ends)

    def _fp8_and_scales(self, parameter: TargetParameter, weight: Weight) -> tuple[TargetParameter, TargetParameter]:
        """Raises ConfigError for a worker that would have a part of a block."""
        if weight.is_expert:
            local = worker_slice(weight, self.rollout.expert_tensor, self.rollout.expert_coords(self.worker)[1])
        else:
            local = worker_slice(weight, self.rollout.tensor, self.rollout.coords(self.worker).tp)
        if fault := slice_fault(local, self.fp8_block):
            raise ConfigError(f"rollout.quantization: {fault} on a worker of an engine, within a block")
        pieces = tuple(
            TargetPiece(
                piece.hf_name + SCALES,
                in_blocks(piece.hf_box, self.fp8_block),
                in_blocks(piece.local_box, self.fp8_block),
                piece.axes,
            )
            for piece in parameter.pieces
        )
        shape = blocks(parameter.local_shape, self.fp8_block)
        scales = TargetParameter(parameter.name + SCALES, parameter.module, shape, SCALE, pieces)
        return replace(parameter, dtype=WORD), scales

    def _parameter(self, weight: Weight, layer: int | None) -> TargetParameter:
        if weight.is_expert:
            return self._experts(weight, layer)
        return self._dense(weight, layer)

    def _dense(self, weight: Weight, layer: int | None) -> TargetParameter:
        _check_dense(self.model, self.rollout.tensor, weight, layer)
        local = worker_slice(weight, self.rollout.tensor, self.rollout.coords(self.worker).tp)
        axes = tuple(range(len(local.shape)))
        pieces = (TargetPiece(b.part.name.format(layer=layer), b.hf_box, b.local_box, axes) for b in local.blocks)
        return self._named(weight, layer, local.shape, tuple(pieces))

    def _experts(self, weight: Weight, layer: int | None) -> TargetParameter:
        """Returns [expert, rows, columns], or on Ascend with the last two swapped."""
        _check_experts(self.model, self.rollout)
        ep, etp = self.rollout.expert_coords(self.worker)
        local = worker_slice(weight, self.rollout.expert_tensor, etp)
        experts = expert_range(self.model.num_experts, self.rollout.expert, ep)
        step, axes = (-1, (2, 1)) if self.transposed else (1, (1, 2))
        if len(local.shape) == 1:  # of biases
            axes = (1,)
        pieces = []
        for slot, expert in enumerate(experts):
            for block in local.blocks:
                local_box = Box(((slot, slot + 1), *block.local_box.ranges[::step]))
                hf_name = block.part.name.format(layer=layer, expert=expert)
                pieces.append(TargetPiece(hf_name, block.hf_box, local_box, axes))
        return self._named(weight, layer, (len(experts), *local.shape[::step]), tuple(pieces))

    def _named(
        self, weight: Weight, layer: int | None, shape: tuple[int, ...], pieces: tuple[TargetPiece, ...]
    ) -> TargetParameter:
        name = weight.vllm.format(layer=layer)
        dtype = weight.vllm_dtype or weight.dtype or self.dtype
        return TargetParameter(name, name.rpartition(".")[0], shape, dtype, pieces)


def _check_dense(model: ModelSpec, workers: int, weight: Weight, layer: int | None) -> None:
    """Raises ConfigError for a weight that vLLM cannot divide."""
    part = weight.parts[0]
    match weight.split:
        case "rows" | "columns":
            size = part.shape[1 if weight.split == "columns" else 0]
            _check_share(size, workers, part.name.format(layer=layer).removesuffix(".weight"))
        case "sections":
            _check_share(model.linear_num_key_heads, workers, "linear_num_key_heads")
        case "vocabulary":
            _check_share(_padded(part.shape[0]), workers, "padded vocabulary")
        case "heads":
            _check_share(model.num_attention_heads, workers, "attention heads")
            if family_of(model).vllm_divides_evenly:
                _check_share(weight.groups, workers, "key/value heads")
            if weight.groups % workers and workers % weight.groups:
                raise ConfigError(
                    f"{weight.groups} key/value heads can neither be divided over {workers} tensor "
                    "ranks nor repeated on them"
                )


def _check_experts(model: ModelSpec, rollout: RolloutLayout) -> None:
    if model.num_experts < rollout.expert:
        raise ConfigError(
            f"{model.num_experts} experts cannot be spread over {rollout.expert} workers: some would have none"
        )
    if family_of(model).vllm_divides_evenly:
        _check_share(model.num_experts, rollout.expert, "experts")
    _check_share(model.moe_intermediate_size, rollout.expert_tensor, "moe_intermediate_size")


def _check_share(size: int, workers: int, what: str) -> None:
    if size % workers:
        raise ConfigError(
            f"{what} = {size} cannot be divided over {workers} workers; choose rollout degrees that divide it"
        )
