"""A user's loss whose file also makes the second step's passes of log-probs slow, on the ranks, and notes each of them
beside itself.
"""

import sys
import time
from pathlib import Path

import torch

from mrl.algo.losses import TokenLoss, register_loss

PASS_S = 12.0
FIRST = {"policy_log_probs": 3, "reference_log_probs": 2}  # engines are compared with the policy before the first step


@register_loss("plain")
def plain(parameters, inputs, log_ratio):
    return TokenLoss(-inputs.advantages * inputs.log_probs, torch.zeros_like(inputs.response_mask))


def slowed(name, method):
    calls = []

    def scored(actor, *arguments):
        calls.append(name)
        if len(calls) >= FIRST[name]:
            Path(__file__).with_name(name).touch()
            time.sleep(PASS_S)
        return method(actor, *arguments)

    return scored


if "mrl.rank.actor" in sys.modules:
    ranks = sys.modules["mrl.rank.actor"].MegatronActor
    for name in FIRST:
        setattr(ranks, name, slowed(name, getattr(ranks, name)))
