"""A whole run of a random DeepSeek-V3: twenty steps with the engine's routes, and the same bits after a stop at the
tenth; and from a checkpoint in FP8 the very run of the bfloat16 model that it stands for.

Its routers choose from groups of experts; nothing touches their constants.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from fp8_models import FILE, in_fp8
from safetensors.torch import load_file, save_file
from test_runs import finish, train
from tiny_models import in_dtype, tiny_latent
from world import PRESET, make_world, metrics, overrides, put_model, succeeded

from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

pytestmark = [pytest.mark.real, pytest.mark.long]

SETTINGS = dict(
    trainer__save_freq=10, trainer__test_freq=-1, trainer__val_before_train=False, trainer__total_epochs=20,
    rollout__enable_prefix_caching=False, actor__router_replay="R3",
)  # fmt: skip
CONSTANTS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """The tiny world with another model under its tokenizer."""
    return put_model(make_world(tmp_path_factory.mktemp("world")), tiny_latent)


def after_twenty_steps(world: Path, folder: Path) -> tuple[dict, dict]:
    """Weights before and after twenty steps, which are the same bit by bit with a stop at the tenth."""
    whole, stopped = folder / "whole", folder / "stopped"
    assert finish(train(world, whole, **SETTINGS, trainer__total_training_steps=20), whole) == 0
    assert finish(train(world, stopped, **SETTINGS, trainer__total_training_steps=10), stopped) == 0
    assert finish(train(world, stopped, "--resume", **SETTINGS, trainer__total_training_steps=20), stopped) == 0
    rows = metrics(whole)
    assert [row["training/global_step"] for row in rows] == list(range(1, 21))
    assert all(row["reshard/verified"] == 1 and row["router/missing_routes"] == 0 for row in rows)
    assert max(row["training/rollout_log_probs_abs_diff_max"] for row in rows) < 1e-4
    assert metrics_difference(rows, metrics(stopped)) is None
    ends = (run / "checkpoints" / "step-20" for run in (whole, stopped))
    assert checkpoint_difference(*ends) is None

    succeeded("convert", "megatron-to-hf", str(whole), "-o", str(folder / "hf"))
    before, after = (load_file(next(each.glob("*.safetensors"))) for each in (world / "model", folder / "hf"))
    assert before.keys() == after.keys()
    return before, after


def test_twenty_steps_train_and_go_on_from_the_tenth_bit_by_bit(world, tmp_path):
    before, after = after_twenty_steps(world, tmp_path)
    still = {name for name in before if before[name].equal(after[name])}
    constants = {name for name in before if name.endswith(CONSTANTS)}
    assert constants and constants <= still
    untouched = still - constants  # experts of a group that no token chose, and nothing else
    assert all(".mlp.experts." in name for name in untouched) and len(untouched) < len(before) / 4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """Two worlds: one whose model is in FP8, one that has in bfloat16 what it stands for."""
    folder = tmp_path_factory.mktemp("fp8")
    plain = put_model(make_world(folder / "plain"), lambda **sizes: in_dtype(tiny_latent(**sizes), torch.bfloat16))
    shutil.copytree(plain, folder / "fp8")
    meant = in_fp8(plain / "model", folder / "fp8" / "model")
    save_file(meant, plain / "model" / FILE, {"format": "pt"})
    config = plain / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()), indent=2))  # as it is written without a quantisation
    return folder / "fp8", plain


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_a_run_from_fp8_is_the_run_of_the_bfloat16_model_that_it_stands_for(checkpoints, tmp_path, placement):
    """Its reference too, and its evaluation, which has no ranks that could bring the weights."""
    settings = dict(
        SETTINGS, trainer__total_training_steps=2, trainer__save_freq=2, trainer__val_before_train=True,
        algorithm__use_kl_loss=True, algorithm__kl_loss_coef=0.1, cluster__placement=placement,
    )  # fmt: skip
    runs = [tmp_path / "fp8", tmp_path / "plain"]
    for world, run_dir in zip(checkpoints, runs, strict=True):
        assert finish(train(world, run_dir, **settings), run_dir) == 0
    rows, expected = (metrics(run_dir) for run_dir in runs)
    assert len(rows) == 3 and metrics_difference(rows, expected) is None
    assert checkpoint_difference(*(run_dir / "checkpoints" / "step-2" for run_dir in runs)) is None
    if placement == "separate":
        told = ("--model", str(checkpoints[0] / "model"), "-o", str(tmp_path / "eval"), "--json")
        results = json.loads(succeeded("eval", str(PRESET), *overrides(checkpoints[0], **settings), *told))
        before = {name: value for name, value in rows[0].items() if name.startswith("val-")}
        assert before and results["metrics"] == before
