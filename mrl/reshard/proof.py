"""Is a plan right, before there is a device or a weight? Two answers that do not lean on each other.

The proof takes the plan at the model's real shapes apart into single copies and holds each against what ranks and workers have. The
rehearsal carries out the same layouts on a shrunken model whose elements are numbered, and looks at every element.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from time import perf_counter

from mrl.errors import ConfigError
from mrl.model.layout import RolloutLayout
from mrl.model.megatron_shards import source_shards
from mrl.model.vllm_parameters import TargetParameter, target_parameters
from mrl.reshard.faults import ShardTable, shard_table, worker_faults
from mrl.reshard.plan import MIB, ReshardPlan, plan_reshard
from mrl.reshard.simulate import rehearse, shrink
from mrl.reshard.streams import ITEM_BYTES

_PROOF_SECONDS = 6.0  # after which no worker is taken apart beyond those that always are
_MIN_BUDGET = 4096


@dataclass(frozen=True)
class Proof:
    """Of the plan at real shapes. All workers are covered by the proof of their templates, which planning includes; some were in full."""

    workers: int  # in full
    of_workers: int  # that there are
    copies: int
    fault: str | None
    seconds: float


@dataclass(frozen=True)
class Rehearsal:
    """Of the same layouts on a shrunken model."""

    layers: int
    experts: int
    rounds: int
    elements: int  # that were written and looked at
    fault: str | None
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """Both answers."""

    proof: Proof
    rehearsal: Rehearsal

    @property
    def fault(self) -> str | None:
        """The first fault."""
        return self.proof.fault or self.rehearsal.fault


def verify(plan: ReshardPlan) -> Verdict:
    """Takes about 15 seconds for 128 ranks, and memory for one worker's copies and those that the plan keeps (`plan.KEPT_COPIES`)."""
    return Verdict(prove(plan), rehearse_small(plan))


def prove(plan: ReshardPlan, seconds: float = _PROOF_SECONDS) -> Proof:
    """Worker after worker: one whole engine and the first worker of each other engine in any case, the rest until the time is up."""
    begun, workers, copies, fault = perf_counter(), 0, 0, None
    shards_of, wanted_at, (always, rest) = _shards_of(plan), _targets_of(plan), _order(plan.rollout)
    with _no_collection():
        for worker in [*always, *rest]:
            if fault or (workers >= len(always) and perf_counter() - begun > seconds):
                break
            messages = list(plan.receives(worker))
            workers, copies = workers + 1, copies + sum(len(message.copies) for message in messages)
            if found := next(worker_faults(wanted_at(worker % plan.rollout.workers_per_engine), messages, shards_of), None):
                fault = f"engine {plan.rollout.coords(worker).engine}, worker {worker}: {found}"
    return Proof(workers, plan.rollout.world_size, copies, fault, perf_counter() - begun)


def _order(rollout: RolloutLayout) -> tuple[list[int], list[int]]:
    """Workers that are always taken apart, and the others; those at one place of their engines follow each other, see `_targets_of`."""
    size = rollout.workers_per_engine
    first = range(0, rollout.world_size, size)
    rest = [engine + place for place in range(1, size) for engine in first[1:]]
    return [*range(1, size), *first], rest


def _targets_of(plan: ReshardPlan) -> Callable[[int], tuple[TargetParameter, ...]]:
    """By place inside an engine: every engine wants the same. The last place's are kept."""

    @lru_cache(maxsize=1)
    def targets_of(place: int) -> tuple[TargetParameter, ...]:
        return target_parameters(plan.model, plan.rollout, place, plan.dialect, plan.dtype)

    return targets_of


@contextmanager
def _no_collection() -> Iterator[None]:
    """Copies refer to no one that refers to them: looking for cycles among hundreds of thousands would double the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _shards_of(plan: ReshardPlan) -> Callable[[int], ShardTable]:
    @cache
    def shards_of(rank: int) -> ShardTable:
        return shard_table(source_shards(plan.model, plan.train, rank))

    return shards_of


def rehearse_small(plan: ReshardPlan) -> Rehearsal:
    """The same layouts, dialect and placement; a budget that makes several rounds. Raises ConfigError when no budget will do."""
    begun = perf_counter()
    model, train = shrink(plan.model, plan.train, plan.rollout)
    small, refusal = None, None
    for budget in _budgets():
        try:
            small = plan_reshard(
                model, train, plan.rollout, dialect=plan.dialect, dtype=plan.dtype, topology=plan.topology, budget_bytes=budget
            )
        except ConfigError as error:
            refusal = error
            continue
        break
    if small is None:
        raise refusal
    fault = next(rehearse(small), None)
    elements = (small.bytes_moved + small.bytes_local) // ITEM_BYTES[plan.dtype]
    return Rehearsal(model.num_layers, model.num_experts, small.num_rounds, elements, fault, perf_counter() - begun)


def _budgets() -> Iterator[int]:
    budget = _MIN_BUDGET
    while budget <= MIB:
        yield budget
        budget *= 4
    yield 64 * MIB
