"""Checkpoints in MXFP4 are read as the bfloat16 model that they stand for, and gpt-oss' files are written as
transformers writes them; the oracle is transformers' own reader and class.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models import TINY, TINY_GPT_OSS
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import mrl.checkpoint.stored_boxes
from mrl.checkpoint.convert import write_hf, write_layout
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.export_check import check_export
from mrl.checkpoint.open_checkpoint import open_hf, open_mrl
from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.engine.requests import _of_model
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import forward_flops, forward_flops_per_token, known_spec, load_model_spec, model_spec
from mrl.model.hf_files import check_checkpoint
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.layout_rules import check_train_layout
from mrl.model.mxfp4 import mxfp4_rows
from mrl.model.vllm_parameters import target_parameters
from mrl.rank.family_reference import own_names
from mrl.rank.mapped_bridge import JoinedFiles
from mrl.reshard.plan import plan_reshard
from mrl.reshard.proof import rehearse

FILE = "model.safetensors"
SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
MATRICES = ("gate_up_proj", "down_proj")


def in_mxfp4(plain: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Writes a checkpoint with experts of random bytes; returns what transformers reads of it."""
    drawn = torch.Generator().manual_seed(5)
    folder.mkdir()
    stored, meant = {}, {}
    for name, tensor in load_file(plain / FILE).items():
        stored[name] = meant[name] = tensor
        if name.endswith(MATRICES):
            experts, columns, rows = tensor.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=drawn, dtype=torch.uint8)
            scales = torch.randint(100, 140, blocks.shape[:-1], generator=drawn, dtype=torch.uint8)
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, folder / FILE, {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return {name: tensor.contiguous() for name, tensor in meant.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("mxfp4") / "plain"
    torch.manual_seed(0)
    made = GptOssForCausalLM(GptOssConfig(**{key: value for key, value in {**TINY, **TINY_GPT_OSS, **SIZES}.items()
                                             if key != "rope_theta"}))  # fmt: skip
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stored(plain) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = plain.with_name("model")
    return folder, in_mxfp4(plain, folder)


def written(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_every_byte_and_scale_is_transformers():
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(256, 0)  # every byte beside every scale
    scales = np.arange(256, dtype=np.uint8)[:, None].repeat(16, 1)
    expected = convert_moe_packed_tensors(torch.from_numpy(blocks.copy())[None], torch.from_numpy(scales.copy())[None])
    found = mxfp4_rows(blocks.reshape(256, 256), scales)
    ours = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
    theirs = expected[0].T.reshape(256, 512)  # which transformers turns
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(0.0, 1.0, -1.0), theirs.nan_to_num(0.0, 1.0, -1.0))


def test_a_conversion_writes_the_bfloat16_model_that_it_stands_for(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(mrl.checkpoint.stored_boxes, "SCRATCH_BYTES", 100)  # a few rows at a time
    folder, meant = stored
    write_hf(open_hf(folder), tmp_path / "hf", Options(workers=1, verify=True))
    found = written(tmp_path / "hf")
    assert found.keys() == meant.keys()
    assert all(torch.equal(found[name], meant[name]) for name in meant)
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    loaded = GptOssForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(loaded.state_dict()[name], meant[name]) for name in meant)


@pytest.mark.parametrize("degrees", [{"world_size": 2, "tensor_model_parallel_size": 2,
                                      "expert_tensor_parallel_size": 1, "sequence_parallel": True},
                                     {"world_size": 2, "expert_model_parallel_size": 2}])  # fmt: skip
@pytest.mark.parametrize("name", ["plain", "model"])
def test_a_layout_and_back_are_the_same_bytes(plain, stored, tmp_path, name, degrees):
    folder = plain.with_name(name)
    expected = stored[1] if name == "model" else load_file(folder / FILE)
    write_layout(open_hf(folder), tmp_path / "ranks", degrees)
    write_hf(open_mrl(tmp_path / "ranks"), tmp_path / "hf")
    found = written(tmp_path / "hf")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[one], expected[one]) for one in expected)


