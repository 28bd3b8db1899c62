"""Orders an engine's workers on the devices of a node, so that each finds most weights on its device.

Actor and engine share the devices, and a weight sync copies within the device what the rank there holds. Example: the
actor has tensor parallelism 2, an engine 4. Ranks 0 and 2 hold the first half of every matrix, ranks 1 and 3 the
second. Workers 0 and 1 need the quarters of the first half. So workers 0 to 3 get devices 0, 2, 1, 3.

What a worker needs and a rank holds are intervals: of experts, of rows or columns within an expert, and of rows or
columns outside the experts. Their overlap is counted in integers. Experts come first, because they are nearly all bytes
of a mixture. Other overlaps decide between equal ones. Without a gain the usual order stays.
"""

from collections.abc import Sequence

from mrl.model.device_grid import Place
from mrl.model.layout import RolloutLayout, TrainLayout


def near_places(
    train: TrainLayout,
    rollout: RolloutLayout,
    ranks: Sequence[Place],
    workers: Sequence[Place],
    ascending: bool = False,
) -> tuple[Place, ...]:
    """Returns the places of all workers in worker order, with those of one engine permuted within each node.

    `ascending`: devices of one tensor group keep their order. A process of Ascend sees the devices of
    ASCEND_RT_VISIBLE_DEVICES, which CANN accepts in ascending order only. Data-parallel ranks are processes of their
    own and are exchanged as a whole.
    """
    rank_at = {place: rank for rank, place in enumerate(ranks)}
    together = 1
    if ascending:
        together = rollout.tensor

    def gain(unit: range, at: range) -> int:
        pairs = ((worker, rank_at.get(workers[place])) for worker, place in zip(unit, at, strict=True))
        return sum(_overlap(train, rollout, rank, worker) for worker, rank in pairs if rank is not None)

    places = list(workers)
    for units in _exchangeable(rollout, workers, together):
        scale = len(units) + 1  # keeping the place of a unit is worth less than any overlap
        order = best_assignment([[gain(unit, at) * scale + (unit == at) for at in units] for unit in units])
        for unit, column in zip(units, order, strict=True):
            places[unit.start : unit.stop] = [workers[at] for at in units[column]]
    return tuple(places)


def _exchangeable(rollout: RolloutLayout, workers: Sequence[Place], together: int) -> list[list[range]]:
    """Returns groups of units of `together` workers that may be exchanged: of one engine, on one node."""
    groups: dict[tuple[int, int], list[range]] = {}
    for first in range(0, len(workers), together):
        groups.setdefault((rollout.coords(first).engine, workers[first].node), []).append(
            range(first, first + together)
        )
    return list(groups.values())


def _overlap(train: TrainLayout, rollout: RolloutLayout, rank: int, worker: int) -> int:
    """Returns how much the rank holds of what the worker needs; experts dominate."""
    expert = train.expert_coords(rank)
    dense = train.dense_coords(rank)
    ep, etp = rollout.expert_coords(worker)
    whole = _common(expert.ep, train.expert, ep, rollout.expert)
    inside = _common(expert.etp, train.expert_tensor, etp, rollout.expert_tensor)
    outside = _common(dense.tp, train.tensor, rollout.coords(worker).tp, rollout.tensor)
    return whole * inside * (rollout.world_size * train.tensor * rollout.tensor + 1) + outside


def _common(first: int, of_first: int, second: int, of_second: int) -> int:
    """Returns the overlap of part `first` of `of_first` and part `second` of `of_second`, in 1 / (of_first x
    of_second).
    """
    return max(0, min((first + 1) * of_second, (second + 1) * of_first) - max(first * of_second, second * of_first))


def best_assignment(gains: Sequence[Sequence[int]]) -> list[int]:
    """Returns the column of each row that maximises the sum of gains. `gains`: [n, n].

    The Hungarian method with potentials: each row searches for the cheapest way to displace earlier ones (Jonker and
    Volgenant, Computing 38, 1987). n^3 steps.
    """
    size = len(gains)
    row_price = [0] * (size + 1)
    column_price = [0] * (size + 1)
    row_of = [0] * (size + 1)  # of each column; both count from 1, and column 0 holds the searching row
    for row in range(1, size + 1):
        row_of[0], column = row, 0
        least = [None] * (size + 1)
        before = [0] * (size + 1)
        used = [False] * (size + 1)
        while row_of[column]:
            used[column] = True
            current = row_of[column]
            step = None
            following = 0
            for other in range(1, size + 1):
                if used[other]:
                    continue
                cost = -gains[current - 1][other - 1] - row_price[current] - column_price[other]
                if least[other] is None or cost < least[other]:
                    least[other], before[other] = cost, column
                if step is None or least[other] < step:
                    step = least[other]
                    following = other
            for other in range(size + 1):
                if used[other]:
                    row_price[row_of[other]] += step
                    column_price[other] -= step
                elif least[other] is not None:
                    least[other] -= step
            column = following
        while column:
            row_of[column] = row_of[before[column]]
            column = before[column]
    columns = [0] * size
    for column in range(1, size + 1):
        columns[row_of[column] - 1] = column - 1
    return columns
