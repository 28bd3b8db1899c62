"""Advantages of tokens are those of verl's estimators, with KL in the reward and over context tokens."""

import numpy as np
import pytest
from golden import differences, golden

from mrl.algo.advantages import WHITENED, AdvantageInputs, TokenAdvantages, response_advantages, whitened
from mrl.algo.gae import estimate, token_rewards
from mrl.algo.rows import moments, row_sums

OURS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}  # the same numbers by another way
NAMES = sorted({case["estimator"] for case in golden("advantages")})


def of(name: str) -> list[dict]:
    return [case for case in golden("advantages") if case["estimator"] == name]


def ours(case: dict) -> np.ndarray:
    """Advantages of the tokens of the mask, end to end, as a rank computes them."""
    name = OURS.get(case["estimator"], case["estimator"])
    mask = np.array(case["mask"], bool)
    lengths = np.full(len(mask), mask.shape[1])
    sampled = mask.ravel()
    penalties = np.array(case["penalties"]).ravel()
    inputs = AdvantageInputs(
        np.array(case["scores"]),
        np.array(case["groups"]),
        mask.sum(1),
        case["by_std"],
        row_sums(penalties, lengths),
        {part: np.array(values) for part, values in case.get("parts", {}).items()},
        {"accuracy": 1.0, "format": 0.5},
    )
    made = response_advantages(name, inputs)
    estimates = None
    if name == "gae":
        rewards = token_rewards(inputs.scores, penalties, sampled, lengths)
        found = estimate(rewards, np.array(case["values"]).ravel(), sampled, lengths, case["gamma"], case["lam"])
        np.testing.assert_allclose(found.returns[sampled], case["returns"], rtol=1e-9, atol=1e-9)
        estimates = found.advantages
    if name in WHITENED:
        made = spread(made, sampled, lengths, penalties, estimates)
    return made.of_tokens(lengths, sampled, penalties, estimates)[sampled]


def spread(made: TokenAdvantages, mask: np.ndarray, lengths: np.ndarray, *of_tokens: np.ndarray) -> TokenAdvantages:
    return whitened(made, moments(made.values(lengths, *of_tokens), mask, lengths))


@pytest.mark.parametrize("name", NAMES)
def test_an_estimator_is_verls(name):
    cases = of(name)
    assert len(cases) == 100
    differing = []
    for case in cases:
        if ours(case).tolist() != pytest.approx(case["advantages"], rel=1e-6, abs=1e-6):  # float32
            differing.append(case)
    if name == "rloo_vectorized":
        assert all(1 in np.bincount(case["groups"]) for case in differing)
        assert len(differing) == differences("advantages")["rloo_vectorized_of_one"]["cases"]
    else:
        assert not differing
