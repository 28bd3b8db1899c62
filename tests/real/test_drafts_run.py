"""A whole run that drafts with the checkpoint's own predicting layer: drafts are counted, each sync proves that they
are not stale, log-probs are the trainer's, and the export has the layer.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_glm, with_head
from world import PRESET, make_world, metrics, overrides, put_model, succeeded

pytestmark = [pytest.mark.real, pytest.mark.long]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    made = put_model(make_world(tmp_path_factory.mktemp("world")), tiny_glm)
    with_head(made / "model")
    return made


def test_two_steps_draft_sync_and_export_the_layer(world, tmp_path):
    settings = {"trainer__total_training_steps": 2, "trainer__save_freq": 2, "model__dtype": "float32"}
    settings |= {"actor__ppo_mini_batch_size": 8, "rollout__speculation": {"method": "mtp", "tokens": 2}}
    run_dir = tmp_path / "run"
    succeeded("train", str(PRESET), "--run-dir", str(run_dir), *overrides(world, **settings))
    rows = [row for row in metrics(run_dir) if row["training/global_step"]]
    assert [row["training/global_step"] for row in rows] == [1, 2]
    assert all(row["reshard/verified"] == 1 and row["reshard/resynced"] == 0 for row in rows)
    assert all(row["training/rollout_log_probs_abs_diff_max"] < 1e-3 for row in rows)
    drafting = [row for row in rows if "drafts/tokens" in row]
    assert drafting and all(1 <= row["drafts/tokens_per_step"] <= 3 and row["drafts/tokens"] > 0 for row in drafting)
    succeeded("convert", "megatron-to-hf", str(run_dir), "-o", str(tmp_path / "hf"))
    before, after = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (world / "model", tmp_path / "hf")
    )
    assert before.keys() == after.keys()
    head = {name for name in before if name.startswith("model.layers.4.")}
    copies = {"model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
              "model.layers.4.shared_head.head.weight": "lm_head.weight"}  # fmt: skip
    assert all(torch.equal(before[name], after[name]) for name in head - copies.keys())
    for copy, original in copies.items():
        assert torch.equal(after[copy], after[original]) and not torch.equal(after[copy], before[copy])
