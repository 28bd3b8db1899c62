"""Whole runs that draft with the checkpoint's own predicting layer: drafts are counted, each sync brings and proves the
layer, log-probs are the trainer's, a killed run goes on with the same bits, and the export has the layer as it became.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import eagle_head, tiny_glm, with_head
from transformers import AutoConfig
from world import PRESET, make_world, metrics, overrides, put_model, succeeded

pytestmark = [pytest.mark.real, pytest.mark.long]

COPIES = {
    "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.4.shared_head.head.weight": "lm_head.weight",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    made = put_model(make_world(tmp_path_factory.mktemp("world")), tiny_glm)
    with_head(made / "model")
    return made


def settings(trained: bool, steps: int) -> dict:
    return {
        "trainer__total_training_steps": steps,
        "trainer__save_freq": 2,
        "model__dtype": "float32",
        "actor__ppo_mini_batch_size": 8,
        "actor__mtp": {"train": trained},
        "rollout__speculation": {"method": "mtp", "tokens": 2},
    }


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("trained", "engines"),
    [
        pytest.param(False, {}, id="kept"),
        pytest.param(True, {}, id="trained"),
        # data-parallel ranks, which sleep between the steps
        pytest.param(
            True,
            {
                "cluster__placement": "colocated",
                "cluster__n_gpus_per_node": 2,
                "rollout__data_parallel_size": 2,
                "rollout__expert_parallel_size": 2,
            },
            id="trained-engine-dp2",
        ),
    ],
)
def test_steps_draft_sync_and_export_the_layer(world, tmp_path, trained, engines):
    run_dir = tmp_path / "run"
    given = settings(trained, 2) | engines
    succeeded("train", str(PRESET), "--run-dir", str(run_dir), *overrides(world, **given))
    rows = [row for row in metrics(run_dir) if row["training/global_step"]]
    assert [row["training/global_step"] for row in rows] == [1, 2]
    assert all(row["reshard/verified"] == 1 and row["reshard/resynced"] == 0 for row in rows)
    assert all(row["training/rollout_log_probs_abs_diff_max"] < 1e-3 for row in rows)
    drafting = [row for row in rows if "drafts/tokens" in row]
    assert drafting and all(1 <= row["drafts/tokens_per_step"] <= 3 and row["drafts/tokens"] > 0 for row in drafting)
    assert all(("actor/mtp_loss" in row) == trained for row in rows)
    succeeded("convert", "megatron-to-hf", str(run_dir), "-o", str(tmp_path / "hf"), "--verify")
    before, after = (tensors(folder) for folder in (world / "model", tmp_path / "hf"))
    assert before.keys() == after.keys()
    head = {name for name in before if name.startswith("model.layers.4.")} - COPIES.keys()
    # experts that no token chose stay
    learns = {name for name in head if ".experts." not in name and not name.endswith("correction_bias")}
    assert {torch.equal(before[name], after[name]) for name in (learns if trained else head)} == {not trained}
    for copy, original in COPIES.items():
        assert torch.equal(after[copy], after[original]) and not torch.equal(after[copy], before[copy])


def test_adapters_are_trained_with_engines_routes_beside_a_layer_that_drafts(world, tmp_path):
    run_dir = tmp_path / "run"
    given = {"actor__lora__rank": 4, "actor__lora__alpha": 8, "actor__optim__lr": 1e-2, "actor__router_replay": "R3"}
    succeeded("train", str(PRESET), "--run-dir", str(run_dir), *overrides(world, **(settings(False, 2) | given)))
    rows = [row for row in metrics(run_dir) if row["training/global_step"]]
    assert all(row["reshard/verified"] == 1 and row["drafts/tokens"] > 0 for row in rows)
    assert all(row["training/rollout_log_probs_abs_diff_max"] < 1e-3 for row in rows)
    assert all(row["actor/grad_norm"] > 0 and row["router/missing_routes"] < 0.1 for row in rows)
    succeeded("convert", "lora-to-hf", str(run_dir), "-o", str(tmp_path / "hf"), "--merged", "--verify")
    before, after = (tensors(folder) for folder in (world / "model", tmp_path / "hf"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any(name.startswith("model.layers.4.") for name in moved)


def test_a_head_of_its_own_drafts_behind_every_sync(tmp_path):
    world = make_world(tmp_path / "world")
    head = eagle_head(tmp_path / "head", AutoConfig.from_pretrained(world / "model"), 24)
    before = (head / "model.safetensors").read_bytes()
    run_dir = tmp_path / "run"
    given = settings(False, 2) | {"rollout__speculation": {"method": str(head), "tokens": 2}}
    succeeded("train", str(PRESET), "--run-dir", str(run_dir), *overrides(world, **given))
    rows = [row for row in metrics(run_dir) if row["training/global_step"]]
    assert all(row["reshard/verified"] == 1 and row["drafts/tokens"] > 0 for row in rows)
    assert all(row["training/rollout_log_probs_abs_diff_max"] < 1e-3 for row in rows)
    assert (head / "model.safetensors").read_bytes() == before


def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(world, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    succeeded("train", str(PRESET), "--run-dir", str(whole), *overrides(world, **settings(True, 4)))
    succeeded("train", str(PRESET), "--run-dir", str(cut), *overrides(world, **settings(True, 2)))
    succeeded("train", str(PRESET), "--run-dir", str(cut), *overrides(world, **settings(True, 4)), "--resume")
    names = ("actor/mtp_loss", "actor/mtp_grad_norm", "actor/grad_norm", "drafts/acceptance", "critic/score/mean")
    last = [[row.get(name) for name in names] for run in (whole, cut) for row in metrics(run)[-1:]]
    assert last[0] == last[1]
    for run in (whole, cut):
        succeeded("convert", "megatron-to-hf", str(run), "-o", str(tmp_path / f"hf-{run.name}"))
    one, other = (tensors(tmp_path / f"hf-{run.name}") for run in (whole, cut))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
