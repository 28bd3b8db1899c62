"""The weight map: the name and place of every tensor of a model in the checkpoint, in Megatron and in vLLM.

A family's file (qwen3.py, ...) lists its `Weight`s. Each one names its checkpoint tensors and its parameter in Megatron
and in vLLM. It tells how both divide it over tensor ranks. Three views are derived from these rows, without knowledge
of a family: tensors.py (checkpoint, parameters, FLOPs), megatron_shards.py (blocks and memory of a rank),
vllm_parameters.py (blocks and memory of an engine worker).

Example: attention with four query heads and two key/value heads. Each word below stands for the `head_dim` rows of one
head.

    checkpoint    self_attn.q_proj.weight  q0 q1 q2 q3
                  self_attn.k_proj.weight  k0 k1
                  self_attn.v_proj.weight  v0 v1

    one row       parts=(q_proj, k_proj, v_proj), split="heads", groups=2
    of the map    megatron="self_attention.linear_qkv.weight", vllm="self_attn.qkv_proj.weight"

                  Megatron                           vLLM
                  head group by head group           queries, then keys, then values of a worker's heads;
                  (its queries, key, value),         with more workers than key/value heads,
                  then cut evenly                    neighbours hold the same one

    TP1           q0 q1 k0 v0 q2 q3 k1 v1            q0 q1 q2 q3 k0 k1 v0 v1

    TP2  rank 0   q0 q1 k0 v0                        q0 q1 k0 v0
         rank 1   q2 q3 k1 v1                        q2 q3 k1 v1

    TP4  rank 0   q0 q1                              q0 k0 v0
         rank 1   k0 v0                              q1 k0 v0
         rank 2   q2 q3                              q2 k1 v1
         rank 3   k1 v1                              q3 k1 v1

Every word of a view is a `Block`: at TP1 and head_dim 1, k1 is row 1 of k_proj, row 6 in Megatron and row 5 in vLLM.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any, Literal

from mrl.model.boxes import Box
from mrl.model.hf_config import HfConfig, LayerKind, ModelSpec
from mrl.model.trained_tower import MODULE, NAMES, TrainedTower

Split = Literal[
    "copied",  # whole on every tensor rank
    "rows",  # each part cut along its first dimension, the slices of all parts one under the other
    "columns",  # cut along the second dimension
    "heads",  # a fused query, key and value projection: see the example above
    "sections",  # each of the sections of the parts cut along its first dimension, as "rows" cuts the parts themselves
    "key heads",  # rows of each key/value head; with more ranks than heads, neighbours hold the same ones
    "vocabulary",  # rows, after padding to a multiple that each side chooses
    "first",  # in vLLM: whole on the first worker, and zeros on the others, whose sum every worker has
]
# prefixes of the names of a layer's weights
HF_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."
VLLM_LAYER = "model.layers.{layer}."
# vLLM's decoder layers register attention, then the MLP, then both norms
VLLM_ATTENTION = ("self_attn.q_proj.", "self_attn.o_proj.", "self_attn.")
VLLM_NORMS = ("input_layernorm.", "post_attention_layernorm.")
PREDICTING = "mtp."  # begins Megatron's names of a predicting layer's weights
DRAFTING = "drafts."  # begins names in vLLM's drafting model, which is beside the model (mrl/engine/drafter.py)
MEGATRON_ORDER = ("input_layernorm.", "self_attn.", "post_attention_layernorm.", "mlp.gate.", "mlp.experts.", "mlp.")


@dataclass(frozen=True)
class Part:
    """One tensor of a Hugging Face checkpoint. `{layer}` and `{expert}` in its name stand for global numbers from 0."""

    name: str
    shape: tuple[int, ...]
    matmul: bool = True  # multiplied as a matrix; False for look-ups, norms and biases

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Inner:
    """A tensor of the model inside a stored one, all of whose axes except the last count as rows.

    If it is turned, it is the transpose of columns of an expert's matrix. All columns of all experts are counted.
    """

    name: str
    shape: tuple[int, ...]
    first: int  # its first row in the stored tensor, or its first column
    is_turned: bool = False

    @property
    def rows(self) -> int:
        """Number of its rows in the stored tensor, or of its columns there."""
        return prod(self.shape[:-1])

    def expert_and_column(self, columns: int) -> tuple[int, int]:
        """Returns the expert and the first column of a turned tensor. `columns`: of each stored matrix."""
        return divmod(self.first, columns)


@dataclass(frozen=True)
class Weight:
    """One row of the map: checkpoint tensors that form one parameter in Megatron and in vLLM.

    Rows of a layer with the same name in vLLM are stacked in one parameter there. `LayerWeights.vllm` has them as one
    row, whose Megatron name has no meaning.

    In `megatron`, `{layer}` and `{expert}` are numbers local to the model chunk and the rank. vLLM stacks the experts
    of a layer in one parameter, whose first axis is the expert.
    """

    parts: tuple[Part, ...]
    megatron: str
    vllm: str
    split: Split
    is_expert: bool = False  # every routed expert has one
    groups: int = 0  # of "heads": number of key/value heads
    # for "heads": the checkpoint has a gate after each query head's rows. Megatron has the gates of a group after its
    # queries, vLLM as in the checkpoint.
    is_gated: bool = False
    # for "sections": their rows; no section spans two parts. For "heads" whose queries, keys and values are one part:
    # the rows of each.
    sections: tuple[int, ...] = ()
    vllm_split: Split | None = None  # in vLLM, if it is not `split`
    dtype: str | None = None  # in the checkpoint and in Megatron; None: the model's
    vllm_dtype: str | None = None  # in vLLM, if it is neither `dtype` nor the engine's
    is_constant: bool = False  # not trained: no gradient, no master weights, no moments

    @property
    def numel(self) -> int:
        """Number of elements in the checkpoint, for one expert."""
        return sum(part.numel for part in self.parts)


def _nothing(name: str, model: ModelSpec) -> bool:
    return False


def _no_keys(model: ModelSpec) -> dict[str, Any]:
    return {}


LayerOf = Callable[[ModelSpec], tuple[Weight, ...]]  # weights of one layer, in the checkpoint's order


@dataclass(frozen=True)
class PredictingNames:
    """Names of a predicting layer's weights: of its own, and the prefix of those that ordinary layers have, too."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    join: str  # the projection of both
    last_norm: str
    # (name of an own weight), and the prefix of the others, in vLLM's drafting model as mrl/engine/drafter.py shows it
    own_in_vllm: Callable[[str], str]
    layer_in_vllm: str
    join_in_vllm: Split  # how workers of vLLM divide the projection
    # vLLM's class joins the first token of a sequence with zeros, in place of its successor's embedding
    forgets_second_token: bool


