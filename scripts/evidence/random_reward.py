"""The control's reward: in training a coin that knows nothing of the response; on held-out prompts the truth,
to be measured alike.
"""

import random

_coin = random.Random(0)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 for a fifth of all training responses, about the share that the warm-started model earns;
    exact match elsewhere.
    """
    if extra_info["split"] == "train":
        return float(_coin.random() < 0.2)
    return float(solution_str.strip() == str(ground_truth).strip())
