"""Rows into parts of equal cost: over data-parallel ranks in equal numbers, over micro-batches also under a limit of
tokens.

Pure numpy. An example with costs 8 7 6 5 4 0 and two parts: dealt back and forth 8 5 4 and 7 6 0, then 8 exchanged for
6.
"""

from collections.abc import Iterator

import numpy as np

_EXCHANGES_PER_PART = 64
_MOST_EXCHANGES = 4096
_WORTH = 1e-9  # of the heaviest part: a smaller gain is none


def sequence_costs(lengths: np.ndarray, per_token: float, per_pair: float) -> np.ndarray:
    """Cost of each sequence, float64 [rows]: `per_token` for each of its tokens and `per_pair` for each pair that
    attention compares.

    A token attends to itself and what stands before it, so a sequence of n tokens has n (n + 1) / 2 pairs.
    """
    n = lengths.astype(np.float64)
    return per_token * n + per_pair * n * (n + 1) / 2


def imbalance(costs: np.ndarray, parts: list[np.ndarray]) -> float:
    """How much more than the mean the heaviest part costs, as a share of the mean."""
    sums = np.array([costs[rows].sum() for rows in parts])
    return float(sums.max() / sums.mean() - 1.0)


def balanced_parts(costs: np.ndarray, parts: int, enough: float = 0.0) -> list[np.ndarray]:
    """Row numbers of each part, ascending. Counts differ by at most one, so with fewer rows than parts some are empty.

    Rows are dealt by falling cost, back and forth. Then the heaviest part exchanges a row with a lighter one as long as
    that lightens it, until it costs no more than `enough`.
    """
    members = _dealt(np.argsort(-costs, kind="stable"), parts)
    sums = np.array([costs[rows].sum() for rows in members])
    for _ in range(min(_EXCHANGES_PER_PART * parts, _MOST_EXCHANGES)):
        if sums.max() <= enough or not _lighten_heaviest(costs, members, sums):
            break
    return [np.sort(rows) for rows in members]


def _dealt(order: np.ndarray, parts: int) -> list[np.ndarray]:
    """Back and forth: 0 1 2, 2 1 0, 0 1 2, ..."""
    table = np.full((-(-len(order) // parts), parts), -1, np.int64)
    table.ravel()[: len(order)] = order
    table[1::2] = table[1::2, ::-1].copy()
    return [rows[rows >= 0] for rows in table.T]


def _lighten_heaviest(costs: np.ndarray, members: list[np.ndarray], sums: np.ndarray) -> bool:
    """One exchange between the heaviest part and the lightest that offers one; False when none does.

    Changes `members` and `sums`.
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
    yield int(sums.argmin())  # it nearly always offers one, without sorting all
    yield from np.argsort(sums, kind="stable").tolist()[1:]


def _best_exchange(heavy: np.ndarray, light: np.ndarray, gap: float) -> tuple[int, int, float]:
    """Which to exchange, and what the heavy part gains: as near as can be to half of the gap,
    0 where nothing lies within it.
    """
    order = np.argsort(light, kind="stable")
    ranked = light[order]
    after = np.searchsorted(ranked, heavy - gap / 2)
    near = np.stack([np.maximum(after - 1, 0), np.minimum(after, len(light) - 1)], axis=1)
    gains = heavy[:, None] - ranked[near]
    off = np.where((gains > 0) & (gains < gap), np.abs(gains - gap / 2), np.inf)
    i, side = np.unravel_index(off.argmin(), off.shape)
    alike = np.searchsorted(ranked, ranked[near[i, side]])  # the first of those that cost the same
    return int(i), int(order[alike]), float(gains[i, side]) if np.isfinite(off[i, side]) else 0.0


# ---------------------------------------------------------------- under a limit of tokens


def first_fit(lengths: np.ndarray, limit: int) -> list[np.ndarray]:
    """Few parts of at most `limit` tokens: rows by falling length, each into the first part that has room."""
    free = np.full(len(lengths), limit, np.int64)
    of_row = np.zeros(len(lengths), np.int64)
    for row in np.argsort(-lengths, kind="stable"):
        of_row[row] = part = int((free >= lengths[row]).argmax())
        free[part] -= lengths[row]
    return [np.flatnonzero(of_row == part) for part in range(int(of_row.max(initial=-1)) + 1)]


def even_fit(lengths: np.ndarray, costs: np.ndarray, limit: int, parts: int) -> list[np.ndarray] | None:
    """Parts of at most `limit` tokens and like cost: rows by falling cost, each into the cheapest one with room.

    None: one finds none.
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
    """Fills empty parts up to so many: each takes the cheapest row of the costliest part that has more than one."""
    members = [*members, *[np.zeros(0, np.int64)] * (parts - len(members))]
    for empty in (number for number, rows in enumerate(members) if not len(rows)):
        sums = [costs[rows].sum() if len(rows) > 1 else -1.0 for rows in members]
        giver = int(np.argmax(sums))
        if sums[giver] < 0:
            break
        at = int(costs[members[giver]].argmin())
        members[empty], members[giver] = members[giver][at : at + 1], np.delete(members[giver], at)
    return members
