"""Adapters' checkpoints beside the model that they are on, which may be of another dtype or have moved, and beside the
adapter that training began with, which may be gone.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import SIZES, write_model
from test_glm4_moe import CONFIG as GLM
from test_glm4_moe import CONSTANTS
from test_lora import EP, LORA, TP, added, factors_of, step_of

from mrl.checkpoint.convert import write_hf
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.manifest import Manifest, RankFiles, file_facts, read_manifest, write_manifest
from mrl.checkpoint.open_checkpoint import open_saved
from mrl.checkpoint.peft_folder import write_peft
from mrl.checkpoint.step_folders import Newest
from mrl.cli.main import main
from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.driver.resume import RunIdentity, _check_same_adapters, without_first_adapter
from mrl.errors import VERBOSE, ConfigError
from mrl.model import model_spec, tensor_specs
from mrl.model.adapters import FIRST, SECOND, factor_name
from mrl.model.peft_files import CONFIG, WEIGHTS, adapter_digest

TINY = Path(__file__).parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"


def model_in(folder: Path, sizes: dict, dtype: str) -> Path:
    """A checkpoint of random weights in a dtype, its constants in float32."""
    write_model(folder)
    (folder / "config.json").write_text(json.dumps(sizes))
    noise = torch.Generator().manual_seed(0)
    tensors = {
        spec.name: torch.randn(spec.shape, generator=noise).to(
            torch.float32 if spec.is_constant else getattr(torch, dtype)
        )
        for spec in tensor_specs(model_spec(sizes))
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def base(tmp_path) -> Path:
    return model_in(tmp_path / "base", SIZES, "float32")


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


# --- a model of another dtype -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [SIZES, GLM], ids=["qwen3", "glm, with constants"])
@pytest.mark.parametrize(("stored", "trained"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_model_of_another_dtype_is_brought_to_that_of_its_adapters_and_then_merged(sizes, stored, trained, tmp_path):
    """As ranks do: `param.to(dtype)` when the model is loaded, then the sum in float32, rounded once."""
    base = model_in(tmp_path / "base", sizes, stored)
    model, dtype = model_spec(sizes), getattr(torch, trained)
    factors = {name: tensor.to(dtype) for name, tensor in factors_of(model, LORA).items()}
    step = step_of(base, tmp_path / "step-3", {"world_size": 2, TP: 2, EP: 2}, factors, trained)
    assert write_hf(open_saved(step), tmp_path / "merged", Options(verify=True)).verified
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert trained in (config.get("dtype"), config.get("torch_dtype"))
    found = load_file(tmp_path / "merged" / "model-00001.safetensors")
    adapted = 0
    for name, tensor in load_file(base / "model.safetensors").items():
        wanted = tensor if name == CONSTANTS or "e_score" in name else tensor.to(dtype)
        first, second = (factors.get(factor_name(name, factor)) for factor in (FIRST, SECOND))
        if first is not None:
            adapted += 1
            wanted = added(wanted.float(), first.float(), second.float(), LORA.scale).to(dtype)
        assert found[name].dtype is wanted.dtype and torch.equal(words(found[name]), words(wanted)), name
    assert adapted == len(factors) // 2


# --- a model that has moved -------------------------------------------------------------------------------------------


def converted(capsys, *arguments) -> tuple[int, str]:
    code = 0
    try:
        main(["convert", *map(str, arguments)])
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr().err


def test_every_conversion_of_adapters_is_told_where_their_model_is_now(base, tmp_path, capsys):
    step = step_of(base, tmp_path / "step-3", {"world_size": 1}, factors_of(model_spec(SIZES), LORA))
    moved = base.rename(tmp_path / "moved")
    code, said = converted(capsys, "megatron-to-hf", step, "-o", tmp_path / "lost")
    assert code == 2 and "--base" in said
    for which, more in (
        ("megatron-to-hf", []),
        ("megatron-to-megatron", ["--weights-only", "--layout", "tp=2"]),
        ("lora-to-hf", ["--merged"]),
    ):
        code, said = converted(capsys, which, step, "-o", tmp_path / which, "--base", moved, *more)
        assert code == 0, said
    one, other = (load_file(tmp_path / name / "model-00001.safetensors") for name in ("megatron-to-hf", "lora-to-hf"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    code, said = converted(
        capsys, "megatron-to-hf", tmp_path / "megatron-to-megatron", "-o", tmp_path / "hf", "--base", moved
    )
    assert code == 2 and "has whole weights" in said and not (tmp_path / "hf").exists()


@pytest.mark.parametrize("has_critic", [False, True])
@pytest.mark.parametrize(
    "which",
    [
        ["lora-to-hf"],
        ["lora-to-hf", "--merged"],
        ["megatron-to-hf"],
        ["megatron-to-megatron", "--weights-only", "--layout", "tp=2"],
    ],
    ids=" ".join,
)
def test_every_conversion_of_adapters_says_that_it_leaves_a_critic_out(base, tmp_path, capsys, which, has_critic):
    step = step_of(base, tmp_path / "step-3", {"world_size": 1}, factors_of(model_spec(SIZES), LORA))
    manifest = read_manifest(step)
    if has_critic:
        critic = step / "critic-00000.safetensors"
        critic.write_bytes(b"one")
        files = RankFiles(None, {critic.name: file_facts(critic)}, manifest.optimizer)
        write_manifest(step, replace(manifest, critic=(files,)))
    main(["convert", *which, str(step), "-o", str(tmp_path / "said")])
    assert ("the critic is left out" in capsys.readouterr().out) == has_critic
    main(["convert", *which, str(step), "-o", str(tmp_path / "json"), "--json"])
    assert json.loads(capsys.readouterr().out)["left_out_critic"] == has_critic


def test_the_path_of_the_model_is_kept_whole(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["model.path=base", "actor.lora.rank=4"]
    identity = RunIdentity.of(load_config(TINY, None, given).config)
    assert identity.adapters["base"]["path"] == str(base.resolve()) and identity.adapters["start"] is None


# --- an adapter that training began with ------------------------------------------------------------------------------


@pytest.fixture
def begun(base, tmp_path):
    """A run directory whose newest checkpoint began with an adapter: what its configuration says."""
    factors = factors_of(model_spec(SIZES), LORA, seed=1)
    write_peft(step_of(base, tmp_path / "step-1", {"world_size": 1}, factors), tmp_path / "adapter")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    start = {"path": str(tmp_path / "adapter"), "digest": adapter_digest(tmp_path / "adapter")}
    step_of(base, tmp_path / "run" / "checkpoints" / "step-3", {"world_size": 1}, factors, start=start)
    given = [
        f"model.path={base}", f"trainer.run_dir={tmp_path / 'run'}", "actor.lora.rank=4", "actor.lora.alpha=8",
        f"actor.lora.path={tmp_path / 'adapter'}",
    ]  # fmt: skip
    return load_config(TINY, None, given)


def of_the_adapter(resolved) -> list[str]:
    found = violations(resolved, model_spec(SIZES), check_paths=True)
    return [violation.field for violation in found if violation.field.startswith("actor.lora")]


def test_the_adapter_that_training_began_with_is_needed_until_there_is_a_checkpoint(begun, tmp_path):
    assert of_the_adapter(begun) == []
    shutil.rmtree(tmp_path / "adapter")
    assert of_the_adapter(without_first_adapter(begun, resume=False)) == ["actor.lora.path"]
    assert of_the_adapter(without_first_adapter(begun, resume=True)) == []
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-3")
    assert of_the_adapter(without_first_adapter(begun, resume=True)) == ["actor.lora.path"]


def test_an_adapter_of_another_base_or_rank_is_one_message_before_anything_starts(begun, tmp_path, monkeypatch):
    monkeypatch.setenv(VERBOSE, "1")  # folders of tests may have long names
    file = model_in(tmp_path / "another", SIZES, "float32") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1
    save_file(tensors, file, {"format": "pt"})
    for base, rank, said in (("base", 8, "r is 4, and actor.lora.rank is 8"), ("another", 4, "digest differs")):
        given = [f"model.path={tmp_path / base}", f"actor.lora={{rank: {rank}, alpha: 8, path: {tmp_path}/adapter}}"]
        found = violations(load_config(TINY, None, given), model_spec(SIZES), check_paths=True)
        (message,) = [str(violation) for violation in found if violation.field.startswith("actor.lora")]
        assert "cannot be started from" in message and said in message


def manifest_with(**adapters) -> Manifest:
    return Manifest(3, {}, "float32", SIZES, (), {}, {}, adapters=adapters)


def test_a_run_keeps_the_digest_of_its_adapter_when_the_folder_is_gone(begun, tmp_path):
    first = RunIdentity.of(begun.config)
    assert first.adapters["start"]["digest"] == adapter_digest(tmp_path / "adapter")
    shutil.rmtree(tmp_path / "adapter")
    again = RunIdentity.of(begun.config)
    point = Newest(Path("step-3"), manifest_with(**first.adapters), {})
    _check_same_adapters(again, point.manifest, point.path)
    assert again.adapters["start"] is None
    assert again.going_on(point).adapters == first.adapters
    assert again.going_on(None) is again


def test_a_run_does_not_go_on_where_another_adapter_is_named(begun, tmp_path):
    then = RunIdentity.of(begun.config).adapters
    file = tmp_path / "adapter" / WEIGHTS
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    now = RunIdentity.of(begun.config)
    for start in (then["start"], None):
        with pytest.raises(ConfigError, match="is not the adapter that training began with"):
            _check_same_adapters(now, manifest_with(**then | {"start": start}), Path("step-3"))


def test_pefts_form_says_the_dropout_that_adapters_were_trained_with(base, tmp_path):
    factors = factors_of(model_spec(SIZES), LORA)
    write_peft(step_of(base, tmp_path / "step-3", {"world_size": 1}, factors, dropout=0.25), tmp_path / "peft")
    assert json.loads((tmp_path / "peft" / CONFIG).read_text())["lora_dropout"] == 0.25
