"""`mrl convert` as it is typed: layouts by degrees or by configuration, a report, exit codes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_model import SIZES

from mrl.checkpoint.manifest import read_manifest
from mrl.cli.main import main
from mrl.config.load import load_config
from mrl.model import model_spec, tensor_specs

PRESET = Path(__file__).resolve().parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"


@pytest.fixture
def model(tmp_path) -> Path:
    """A Hugging Face checkpoint of float32 weights that are all different."""
    folder, rng = tmp_path / "model", np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    save_file(
        {t.name: rng.standard_normal(t.shape, np.float32) for t in tensor_specs(model_spec(SIZES))},
        folder / "model.safetensors",
    )
    return folder


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = 0
    try:
        main(["convert", *map(str, arguments)])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_there_to_another_layout_and_back(capsys, model, tmp_path):
    layouts = [
        ("hf-to-megatron", model, "a", ["--layout", "tp=2,pp=2,ep=2"]),
        ("megatron-to-megatron", "a", "b", ["--layout", "ep=4"]),
    ]
    for which, source, target, layout in layouts:
        code, said, _ = run(capsys, which, tmp_path / source, "-o", tmp_path / target, "--verify", "--json", *layout)
        report = json.loads(said)
        assert code == 0 and report["verified"] and report["tensors"] == len(tensor_specs(model_spec(SIZES)))
    assert read_manifest(tmp_path / "b").layout["expert_model_parallel_size"] == 4
    code, said, _ = run(capsys, "megatron-to-hf", tmp_path / "b", "-o", tmp_path / "hf", "--verify")
    assert code == 0 and "bytes and digests are the source's" in said
    one, other = load_file(model / "model.safetensors"), load_file(tmp_path / "hf" / "model-00001.safetensors")
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_configuration_gives_the_layout_and_says_which_model(capsys, model, tmp_path):
    preset = tmp_path / "mine.yaml"
    text = f"extends: {PRESET}\nmodel: {{path: {model}, dtype: float32}}\n"
    preset.write_text(text)
    code, _, err = run(capsys, "hf-to-megatron", model, "-o", tmp_path / "ours", "--config", preset)
    assert code == 0, err
    # what a run of that configuration compares with its own
    assert read_manifest(tmp_path / "ours").layout == load_config(preset).config.actor.layout.model_dump()
    other = shutil.copytree(model, tmp_path / "other")
    (other / "config.json").write_text(json.dumps(SIZES | {"num_experts": 8}))
    preset.write_text(text.replace(f"path: {model}", f"path: {other}"))
    code, _, err = run(capsys, "hf-to-megatron", model, "-o", tmp_path / "again", "--config", preset)
    assert code == 2 and "another architecture" in err and "num_experts 8, not 4" in err
    preset.write_text(text.replace("float32", "bfloat16"))
    code, _, err = run(capsys, "hf-to-megatron", model, "-o", tmp_path / "again", "--config", preset)
    assert code == 2 and "weights are float32, model.dtype" in err and not (tmp_path / "again").exists()


@pytest.mark.parametrize(("which", "more"), [("megatron-to-hf", []), ("megatron-to-megatron", ["--layout", "tp=1"])])
def test_files_of_a_torch_dist_checkpoint_are_not_ignored_where_it_is_not_trusted(capsys, model, tmp_path, which, more):
    assert run(capsys, "hf-to-megatron", model, "-o", tmp_path / "ours", "--layout", "tp=1")[0] == 0
    code, _, said = run(capsys, which, tmp_path / "ours", "-o", tmp_path / "again", "--hf-files", model, *more)
    assert code == 2 and "--hf-files" in said and "--trust-checkpoint" in said and not (tmp_path / "again").exists()


def test_tensors_that_stay_behind_are_told(capsys, model, tmp_path):
    file = model / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}, file)
    code, said, _ = run(capsys, "hf-to-megatron", model, "-o", tmp_path / "ours", "--layout", "tp=1", "--verify")
    assert (
        code == 0
        and "1 entries of the source are not parameters and are left out: model.layers.0.self_attn.rotary_emb.inv_freq"
        in said
    )


def test_usage_is_answered_with_2_and_a_bad_checkpoint_with_4(capsys, model, tmp_path):
    assert run(capsys, "hf-to-megatron", model, "-o", tmp_path / "o")[0] == 2  # neither --layout nor --config
    code, _, err = run(capsys, "hf-to-megatron", model, "-o", tmp_path / "o", "--layout", "tp=3")
    assert code == 2 and "tensor_model_parallel_size = 3" in err
    assert run(capsys, "hf-to-megatron", model, "-o", tmp_path / "o", "--layout", "tp=1", "--workers", "0")[0] == 2
    assert run(capsys, "hf-to-megatron", tmp_path / "nowhere", "-o", tmp_path / "o", "--layout", "tp=1")[0] == 4
    assert run(capsys, "megatron-to-megatron", model, "-o", tmp_path / "o", "--layout", "tp=1")[0] == 4
    assert run(capsys, "hf-to-megatron", model, "-o", model, "--layout", "tp=1")[0] == 2
    code, _, err = run(capsys, "hf-to-megatron", model, "-o", model / "below" / "it", "--layout", "tp=1")
    assert code == 2 and "is inside of" in err and not (model / "below").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
