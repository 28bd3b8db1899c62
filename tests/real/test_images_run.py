"""Whole runs with images: engines' log-probs are the ranks' in every step. A weight sync brings the text model alone
beside a frozen tower: in turns on the same devices, with generation ahead and routes replayed, and by engines of
several ranks, too. A tower that is trained comes with it. The models are drawn, and their rows have no, one or two
pictures of different sizes.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from test_runs import finish, train
from world import PRESET, ROOT, metrics, mrl, overrides

from mrl.checkpoint.convert import write_hf
from mrl.checkpoint.open_checkpoint import open_mrl
from mrl.checkpoint.vision_tower import open_whole
from mrl.record.sample_files import read_samples

pytestmark = [pytest.mark.real, pytest.mark.long]

SETTINGS = {
    "model__vision": "frozen",
    "actor__layout__expert_model_parallel_size": 1,
    "actor__layout__sequence_parallel": False, "trainer__total_training_steps": 3, "trainer__test_freq": 2,
    "trainer__save_freq": 1, "rollout__n": 4, "data__max_prompt_length": 40, "data__max_response_length": 8,
}  # fmt: skip
# a drawn model never counts right
REWARD = "def compute_score(solution_str, **_):\n    return len(set(solution_str)) % 3 / 2\n"
TP, PP = "actor__layout__tensor_model_parallel_size", "actor__layout__pipeline_model_parallel_size"
TP2 = {TP: 2, "actor__layout__sequence_parallel": True, "rollout__tensor_model_parallel_size": 2,
       "cluster__n_gpus_per_node": 4}  # fmt: skip
LAYOUTS = {
    "moe-pp2": (8, {TP: 1, PP: 2}),
    "dense-tp2": (0, TP2),
    "moe-ahead-replayed": (8, {TP: 1, PP: 2, "trainer__schedule": "bounded", "actor__router_replay": "R3",
                               "rollout__enable_prefix_caching": False}),
    "moe-engine-dp2": (8, {TP: 1, PP: 2, "rollout__data_parallel_size": 2, "rollout__expert_parallel_size": 2,
                           "cluster__n_gpus_per_node": 4}),
    "dense-colocated": (0, {TP: 1, "actor__layout__world_size": 1, "cluster__placement": "colocated",
                            "cluster__n_gpus_per_node": 1}),
}  # fmt: skip
# against a reference, whose tower stays as it was
KL = {"algorithm__use_kl_loss": True, "actor__ppo_mini_batch_size": 8}
RATES = {"actor__optim__lr": 1e-4, "actor__optim__vision_lr": 1e-3, "actor__optim__lr_warmup_steps": 0}
TRAINED = {
    "moe-pp2": (8, {TP: 1, PP: 2, "model__vision": "trained"} | KL | RATES),
    "dense-tp2": (0, TP2 | RATES | {"model__vision": "projector"}),
}

EVALUATED = "moe-pp2"


def script():
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("make_vision_world", ROOT / "scripts" / "make_vision_world.py")
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def make_world(folder: Path, experts: int) -> Path:
    world = script()
    model, processor = world.make_model(0, experts), world.make_processor()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():  # a freshly made model is nearly uniform
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)
            else:
                parameter.add_(0.6 * torch.rand(parameter.shape, generator=random) - 0.3)
    task = world.Task(world.make_tokenizer(), processor, model)
    world.save(model, task, processor, folder / "model")
    (folder / "data").mkdir()
    train_boards, held_out = world.boards(0)
    for name, boards in (("train", train_boards[:48]), ("val", held_out[:16])):
        rows = world.data_rows(boards, name)
        for number, row in enumerate(rows):
            if number % 4 == 1:
                row["prompt"][0]["content"] = "<image>and<image>?"
                row["images"] = [*row["images"], rows[number - 1]["images"][0]]
            if number % 4 == 3:
                row |= {"prompt": [{"role": "user", "content": f"none {number}"}], "images": []}
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{name}.parquet")
    return folder


def run_of(name: str, layouts: dict, tmp_path: Path) -> tuple[Path, Path, dict, list[dict]]:
    """The world, the run directory, its settings and the metrics of three steps, with a resume before the last one."""
    experts, layout = layouts[name]
    world = make_world(tmp_path / "world", experts)
    run = tmp_path / "run"
    (world / "reward.py").write_text(REWARD)
    given = SETTINGS | layout | {"reward__custom_reward_function__path": world / "reward.py"}
    assert finish(train(world, run, **given | {"trainer__total_training_steps": 2}), run) == 0
    assert finish(train(world, run, "--resume", **given), run) == 0
    rows = [row for row in metrics(run) if row["training/global_step"]]
    assert len(rows) == 3
    for row in rows:
        assert row["training/rollout_log_probs_abs_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0
    planned = json.loads((run / "plan.json").read_text())["reshard"]["bytes_required"]
    assert all(row["reshard/bytes_required"] == planned for row in rows)
    return world, run, given, rows


@pytest.mark.parametrize("name", LAYOUTS)
def test_engines_see_what_ranks_see_and_a_sync_brings_the_text_model_alone(name, tmp_path):
    world, run, given, _ = run_of(name, LAYOUTS, tmp_path)
    seen = [row["images"] for row in read_samples(run / "samples", 1)]
    assert {len(images) for images in seen} == {0, 1, 2}
    names = {image["name"] for images in seen for image in images}
    assert names <= {file.name for file in (run / "images").rglob("*")}
    if name == EVALUATED:
        check_evaluation(world, run, given)


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