def _of_deepseek(name: str) -> str:
    return name


DEEPSEEK_NAMES = PredictingNames(
    HF_LAYER,
    HF_LAYER + "enorm.weight",
    HF_LAYER + "hnorm.weight",
    HF_LAYER + "eh_proj.weight",
    HF_LAYER + "shared_head.norm.weight",
    _of_deepseek,
    VLLM_LAYER + "mtp_block.",
    "copied",
    forgets_second_token=True,
)


@dataclass(frozen=True)
class Family:
    """The content of a family's file."""

    architecture: str  # in config.json's `architectures`
    model_type: str  # ModelSpec.family
    read: Callable[[HfConfig], ModelSpec]  # of config.json; raises ConfigError for what training would not compute
    dense_layer: LayerOf  # a layer without experts
    expert_layer: LayerOf | None = None  # a layer with experts
    linear_layer: LayerOf | None = None  # a layer with gated delta attention, with or without experts as all of them
    # Each side orders a layer's weights: by the first of these prefixes of a weight's checkpoint name, and by the
    # checkpoint's order among equal prefixes.
    megatron_order: tuple[str, ...] = MEGATRON_ORDER
    vllm_order: tuple[str, ...] = (*VLLM_ATTENTION, "mlp.", *VLLM_NORMS)
    # of the layer that predicts a further token, where ranks can hold it
    predicting: PredictingNames | None = None
    # tells whether a tensor of the family's checkpoints is not part of the model
    is_left_out: Callable[[str, ModelSpec], bool] = _nothing
    # keys of config.json that vLLM reads but transformers does not write, so that no engine uses another default
    engine_keys: Callable[[ModelSpec], dict[str, Any]] = _no_keys
    # `architectures` of a model that also reads images and contains this one (mrl/model/wrapped.py)
    wrapper: str = ""
    seeing: str = ""  # vLLM's class of that model in engines that see images (mrl/engine/seeing_models.py)
    wrapped_type: str = ""  # model_type of the text model inside that model, if it is not `model_type`
    # keys of config.json that the class inside that model computes alike whatever they say
    wrapped_always: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # whether transformers' class of that model also ties its embeddings where the text model's part of config.json
    # alone says so, as transformers 4 wrote it; others read the outer key alone
    wrapped_ties: bool = False
    engine_architecture: str = ""  # vLLM's class that engines use, if `engine_keys` name another one
    vllm_embedding: str = "model.embed_tokens.weight"
    # vLLM's class gives every worker the same number of experts, and key/value heads of its own
    vllm_divides_evenly: bool = False
    # (name, shape) of a stored tensor, and the hidden size -> tensors of the model inside it; None: files have these
    inside: Callable[[str, tuple[int, ...], int], Iterable[Inner]] | None = None
    # (name, shape) of a tensor of the model, and the number of experts -> (name, shape) of the stored one in exports
    stored: Callable[[str, tuple[int, ...], int], tuple[str, tuple[int, ...]]] | None = None
    # (name, tensor) of the model as vLLM's loader takes it, if it is not as the checkpoint has it
    for_loader: Callable[[str, Any], tuple[str, Any]] | None = None
    # Suffixes of names that official folders have in float32 beside bfloat16. They are read in the model's dtype, as in
    # transformers.
    rounded: tuple[str, ...] = ()
    # official folders contain code beside the weights (`auto_map`) for what `read` reads; it is neither run nor copied
    has_code_beside: bool = False


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one kind of layer, in the order of each side."""

    hf: tuple[Weight, ...]
    megatron: tuple[Weight, ...]
    vllm: tuple[Weight, ...]


@dataclass(frozen=True)
class WeightMap:
    """All weights of a model."""

    model: ModelSpec
    embedding: Weight
    dense_layer: LayerWeights
    expert_layer: LayerWeights
    linear_layer: LayerWeights
    predicting_layer: LayerWeights
    final_norm: Weight
    output: Weight  # the embedding's tensor, if embeddings are tied
    tower: tuple[Weight, ...] = ()  # of a vision tower that is trained; none of it is in `counted`

    @classmethod
    def of(cls, model: ModelSpec, family: Family) -> "WeightMap":
        """Makes the map from the rows of the family, with the vocabulary matrices and final norm of all decoders."""
        shape = (model.vocab_size, model.hidden_size)
        hidden = (model.hidden_size,)
        output = "lm_head.weight"
        if model.tie_word_embeddings:
            output = "model.embed_tokens.weight"
        return cls(
            model,
            replace(
                _vocabulary(Part("model.embed_tokens.weight", shape, matmul=False), "embedding.word_embeddings.weight"),
                vllm=family.vllm_embedding,
            ),
            _layer_weights(family, family.dense_layer(model)),
            _layer_weights(family, family.expert_layer(model) if family.expert_layer and model.is_moe else ()),
            _layer_weights(family, family.linear_layer(model) if family.linear_layer and model.is_hybrid else ()),
            _predicting_layer(model, family),
            copied("model.norm.weight", hidden, "decoder.final_layernorm.weight"),
            _vocabulary(Part(output, shape), "output_layer.weight"),
            () if model.trained_tower is None else tuple(_of_tower(model.trained_tower)),
        )

    def layer(self, number: int) -> LayerWeights:
        """Returns the weights of a layer by its global number."""
        return self.of_kind(self.model.layer_kind(number))

    def of_kind(self, kind: LayerKind) -> LayerWeights:
        """Returns the weights of a layer of this kind."""
        if kind.predicts:
            return self.predicting_layer
        if kind.is_linear:
            return self.linear_layer
        if kind.has_experts:
            return self.expert_layer
        return self.dense_layer

    @cached_property
    def tower_in_vllm(self) -> tuple[Weight, ...]:
        """Returns the rows of `tower` as vLLM has them: gate and up are one parameter."""
        rows: dict[str, Weight] = {}
        for weight in self.tower:
            known = rows.get(weight.vllm)
            rows[weight.vllm] = weight if known is None else replace(known, parts=(*known.parts, *weight.parts))
        return tuple(rows.values())

    @property
    def ends(self) -> tuple[Weight, ...]:
        """Returns the weights after the layers in a checkpoint and in vLLM."""
        if self.model.tie_word_embeddings:
            return (self.final_norm,)
        return (self.final_norm, self.output)

    @cached_property
    def layers(self) -> tuple[tuple[LayerWeights, int], ...]:
        """Returns each kind of layer in the model, with the number of its layers."""
        counts = Counter(map(self.model.layer_kind, range(self.model.all_layers)))
        return tuple((self.of_kind(kind), counts[kind]) for kind in sorted(counts))

    @cached_property
    def counted(self) -> tuple[tuple[Weight, int], ...]:
        """Returns every weight of the checkpoint and of vLLM, with the number of layers that have it."""
        inside = ((weight, count) for kind, count in self.layers for weight in kind.hf)
        return ((self.embedding, 1), *inside, *((weight, 1) for weight in self.ends))

    def has(self, megatron_name: str) -> bool:
        """Tells whether a layer has a Megatron parameter with that name, e.g. "mlp.router.weight"."""
        return any(weight.megatron == MEGATRON_LAYER + megatron_name for weight, _ in self.counted)


def copied(hf_name: str, shape: tuple[int, ...], megatron: str, matmul: bool = False) -> Weight:
    """Makes a weight that is replicated on every rank and has the checkpoint's name in vLLM."""
    return Weight((Part(hf_name, shape, matmul),), megatron, hf_name, "copied")


