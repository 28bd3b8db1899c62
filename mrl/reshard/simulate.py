"""A plan carried out in memory with numbered elements: every element of the model is an integer of its own, so that no mistake hides.

What a worker should end up with is said anew here, as vLLM 0.32's loader slices full tensors, without the boxes that the plan is made of.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import lcm

import numpy as np

from mrl.model import ModelSpec, tensor_specs
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.megatron_shards import Shard, source_shards
from mrl.model.vllm_parameters import TRANSPOSED
from mrl.reshard.plan import Copy, ReshardPlan

Arrays = dict[str, np.ndarray]


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


def loaded(model: ModelSpec, rollout: RolloutLayout, worker: int, hf: Arrays, transposed: bool) -> Arrays:
    """The parameters of one worker after vLLM's own loader has seen all full tensors; `transposed`: as vllm-ascend stores experts."""
    tp, size = rollout.coords(worker).tp, rollout.tensor
    found: Arrays = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in hf:
            rows = -(-len(hf[name]) // 64) * 64
            words = np.zeros((rows, model.hidden_size), np.int32)
            words[: len(hf[name])] = hf[name]
            found[name] = _cut(words, size, tp)
    found["model.norm.weight"] = hf["model.norm.weight"]
    for layer in range(model.num_layers):
        at = f"model.layers.{layer}."
        _load_attention(found, hf, at, model.num_key_value_heads, tp, size)
        for leaf in ("input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate.weight", "mlp.shared_expert_gate.weight"):
            if at + leaf in hf:
                found[at + leaf] = hf[at + leaf]
        for mlp in (f"{at}mlp.", f"{at}mlp.shared_expert."):
            if f"{mlp}gate_proj.weight" in hf:
                halves = [_cut(hf[f"{mlp}{part}_proj.weight"], size, tp) for part in ("gate", "up")]
                found[f"{mlp}gate_up_proj.weight"] = np.concatenate(halves)
                found[f"{mlp}down_proj.weight"] = _cut(hf[f"{mlp}down_proj.weight"], size, tp, axis=1)
        if layer in model.moe_layers:
            _load_experts(found, hf, f"{at}mlp.experts.", model.num_experts, rollout, worker, transposed)
    return found


def _load_attention(found: Arrays, hf: Arrays, at: str, kv_heads: int, tp: int, size: int) -> None:
    attention = f"{at}self_attn."
    for leaf in ("weight", "bias"):
        if f"{attention}q_proj.{leaf}" in hf:
            q, k, v = (hf[f"{attention}{part}_proj.{leaf}"] for part in "qkv")
            copies = max(1, size // kv_heads)  # of each key/value head, on neighbouring ranks
            heads = [_cut(x, size // copies, tp // copies) for x in (k, v)]
            found[f"{attention}qkv_proj.{leaf}"] = np.concatenate([_cut(q, size, tp), *heads])
    found[f"{attention}o_proj.weight"] = _cut(hf[f"{attention}o_proj.weight"], size, tp, axis=1)
    for norm in ("q_norm.weight", "k_norm.weight"):
        if attention + norm in hf:
            found[attention + norm] = hf[attention + norm]


def _load_experts(found: Arrays, hf: Arrays, at: str, num_experts: int, rollout: RolloutLayout, worker: int, transposed: bool) -> None:
    flat, group = worker % rollout.workers_per_engine, rollout.workers_per_engine
    spread = rollout.expert > 1
    mine = np.array_split(np.arange(num_experts), group)[flat] if spread else range(num_experts)
    parts, part = (1, 0) if spread else (group, flat)
    w13, w2 = [], []
    for expert in mine:
        gate, up, down = (hf[f"{at}{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        w13.append(np.concatenate([_cut(gate, parts, part), _cut(up, parts, part)]))
        w2.append(_cut(down, parts, part, axis=1))
    for leaf, blocks in (("w13_weight", w13), ("w2_weight", w2)):
        stacked = np.stack(blocks)
        found[f"{at}routed_experts.{leaf}"] = stacked.transpose(0, 2, 1) if transposed else stacked


def _cut(array: np.ndarray, parts: int, index: int, axis: int = 0) -> np.ndarray:
    """One of equal parts along an axis."""
    size, rest = divmod(array.shape[axis], parts)
    if rest:
        raise ValueError(f"{array.shape} cannot be cut into {parts} parts along {axis}")
    return array[(slice(None),) * axis + (slice(index * size, (index + 1) * size),)]


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
        vocab_size=128 * lcm(train.tensor, rollout.tensor) - (-model.vocab_size % 64),
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
