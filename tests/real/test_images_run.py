"""Whole runs with images: engines' log-probs are the ranks' in every step. A weight sync brings the text model alone
beside a frozen tower: in turns on the same devices, with generation ahead and routes replayed, by engines of several
ranks or in FP8, with adapters, and where tools answer behind images, too. A tower that is trained comes with it. The
models are drawn, and their rows have no, one or two pictures of different sizes.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from seeing_world import make_seeing_world
from test_runs import finish, train
from world import PRESET, metrics, mrl, overrides

from mrl.checkpoint.convert import write_hf
from mrl.checkpoint.open_checkpoint import open_mrl, open_saved
from mrl.checkpoint.peft_folder import write_peft
from mrl.checkpoint.vision_tower import open_whole
from mrl.record.sample_files import read_samples
from mrl.tools.rehearse.watched import write_hook

pytestmark = [pytest.mark.real, pytest.mark.long]

SETTINGS = {
    "model__vision": "frozen",
    "actor__layout__expert_model_parallel_size": 1,
    "actor__layout__sequence_parallel": False, "trainer__total_training_steps": 3, "trainer__test_freq": 2,
    "trainer__save_freq": 1, "rollout__n": 4, "data__max_prompt_length": 40, "data__max_response_length": 8,
}  # fmt: skip
TP, PP = "actor__layout__tensor_model_parallel_size", "actor__layout__pipeline_model_parallel_size"
TP2 = {TP: 2, "actor__layout__sequence_parallel": True, "rollout__tensor_model_parallel_size": 2,
       "cluster__n_gpus_per_node": 4}  # fmt: skip
COLOCATED = {TP: 1, "actor__layout__world_size": 1, "cluster__placement": "colocated", "cluster__n_gpus_per_node": 1}
WORDS = {"model__dtype": "bfloat16", "rollout__quantization": "fp8", "rollout__quantization_block": 32}
LAYOUTS = {
    "moe-pp2": (8, {TP: 1, PP: 2}),
    "dense-tp2": (0, TP2),
    "moe-ahead-replayed": (8, {TP: 1, PP: 2, "trainer__schedule": "bounded", "actor__router_replay": "R3",
                               "rollout__enable_prefix_caching": False}),
    "moe-engine-dp2": (8, {TP: 1, PP: 2, "rollout__data_parallel_size": 2, "rollout__expert_parallel_size": 2,
                           "cluster__n_gpus_per_node": 4}),
    "dense-colocated": (0, COLOCATED),
    "moe-words": (8, {TP: 1, PP: 2} | WORDS),
    "moe-pictures": (8, {TP: 1, PP: 2, "rollout__turns__tools": ["picture"], "rollout__turns__max_turns": 3,
                         "data__max_prompt_length": 96, "data__max_response_length": 128}),
    "moe-adapters-calls": (8, {TP: 1, PP: 2, "actor__lora__rank": 4, "actor__lora__alpha": 8, "actor__optim__lr": 1e-3,
                               "rollout__turns__tools": ["calculator"], "rollout__turns__max_turns": 3,
                               "data__max_prompt_length": 96, "data__max_response_length": 128}),
}  # fmt: skip
# against a reference, whose tower stays as it was
KL = {"algorithm__use_kl_loss": True, "actor__ppo_mini_batch_size": 8}
RATES = {"actor__optim__lr": 1e-4, "actor__optim__vision_lr": 1e-3, "actor__optim__lr_warmup_steps": 0}
TRAINED = {
    "moe-pp2": (8, {TP: 1, PP: 2, "model__vision": "trained"} | KL | RATES),
    "dense-tp2": (0, TP2 | RATES | {"model__vision": "projector"}),
    "dense-colocated": (0, COLOCATED | RATES | {"model__vision": "trained"}),
}

EVALUATED = "moe-pp2"


def run_of(name: str, layouts: dict, tmp_path: Path) -> tuple[Path, Path, dict, list[dict]]:
    """The world, the run directory, its settings and the metrics of three steps, with a resume before the last one."""
    experts, layout = layouts[name]
    world = make_seeing_world(tmp_path / "world", experts, "rollout__turns__tools" in layout)
    run = tmp_path / "run"
    given = SETTINGS | layout | {"reward__custom_reward_function__path": world / "reward.py"}
    if "rollout__turns__tools" in layout:
        given["rollout__turns__path"] = world / "pictures.py"
    assert finish(train(world, run, **given | {"trainer__total_training_steps": 2}), run) == 0
    assert finish(train(world, run, "--resume", **given), run) == 0
    rows = [row for row in metrics(run) if row["training/global_step"]]
    assert len(rows) == 3
    for row in rows:
        if "rollout__quantization" in layout:  # words round what ranks hold
            assert 0 < row["training/rollout_log_probs_abs_diff_mean"] < 0.5
        else:
            assert row["training/rollout_log_probs_abs_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0
    planned = json.loads((run / "plan.json").read_text())["reshard"]["bytes_required"]
    assert all(row["reshard/bytes_required"] == planned for row in rows)
    return world, run, given, rows


@pytest.mark.parametrize("name", LAYOUTS)
def test_engines_see_what_ranks_see_and_a_sync_brings_the_text_model_alone(name, tmp_path, monkeypatch):
    write_hook(tmp_path / "hook", tmp_path / "notes")  # drawn models call nothing: calls are made up
    paths = [str(tmp_path / "hook"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    world, run, given, _ = run_of(name, LAYOUTS, tmp_path)
    rows = list(read_samples(run / "samples", 1))
    of_prompts = [[image for image in row["images"] if image["first_token"] < len(row["prompt_ids"])] for row in rows]
    assert {len(images) for images in of_prompts} == {0, 1, 2}
    names = {image["name"] for row in rows for image in row["images"]}
    assert names <= {file.name for file in (run / "images").rglob("*")}
    if name == EVALUATED:
        check_evaluation(world, run, given)
    if "rollout__turns__tools" in given:
        assert any(row["images"] and not all(row["sampled"]) for row in rows), "no answer of a tool behind an image"
    if given.get("rollout__turns__tools") == ["picture"]:
        check_pictures(rows)
    if "actor__lora__rank" in given:
        check_adapters(world, run, tmp_path)


def check_pictures(rows: list[dict]) -> None:
    """Pictures of answers stand behind prompts, and nothing of them was sampled."""
    shown = 0
    for row in rows:
        begin = len(row["prompt_ids"])
        for image in row["images"]:
            if (first := image["first_token"] - begin) >= 0:
                shown += 1
                assert not any(row["sampled"][first : first + image["tokens"]])
                assert len(set(row["response_ids"][first : first + image["tokens"]])) == 1
    assert shown > len(rows), "few tools have answered by a picture"


def check_adapters(world: Path, run: Path, tmp_path: Path) -> None:
    """They are merged into the text model inside of the whole, and PEFT's form names its modules there."""
    source = open_saved(run / "checkpoints" / "step-3", world / "model")
    write_hf(source, tmp_path / "hf", whole=open_whole(world / "model", source))
    before, after = weights(world / "model"), weights(tmp_path / "hf")
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert before.keys() == after.keys() and moved and all("language_model" in key for key in moved)
    write_peft(run / "checkpoints" / "step-3", tmp_path / "peft")
    names = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)


