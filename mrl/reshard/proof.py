"""Checks a plan before any device or weight exists, by two methods that are independent of each other.

The proof takes the plan at the model's real shapes apart into single copies. It compares each with what ranks and
workers have. The rehearsal executes the same layouts on a small model. There every element is a different integer, so
that no error is hidden. It compares every worker with what the engine's own loader makes of full tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import inf, lcm
from time import perf_counter
from typing import Any

import numpy as np

from mrl.errors import ConfigError
from mrl.model import ModelSpec
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.megatron_shards import Shard
from mrl.model.quantised import with_scales
from mrl.model.quantised_shards import sent_shards
from mrl.model.trained_tower import TrainedTower
from mrl.model.vllm_loader import loaded
from mrl.model.vllm_parameters import TRANSPOSED, VOCABULARY_MULTIPLE, TargetParameter, target_parameters
from mrl.reshard.faults import ShardTable, shard_table, worker_faults
from mrl.reshard.messages import Copy
from mrl.reshard.plan import ReshardPlan, no_collection, plan_reshard
from mrl.units import MIB

Arrays = dict[str, np.ndarray]
Wire = dict[tuple[int, int, int], np.ndarray]  # (round, source, worker) -> the message's elements

_PROOF_SECONDS = 6.0  # after which only the workers are checked that are always checked
_SMALL_BLOCK = 2  # block size of words in a rehearsal: all of its matrices are cut into even numbers
# of a rehearsal; the first that is large enough is used
_BUDGETS = (*(4096 * 4**power for power in range(5)), 64 * MIB)


@dataclass(frozen=True)
class Proof:
    """What was proved about the plan at real shapes.

    Planning proves the templates, which covers all workers. Some workers were checked in full as well.
    """

    workers: int  # checked in full
    of_workers: int  # all workers of the plan
    copies: int
    fault: str | None
    seconds: float


@dataclass(frozen=True)
class PlanRehearsal:
    """What was found when the weights of a small model were moved between the same layouts."""

    layers: int
    experts: int
    rounds: int
    elements: int  # written and compared
    fault: str | None
    seconds: float


@dataclass(frozen=True)
class PlanVerdict:
    """The results of both checks of a plan."""

    proof: Proof
    rehearsal: PlanRehearsal

    @property
    def fault(self) -> str | None:
        """The first fault."""
        return self.proof.fault or self.rehearsal.fault


def verify(plan: ReshardPlan, every_worker: bool = False) -> PlanVerdict:
    """Proves and rehearses a plan. Takes about 15 seconds for 128 ranks, and memory for one worker's copies and
    KEPT_COPIES.

    With `every_worker` all workers are checked in full, however long it takes.
    """
    return PlanVerdict(prove(plan, inf if every_worker else _PROOF_SECONDS), rehearse(plan))


def prove(plan: ReshardPlan, seconds: float = _PROOF_SECONDS) -> Proof:
    """Checks one whole engine and the first worker of each other engine, then other workers until `seconds` have
    passed.
    """
    begun = perf_counter()
    workers = 0
    copies = 0
    fault = None
    shards_of, parameters_of, (always, rest) = _shards_of(plan), _parameters_of(plan), _order(plan.rollout)
    with no_collection():
        for worker in [*always, *rest]:
            if fault or (workers >= len(always) and perf_counter() - begun > seconds):
                break
            messages = list(plan.receives(worker))
            workers = workers + 1
            copies = copies + sum(len(message.copies) for message in messages)
            parameters = parameters_of(worker % plan.rollout.workers_per_engine)
            if first := next(worker_faults(parameters, messages, shards_of), None):
                fault = f"engine {plan.rollout.coords(worker).engine}, worker {worker}: {first}"
    return Proof(workers, plan.rollout.world_size, copies, fault, perf_counter() - begun)


def _order(rollout: RolloutLayout) -> tuple[list[int], list[int]]:
    """Returns workers that are always checked, and the others.

    Workers at the same position follow each other, because `_parameters_of` keeps one position.
    """
    size = rollout.workers_per_engine
    first = range(0, rollout.world_size, size)
    rest = [engine + position for position in range(1, size) for engine in first[1:]]
    return [*range(1, size), *first], rest


def _parameters_of(plan: ReshardPlan) -> Callable[[int], tuple[TargetParameter, ...]]:
    """Returns a function from a position inside an engine to its parameters, which are the same in every engine.

    The last position's parameters are kept.
    """

    @lru_cache(maxsize=1)
    def parameters_of(position: int) -> tuple[TargetParameter, ...]:
        return target_parameters(plan.model, plan.rollout, position, plan.dialect, plan.dtype, plan.fp8_block)

    return parameters_of


def _shards_of(plan: ReshardPlan) -> Callable[[int], ShardTable]:
    @cache
    def shards_of(rank: int) -> ShardTable:
        return shard_table(sent_shards(plan.model, plan.train, rank, plan.fp8_block))

    return shards_of


def rehearse(plan: ReshardPlan) -> PlanRehearsal:
    """Rehearses the plan with the same layouts, dialect and placement, and a budget that makes several rounds.

    Raises ConfigError when no budget is large enough.
    """
    begun = perf_counter()
    small = _small_plan(plan)
    fault = next(simulated_faults(small), None)
    blocks = [template.blocks[segment.block] for template in small.templates for segment in small.segments]
    elements = sum(grain.hf_box.volume for block in blocks for grain in block) * plan.rollout.num_engines
    return PlanRehearsal(
        small.model.num_layers, small.model.num_experts, small.num_rounds, elements, fault, perf_counter() - begun
    )


def _small_plan(plan: ReshardPlan) -> ReshardPlan:
    """Makes the plan of the small model. Raises ConfigError when even the largest budget is too small."""
    model, train = shrink(plan.model, plan.train, plan.rollout)
    arguments = {"dialect": plan.dialect, "dtype": plan.dtype, "topology": plan.topology}
    arguments["fp8_block"] = min(plan.fp8_block, _SMALL_BLOCK)
    *budgets, largest = _BUDGETS
    for budget in budgets:
        with suppress(ConfigError):
            return plan_reshard(model, train, plan.rollout, **arguments, budget_bytes=budget)
    return plan_reshard(model, train, plan.rollout, **arguments, budget_bytes=largest)


def shrink(model: ModelSpec, train: TrainLayout, rollout: RolloutLayout) -> tuple[ModelSpec, TrainLayout]:
    """Returns a small model of the same layout and divisibility, and its training layout.

    Each chunk has two layers and one of each kind, each shard two rows. On either side a rank has two experts, if the
    model has enough. Heads, padding of the vocabulary and uneven divisions stay.
    """
    kept = [_kept_layers(layers, model) for layers in _chunks(train)]
    layers = [layer for chunk in kept for layer in chunk]
    counts = iter(len(chunk) for chunk in kept)
    by_chunk = [[next(counts) for _ in range(train.pipeline)] for _ in range(train.virtual_pipeline)]
    small = replace(
        model,
        num_layers=len(layers),
        moe_layers=tuple(number for number, layer in enumerate(layers) if layer in model.moe_layers),
        hidden_size=4,
        head_dim=2,
        vocab_size=128 * lcm(train.tensor, rollout.tensor) - (-model.vocab_size % VOCABULARY_MULTIPLE),
        intermediate_size=2 * lcm(train.tensor, rollout.tensor),
        moe_intermediate_size=2 * lcm(train.expert_tensor, rollout.expert_tensor),
        shared_expert_intermediate_size=2 * lcm(train.tensor, rollout.tensor)
        if model.shared_expert_intermediate_size
        else 0,
        num_experts=_few_experts(model.num_experts, train.expert, rollout.expert) if model.is_moe else 0,
        trained_tower=_small_tower(model.trained_tower),
        **_small_latents(model),
        **_small_states(model, layers, lcm(train.tensor, rollout.tensor)),
    )
    return small, replace(train, chunk_layers=tuple(zip(*by_chunk, strict=True)))


def _small_tower(tower: TrainedTower | None) -> TrainedTower | None:
    """Returns a vision tower of the same tensors in two layers."""
    if tower is None:
        return None
    widths = {
        "hidden_size": 4,
        "intermediate_size": 3,
        "out_hidden_size": 4,
        "positions": min(tower.sizes.positions, 5),
    }
    return replace(tower, sizes=replace(tower.sizes, layers=2, patch=(1, 2, 2, 2), merged=2, **widths))


def _small_latents(model: ModelSpec) -> dict[str, int]:
    """Returns sizes of latent attention for a head_dim of 2. A latent of size 0 keeps it."""
    if not model.is_latent:
        return {}
    return {"kv_lora_rank": 3, "q_lora_rank": min(model.q_lora_rank, 3), "qk_rope_head_dim": 1, "v_head_dim": 2}


def _small_states(model: ModelSpec, layers: Sequence[int], tensor: int) -> dict[str, Any]:
    """Returns heads and sizes of gated delta attention in the kept `layers`. The number of values per key stays."""
    if not model.is_hybrid:
        return {}
    values_a_key = model.linear_num_value_heads // model.linear_num_key_heads
    return {
        "linear_layers": tuple(number for number, layer in enumerate(layers) if layer in model.linear_layers),
        "linear_num_key_heads": tensor,
        "linear_num_value_heads": tensor * values_a_key,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 2,
        "linear_conv_kernel_dim": 2,
    }


def _kept_layers(layers: range, model: ModelSpec) -> list[int]:
    """Returns the first and last layer of a chunk, and one of each remaining kind."""
    of_each_kind = {model.layer_kind(layer): layer for layer in (*layers, *layers[:1])}.values()
    return sorted({*layers[:1], *layers[-1:], *of_each_kind})


def _chunks(train: TrainLayout) -> list[range]:
    """Returns the layers of each chunk in model order."""
    return [
        train.stage_layers(stage, chunk) for chunk in range(train.virtual_pipeline) for stage in range(train.pipeline)
    ]


def _few_experts(num_experts: int, train: int, rollout: int) -> int:
    """Returns a small number of experts: at least two for each rank and worker, or one if a worker has only one.

    It divides evenly among the workers if the real number does.
    """
    even = num_experts % rollout == 0
    least = max(2 * train, min(2, num_experts // rollout) * rollout)
    count = -(-least // train) * train
    while (count % rollout == 0) != even:
        count += train
    return count


def simulated_faults(plan: ReshardPlan) -> Iterator[str]:
    """Executes the plan in memory and yields its faults. None: every worker has what the loader would give it.

    Holds the whole model in 4-byte integers once for each replica on both sides, so it is for small models.
    """
    hf = numbered(plan.model, plan.fp8_block)
    wire: Wire = {}
    for rank in range(plan.train.world_size):
        sent = sent_shards(plan.model, plan.train, rank, plan.fp8_block)
        shards = {(shard.vp_chunk, shard.megatron_name): fill(shard, hf) for shard in sent}
        for message in plan.sends(rank):
            wire[message.round, message.source, message.worker] = _packed(shards, message.copies)
    for position in range(plan.rollout.workers_per_engine):
        wanted = loaded(plan.model, plan.rollout, position, hf, transposed=plan.dialect == TRANSPOSED)
        for engine in range(plan.rollout.num_engines):
            worker = engine * plan.rollout.workers_per_engine + position
            yield from (
                f"engine {engine}, worker {worker}: {fault}" for fault in _arrival_faults(plan, worker, wanted, wire)
            )
    yield from (f"round {key[0]}: worker {key[2]} does not expect what rank {key[1]} sends" for key in wire)


def _arrival_faults(plan: ReshardPlan, worker: int, wanted: Arrays, wire: Wire) -> Iterator[str]:
    """Takes the worker's messages off the wire and compares the result."""
    parameters = {name: np.zeros_like(array) for name, array in wanted.items()}
    for message in plan.receives(worker):
        data = wire.pop((message.round, message.source, worker), None)
        if data is None:
            yield f"round {message.round}: rank {message.source} sends nothing to worker {worker}, which waits for it"
            return
        _unpack(parameters, message.copies, data)
    for name, array in wanted.items():
        if not np.array_equal(parameters[name], array):
            index = tuple(int(axis[0]) for axis in np.nonzero(parameters[name] != array))
            yield f"{name} has element {parameters[name][index]} at {index}, not {array[index]}"