def _of_tower(tower: TrainedTower) -> Iterator[Weight]:
    for name, shape in tower.shapes():
        in_vllm = name
        for part in (".gate_proj.", ".up_proj."):
            in_vllm = in_vllm.replace(part, ".gate_up_proj.")
        yield replace(copied(NAMES + name, shape, MODULE + name, matmul=len(shape) > 1), vllm=MODULE + in_vllm)


def per_expert(weights: Iterable[Weight], experts: Iterable[int]) -> Iterator[tuple[Weight, int | None]]:
    """Yields each weight with the number of its expert, weights of one expert together; None for weights outside
    experts.
    """
    for is_expert, group in groupby(weights, key=lambda weight: weight.is_expert):
        together = tuple(group)
        yield from ((weight, expert) for expert in (experts if is_expert else (None,)) for weight in together)


def _vocabulary(part: Part, megatron: str) -> Weight:
    return Weight((part,), megatron, part.name, "vocabulary")


def _layer_weights(family: Family, weights: tuple[Weight, ...]) -> LayerWeights:
    in_vllm = _joined(_ordered(weights, family.vllm_order))
    orders = (weights, _ordered(weights, family.megatron_order), in_vllm)
    return LayerWeights(*(tuple(map(_in_layer, order)) for order in orders))


