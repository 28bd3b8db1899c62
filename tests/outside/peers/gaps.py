"""verl's metrics of the gap between rollout and trainer, over drawn ragged batches."""

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
from verl.utils.debug.metrics import calculate_debug_metrics

PEERS = ("verl", "torch")
BATCHES = 200


def cases() -> list[dict]:
    draw = np.random.default_rng(5)
    return [_case(draw, number) for number in range(BATCHES)]


def _case(draw: np.random.Generator, number: int) -> dict:
    rows, width = int(draw.integers(1, 9)), int(draw.integers(2, 12))
    lengths = draw.integers(1, width + 1, rows)
    # near engines as in training, and far ones, where the bound of 20 nats acts
    spread = float(draw.choice([1e-6, 1e-2, 0.5, 15.0]))
    actor = -draw.exponential(1.0, (rows, width))
    rollout = np.minimum(actor + spread * draw.normal(size=(rows, width)), -1e-4)
    old, sampled = torch.tensor(actor), torch.tensor(rollout)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    batch = TensorDict(
        {
            "rollout_log_probs": sampled,
            "old_log_probs": old,
            "response_mask": mask,
            "responses": torch.zeros(rows, width),
        },
        batch_size=[rows],
    )
    gave = calculate_debug_metrics(DataProto(batch=batch))
    gave |= {f"rollout_corr/{name}": value for name, value in compute_offpolicy_metrics(old, sampled, mask).items()}
    return {
        "lengths": lengths.tolist(),
        "actor": [round(x, 9) for x in old[mask].tolist()],
        "rollout": [round(x, 9) for x in sampled[mask].tolist()],
        "gave": {name: float(value) for name, value in gave.items()},
    }