def test_ranks_read_it_too_and_engines_wait_for_their_first_sync(plain, stored, tmp_path):
    folder, meant = stored
    save_file(meant, tmp_path / FILE)
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    expected = own_names(tmp_path)
    model = load_model_spec(folder)
    found = JoinedFiles(str(folder), model).load_some_hf_weight(list(expected))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    arguments = _of_model(model, "cpu")
    assert arguments["hf_overrides"]["quantization_config"] is None and "load_format" in arguments
    assert model == load_model_spec(plain)


def test_an_engines_loader_finds_no_quantisation_that_was_overridden_by_none():
    """vLLM's loader of gpt-oss asks what it is wherever the configuration has the key."""
    from mrl.engine.v0_common import AwaitedWeights

    config = GptOssConfig(quantization_config={"quant_method": "mxfp4"})
    config.update({"quantization_config": None})
    assert hasattr(config, "quantization_config")
    layer = torch.nn.Linear(2, 2)
    loader = SimpleNamespace(load_config=SimpleNamespace(model_loader_extra_config={}))
    AwaitedWeights.load_weights(loader, layer, SimpleNamespace(hf_config=config, model="none"))
    assert not hasattr(config, "quantization_config") and config.to_dict()["model_type"] == "gpt_oss"


def test_an_export_is_checked_and_mxfp4_is_not(plain, stored, tmp_path):
    assert check_export(plain).is_sound
    wrong = load_file(plain / FILE)
    matrix = wrong["model.layers.1.mlp.experts.gate_up_proj"]
    matrix[2, :, 5] = 0  # row 5 of an expert's matrix
    save_file(wrong, tmp_path / FILE, {"format": "pt"})
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    faults = {fault.tensor: fault.what for fault in check_export(tmp_path, plain).faults}
    assert list(faults) == ["model.layers.1.mlp.experts.2.gate_up_proj.weight"]
    assert "rows 5 of 64 are zero" in faults.popitem()[1]
    with pytest.raises(ConfigError, match="4-bit numbers, which is not compared"):
        check_export(stored[0])


def _without(name: str, tensors: dict) -> dict:
    return {key: tensor for key, tensor in tensors.items() if not key.endswith(name)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: _without("0.mlp.experts.down_proj_scales", t), "down_proj_scales must be U8"),
        (lambda t: _without("0.mlp.experts.down_proj_blocks", t), "down_proj.weight is missing"),
        (
            lambda t: t | {n: x[..., :8].contiguous() for n, x in t.items() if n.endswith("_blocks")},
            "only U8 in blocks of 16",
        ),
        (lambda t: t | {n: x.short() for n, x in t.items() if n.endswith("_scales")}, "must be U8"),
        (lambda t: _without("0.mlp.experts.down_proj_bias", t), "down_proj.bias is missing"),
        (lambda t: _without("0.self_attn.sinks", t), "self_attn.sinks is missing"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(stored, tmp_path, change, words):
    folder, _ = stored
    save_file(change(load_file(folder / FILE)), tmp_path / FILE)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(EnvironmentFault, match=words):
        check_checkpoint(tmp_path, load_model_spec(tmp_path))


def test_blocks_without_the_key_in_the_configuration_are_refused(plain, stored, tmp_path):
    save_file(load_file(stored[0] / FILE), tmp_path / FILE)
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    with pytest.raises(EnvironmentFault, match=r"is in MXFP4, but config\.json has no"):
        check_checkpoint(tmp_path, load_model_spec(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "only mxfp4"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"sliding_window": None}, "sliding_window"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"swiglu_limit": 6.0}, "swiglu_limit"),
        ({"attention_bias": False}, "attention_bias"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_type"),
        ({"rope_parameters": TINY_GPT_OSS["rope_parameters"] | {"attention_factor": 2.0}}, "attention_factor"),
        ({"rope_parameters": {k: v for k, v in TINY_GPT_OSS["rope_parameters"].items() if k != "beta_fast"}},
         "beta_fast"),
    ],
)  # fmt: skip
def test_what_vllms_class_would_compute_otherwise_is_refused(plain, change, words):
    config = json.loads((plain / "config.json").read_text())
    with pytest.raises(ConfigError, match=words):
        model_spec(config | change)


