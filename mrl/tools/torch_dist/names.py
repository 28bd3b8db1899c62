"""The keys of torch_dist checkpoints, and their tensors in Hugging Face coordinates.

Megatron-core 0.16.1 names a layer's parameter in one of three ways; a checkpoint uses one of them (`sharded_state_dict`
of transformer_block.py, experts.py and mlp.py):

* homogeneous, its default: one tensor for all layers, `decoder.layers.self_attention.linear_qkv.weight` [layers, ...];
* `non_homogeneous_layers`: `decoder.layers.3.self_attention...`, and one tensor for all experts of a layer,
  `decoder.layers.3.mlp.experts.experts.linear_fc1.weight` [experts, ...];
* `singleton_local_shards`: every expert and both halves of a gated layer by themselves,
  `decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight_w` (gate) and `_v` (up).

In all of them a tensor is what one rank without any parallelism would hold. The fused qkv rows are ordered by groups,
and gate is above up. The vocabulary has the padding rows of the saving run.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from mrl.errors import ConfigError
from mrl.model import ModelSpec
from mrl.model.boxes import Box
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import Piece, Shard, source_shards

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+?)(\d*)")
_EXPERTS = "mlp.experts."


@dataclass(frozen=True)
class KeyPosition:
    """The position of a parameter: at `index` of the leading axes of tensor `key`, whose sizes are `lead`.

    For a gated layer it may be one half.
    """

    key: str
    index: tuple[int, ...]
    lead: tuple[int, ...]
    first_row: int  # of the parameter
    rows: int


def whole_parameters(model: ModelSpec) -> tuple[Shard, ...]:
    """Returns the parameters of a rank that has all of them, with global numbers of layers and experts.

    Raises ConfigError for a model with constants, gated delta attention, sinks or norms over all heads, whose form in
    torch_dist files is unknown here.
    """
    shards = source_shards(model, TrainLayout.build({"world_size": 1}, model), 0)
    if model.is_hybrid or model.wide_qk_norm or model.attention_sinks or any(shard.is_constant for shard in shards):
        raise ConfigError(
            f"{model.family} models are not converted from or to Megatron's torch_dist format; use Hugging Face files"
        )
    return shards


def written_position(shard: Shard, model: ModelSpec, separate_layers: bool) -> KeyPosition:
    """Returns the position to write: homogeneous, or with `separate_layers` Megatron's non-homogeneous one."""
    positions = _whole_positions(shard, model)
    if separate_layers and len(positions) > 1:
        return positions[1]
    return positions[0]


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor of a torch_dist checkpoint: parameters of equal shape, stacked along its leading axes."""

    lead: tuple[int, ...]
    shape: tuple[int, ...]  # of one of them
    padded: bool  # vocabulary padding may follow
    # index on the leading axes -> parameter, and its row where the shape begins
    members: Mapping[tuple[int, ...], tuple[Shard, int]]

    def fits(self, size: tuple[int, ...]) -> bool:
        """Tells whether a checkpoint's size of the tensor is possible."""
        if self.padded and len(size) == len(self.shape):
            return size[0] >= self.shape[0] and size[1:] == self.shape[1:]
        return size == (*self.lead, *self.shape)

    def pieces(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
        """Returns a stored block's shape, with leading axes and rows merged, and its pieces. Padding has none."""
        axes = len(self.lead)
        indices = list(
            product(*(range(start, start + size) for start, size in zip(offsets[:axes], sizes[:axes], strict=True)))
        )
        rows, *columns = sizes[axes:]
        pieces: list[Piece] = []
        for number, index in enumerate(indices):
            shard, first = self.members[index]
            begin = (first + offsets[axes], *offsets[axes + 1 :])
            window = Box(tuple((start, start + size) for start, size in zip(begin, sizes[axes:], strict=True)))
            to = (number * rows - begin[0], *(-start for start in begin[1:]))
            common = ((piece, window.intersect(piece.local_box)) for piece in shard.pieces)
            pieces += [
                Piece(p.hf_name, box.rebase(p.local_box, p.hf_box), box.shift(to))
                for p, box in common
                if box is not None
            ]
        return (len(indices) * rows, *columns), tuple(pieces)


def global_tensors(model: ModelSpec) -> dict[str, GlobalTensor]:
    """Returns every key that a checkpoint of the model may have."""
    members: dict[str, dict[tuple[int, ...], tuple[Shard, int]]] = {}
    facts: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool]] = {}
    for shard in whole_parameters(model):
        for position in _positions(shard, model):
            members.setdefault(position.key, {})[position.index] = (shard, position.first_row)
            facts[position.key] = (
                position.lead,
                (position.rows, *shard.local_shape[1:]),
                shard.megatron_name in _VOCABULARY,
            )
    return {key: GlobalTensor(*facts[key], of_key) for key, of_key in members.items()}


def _positions(shard: Shard, model: ModelSpec) -> Iterator[KeyPosition]:
    """Yields all positions that a parameter may have."""
    for position in _whole_positions(shard, model):
        yield position
        if position.key.endswith("pre_mlp_layernorm.weight"):
            # without Transformer Engine, Megatron names the norm before experts as if it were fused with a dense layer
            key = position.key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
            yield KeyPosition(key, position.index, position.lead, 0, position.rows)
    *_, last = _whole_positions(shard, model)
    if last.key.endswith("linear_fc1.weight") and not last.lead:
        half = shard.local_shape[0] // 2
        yield KeyPosition(f"{last.key}_w", (), (), 0, half)
        yield KeyPosition(f"{last.key}_v", (), (), half, half)


def _whole_positions(shard: Shard, model: ModelSpec) -> list[KeyPosition]:
    """Returns the homogeneous, the non-homogeneous and, for experts, the singleton position."""
    rows = shard.local_shape[0]
    match = _LAYER.fullmatch(shard.megatron_name)
    if match is None:
        return [KeyPosition(shard.megatron_name, (), (), 0, rows)]
    layer = int(match[1])
    rest = match[2]
    if not rest.startswith(_EXPERTS):
        stacked = KeyPosition(f"decoder.layers.{rest}", (layer,), (model.num_layers,), 0, rows)
        return [stacked, KeyPosition(f"decoder.layers.{layer}.{rest}", (), (), 0, rows)]
    expert = int(match[3])
    leaf = rest.removeprefix(_EXPERTS)
    experts = f"{_EXPERTS}experts."
    prefix = f"decoder.layers.{layer}."
    return [
        KeyPosition(f"decoder.layers.{experts}{leaf}", (layer, expert), (model.num_layers, model.num_experts), 0, rows),
        KeyPosition(f"{prefix}{experts}{leaf}", (expert,), (model.num_experts,), 0, rows),
        KeyPosition(f"{prefix}{experts}{expert}.{leaf}", (), (), 0, rows),
    ]
