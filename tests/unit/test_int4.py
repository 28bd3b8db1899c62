"""Checkpoints of 4-bit integers are read as the bfloat16 model that they stand for; the oracle is the package
compressed-tensors, which wrote Kimi-K2-Thinking's, and torch.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real"))
from tiny_models import in_dtype, save, tiny_latent

import mrl.checkpoint.stored_boxes
from mrl.checkpoint.convert import write_hf
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.export_check import check_export
from mrl.checkpoint.open_checkpoint import open_hf
from mrl.engine.requests import _of_model
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import load_model_spec, model_spec
from mrl.model.hf_files import check_checkpoint
from mrl.rank.mapped_bridge import Int4Files

FILE = "model.safetensors"
GROUP = 32
WEIGHTS = {"num_bits": 4, "group_size": GROUP, "strategy": "group", "symmetric": True, "type": "int"}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": WEIGHTS, "targets": ["Linear"]}},
}


def in_int4(plain: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Writes a checkpoint whose experts are 4-bit integers; returns what its tensors stand for."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    folder.mkdir()
    stored, meant = {}, {}
    for name, tensor in load_file(plain / FILE).items():
        stored[name] = meant[name] = tensor
        if ".experts." in name:
            groups = tensor.float().unflatten(1, (-1, GROUP))
            scales = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
            codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(1).to(torch.int8)
            del stored[name]
            stored |= {
                f"{name}_packed": pack_to_int32(codes, 4),
                f"{name}_scale": scales,
                f"{name}_shape": torch.tensor(tensor.shape),
            }
            # as the package decompresses: both factors in the dtype of the scales
            meant[name] = codes.to(torch.bfloat16) * scales.repeat_interleave(GROUP, 1)
    save_file(stored, folder / FILE, {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    return meant


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("int4")
    plain = save(in_dtype(tiny_latent(), torch.bfloat16), out / "plain")
    return out / "model", in_int4(plain, out / "model")


def test_a_conversion_writes_the_bfloat16_model_that_it_stands_for(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(mrl.checkpoint.stored_boxes, "SCRATCH_BYTES", 100)  # a few rows at a time
    folder, meant = stored
    write_hf(open_hf(folder), tmp_path / "hf", Options(workers=1, verify=True))
    written = {
        name: tensor for file in (tmp_path / "hf").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert written.keys() == meant.keys()
    assert all(torch.equal(written[name], meant[name]) for name in meant)
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


def test_ranks_read_it_too_and_engines_wait_for_their_first_sync(stored):
    folder, meant = stored
    found = Int4Files(str(folder)).load_some_hf_weight(list(meant))
    assert all(torch.equal(found[name], meant[name]) for name in meant)
    arguments = _of_model(load_model_spec(folder), "cpu")
    assert arguments["hf_overrides"]["quantization_config"] is None and "load_format" in arguments


def test_an_export_is_not_checked_in_it(stored):
    with pytest.raises(ConfigError, match="4-bit integers, which is not compared"):
        check_export(stored[0])


def _without(name: str, tensors: dict) -> dict:
    return {key: tensor for key, tensor in tensors.items() if not key.endswith(name)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: _without("0.up_proj.weight_scale", t), "up_proj.weight_scale must be BF16"),
        (lambda t: _without("0.up_proj.weight_packed", t), "up_proj.weight is missing"),
        (lambda t: t | {n: x[:, :-1].contiguous() for n, x in t.items() if n.endswith("_packed")}, "has shape"),
        (lambda t: t | {n: x.float() for n, x in t.items() if n.endswith("_scale")}, "must be BF16"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(stored, tmp_path, change, words):
    folder, _ = stored
    save_file(change(load_file(folder / FILE)), tmp_path / FILE)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(EnvironmentFault, match=words):
        check_checkpoint(tmp_path, load_model_spec(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_bits", 8), ("symmetric", False), ("type", "float"), ("strategy", "channel"), ("group_size", 12),
     ("actorder", "group")],
)  # fmt: skip
def test_other_formats_are_refused_by_name(stored, key, value):
    config = json.loads((stored[0] / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value
    with pytest.raises(ConfigError, match=key):
        model_spec(config)