# ---------------------------------------------------------------- ranks and engines


@pytest.mark.parametrize("rollout", [(1, 1), (2, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 1, 2)])
@pytest.mark.parametrize("degrees", [{"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
                                     {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}])  # fmt: skip
def test_every_element_gets_where_vllms_loader_would_put_it(plain, degrees, rollout):
    model = replace(load_model_spec(plain), dtype="bfloat16")
    train = TrainLayout.build({"world_size": 4, **degrees}, model)
    found = rehearse(plan_reshard(model, train, RolloutLayout(*rollout), dialect="cuda", dtype="bfloat16"))
    assert found.fault is None and found.elements > 0


@pytest.mark.parametrize("rollout", [(1, 4), (1, 1, 4, 4)])
def test_engines_that_vllms_class_cannot_cut_are_refused(plain, rollout):
    with pytest.raises(ConfigError, match="cannot be divided over 4 workers"):
        target_parameters(load_model_spec(plain), RolloutLayout(*rollout), 0, "cpu", "float32")


def test_experts_with_biases_are_not_cut(plain):
    (found,) = check_train_layout({"world_size": 2, "expert_tensor_parallel_size": 2}, load_model_spec(plain))
    assert (found.field, found.allowed) == ("expert_tensor_parallel_size", (1,))


@pytest.mark.parametrize("window", [4, 100])
def test_flops_count_what_a_window_shows(plain, window):
    model = replace(load_model_spec(plain), sliding_window=window)  # one of two layers has it
    lengths = [3, 9, 30]
    seen = [sum(min(i, window) for i in range(1, length + 1)) + length * (length + 1) / 2 for length in lengths]
    of_pairs = 2 * model.num_attention_heads * 2 * model.head_dim * sum(seen)
    without = sum(lengths) * forward_flops_per_token(model, 0)
    assert forward_flops(model, lengths, sum(lengths)) == pytest.approx(without + of_pairs)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("reshard.path=slow", "must be fast for attention with sinks"),
        ("actor.layout.context_parallel_size=2", "must be 1 for attention with sinks outside cpu"),
        ("actor.lora.rank=8", "must be 0 for a model of the gpt_oss family"),
        ("rollout.quantization=fp8", "experts with biases have no form in FP8"),
        ("algorithm.adv_estimator=gae", "must not be gae for a model with latent or gated delta attention, or"),
        ("rollout.tensor_model_parallel_size=16", "must divide num_attention_heads = 64 and num_key_value_heads = 8"),
        ("rollout.data_parallel_size=3", "must divide num_experts = 32"),
        ("cluster.device=npu", "must be cuda or cpu for attention with sinks"),
        ("model.override_transformer_config.bias_activation_fusion=true", "must be false for experts with biases"),
        ("model.override_transformer_config.use_te_activation_func=false", "must be true for experts with biases"),
        ("model.override_transformer_config.bias_dropout_fusion=true", "must be false for experts with biases"),
    ],
)
def test_what_no_kernel_or_loader_of_it_does_is_refused(said, words):
    preset = Path(__file__).parents[2] / "parallel_configs" / "gpt-oss-20b" / "h100-1x8.yaml"
    more = ["rollout.expert_parallel_size=3"] if "data_parallel_size=3" in said else []
    found = violations(load_config(preset, None, [said, *more]), known_spec("gpt-oss-20b"))
    assert any(words in f"{violation.rule}; {violation.why}" for violation in found)