def check_evaluation(world: Path, run: Path, given: dict) -> None:
    """Engines with the text model of a checkpoint and the tower of model.path give the run's own held-out answers."""
    (before,) = [row for row in metrics(run) if row["training/global_step"] == 2]
    out = world.with_name("evaluated")
    step = run / "checkpoints" / "step-2"
    done = mrl("eval", str(PRESET), *overrides(world, **given), "--checkpoint", str(step), "-o", str(out), "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    held_out = {key: value for key, value in before.items() if key.startswith("val-")}
    assert held_out and json.loads(done.stdout)["metrics"] == held_out
    assert sorted(file.name for file in out.iterdir()) == [
        "config.resolved.yaml", "generations.jsonl", "logs", "results.json",
    ]  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_engines_see_with_the_tower_that_was_trained(name, tmp_path):
    world, run, _, rows = run_of(name, TRAINED, tmp_path)
    vision = TRAINED[name][1]["model__vision"]
    source = open_mrl(run / "checkpoints" / "step-3")
    assert source.model.trained_part == vision
    if "algorithm__use_kl_loss" in TRAINED[name][1]:
        assert abs(rows[0]["actor/kl_loss"]) < 1e-6 < rows[2]["actor/kl_loss"]
    write_hf(source, tmp_path / "hf", whole=open_whole(world / "model", source))
    before, after = weights(world / "model"), weights(tmp_path / "hf")
    assert before.keys() == after.keys()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    tower = {key.partition("visual.")[2] for key in moved if "visual." in key}
    assert {"merger.linear_fc1.weight", "deepstack_merger_list.0.linear_fc2.weight"} <= tower
    assert ("blocks.0.attn.qkv.weight" in tower) == ("patch_embed.proj.weight" in tower) == (vision == "trained")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
