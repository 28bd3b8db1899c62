"""A critic computes what the Hugging Face model under a head computes, in every layout: values, loss, the norm of its
gradient and two updates; the actor beside it stays as it is. And a run with one resumes bit by bit.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from metric_names import CRITIC, SAVING, STEPS_AFTER_SAVING, check_names
from padded import PaddedBatch
from ranks import run_ranks
from test_parity import CP, EP, PP, TP, _samples
from tiny_models import save, tiny_dense, tiny_moe
from torch import Tensor
from world import PRESET, make_world, metrics, overrides, succeeded

from mrl.checkpoint.manifest import read_manifest
from mrl.config.schema import LayoutConfig
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

pytestmark = [pytest.mark.real, pytest.mark.long]

MODELS = {"moe": tiny_moe, "dense": tiny_dense}
VPP = "virtual_pipeline_model_parallel_size"
PADDED = {"use_remove_padding": False}
LEAVES = ("param_offload", "grad_offload", "optimizer_offload")
# name -> (model, ranks, degrees, fields of the actor, fields of the critic)
LAYOUTS = {
    "moe-tp1": ("moe", 1, {}, {}, {}),
    "moe-leaves": ("moe", 1, {}, {}, dict.fromkeys(LEAVES, True)),
    "moe-padded": ("moe", 1, {}, PADDED, {"ppo_micro_batch_size_per_gpu": 4, "forward_micro_batch_size_per_gpu": 6}),
    "dense-tp1": ("dense", 1, {}, {}, {}),
    "moe-tp2": ("moe", 2, {TP: 2}, {}, {}),
    "moe-pp2": ("moe", 2, {PP: 2}, {}, {}),
    "moe-pp2-vpp2": ("moe", 2, {PP: 2, VPP: 2}, {}, {}),
    "moe-ep2": ("moe", 2, {EP: 2}, {}, {}),
    "moe-dp2": ("moe", 2, {}, {}, {"ppo_micro_batch_size_per_gpu": 3}),
    "dense-tp2": ("dense", 2, {TP: 2}, {}, {}),
    "dense-tp2-whole-sequences": ("dense", 2, {TP: 2, "sequence_parallel": False}, {}, {}),
    "dense-pp2": ("dense", 2, {PP: 2}, {}, {}),
    "dense-cp2": ("dense", 2, {CP: 2}, {}, {}),
    # the critic in a layout of its own
    "moe-tp2-beside-ep2": ("moe", 2, {TP: 2}, {}, {"layout": {EP: 2}}),
    "moe-dp2-beside-tp2": ("moe", 2, {}, {}, {"layout": {TP: 2}, **dict.fromkeys(LEAVES, True)}),
    "moe-pp2-beside-tp2": ("moe", 2, {PP: 2}, PADDED, {"layout": {TP: 2}}),
    "moe-ep2-beside-vpp2": ("moe", 2, {EP: 2}, {}, {"layout": {PP: 2, VPP: 2}, **dict.fromkeys(LEAVES, True)}),
    "dense-tp2-beside-cp2": ("dense", 2, {TP: 2}, {}, {"layout": {CP: 2}, "ppo_micro_batch_size_per_gpu": 3}),
    "dense-cp2-beside-dp2": ("dense", 2, {CP: 2}, {}, {"layout": {}}),
}  # fmt: skip
REACH, LR = 0.3, 1e-3


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> dict[str, dict]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("oracle")
    return {name: _oracle(make(), folder / name) for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def results(oracles, tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for world_size in (1, 2):
        out = tmp_path_factory.mktemp(f"ranks{world_size}")
        names = [name for name, (_, world, *_) in LAYOUTS.items() if world == world_size]
        cases = out / "cases.json"
        cases.write_text(json.dumps([_case(name, oracles) for name in names]))
        run_ranks(Path(__file__).with_name("critic_worker.py"), world_size, out, [str(cases)])
        folders |= {name: out / name for name in names}
    return folders


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_hugging_face_under_the_head(layout, oracles, results):
    expected = oracles[LAYOUTS[layout][0]]["values"]
    assert np.abs(_values(results[layout], "before") - expected).max() < 1e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_norm_of_the_gradient_are_those_of_hugging_face(layout, oracles, results):
    oracle = oracles[LAYOUTS[layout][0]]
    reports = [json.loads(file.read_text()) for file in results[layout].glob("report-*.json")]
    first = [report["parts"][0] for report in reports if report["parts"]]
    total, tokens = (sum(part["critic/vf_loss"][i] for part in first) for i in (0, 1))
    assert total / tokens == pytest.approx(oracle["loss"], rel=1e-5)
    (norm,) = [part["critic/grad_norm"][0] for part in first if "critic/grad_norm" in part]
    assert norm == pytest.approx(oracle["norm"], rel=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_updates_move_values_alike_and_the_actor_not_at_all(layout, results):
    one_rank = results[f"{LAYOUTS[layout][0]}-tp1"]
    before, after = (_values(one_rank, name) for name in ("before", "after"))
    assert np.abs(after - before).max() > 1e-3
    assert np.abs(_values(results[layout], "after") - after).max() < 1e-4 * np.abs(after - before).max() + 1e-5
    reports = [json.loads(file.read_text()) for file in results[layout].glob("report-*.json")]
    assert len(reports) == LAYOUTS[layout][1] and all(report["actor_stays"] for report in reports)


@pytest.mark.parametrize("layout", ["moe-leaves", "moe-dp2-beside-tp2", "moe-ep2-beside-vpp2"])
def test_what_leaves_the_device_does(layout, results):
    report = json.loads((results[layout] / "report-0.json").read_text())
    assert report["left"].keys() == {"parameters", "gradients", "optimizer"} and all(report["left"].values())


def _values(folder: Path, name: str) -> np.ndarray:
    parts = [np.load(file) for file in folder.glob(f"values-{name}-*.npz")]
    rows = np.concatenate([part["rows"] for part in parts])
    unique, first = np.unique(rows, return_index=True)  # tensor and context ranks each have them
    assert unique.tolist() == list(range(13))
    return np.concatenate([part["values"] for part in parts])[first]


def _case(name: str, oracles: dict[str, dict]) -> dict:
    model, world_size, degrees, actor, critic = LAYOUTS[name]
    oracle = oracles[model]
    if "layout" in critic:
        critic = critic | {"layout": LayoutConfig(world_size=world_size).model_dump() | critic["layout"]}
    config = {
        "model": {"path": str(oracle["path"]), "dtype": "float32"},
        "actor": {
            "layout": {"world_size": world_size} | degrees, "ppo_mini_batch_size": 13,
            "ppo_micro_batch_size_per_gpu": 5, **actor,
        },
        "critic": {
            "cliprange_value": REACH,
            "optim": {"lr": LR, "eps": 1e-3, "weight_decay": 0.0, "clip_grad": 0.5 * oracle["norm"]},
            **critic,
        },
        "rollout": {"n": 1},
        "algorithm": {"adv_estimator": "gae", "policy_loss": {"loss_mode": "vanilla", "loss_agg_mode": "token-mean"}},
        "data": {"train_batch_size": 13},
        "cluster": {"device": "cpu", "step_timeout_s": 300},
    }  # fmt: skip
    return {"name": name, "config": config, "batch": str(oracle["batch"]), "columns": str(oracle["columns"])}


def _oracle(model, path: Path) -> dict:
    model_path = save(model, path)
    batch = _samples(model.config.vocab_size)
    mask = torch.from_numpy(batch.response_mask)
    rng = np.random.default_rng(4)
    head = rng.normal(size=(1, model.config.hidden_size)).astype(np.float32) / model.config.hidden_size
    with torch.no_grad():
        start = _hugging_faces(model, batch, torch.from_numpy(head))
    old = start.numpy() + rng.normal(size=start.shape).astype(np.float32) * 0.4
    returns = rng.normal(size=start.shape).astype(np.float32)
    flat = {"old_values": old[batch.response_mask], "returns": returns[batch.response_mask], "head": head}
    np.savez(path / "columns.npz", **flat)
    np.savez(path / "batch.npz", **batch.arrays)
    weight = torch.from_numpy(head).requires_grad_()
    values = _hugging_faces(model, batch, weight)[mask]
    old_flat, wanted = (torch.from_numpy(flat[name]) for name in ("old_values", "returns"))
    near = torch.clamp(values, old_flat - REACH, old_flat + REACH)
    loss = 0.5 * torch.maximum((values - wanted) ** 2, (near - wanted) ** 2).mean()
    loss.backward()
    gradients = [
        p.grad for name, p in model.named_parameters() if p.grad is not None and not name.startswith("lm_head")
    ]
    norm = torch.sqrt(sum(g.double().square().sum() for g in [*gradients, weight.grad]))
    return {
        "path": model_path, "batch": path / "batch.npz", "columns": path / "columns.npz",
        "values": np.where(batch.response_mask, start.numpy(), 0), "loss": loss.item(), "norm": norm.item(),
    }  # fmt: skip


def _hugging_faces(model, batch: PaddedBatch, head: Tensor) -> Tensor:
    """[batch, response_length]: of the state before each response token, one sample at a time."""
    values = torch.zeros(batch.rollout_log_probs.shape)
    for row, (prompt, response) in enumerate(zip(batch.prompt_lengths, batch.response_lengths, strict=True)):
        ids = torch.from_numpy(batch.input_ids[row : row + 1, : prompt + response])
        states = model.model(ids).last_hidden_state[0, prompt - 1 : prompt + response - 1]
        values[row, :response] = (states @ head.T)[:, 0]
    return values


# ---------------------------------------------------------------- whole runs

PPO = {
    "critic__optim__lr": 1e-3,
    "trainer__total_training_steps": 3,
    "trainer__save_freq": 1,
    "trainer__test_freq": -1,
    "trainer__val_before_train": False,
    "trainer__critic_warmup": 2,
    "trainer__max_actor_ckpt_to_keep": 3,
    "trainer__deterministic": True,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def trained(world: Path, run_dir: Path, *more: str, preset: Path = PRESET, **settings) -> Path:
    given = overrides(world, **(PPO | settings))
    succeeded("train", str(preset), "--recipe", "ppo", "--run-dir", str(run_dir), *given, *more)
    return run_dir


def test_a_run_with_a_critic_trains_it_first_and_resumes_bit_by_bit(world, tmp_path):
    run = trained(world, tmp_path / "run")
    rows = [row for row in metrics(run) if row["training/global_step"]]
    assert [row["actor/updates"] for row in rows] == [0, 2, 2] and all(row["reshard/verified"] for row in rows)
    assert rows[0]["critic/values/max"] == rows[0]["critic/values/min"] == 0.0 and rows[2]["critic/values/max"] != 0
    assert all(row["critic/grad_norm"] > 0 and row["timing_s/update_critic"] > 0 for row in rows)
    assert "actor/grad_norm" not in rows[0] and rows[1]["actor/grad_norm"] > 0
    check_names(rows, CRITIC, SAVING, STEPS_AFTER_SAVING)
    other = trained(world, tmp_path / "other", trainer__total_training_steps=2)
    trained(world, other, "--resume")
    assert metrics_difference(metrics(run), metrics(other)) is None
    ends = [folder / "checkpoints" / "step-3" for folder in (run, other)]
    assert checkpoint_difference(*ends) is None
    manifest = read_manifest(ends[0])
    assert (manifest.optimizer["num_updates"], manifest.of_critic.optimizer["num_updates"]) == (4, 6)
    apart = {"actor__layout__tensor_model_parallel_size": 1, "actor__layout__sequence_parallel": False}
    moved = trained(world, other, "--resume", trainer__total_training_steps=4, **apart)
    assert metrics(moved)[-1]["critic/vf_loss"] > 0
    said = succeeded("convert", "megatron-to-hf", str(run), "-o", str(tmp_path / "hf"), "--verify")
    assert "the critic is left out" in said


BESIDE = {"critic__layout": {"world_size": 2, EP: 2}}  # the actor has TP2 too
OF_CRITIC = ("vf_loss", "vf_explained_var", "grad_norm", "values/mean", "values/max", "returns/mean")


def test_a_critic_in_its_own_layout_trains_as_one_in_the_actors_and_goes_on_from_either(world, tmp_path):
    """By the same responses, since the actor waits for the last step; each layout goes on from the other's, too."""
    given = {"trainer__critic_warmup": 4, "trainer__total_training_steps": 4}
    layouts = {"alike": {}, "apart": BESIDE}
    runs = [trained(world, tmp_path / name, **given, **own) for name, own in layouts.items()]
    for start, own in zip(reversed(runs), layouts.values(), strict=True):
        begins = {"trainer__resume_mode": "resume_path"}
        begins |= {"trainer__resume_from_path": start / "checkpoints" / "step-2"}
        runs.append(trained(world, tmp_path / f"from-{start.name}", **given, **own, **begins))
    first, *others = [{step: row for row in metrics(run) if (step := row["training/global_step"])} for run in runs]
    # a run that begins from a checkpoint has the line of its step
    assert [sorted(rows) for rows in others] == [[1, 2, 3, 4], [2, 3, 4], [2, 3, 4]]
    for rows in others:
        for step, row in rows.items():
            for name in OF_CRITIC:
                assert row[f"critic/{name}"] == pytest.approx(first[step][f"critic/{name}"], rel=1e-5, abs=1e-6), name
    assert first[4]["critic/values/max"] != 0 and first[4]["actor/updates"] == 2


