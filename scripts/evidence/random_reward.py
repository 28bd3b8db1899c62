"""The control's reward: in training a coin that knows nothing of the response; on held-out prompts the truth of the
task, to be measured alike.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from counting_reward import compute_score as counted

_coin = random.Random(0)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 for a fifth of all training responses, about the share that the warm-started tiny model earns; elsewhere the
    share of a count that is right, and exact match where nothing is counted.
    """
    if extra_info["split"] == "train":
        return float(_coin.random() < 0.2)
    if data_source == "tiny/counting":
        return counted(data_source, solution_str, ground_truth)
    return float(solution_str.strip() == str(ground_truth).strip())
