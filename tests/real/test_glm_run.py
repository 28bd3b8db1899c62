"""A whole run of a random GLM-4.5 MoE: it trains in two layers' kinds, syncs, saves, and its constants are never
touched.

Its steps are one update each, without the pass of old log-probs.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import in_dtype, tiny_glm
from world import PRESET, make_world, metrics, overrides, put_model, succeeded

pytestmark = [pytest.mark.real, pytest.mark.long]

CONSTANTS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """The tiny world with another model under its tokenizer."""
    return put_model(
        make_world(tmp_path_factory.mktemp("world")), lambda **kept: in_dtype(tiny_glm(**kept), torch.bfloat16)
    )


def test_two_steps_train_sync_and_save_and_leave_the_constants(world, tmp_path):
    settings = {"trainer__total_training_steps": 2, "trainer__save_freq": 2, "model__dtype": "bfloat16"}
    settings |= {"actor__ppo_mini_batch_size": 8, "algorithm__anchor": "on_policy"}
    run_dir = tmp_path / "run"
    succeeded("train", str(PRESET), "--run-dir", str(run_dir), *overrides(world, **settings))
    rows = [row for row in metrics(run_dir) if row["training/global_step"]]
    assert [row["training/global_step"] for row in rows] == [1, 2]
    assert all(row["reshard/verified"] == 1 and row["reshard/resynced"] == 0 for row in rows)
    assert all(row["actor/grad_norm"] > 0 == row["actor/ppo_kl"] and "timing_s/old_log_prob" not in row for row in rows)
    assert all(row["actor/entropy"] > 0 and row["rollout_corr/k3_kl"] > 0 for row in rows)
    succeeded("convert", "megatron-to-hf", str(run_dir), "-o", str(tmp_path / "hf"))
    before, after = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (world / "model", tmp_path / "hf")
    )
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if name.endswith(CONSTANTS)} <= same
    assert any(name.endswith("self_attn.q_proj.weight") and name not in same for name in before)
