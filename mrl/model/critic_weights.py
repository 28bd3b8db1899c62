"""A critic's weights: the actor's, with a value head in place of the output layer, as boxes of named tensors.

The head has the name that transformers gives it in its models for the classification of tokens.
"""

from dataclasses import replace
from math import prod

from mrl.model.boxes import Box
from mrl.model.hf_config import ModelSpec
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import Piece, Shard, source_shards
from mrl.model.registry import weight_map
from mrl.model.tensors import parameter_count

HEAD = "score.weight"  # [1, hidden]


def body_of(model: ModelSpec) -> ModelSpec:
    """The model as a critic has it beside its head: embeddings belong to no output layer."""
    return replace(model, tie_word_embeddings=False)


def critic_count(model: ModelSpec) -> int:
    """Parameters of a critic."""
    body = body_of(model)
    (output,) = weight_map(body).output.parts
    return parameter_count(body) - prod(output.shape) + model.hidden_size


def critic_shards(model: ModelSpec, layout: TrainLayout, rank: int) -> tuple[Shard, ...]:
    """The parameters of one rank of a critic, as `source_shards` has the actor's. The head is whole on tensor ranks."""
    body = body_of(model)
    output = weight_map(body).output.megatron
    shards = source_shards(body, layout, rank)
    return tuple(_head(model, layout, rank, shard) if shard.megatron_name == output else shard for shard in shards)


def _head(model: ModelSpec, layout: TrainLayout, rank: int, output: Shard) -> Shard:
    """The head in place of the output layer's shard."""
    shape = (1, model.hidden_size)
    whole = Box.whole(shape)
    replicas = layout.dense_group(rank, "tp", "cp", "dp")
    return replace(output, local_shape=shape, pieces=(Piece(HEAD, whole, whole),), replicas=replicas)
