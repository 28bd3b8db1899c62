"""A critic's weights as boxes of named tensors: the actor's weights, with a value head instead of the output layer.

The head has the name that transformers uses in token classification models.
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
    """Returns the critic's model without its head. Its embeddings are not tied to an output layer."""
    return replace(model, tie_word_embeddings=False)


def critic_count(model: ModelSpec) -> int:
    """Returns the number of a critic's parameters."""
    body = body_of(model)
    (output,) = weight_map(body).output.parts
    return parameter_count(body) - prod(output.shape) + model.hidden_size


def critic_shards(model: ModelSpec, layout: TrainLayout, rank: int) -> tuple[Shard, ...]:
    """Returns the parameters of one rank of a critic, as `source_shards` does for the actor. The head is complete on
    every tensor rank.
    """
    body = body_of(model)
    output = weight_map(body).output.megatron
    shards = source_shards(body, layout, rank)
    return tuple(_head(model, layout, rank, shard) if shard.megatron_name == output else shard for shard in shards)


def _head(model: ModelSpec, layout: TrainLayout, rank: int, output: Shard) -> Shard:
    """Returns the head that replaces the output layer's shard."""
    shape = (1, model.hidden_size)
    whole = Box.whole(shape)
    replicas = layout.dense_group(rank, "tp", "cp", "dp")
    return replace(output, local_shape=shape, pieces=(Piece(HEAD, whole, whole),), replicas=replicas)