def numbered(model: ModelSpec, fp8_block: int = 0) -> Arrays:
    """Returns a checkpoint in which every element, scales too, is a different number. 0 is reserved for padding."""
    arrays = {}
    number = 1
    for spec in with_scales(model, fp8_block):
        arrays[spec.name] = np.arange(number, number + spec.numel, dtype=np.int32).reshape(spec.shape)
        number += spec.numel
    return arrays


def fill(shard: Shard, hf: Arrays) -> np.ndarray:
    """Returns what a rank holds in one parameter."""
    local = np.zeros(shard.local_shape, dtype=np.int32)
    for piece in shard.pieces:
        local[piece.local_box.slices] = hf[piece.hf_name][piece.hf_box.slices]
    return local


def _packed(shards: dict[tuple[int, str], np.ndarray], copies: Sequence[Copy]) -> np.ndarray:
    """Returns a message as it travels."""
    return np.concatenate([shards[copy.vp_chunk, copy.source_name][copy.source_box.slices].ravel() for copy in copies])


def _unpack(parameters: Arrays, copies: Sequence[Copy], data: np.ndarray) -> None:
    """Writes a message into a worker's parameters."""
    start = 0
    for copy in copies:
        block = data[start : start + copy.hf_box.volume].reshape(copy.hf_box.shape)
        start += block.size
        target = parameters[copy.parameter][copy.target_box.slices]
        if copy.axes != tuple(range(target.ndim))[-len(copy.axes) :]:
            # dimensions of the parameter that the tensor does not have (the expert) come first
            others = [axis for axis in range(target.ndim) if axis not in copy.axes]
            target = target.transpose([*others, *copy.axes])
        target[...] = block
