"""GiGPO's advantages by its authors' own functions: gigpo/core_gigpo.py of DrMAS, which has verl-agent's. It is on no
index; scripts/evidence/outside.sh fetches it.
"""

from types import SimpleNamespace

import core_gigpo
import numpy as np
import torch

PEERS = ("verl", "torch")
WIDTH = 3  # tokens of a turn


def cases() -> list[dict]:
    draw = np.random.default_rng(17)
    return [_case(draw) for _ in range(400)]


def _case(draw: np.random.Generator) -> dict:
    sizes = draw.integers(1, 6, int(draw.integers(1, 4)))
    groups = np.repeat(np.arange(len(sizes)), sizes)
    counts = draw.integers(1, 6, len(groups))
    turns = int(counts.sum())
    rewards = {
        "binary": draw.integers(0, 2, turns).astype(float),
        "last": np.zeros(turns),
        "real": np.round(draw.normal(size=turns), 2),
    }[str(draw.choice(["binary", "last", "real"]))]
    last = np.cumsum(counts) - 1
    if not rewards.any():
        rewards[last] = draw.integers(0, 2, len(last))
    states = draw.integers(0, int(draw.choice([2, 5, 50])), turns)
    gamma = float(draw.choice([1.0, 0.95, 0.5]))
    weight = float(draw.choice([1.0, 0.5, 2.0]))
    by_std = bool(draw.integers(0, 2))
    rows = np.repeat(np.arange(len(groups)), counts)
    scores = np.bincount(rows, rewards, len(groups))
    return {
        "groups": groups.tolist(), "counts": counts.tolist(), "rewards": rewards.tolist(), "states": states.tolist(),
        "gamma": gamma, "weight": weight, "by_std": by_std, "scores": scores.tolist(),
        "advantages": _theirs(groups[rows], rows, scores[rows], rewards, states, gamma, weight, by_std),
    }  # fmt: skip


def _theirs(groups, rows, scores, rewards, states, gamma, weight, by_std) -> list[float]:
    """One of their rows is a turn."""
    mask = torch.ones(len(rows), WIDTH)
    totals = torch.zeros(len(rows), WIDTH)
    totals[:, -1] = torch.tensor(scores)
    index = np.array([f"prompt {group}" for group in groups], object)
    trajectories = np.array([f"trajectory {row}" for row in rows], object)
    places = np.arange(len(rows)) - np.searchsorted(rows, rows)
    columns = {"rewards": np.array(rewards), "traj_uid": trajectories, "env_step": places}
    columns["active_masks"] = np.ones(len(rows))
    batch = SimpleNamespace(non_tensor_batch=columns, batch={"input_ids": mask})
    returns = core_gigpo.compute_step_discounted_returns(batch, gamma)
    observed = np.array([f"state {state}" for state in states], object)
    mode = "mean_std_norm" if by_std else "mean_norm"
    found, _ = core_gigpo.compute_gigpo_outcome_advantage(
        totals, returns, mask, observed, index, trajectories, step_advantage_w=weight, mode=mode
    )
    return found[:, 0].tolist()