def test_a_critic_beside_adapters_resumes_bit_by_bit(world, tmp_path):
    """The actor trains adapters alone, the critic is whole; a checkpoint has both."""
    adapted = {"actor__lora__rank": 8, "actor__optim__lr": 1e-3, **BESIDE}
    run = trained(world, tmp_path / "run", **adapted)
    rows = [row for row in metrics(run) if row["training/global_step"]]
    assert all(row["reshard/verified"] for row in rows) and rows[2]["critic/values/max"] != 0
    other = trained(world, tmp_path / "other", **adapted, trainer__total_training_steps=2)
    trained(world, other, "--resume", **adapted)
    assert metrics_difference(metrics(run), metrics(other)) is None
    ends = [folder / "checkpoints" / "step-3" for folder in (run, other)]
    assert checkpoint_difference(*ends) is None
    manifest = read_manifest(ends[0])
    assert manifest.adapters and not manifest.of_critic.adapters
    assert (manifest.optimizer["num_updates"], manifest.of_critic.optimizer["num_updates"]) == (4, 6)


@pytest.mark.parametrize("own", [{}, BESIDE], ids=["alike", "beside"])
def test_a_colocated_critic_that_leaves_its_devices_has_the_same_bits(own, world, tmp_path):
    leaves = {f"critic__{name}": True for name in LEAVES}
    apart, shared = (
        trained(world, tmp_path / preset.stem, preset=preset, trainer__total_training_steps=2, **own, **given)
        for preset, given in ((PRESET, {}), (PRESET.with_name("cpu-colocated.yaml"), leaves))
    )
    assert checkpoint_difference(*(folder / "checkpoints" / "step-2" for folder in (apart, shared))) is None
    assert metrics(shared)[-1]["offload/critic_optimizer_bytes"] > 0
