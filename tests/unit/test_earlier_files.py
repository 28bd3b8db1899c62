"""What users have from before the rooms were rebuilt still works: presets, a loss and a reward of their own."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch

from mrl.algo import losses
from mrl.config.load import load_config
from mrl.reward.resolve import load_module

ROOT = Path(__file__).parents[2]
BEFORE = "8480244"
NAMED = ("parallel_configs", "tests/real/users_loss.py", "scripts/counting_reward.py")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> Path:
    """Files of that commit."""
    folder = tmp_path_factory.mktemp("earlier")
    made = subprocess.run(["git", "archive", BEFORE, *NAMED], cwd=ROOT, capture_output=True)
    if made.returncode:
        pytest.skip(f"the history does not reach back to {BEFORE}")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_presets_load(earlier):
    presets = sorted(earlier.glob("parallel_configs/*/*.yaml"))
    names = {preset.parent.name for preset in presets} - {"base"}
    assert len(presets) >= 19 and {"qwen3-235b-a22b", "qwen3-30b-a3b", "tiny-moe"} <= names
    for preset in presets:
        assert load_config(preset).config.model.path


def test_a_loss_and_a_reward_load_and_compute(earlier, monkeypatch):
    """By hand: a token of advantage 2 and log-prob -3 loses 6, and twice the square of its log-ratio, 0.5."""
    monkeypatch.setattr(losses, "TOKEN_LOSSES", {})
    losses.load_custom_loss(str(earlier / "tests" / "real" / "users_loss.py"), "leashed")
    one = torch.ones(1, 1)
    parameters = losses.PolicyLossParameters(custom={"beta": 2.0})
    inputs = losses.LossInputs(-3 * one, None, 2 * one, one.bool())
    made = losses.TOKEN_LOSSES["leashed"](parameters, inputs, 0.5 * one)
    assert made.values.item() == 6.5 and not made.clipped.any()
    reward = load_module(earlier / "scripts" / "counting_reward.py", "reward.custom_reward_function.path")
    assert reward.compute_score("long", "1 2 4", "1 2 3") == pytest.approx(2 / 3)
