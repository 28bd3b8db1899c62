"""The gap between engine and trainer is measured by verl's formulas, under verl's names."""

import math

import numpy as np
import pytest
from golden import golden

from mrl.algo.correction import mismatch_metrics, mismatch_of_rows

# verl's own, of which we have no twin: a flag, extremes, and logs of what is here
LEFT_OUT = {
    "training/rollout_probs_diff_valid",
    "rollout_corr/training_log_ppl",
    "rollout_corr/rollout_log_ppl",
    "rollout_corr/log_ppl_diff_max",
    "rollout_corr/log_ppl_diff_min",
}


def test_every_metric_is_verls():
    compared = 0
    for case in golden("gaps"):
        arrays = (np.array(case[name]) for name in ("rollout", "actor", "lengths"))
        ours = mismatch_metrics(mismatch_of_rows(*arrays))
        for name, theirs in case["gave"].items():
            if name in LEFT_OUT or not math.isfinite(theirs):  # nan: verl's spread of a single token
                continue
            if name == "rollout_corr/k3_kl" and np.abs(np.array(case["actor"]) - case["rollout"]).max() > 20:
                continue  # the log ratio is bounded by 20 here, and in verl's other metrics, but not in its k3
            # verl subtracts near numbers: exp(x) - x - 1 keeps 16 digits of 1
            assert ours[name] == pytest.approx(theirs, rel=2e-6, abs=2e-8), name
            compared += 1
    assert compared > 2000