def _predicting_layer(model: ModelSpec, family: Family) -> LayerWeights:
    """Returns the weights of a predicting layer: two norms, the projection that joins what they give, those of an
    ordinary layer with keys and values, and the norm before the output layer.

    Megatron's names are those of its MultiTokenPredictionLayer.
    """
    names = family.predicting
    if not model.predicting_layers or names is None:
        return LayerWeights((), (), ())
    hidden = model.hidden_size

    def norm(name: str, megatron: str) -> Weight:
        part = Part(name, (hidden,), matmul=False)
        return Weight((part,), PREDICTING + megatron, DRAFTING + names.own_in_vllm(name), "copied")

    join = Weight(
        (Part(names.join, (hidden, 2 * hidden)),),
        PREDICTING + "eh_proj.weight",
        DRAFTING + names.own_in_vllm(names.join),
        "rows",
        vllm_split=names.join_in_vllm,
    )
    first = (norm(names.embedding_norm, "enorm.weight"), norm(names.hidden_norm, "hnorm.weight"), join)
    last = norm(names.last_norm, "final_layernorm.weight")

    def inside(weight: Weight) -> Weight:
        parts = tuple(replace(part, name=part.name.replace(HF_LAYER, names.layer, 1)) for part in weight.parts)
        megatron = weight.megatron.replace(MEGATRON_LAYER, PREDICTING + "transformer_layer.", 1)
        vllm = weight.vllm.replace(VLLM_LAYER, DRAFTING + names.layer_in_vllm, 1)
        return replace(weight, parts=parts, megatron=megatron, vllm=vllm)

    layer_of = family.expert_layer if model.is_moe else family.dense_layer
    layer = _layer_weights(family, layer_of(model))
    return LayerWeights(*((*first, *map(inside, order), last) for order in (layer.hf, layer.megatron, layer.vllm)))


