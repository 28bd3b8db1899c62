"""Ranks get rows as evenly as verl's Karmarkar-Karp gives them."""

import numpy as np
from golden import differences, golden

from mrl.rank.balance import balanced_parts


def test_the_heaviest_rank_is_hardly_ever_heavier_than_verls():
    ratios = []
    for case in golden("balance"):
        costs = np.array(case["lengths"], np.float64)
        parts = balanced_parts(costs, case["parts"])
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(costs)))
        assert len({len(part) for part in parts}) == 1
        ratios.append(max(costs[part].sum() for part in parts) / case["heaviest"])
    assert np.mean(ratios) <= 0.98
    assert max(ratios) <= 1.02
    assert int((np.array(ratios) > 1.001).sum()) == differences("balance")["heavier"]["cases"]
