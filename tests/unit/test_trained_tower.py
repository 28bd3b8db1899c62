"""A vision tower that is trained: its tensors are transformers', a sync brings it to every worker, and a checkpoint
gives it back byte for byte.
"""

import json
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real"))
from tiny_models import in_dtype, save, tiny_kinds_moe
from whole_models import in_whole

from mrl.checkpoint.convert import ExpectedModel, write_hf, write_layout
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.manifest import read_manifest
from mrl.checkpoint.open_checkpoint import open_hf, open_mrl
from mrl.checkpoint.vision_tower import open_whole
from mrl.cli.convert import parse_layout
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import model_spec
from mrl.model.hf_files import check_checkpoint
from mrl.model.registry import family_of, known_hf_config, load_model_spec
from mrl.model.tower_sizes import VisionTower
from mrl.model.trained_tower import PROJECTOR, TRAINED, TrainedTower
from mrl.reshard.proof import verify
from mrl.reshard.setup import SyncSetup
from mrl.tools.family.drawn import small_config
from mrl.tools.rehearse.small_tower import whole_config

VISION = {"depth": 2, "hidden_size": 8, "intermediate_size": 6, "out_hidden_size": 64, "num_position_embeddings": 9}


@pytest.mark.parametrize("sizes", [{}, {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 24}])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"), ("qwen3_vl", "Qwen3VLVisionModel"),
     ("qwen3_vl_moe", "Qwen3VLMoeVisionModel"), ("qwen3_5", "Qwen3_5VisionModel"),
     ("qwen3_5_moe", "Qwen3_5MoeVisionModel")],
)  # fmt: skip
def test_a_towers_tensors_are_those_of_transformers_class(kind, name, sizes):
    import transformers

    made = getattr(transformers.models, kind)
    config = getattr(made, name.replace("TransformerPretrainedModel", "Model").replace("VisionModel", "VisionConfig"),
                     None)  # fmt: skip
    config = config or made.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig
    with torch.device("meta"):
        tower = getattr(getattr(made, f"modeling_{kind}"), name)(config(**sizes))
    described = TrainedTower(TRAINED, VisionTower.of({"model_type": kind, "vision_config": sizes}))
    assert list(described.shapes()) == [(key, tuple(tensor.shape)) for key, tensor in tower.named_parameters()]
    projector = replace(described, part=PROJECTOR)
    parts = {id(tensor) for name, part in tower.named_children() if "merger" in name for tensor in part.parameters()}
    assert [projector.is_trained(key) for key, _ in described.shapes()] == [
        id(tensor) in parts for tensor in tower.parameters()
    ]


@pytest.mark.parametrize("text", ["Qwen3-30B-A3B", "Qwen2.5-0.5B"])
def test_a_sync_brings_the_whole_tower_to_every_worker_and_nothing_of_a_frozen_one(text):
    plain = small_config(known_hf_config(text))
    whole = whole_config(plain, family_of(model_spec(plain)))
    plans = {}
    for vision in (TRAINED, PROJECTOR, "frozen"):
        setup = SyncSetup(
            hf_config=whole, dialect="cpu", dtype="float32", budget_bytes=200_000, timeout_s=20.0, vision=vision,
            train={"world_size": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            rollout={"num_engines": 1, "tensor": 2, "data": 1, "expert": 1}, transport={"kind": "shm"},
            topology={"ranks": [[0, rank] for rank in range(4)], "workers": [[0, 4], [0, 5]]},
        )  # fmt: skip
        plans[vision] = setup.plan()
        assert verify(plans[vision]).fault is None
    numbers = sum(prod(shape) for _, shape in model_spec(whole, TRAINED).trained_tower.shapes())
    tower = 2 * 4 * numbers  # of two workers, in float32
    assert plans[TRAINED].bytes_required == plans["frozen"].bytes_required + tower
    assert plans[PROJECTOR].bytes_required == plans[TRAINED].bytes_required


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of Qwen3.5's kind in bfloat16 with a whole tower."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("seeing")
    whole = out / "whole"
    in_whole(save(in_dtype(tiny_kinds_moe(), torch.bfloat16), out / "text"), whole)
    config = json.loads((whole / "config.json").read_text())
    config["vision_config"] |= VISION
    (whole / "config.json").write_text(json.dumps(config))
    stored = {name: tensor for name, tensor in load_file(whole / "model.safetensors").items() if ".visual." not in name}
    for name, shape in TrainedTower(TRAINED, VisionTower.of(config)).shapes():
        stored[f"model.visual.{name}"] = torch.randn(shape).bfloat16()
    save_file(stored, whole / "model.safetensors", {"format": "pt"})
    return whole


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("vision", [TRAINED, PROJECTOR])
def test_there_and_back_all_has_the_same_bytes(folder, tmp_path, vision):
    write_layout(
        open_hf(folder, vision=vision), tmp_path / "ours", parse_layout("tp=2,pp=2,ep=2"), options=Options(verify=True)
    )
    assert read_manifest(tmp_path / "ours").vision == vision
    write_layout(open_mrl(tmp_path / "ours"), tmp_path / "again", parse_layout("tp=1,pp=2"))
    source = open_mrl(tmp_path / "again")
    assert source.model == load_model_spec(folder, vision)
    report = write_hf(source, tmp_path / "hf", Options(verify=True), open_whole(folder, source))
    before, after = weights(folder), weights(tmp_path / "hf")
    assert before.keys() == after.keys() and report.of_vision_tower == 0
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)
    check_checkpoint(tmp_path / "hf", load_model_spec(tmp_path / "hf", vision))


def test_a_trained_tower_is_never_left_out_without_a_word(folder, tmp_path):
    source = open_hf(folder, vision=TRAINED)
    with pytest.raises(ConfigError, match="--vision-from"):
        write_hf(source, tmp_path / "hf")
    frozen = ExpectedModel("run.yaml", str(folder), "bfloat16", "frozen")
    with pytest.raises(ConfigError, match=r"model\.vision in run\.yaml is frozen"):
        frozen.check(source)
    with pytest.raises(ConfigError, match="the text model alone"):
        replace(frozen, vision=TRAINED).check(open_hf(folder))


def test_a_folder_without_one_of_its_tensors_is_refused_by_name(folder, tmp_path):
    stored = weights(folder)
    del stored["model.visual.merger.linear_fc1.bias"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(EnvironmentFault, match=r"model\.visual\.merger\.linear_fc1\.bias is missing"):
        check_checkpoint(tmp_path, load_model_spec(tmp_path, TRAINED))
    check_checkpoint(tmp_path, load_model_spec(tmp_path))
