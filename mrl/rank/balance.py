"""Splits rows into parts of equal cost, in pure numpy.

Data-parallel ranks get equal numbers of rows. Micro-batches may have a limit of tokens. Example: costs 8 7 6 5 4 0 and
two parts. Dealing back and forth gives 8 5 4 and 7 6 0. Then 8 is exchanged for 6.
"""

from collections.abc import Iterator

import numpy as np

_EXCHANGES_PER_PART = 64
_MOST_EXCHANGES = 4096
_WORTH = 1e-9  # relative to the heaviest part: a smaller gain does not count


def sequence_costs(lengths: np.ndarray, per_token: float, per_pair: float) -> np.ndarray:
    """Returns the cost of each sequence, float64 [rows].

    `per_token` is the cost of a token, `per_pair` of a pair that attention compares. A token attends to itself and to
    earlier ones, so n tokens have n (n + 1) / 2 pairs.
    """
    n = lengths.astype(np.float64)
    return per_token * n + per_pair * n * (n + 1) / 2


def imbalance(costs: np.ndarray, parts: list[np.ndarray]) -> float:
    """Returns how much more than the mean the heaviest part costs, as a share of the mean."""
    sums = np.array([costs[rows].sum() for rows in parts])
    return float(sums.max() / sums.mean() - 1.0)


def balanced_parts(costs: np.ndarray, parts: int, enough: float = 0.0) -> list[np.ndarray]:
    """Returns row numbers of each part, ascending. Counts differ by at most one, so with fewer rows than parts some are
    empty.

    Rows are dealt by falling cost, back and forth. Then the heaviest part exchanges rows with lighter ones while that
    reduces its cost. It stops when the heaviest part costs at most `enough`.
    """
    members = _dealt(np.argsort(-costs, kind="stable"), parts)
    sums = np.array([costs[rows].sum() for rows in members])
    for _ in range(min(_EXCHANGES_PER_PART * parts, _MOST_EXCHANGES)):
        if sums.max() <= enough or not _lighten_heaviest(costs, members, sums):
            break
    return [np.sort(rows) for rows in members]


def _dealt(order: np.ndarray, parts: int) -> list[np.ndarray]:
    """Deals rows back and forth: 0 1 2, 2 1 0, 0 1 2, ..."""
    table = np.full((-(-len(order) // parts), parts), -1, np.int64)
    table.ravel()[: len(order)] = order
    table[1::2] = table[1::2, ::-1].copy()
    return [rows[rows >= 0] for rows in table.T]


def _lighten_heaviest(costs: np.ndarray, members: list[np.ndarray], sums: np.ndarray) -> bool:
    """Exchanges one row between the heaviest part and the lightest that offers an exchange.

    Changes `members` and `sums`. Returns False if no part offers one.
    """
    heavy = int(sums.argmax())
    for light in _from_the_lightest(sums):
        if light == heavy or not len(members[light]):
            continue
        i, j, gain = _best_exchange(costs[members[heavy]], costs[members[light]], sums[heavy] - sums[light])
        if gain > _WORTH * sums[heavy]:
            members[heavy][i], members[light][j] = members[light][j], members[heavy][i]
            sums[heavy] -= gain
            sums[light] += gain
            return True
    return False


def _from_the_lightest(sums: np.ndarray) -> Iterator[int]:
    yield int(sums.argmin())  # it nearly always offers one, so sorting is rarely needed
    yield from np.argsort(sums, kind="stable").tolist()[1:]


def _best_exchange(heavy: np.ndarray, light: np.ndarray, gap: float) -> tuple[int, int, float]:
    """Returns the two rows to exchange, and the gain of the heavy part.

    The gain is as near as possible to half of the gap, and 0 if no exchange lies within it.
    """
    order = np.argsort(light, kind="stable")
    ranked = light[order]
    after = np.searchsorted(ranked, heavy - gap / 2)
    near = np.stack([np.maximum(after - 1, 0), np.minimum(after, len(light) - 1)], axis=1)
    gains = heavy[:, None] - ranked[near]
    off = np.where((gains > 0) & (gains < gap), np.abs(gains - gap / 2), np.inf)
    i, side = np.unravel_index(off.argmin(), off.shape)
    alike = np.searchsorted(ranked, ranked[near[i, side]])  # the first one of equal cost
    return int(i), int(order[alike]), float(gains[i, side]) if np.isfinite(off[i, side]) else 0.0


# ---------------------------------------------------------------- under a limit of tokens


def first_fit(lengths: np.ndarray, limit: int) -> list[np.ndarray]:
    """Returns few parts of at most `limit` tokens. Rows go by falling length into the first part with room."""
    free = np.full(len(lengths), limit, np.int64)
    of_row = np.zeros(len(lengths), np.int64)
    for row in np.argsort(-lengths, kind="stable"):
        of_row[row] = part = int((free >= lengths[row]).argmax())
        free[part] -= lengths[row]
    return [np.flatnonzero(of_row == part) for part in range(int(of_row.max(initial=-1)) + 1)]


def even_fit(lengths: np.ndarray, costs: np.ndarray, limit: int, parts: int) -> list[np.ndarray] | None:
    """Returns parts of at most `limit` tokens and similar cost, or None if the method finds none.

    Rows go by falling cost into the cheapest part with room.
    """
    free = np.full(parts, limit, np.int64)
    sums = np.zeros(parts)
    of_row = np.zeros(len(lengths), np.int64)
    for row in np.argsort(-costs, kind="stable"):
        part = int(np.where(free >= lengths[row], sums, np.inf).argmin())
        if free[part] < lengths[row]:
            return None
        of_row[row] = part
        free[part] -= lengths[row]
        sums[part] += costs[row]
    return [np.flatnonzero(of_row == part) for part in range(parts)]


def without_empty(members: list[np.ndarray], costs: np.ndarray, parts: int) -> list[np.ndarray]:
    """Fills empty parts so that there are `parts` non-empty ones.

    Each takes the cheapest row of the costliest part that has more than one row.
    """
    members = [*members, *[np.zeros(0, np.int64)] * (parts - len(members))]
    for empty in (number for number, rows in enumerate(members) if not len(rows)):
        sums = [costs[rows].sum() if len(rows) > 1 else -1.0 for rows in members]
        giver = int(np.argmax(sums))
        if sums[giver] < 0:
            break
        at = int(costs[members[giver]].argmin())
        members[empty], members[giver] = members[giver][at : at + 1], np.delete(members[giver], at)
    return members
