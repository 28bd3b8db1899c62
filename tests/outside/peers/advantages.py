"""verl's advantage estimators over drawn steps: groups of several sizes, equal scores, context, KL in the reward."""

import numpy as np
import torch
from verl.trainer.config.algorithm import AlgoConfig
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_gdpo_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)

PEERS = ("verl", "torch")
WIDTH = 6
OF_GROUPS = {
    "grpo": compute_grpo_outcome_advantage,
    "grpo_vectorized": compute_grpo_vectorized_outcome_advantage,
    "rloo": compute_rloo_outcome_advantage,
    "rloo_vectorized": compute_rloo_vectorized_outcome_advantage,
    "opo": compute_opo_outcome_advantage,
    "grpo_passk": compute_grpo_passk_outcome_advantage,
    "reinforce_plus_plus_baseline": compute_reinforce_plus_plus_baseline_outcome_advantage,
}
PARTS = ("accuracy", "format")
WEIGHTS = (1.0, 0.5)


def cases() -> list[dict]:
    draw = np.random.default_rng(13)
    names = (*OF_GROUPS, "reinforce_plus_plus", "gdpo", "gae")
    return [_case(draw, name) for name in names for _ in range(100)]


def _case(draw: np.random.Generator, name: str) -> dict:
    sizes = draw.integers(2 if name == "grpo_passk" else 1, 6, int(draw.integers(2, 5)))
    groups = np.repeat(np.arange(len(sizes)), sizes)
    groups = groups[draw.permutation(len(groups))]
    rows = len(groups)
    shape = (rows, WIDTH)
    mask = np.arange(WIDTH) < draw.integers(1, WIDTH + 1, rows)[:, None]
    if name != "gdpo" and draw.random() < 0.5:
        mask &= draw.random(shape) < 0.7
    mask[:, 0] = True
    scores = {
        "binary": draw.integers(0, 2, rows).astype(float),
        "real": np.round(draw.normal(size=rows), 2),
    }[str(draw.choice(["binary", "real"]))]
    penalties = np.zeros(shape)
    if name != "gdpo" and draw.random() < 0.5:
        penalties = np.round(0.05 * draw.normal(size=shape), 3) * mask
    rewards = torch.tensor(-penalties)
    last = WIDTH - 1 - mask[:, ::-1].argmax(1)
    rewards[torch.arange(rows), torch.tensor(last)] += torch.tensor(scores)
    response_mask = torch.tensor(mask.astype(np.float64))
    case = {
        "estimator": name,
        "groups": groups.tolist(),
        "scores": scores.tolist(),
        "penalties": penalties.tolist(),
        "mask": mask.astype(int).tolist(),
    }
    by_std = bool(draw.random() < 0.7)
    config = AlgoConfig(norm_adv_by_std_in_grpo=by_std, gamma=1.0)
    index = np.array([f"prompt-{group}" for group in groups], dtype=object)
    if name == "gae":
        values = np.round(draw.normal(size=shape), 2)
        gamma, lam = (float(draw.choice(choice)) for choice in ([1.0, 0.9], [1.0, 0.95, 0.0]))
        given = (rewards, torch.tensor(values), response_mask, gamma, lam)
        advantages, returns = compute_gae_advantage_return(*given)
        case |= {"values": values.tolist(), "gamma": gamma, "lam": lam, "returns": returns[response_mask > 0].tolist()}
    elif name == "reinforce_plus_plus":
        advantages, _ = compute_reinforce_plus_plus_outcome_advantage(rewards, response_mask, config=config)
    elif name == "gdpo":
        parts = {part: np.round(draw.normal(size=rows), 2) for part in PARTS}
        case["parts"] = {part: values.tolist() for part, values in parts.items()}
        config = AlgoConfig(
            norm_adv_by_std_in_grpo=by_std, gamma=1.0, gdpo_reward_keys=list(PARTS), gdpo_reward_weights=list(WEIGHTS)
        )
        advantages, _ = compute_gdpo_outcome_advantage(
            rewards,
            response_mask,
            index,
            norm_adv_by_std_in_grpo=by_std,
            config=config,
            non_tensor_batch=parts,
            batch={
                "prompts": torch.zeros(rows, 1),
                "attention_mask": torch.cat([torch.ones(rows, 1), response_mask], 1).long(),
            },
        )
    else:
        options = {}
        if name in ("grpo", "grpo_vectorized"):
            options["norm_adv_by_std_in_grpo"] = by_std
        advantages, _ = OF_GROUPS[name](rewards, response_mask, index=index, config=config, **options)
    gave = advantages[response_mask > 0].double().tolist()
    return case | {"by_std": by_std, "advantages": gave}
