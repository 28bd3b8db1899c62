"""GiGPO's advantages of turns are those of its authors' own functions."""

import numpy as np
import pytest
from golden import golden

from mrl.algo.advantages import AdvantageInputs, response_advantages
from mrl.algo.turn_credit import turn_numbers


def ours(case: dict) -> np.ndarray:
    counts = np.array(case["counts"])
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    turns = turn_numbers(counts, places, np.array(case["rewards"]), np.array(case["states"], np.uint64))
    inputs = AdvantageInputs(
        np.array(case["scores"]),
        np.array(case["groups"]),
        counts,
        case["by_std"],
        turns=turns,
        gamma=case["gamma"],
        step_advantage_weight=case["weight"],
    )
    return response_advantages("gigpo", inputs).per_turn.values


def test_advantages_of_turns_are_the_authors():
    """In float32, a group whose values are nearly equal has a small std, which raises its rounding."""
    cases = golden("gigpo")
    assert len(cases) == 400
    for case in cases:
        assert ours(case).tolist() == pytest.approx(case["advantages"], rel=2e-5, abs=2e-5)
