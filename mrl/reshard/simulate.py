"""A plan carried out in memory with numbered elements: every element of the model is an integer of its own, so that no mistake hides.

What a worker should end up with is asked of a second description, which knows nothing of the boxes that the plan is made of.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import lcm

import numpy as np

from mrl.model import ModelSpec, tensor_specs
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.megatron_shards import Shard, source_shards
from mrl.model.vllm_loader import Arrays, loaded
from mrl.model.vllm_parameters import TRANSPOSED, VOCABULARY_MULTIPLE
from mrl.reshard.plan import Copy, ReshardPlan


def rehearse(plan: ReshardPlan) -> Iterator[str]:
    """Faults, as sentences; none when every worker ends up with what vLLM's loader would give it.

    Holds the whole model in 4-byte integers once a replica on either side: for small models.
    """
    hf = numbered(plan.model)
    wire: dict[tuple[int, int, int], np.ndarray] = {}
    for rank in range(plan.train.world_size):
        shards = {(s.vp_chunk, s.megatron_name): fill(s, hf) for s in source_shards(plan.model, plan.train, rank)}
        for message in plan.sends(rank):
            wire[message.round, message.source, message.worker] = packed(shards, message.copies)
    for place in range(plan.rollout.workers_per_engine):  # what stands at one place of every engine is alike
        wanted = loaded(plan.model, plan.rollout, place, hf, transposed=plan.dialect == TRANSPOSED)
        for engine in range(plan.rollout.num_engines):
            yield from _worker_faults(plan, engine, engine * plan.rollout.workers_per_engine + place, wanted, wire)
    yield from (f"round {at[0]}: worker {at[2]} does not expect what rank {at[1]} sends" for at in wire)


def _worker_faults(
    plan: ReshardPlan, engine: int, worker: int, wanted: Arrays, wire: dict[tuple[int, int, int], np.ndarray]
) -> Iterator[str]:
    """Takes the worker's messages off the wire, and compares."""
    held = {name: np.zeros_like(array) for name, array in wanted.items()}
    for message in plan.receives(worker):
        data = wire.pop((message.round, message.source, worker), None)
        if data is None:
            yield f"round {message.round}: rank {message.source} sends nothing to worker {worker}, which waits for it"
            return
        unpack(held, message.copies, data)
    for name, array in wanted.items():
        if not np.array_equal(held[name], array):
            at = tuple(int(axis[0]) for axis in np.nonzero(held[name] != array))
            yield f"engine {engine}, worker {worker}: {name} has element {held[name][at]} at {at}, not {array[at]}"


def numbered(model: ModelSpec) -> Arrays:
    """A checkpoint in which every element is a number of its own; 0 is kept for padding."""
    arrays, number = {}, 1
    for spec in tensor_specs(model):
        arrays[spec.name] = np.arange(number, number + spec.numel, dtype=np.int32).reshape(spec.shape)
        number += spec.numel
    return arrays


def fill(shard: Shard, hf: Arrays) -> np.ndarray:
    """What a rank holds in one parameter."""
    local = np.zeros(shard.local_shape, dtype=np.int32)
    for piece in shard.pieces:
        local[piece.local_box.slices] = hf[piece.hf_name][piece.hf_box.slices]
    return local


def packed(shards: dict[tuple[int, str], np.ndarray], copies: Sequence[Copy]) -> np.ndarray:
    """A message as it travels."""
    return np.concatenate([shards[copy.vp_chunk, copy.megatron_name][copy.source_box.slices].ravel() for copy in copies])


def unpack(held: Arrays, copies: Sequence[Copy], data: np.ndarray) -> None:
    """Writes a message into a worker's parameters."""
    at = 0
    for copy in copies:
        block = data[at : at + copy.hf_box.volume].reshape(copy.hf_box.shape)
        at += block.size
        place = held[copy.parameter][copy.target_box.slices]
        if copy.axes != tuple(range(place.ndim))[-len(copy.axes) :]:
            # dimensions of the parameter that the tensor has not (the expert) come first
            rest = [axis for axis in range(place.ndim) if axis not in copy.axes]
            place = place.transpose([*rest, *copy.axes])
        place[...] = block


def shrink(model: ModelSpec, train: TrainLayout, rollout: RolloutLayout) -> tuple[ModelSpec, TrainLayout]:
    """A model of the same layout and divisibility, and the training layout for it.

    Two layers a chunk (and one of each kind), two experts a rank on either side (where the model has as many), two rows a shard; heads,
    padding of the vocabulary and what is uneven stay.
    """
    kept = [_kept(layers, model.moe_layers) for layers in _chunks(train)]
    layers = [layer for chunk in kept for layer in chunk]
    counts = iter(len(chunk) for chunk in kept)
    by_chunk = [[next(counts) for _ in range(train.pipeline)] for _ in range(train.virtual_pipeline)]
    small = replace(
        model,
        num_layers=len(layers),
        moe_layers=tuple(n for n, layer in enumerate(layers) if layer in model.moe_layers),
        hidden_size=4,
        head_dim=2,
        vocab_size=128 * lcm(train.tensor, rollout.tensor) - (-model.vocab_size % VOCABULARY_MULTIPLE),
        intermediate_size=2 * lcm(train.tensor, rollout.tensor),
        moe_intermediate_size=2 * lcm(train.expert_tensor, rollout.expert_tensor),
        shared_expert_intermediate_size=2 * lcm(train.tensor, rollout.tensor) if model.shared_expert_intermediate_size else 0,
        num_experts=_few_experts(model.num_experts, train.expert, rollout.expert) if model.is_moe else 0,
    )
    return small, replace(train, chunk_layers=tuple(zip(*by_chunk, strict=True)))


def _kept(layers: range, moe_layers: Collection[int]) -> list[int]:
    """First and last layer of a chunk, and one of the kind that neither is."""
    of_each_kind = {layer in moe_layers: layer for layer in (*layers, *layers[:1])}.values()
    return sorted({*layers[:1], *layers[-1:], *of_each_kind})


def _chunks(train: TrainLayout) -> list[range]:
    """Layers of each chunk in model order."""
    return [train.stage_layers(pp, vp) for vp in range(train.virtual_pipeline) for pp in range(train.pipeline)]


def _few_experts(num_experts: int, train: int, rollout: int) -> int:
    """At least two a training rank and a worker, or the one that a worker has; as even or uneven over the workers as the real number."""
    even, least = num_experts % rollout == 0, max(2 * train, min(2, num_experts // rollout) * rollout)
    count = -(-least // train) * train
    while (count % rollout == 0) != even:
        count += train
    return count
