"""What a calibration by one batch predicts of a rank's log-probs and updates in other batches, lengths and
micro-batches, beside the seconds that its core computes for them. These are nearly the same whatever else the machine
does meanwhile.
"""

import json

import pytest
from ranks import ROOT, run_ranks
from world import make_world

from mrl.config.schema import RunConfig
from mrl.model import planning_model_spec
from mrl.plan.calibration import MODEL_ERROR, MeasuredRun, calibrate
from mrl.plan.devices import MeasuredLengths, find_device
from mrl.plan.plan_inputs import PlanInputs

BASE = (128, 128, 4)
CASES = {  # samples, of a micro-batch, tokens of a response behind 8 of a prompt
    "base": BASE,
    "batch / 2": (64, 64, 4),
    "batch x 2": (256, 128, 4),
    "length x 1.7": (128, 128, 12),
    "length x 3": (128, 128, 28),
    "micro-batch / 4": (128, 32, 4),
}
GOAL = 0.15


def config_of(model: str, samples: int, micro: int, response: int) -> dict:
    return {
        "model": {"path": model, "dtype": "float32"},
        "actor": {
            "layout": {"world_size": 1},
            "ppo_mini_batch_size": samples,
            "ppo_micro_batch_size_per_gpu": micro,
            "optim": {"lr": 1e-6},
        },
        "rollout": {"n": 1},
        "algorithm": {"policy_loss": {"loss_mode": "vanilla", "clip_ratio_low": 0.9, "clip_ratio_high": 10.0}},
        "data": {"train_batch_size": samples, "max_prompt_length": 8, "max_response_length": response},
        "cluster": {"device": "cpu", "step_timeout_s": 300},
    }


def observed(config: dict, seconds: dict) -> MeasuredRun:
    """What a run of this configuration would show of these phases."""
    given = RunConfig.model_validate(config)
    response = given.data.max_response_length
    inputs = PlanInputs.of(given, planning_model_spec(given.model.path)[0], find_device("cpu"))
    lengths = MeasuredLengths(float(given.data.max_prompt_length), (float(response),), response)
    return MeasuredRun(inputs, seconds, dict.fromkeys(seconds, MODEL_ERROR), lengths, {})


@pytest.mark.real
@pytest.mark.long
def test_a_calibration_by_one_batch_predicts_others_within_15_percent(tmp_path):
    model = str(make_world(tmp_path / "world", prompts=2) / "model")
    configs = {name: config_of(model, *case) for name, case in CASES.items()}
    (tmp_path / "plan.json").write_text(json.dumps(configs))
    run_ranks(ROOT / "tests" / "real" / "seconds_worker.py", 1, tmp_path / "out", [str(tmp_path / "plan.json")])
    measured = json.loads((tmp_path / "out" / "seconds.json").read_text())
    base = observed(configs["base"], measured["base"])
    found = calibrate([base], base.lengths).assumptions
    off = {}
    for name, config in configs.items():
        for phase, seconds in observed(config, measured[name]).predicted(found).items():
            off[name, phase] = seconds / measured[name][phase] - 1
    print({" ".join(key): f"{value:+.0%}" for key, value in off.items()})
    assert all(abs(value) <= GOAL for value in off.values()), off
