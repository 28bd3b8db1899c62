"""A schedule of a weight sync without any search: what that of mrl/reshard/schedule.py is held against.

Workers stand evenly over the model in their order and walk it freely (no strides are tried, no lockstep). Within a
round, worker after worker and grain after grain, whichever of the nearest replicas has least to send in that round
sends.
"""

from dataclasses import replace

import numpy as np

from mrl.reshard.plan import ReshardPlan
from mrl.reshard.schedule import Loads, RoundSchedule
from mrl.reshard.streams import TIERS, rotated


def with_simple_schedule(plan: ReshardPlan) -> ReshardPlan:
    """The same bytes in at least as many rounds, none over the budget."""
    rounds = plan.num_rounds
    while True:
        schedule, loads = _simple(plan, rounds)
        if loads.largest <= plan.budget_bytes:
            return replace(plan, schedule=schedule, loads=loads)
        rounds += 1


def _simple(plan: ReshardPlan, rounds: int) -> tuple[RoundSchedule, Loads]:
    streams, workers = plan.schedule.streams, plan.rollout.world_size
    sent = np.zeros((len(TIERS), rounds, plan.train.world_size), dtype=np.int64)
    received = np.zeros((len(TIERS), rounds, workers), dtype=np.int64)
    starts, choices = [], []
    for worker in range(workers):
        stream = streams[worker % len(streams)]
        start = stream.start_near(worker, workers, lockstep=False)
        _, round_of = stream.travel(start, rounds, lockstep=False)
        candidates = stream.candidates(plan.devices, worker)
        chosen = np.zeros(len(round_of), dtype=np.int16)
        grains = zip(
            rotated(stream.holder_set, start).tolist(),
            rotated(stream.nbytes, start).tolist(),
            round_of.tolist(),
            strict=True,
        )
        for row, (held_by, nbytes, number) in enumerate(grains):
            ranks = candidates.ranks[held_by, : candidates.count[held_by]]
            least = int(sent[:, number, ranks].sum(axis=0).argmin())
            tier = candidates.tier[held_by]
            sent[tier, number, ranks[least]] += nbytes
            received[tier, number, worker] += nbytes
            chosen[row] = candidates.numbers[held_by, least]
        starts.append(start)
        choices.append(chosen)
    return RoundSchedule(streams, tuple(starts), False, rounds, tuple(choices)), Loads(sent, received)
