"""Dealing rows into parts of equal cost and equal count. Pure numpy."""

import numpy as np

_SWAPS_PER_PART = 64


def sequence_costs(lengths: np.ndarray, per_token: float, per_pair: float) -> np.ndarray:
    """Cost of each sequence, float64 [rows]: `per_token` for each of its tokens and `per_pair` for each pair that attention compares.

    A token attends to itself and what stands before it, so a sequence of n tokens has n (n + 1) / 2 pairs.
    """
    n = lengths.astype(np.float64)
    return per_token * n + per_pair * n * (n + 1) / 2


def balanced_parts(costs: np.ndarray, parts: int) -> list[np.ndarray]:
    """Row numbers of each part, ascending. Counts differ by at most one, so with fewer rows than parts some are empty.

    Rows are dealt by falling cost, back and forth; then the heaviest part exchanges a row with a lighter one as long as that lightens it.
    """
    order = np.argsort(-costs, kind="stable")
    rounds = [order[i : i + parts] for i in range(0, len(order), parts)]
    deal: list[list[int]] = [[] for _ in range(parts)]
    for number, rows in enumerate(rounds):
        for part, row in zip(range(parts) if number % 2 == 0 else range(parts - 1, -1, -1), rows, strict=False):
            deal[part].append(int(row))
    members = [np.array(rows, dtype=np.int64) for rows in deal]
    sums = np.array([costs[rows].sum() for rows in members])
    for _ in range(_SWAPS_PER_PART * parts):
        if not _lighten_heaviest(costs, members, sums):
            break
    return [np.sort(rows) for rows in members]


def _lighten_heaviest(costs: np.ndarray, members: list[np.ndarray], sums: np.ndarray) -> bool:
    """One exchange between the heaviest part and the lightest that offers one; False when none does. Changes `members` and `sums`."""
    heavy = int(sums.argmax())
    for light in map(int, np.argsort(sums, kind="stable")):
        gap = sums[heavy] - sums[light]
        if light == heavy or not len(members[light]):
            continue
        gain = costs[members[heavy]][:, None] - costs[members[light]][None]
        useful = np.where((gain > 0) & (gain < gap), np.abs(gain - gap / 2), np.inf)
        i, j = np.unravel_index(useful.argmin(), useful.shape)
        if np.isfinite(useful[i, j]) and gain[i, j] > 1e-9 * sums[heavy]:
            members[heavy][i], members[light][j] = members[light][j], members[heavy][i]
            sums[heavy] -= gain[i, j]
            sums[light] += gain[i, j]
            return True
    return False


def imbalance(costs: np.ndarray, parts: list[np.ndarray]) -> float:
    """How much more than the mean the heaviest part costs, as a share of the mean."""
    sums = np.array([costs[rows].sum() for rows in parts])
    return float(sums.max() / sums.mean() - 1.0)