def _joined(weights: Iterable[Weight]) -> Iterator[Weight]:
    """Joins neighbours with the same name in vLLM into one row."""
    for _, group in groupby(weights, key=lambda weight: weight.vllm):
        first, *others = group
        yield replace(first, parts=(*first.parts, *(part for other in others for part in other.parts)))


def _ordered(weights: Iterable[Weight], prefixes: Sequence[str]) -> list[Weight]:
    """Sorts the weights. Raises ValueError for a weight without matching prefix."""

    def position(weight: Weight) -> int:
        for number, prefix in enumerate(prefixes):
            if weight.parts[0].name.startswith(prefix):
                return number
        raise ValueError(f"{weight.parts[0].name} has no place in the order {', '.join(prefixes)}")

    return sorted(weights, key=position)


def _in_layer(weight: Weight) -> Weight:
    """Returns the weight with complete names."""
    parts = tuple(replace(part, name=HF_LAYER + part.name) for part in weight.parts)
    return replace(weight, parts=parts, megatron=MEGATRON_LAYER + weight.megatron, vllm=VLLM_LAYER + weight.vllm)


# ---------------------------------------------------------------- slices


@dataclass(frozen=True)
class Block:
    """A box of a checkpoint tensor, and its position in a rank's slice. Both boxes have the same shape."""

    part: Part
    hf_box: Box
    local_box: Box


@dataclass(frozen=True)
class Slice:
    """A rank's part of a weight (or of one expert's). Local elements outside of all blocks are zero."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def numel(self) -> int:
        """Number of elements with padding."""
        return prod(self.shape)


def even_slice(weight: Weight, ranks: int, index: int) -> Slice:
    """Returns part `index` of `ranks` of a weight that Megatron and vLLM split alike: not "heads" and "vocabulary"."""
    part = weight.parts[0]
    match weight.split:
        case "copied":
            return stacked([(part, 0, part.shape[0]) for part in weight.parts])
        case "rows":
            return stacked([(part, *share(part.shape[0], ranks, index)) for part in weight.parts])
        case "sections":
            return stacked([_share_of_section(*section, ranks, index) for section in sections_of(weight)])
        case "columns":
            box = Box(((0, part.shape[0]), share(part.shape[1], ranks, index)))
            return Slice(box.shape, (Block(part, box, Box.whole(box.shape)),))
        case "first":
            whole = Box.whole(part.shape)
            return Slice(part.shape, (Block(part, whole, whole),) if index == 0 else ())
    raise ValueError(f"{weight.megatron}: Megatron and vLLM cut {weight.split!r} each in its own way")


def sections_of(weight: Weight) -> Iterator[tuple[Part, int, int]]:
    """Yields (part, first row, rows) of each section. Without sections, each part is one."""
    if not weight.sections:
        yield from ((part, 0, part.shape[0]) for part in weight.parts)
        return
    parts = iter(weight.parts)
    part = next(parts)
    first = 0
    for rows in weight.sections:
        if first == part.shape[0]:
            part = next(parts)
            first = 0
        yield part, first, rows
        first += rows


def _share_of_section(part: Part, first: int, rows: int, ranks: int, index: int) -> tuple[Part, int, int]:
    start, stop = share(rows, ranks, index)
    return part, first + start, first + stop


def stacked(segments: Sequence[tuple[Part, int, int]], rows: int | None = None) -> Slice:
    """Stacks rows [start, stop) of several parts. `rows` is the height of the slice if padding follows."""
    blocks = []
    at = 0
    columns = Box.whole(segments[0][0].shape[1:]).ranges
    for part, start, stop in segments:
        if start < stop:
            blocks.append(Block(part, Box(((start, stop), *columns)), Box(((at, at + stop - start), *columns))))
        at += max(0, stop - start)
    return Slice((at if rows is None else rows, *segments[0][0].shape[1:]), tuple(blocks))


def share(size: int, ranks: int, index: int) -> tuple[int, int]:
    """Returns (start, stop) of one of equal shares of a dimension."""
    each = size // ranks
    return index * each, (index + 1) * each
