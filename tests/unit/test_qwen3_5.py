"""Qwen3.5 as a text model: what its configuration means, alone and inside a model that also reads images, how the
files of such a model are read and written, and what is refused.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real"))
from tiny_models import in_dtype, save, tiny_kinds, tiny_kinds_moe
from whole_models import PRECISE, in_whole

import mrl.checkpoint.planned_file
import mrl.checkpoint.stored_boxes
from mrl.checkpoint.convert import write_hf, write_layout
from mrl.checkpoint.convert_job import Options
from mrl.checkpoint.export_check import check_export
from mrl.checkpoint.open_checkpoint import open_hf, open_mrl
from mrl.checkpoint.vision_tower import open_whole
from mrl.cli.convert import parse_layout
from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.data.row_files import BadRow, RawRow, parse_row, read_rows
from mrl.engine.engine_state import AWAITED
from mrl.engine.requests import _of_model
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import known_spec, load_model_spec, model_spec, tensor_specs
from mrl.model.hf_config import LayerKind
from mrl.model.hf_files import check_checkpoint
from mrl.model.layout import RolloutLayout, TrainLayout, check_train_layout
from mrl.model.registry import _KNOWN, family_of, stop_token_ids
from mrl.model.vllm_parameters import target_parameters
from mrl.model.wrapped import inner_tensors
from mrl.plan.engine_memory import state_bytes_per_sequence
from mrl.reshard.plan import plan_reshard
from mrl.reshard.proof import rehearse
from mrl.tools.rehearse.small_model import small_hf_config

DENSE = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "intermediate_size": 96,
    "max_position_embeddings": 65536, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    "dtype": "float32",
}  # fmt: skip
MOE = {key: value for key, value in DENSE.items() if key != "intermediate_size"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 32,
    "num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48,
}  # fmt: skip
WHOLE = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": MOE,
    "vision_config": {"depth": 2},
}  # fmt: skip
TP = "tensor_model_parallel_size"


def test_the_published_configuration_is_that_of_transformers_defaults():
    """Its file is typed from the model's card and from other trainers' settings."""
    from transformers import Qwen3_5MoeTextConfig

    published = json.loads((_KNOWN / "Qwen3.5-35B-A3B.json").read_text())["text_config"]
    defaults = Qwen3_5MoeTextConfig().to_dict()
    own = {"full_attention_interval", "mtp_num_hidden_layers", "dtype", "attn_output_gate", "mamba_ssm_dtype"}
    of_a_default = {"max_position_embeddings", "rope_parameters"}
    compared = published.keys() - own - of_a_default
    assert {key: published[key] for key in compared} == {key: defaults[key] for key in compared}
    spec = known_spec("Qwen3.5-35B-A3B")
    kinds = ["linear_attention" if layer in spec.linear_layers else "full_attention" for layer in range(40)]
    assert kinds == defaults["layer_types"]
    assert spec.rotation.partial_rotary_factor == defaults["rope_parameters"]["partial_rotary_factor"]


def test_a_text_model_is_the_same_alone_and_inside_one_that_reads_images():
    alone, inside = model_spec(MOE), model_spec(WHOLE)
    assert inside == alone and inside.is_wrapped and not alone.is_wrapped
    assert inside.norm_topk_prob and inside.linear_by_kind and inside.layer_kind(0) == LayerKind(True, True)
    of_whole = {key: value for key, value in MOE.items() if key != "dtype"}
    assert model_spec(WHOLE | {"text_config": of_whole, "torch_dtype": "bfloat16"}).dtype == "bfloat16"


def test_layers_of_a_dense_model_have_no_experts_of_either_kind():
    model = model_spec(DENSE)
    assert {model.layer_kind(layer) for layer in range(4)} == {LayerKind(False), LayerKind(False, True)}


MULTIMODAL_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64,
    "mrope_section": [2, 1, 1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16'"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"model_type": "qwen3_5_moe"}, "model_type = 'qwen3_5_moe'"),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads = 6"),
        ({"rope_parameters": MULTIMODAL_YARN}, "rope_type = 'yarn' beside mrope_section"),
        ({"tie_word_embeddings": True}, r"text_config\.tie_word_embeddings = True"),
        ({"hidden_size": -1}, "hidden_size = -1"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(change, words):
    with pytest.raises(ConfigError, match=words):
        model_spec(WHOLE | {"text_config": MOE | change})


def test_fp8_around_a_text_model_is_refused_before_its_files_are_read():
    with pytest.raises(ConfigError, match="quantization_config of quant_method fp8 is not supported"):
        model_spec(WHOLE | {"quantization_config": {"quant_method": "fp8"}})
    assert model_spec(WHOLE | {"quantization_config": None}) == model_spec(WHOLE)


def test_the_gates_function_has_two_names():
    assert model_spec(MOE | {"output_gate_type": "swish"}) == model_spec(MOE)


def test_a_whole_without_a_text_model_and_one_that_is_not_known_are_refused():
    with pytest.raises(ConfigError, match="has no text_config"):
        model_spec({key: value for key, value in WHOLE.items() if key != "text_config"})
    with pytest.raises(ConfigError, match=r"Qwen3OmniMoeForConditionalGeneration.* not supported"):
        model_spec(WHOLE | {"architectures": ["Qwen3OmniMoeForConditionalGeneration"]})


VL_MOE = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "vision_config": {},
    "text_config": {
        key: value for key, value in MOE.items() if not key.startswith("linear_") and key not in (
            "architectures", "shared_expert_intermediate_size", "layer_types", "full_attention_interval",
            "attn_output_gate", "mamba_ssm_dtype", "partial_rotary_factor", "rope_parameters",
        )
    } | {"model_type": "qwen3_vl_moe_text", "rope_theta": 10000.0, "intermediate_size": 96},
}  # fmt: skip


def test_experts_inside_qwen3_vl_always_sum_to_one_whatever_its_configuration_says():
    text = VL_MOE["text_config"]
    without = {key: value for key, value in text.items() if key != "norm_topk_prob"}
    assert model_spec(VL_MOE | {"text_config": without}).norm_topk_prob
    with pytest.raises(ConfigError, match=r"text_config\.norm_topk_prob = False is not supported"):
        model_spec(VL_MOE | {"text_config": text | {"norm_topk_prob": False}})


def test_turned_experts_are_columns_of_the_stored_ones():
    """As transformers reads them: by the hidden size, and not turned where both sides have it."""
    down = list(inner_tensors("model.language_model.layers.3.mlp.experts.down_proj", (2, 5, 7), hidden_size=7))
    assert [(inner.name, inner.shape, inner.first, inner.is_turned) for inner in down] == [
        ("model.layers.3.mlp.experts.0.down_proj.weight", (7, 5), 0, True),
        ("model.layers.3.mlp.experts.1.down_proj.weight", (7, 5), 7, True),
    ]
    both = list(inner_tensors("model.language_model.layers.0.mlp.experts.gate_up_proj", (2, 7, 6), hidden_size=7))
    assert [(inner.name.split(".")[-2], inner.shape, inner.first, inner.is_turned) for inner in both] == [
        ("gate_proj", (3, 7), 0, True), ("up_proj", (3, 7), 3, True),
        ("gate_proj", (3, 7), 6, True), ("up_proj", (3, 7), 9, True),
    ]  # fmt: skip
    for shape in ((2, 6, 7), (2, 8, 8)):
        found = inner_tensors("model.language_model.layers.0.mlp.experts.gate_up_proj", shape, shape[-1])
        assert not any(inner.is_turned for inner in found)


def test_three_equal_positions_turn_a_head_as_one_does():
    """Multimodal rotation of a text, in transformers' own words."""
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    config = Qwen3_5TextConfig(head_dim=32, rope_parameters=rope)
    positions = torch.arange(50)
    cos, sin = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), positions[None, None].expand(3, 1, -1))
    angles = positions[:, None] / 1e4 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(cos[0], torch.cat([angles, angles], 1).cos())
    torch.testing.assert_close(sin[0], torch.cat([angles, angles], 1).sin())


# ---------------------------------------------------------------- files of the whole


def test_the_wholes_tensors_are_the_text_models_its_vision_tower_and_nothing_else():
    """Names and shapes of transformers' own model, which the official files have."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = {key: value for key, value in MOE.items() if key not in ("architectures", "rope_theta")}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
    with torch.device("meta"):
        whole = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=vision))
    stored = {name: tuple(tensor.shape) for name, tensor in whole.state_dict().items()}
    model = model_spec(WHOLE)
    inside, left = {}, []
    for key, shape in stored.items():
        if family_of(model).is_left_out(key, model):
            left.append(key)
        else:
            inside |= {inner.name: inner.shape for inner in inner_tensors(key, shape)}
    assert inside == {spec.name: spec.shape for spec in tensor_specs(model)}
    assert left and all(name.startswith("model.visual.") for name in left)
    assert family_of(model).is_left_out("mtp.layers.0.mlp.gate.weight", model)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Text models in bfloat16, and wholes around them."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("models")
    found = {}
    for name, make in {"dense": tiny_kinds, "moe": tiny_kinds_moe}.items():
        found[name] = save(in_dtype(make(), torch.bfloat16), out / name)
        in_whole(found[name], out / f"whole {name}", precise=True)
        found[f"whole {name}"] = out / f"whole {name}"
    return found


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Tensors do not fit into a block or a scratch buffer, nor all of them into a file."""
    monkeypatch.setattr(mrl.checkpoint.planned_file, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(mrl.checkpoint.stored_boxes, "SCRATCH_BYTES", 3000)
    monkeypatch.setattr(mrl.checkpoint.planned_file, "FILE_BYTES", 300_000)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def drafting(folder: Path) -> dict[str, torch.Tensor]:
    """The layers that predict further tokens, which an export has as they were."""
    return {key: tensor for key, tensor in weights(folder).items() if key.startswith("mtp.")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize(("name", "layout"), [("moe", "tp=2,pp=2,ep=2"), ("dense", "tp=2,pp=2")])
def test_there_and_back_the_text_model_has_the_same_bytes(folders, tmp_path, small_parts, name, layout):
    """What is in float32 beside bfloat16 stands for the nearest bfloat16, as transformers reads it."""
    report = write_layout(
        open_hf(folders[f"whole {name}"]), tmp_path / "ours", parse_layout(layout), options=Options(verify=True)
    )
    assert {key for key in report.left_out if not key.startswith("model.visual.")} == {"mtp.norm.weight"}
    write_hf(open_mrl(tmp_path / "ours"), tmp_path / "hf", Options(verify=True))
    assert same(weights(tmp_path / "hf"), weights(folders[name]) | drafting(folders[f"whole {name}"]))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == json.loads((folders[name] / "config.json").read_text())["architectures"]
    assert config["mtp_num_hidden_layers"] == 1 and "vision_config" not in config
    assert load_model_spec(tmp_path / "hf") == replace(load_model_spec(folders[name]), left_out_layers=1)


def test_with_its_vision_tower_the_whole_comes_back_byte_for_byte(folders, tmp_path, small_parts):
    whole = folders["whole moe"]
    write_layout(open_hf(whole), tmp_path / "ours", parse_layout("tp=2,ep=2"))
    source = open_mrl(tmp_path / "ours")
    report = write_hf(source, tmp_path / "hf", Options(verify=True), open_whole(whole, source))
    before, after = weights(whole), weights(tmp_path / "hf")
    rounded = {key: tensor.bfloat16() for key, tensor in before.items() if key.endswith(PRECISE)}
    expected = before | rounded
    assert same(after, expected) and report.of_vision_tower == 2
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["vision_config"] and config["text_config"]["mtp_num_hidden_layers"] == 1
    assert load_model_spec(tmp_path / "hf").is_wrapped
    check_checkpoint(tmp_path / "hf", load_model_spec(tmp_path / "hf"))


def test_a_tower_of_another_model_or_none_is_refused(folders, tmp_path):
    source = open_hf(folders["moe"])
    with pytest.raises(ConfigError, match="no vision tower"):
        open_whole(folders["moe"], source)
    with pytest.raises(ConfigError, match="another architecture"):
        open_whole(folders["whole dense"], source)


def test_a_tensor_that_is_there_in_both_forms_is_refused(folders, tmp_path):
    in_whole(folders["dense"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.language_model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentFault, match=r"model\.norm\.weight is stored twice"):
        check_checkpoint(tmp_path, load_model_spec(tmp_path))


def test_experts_of_another_number_are_told(folders, tmp_path):
    in_whole(folders["moe"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stacked = "model.language_model.layers.1.mlp.experts.down_proj"
    tensors[stacked] = tensors[stacked][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentFault, match=r"model\.layers\.1\.mlp\.experts\.7\.down_proj\.weight is missing"):
        check_checkpoint(tmp_path, load_model_spec(tmp_path))


def test_megatrons_side_is_given_the_text_models_tensors(folders):
    from mrl.model import load_model_spec
    from mrl.rank.mapped_bridge import JoinedFiles

    whole = folders["whole moe"]
    expected = weights(folders["moe"])
    found = JoinedFiles(str(whole), load_model_spec(whole)).load_some_hf_weight(list(expected))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].bfloat16(), expected[name]) for name in expected)


def test_turned_experts_are_converted_and_checked_as_others(folders, tmp_path, small_parts):
    """As in official folders of Qwen3-VL with experts."""
    from mrl.rank.mapped_bridge import JoinedFiles

    whole = tmp_path / "turned"
    whole.mkdir()
    (whole / "config.json").write_text((folders["whole moe"] / "config.json").read_text())
    turned = {
        key: tensor.transpose(1, 2).contiguous() if key.endswith("gate_up_proj") else tensor  # down: 64 by 64
        for key, tensor in weights(folders["whole moe"]).items()
    }
    save_file(turned, whole / "model.safetensors", {"format": "pt"})
    write_layout(open_hf(whole), tmp_path / "ours", parse_layout("tp=2,ep=2"))
    source = open_mrl(tmp_path / "ours")
    write_hf(source, tmp_path / "text")
    assert same(weights(tmp_path / "text"), weights(folders["moe"]) | drafting(folders["whole moe"]))
    write_hf(source, tmp_path / "whole", Options(verify=True), open_whole(whole, source))
    after = weights(tmp_path / "whole")
    experts = {key: tensor for key, tensor in turned.items() if ".experts." in key}
    assert experts and same({key: after[key] for key in experts}, experts)
    expected = weights(folders["moe"])
    found = JoinedFiles(str(whole), load_model_spec(whole)).load_some_hf_weight(list(expected))
    assert all(torch.equal(found[name].bfloat16(), expected[name]) for name in expected)
    assert check_export(whole, folders["moe"]).is_sound


# ---------------------------------------------------------------- layouts, engines, plans


def test_tensor_ranks_without_their_sequences_would_not_sum_a_norms_gradient():
    model = model_spec(DENSE)
    found = check_train_layout({"world_size": 2, TP: 2, "sequence_parallel": False}, model)
    assert [(violation.field, violation.rule) for violation in found] == [
        ("sequence_parallel", f"must be on for gated delta attention with {TP} > 1")
    ]
    assert check_train_layout({"world_size": 2, TP: 2}, model) == []


@pytest.mark.parametrize("config", [DENSE, MOE])
@pytest.mark.parametrize("train", [{}, {TP: 2}, {TP: 2, "pipeline_model_parallel_size": 2}])
@pytest.mark.parametrize("engine", [RolloutLayout(1, 1), RolloutLayout(1, 4)])
def test_a_plan_brings_every_element_to_its_place(config, train, engine):
    model = model_spec(config | {"num_hidden_layers": 8})
    layout = TrainLayout.build({"world_size": 8} | train, model)
    rehearsal = rehearse(plan_reshard(model, layout, engine, dialect="cuda", dtype="bfloat16"))
    assert rehearsal.fault is None and rehearsal.elements > 0


def test_engines_have_each_kind_of_a_projection_cut_by_itself():
    held = {t.name: t for t in target_parameters(model_spec(MOE), RolloutLayout(1, 2), 1, "cpu", "float32")}
    pieces = held["model.layers.0.linear_attn.in_proj_qkvz.weight"].pieces
    rows = [(piece.hf_name.rsplit(".", 2)[1], piece.hf_box.ranges[0]) for piece in pieces]
    # the second half of 32 queries, of 32 keys, of 48 values; of 48 gates
    three = [("in_proj_qkv", rows) for rows in ((16, 32), (48, 64), (88, 112))]
    assert rows == [*three, ("in_proj_z", (24, 48))]


def test_engines_are_of_the_text_model_and_get_its_weights_by_a_sync(folders):
    assert _of_model(model_spec(MOE), "cpu") == {}
    given = _of_model(model_spec(WHOLE), "cpu")
    assert given == {"hf_overrides": {"architectures": ["Qwen3_5MoeForCausalLM"]}, "load_format": AWAITED}


def test_a_responses_end_is_that_of_the_text_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(WHOLE | {"text_config": MOE | {"eos_token_id": 7}}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert stop_token_ids(str(tmp_path)) == (7, 9)


def test_states_are_in_float32_where_the_configuration_says_so():
    plain, precise = model_spec(MOE), model_spec(MOE | {"mamba_ssm_dtype": "float32"})
    reached = 3 * (2 * 4 * 8 + 8 * 6) * 3
    state = 3 * 8 * 8 * 6
    assert state_bytes_per_sequence(plain, 1, 2) == 2 * (state + reached)
    assert state_bytes_per_sequence(precise, 1, 2) == 4 * state + 2 * reached


@pytest.mark.parametrize("name", ["Qwen3.5-35B-A3B", "Qwen3.5-27B"])
def test_the_small_form_is_of_the_text_model_with_both_kinds_of_layers(name):
    small = model_spec(small_hf_config(json.loads((_KNOWN / f"{name}.json").read_text()), 2, 64, 128))
    assert small.linear_layers == (0,) and small.linear_by_kind and not small.is_wrapped
    assert small.is_moe == known_spec(name).is_moe and small.rotation.partial_rotary_factor == 0.25


def refused(*overrides: str) -> set[str]:
    config = load_config("parallel_configs/tiny-moe/cpu.yaml", overrides=overrides)
    return {violation.field for violation in violations(config, model_spec(WHOLE))}


def test_what_engines_of_a_whole_are_told_cannot_be_overridden():
    plain = refused("rollout.enable_prefix_caching=false")
    for name, value in {"load_format": '"auto"', "hf_overrides": '{"a": 1}'}.items():
        given = f'rollout.engine_kwargs.vllm={{"{name}": {value}}}'
        assert refused("rollout.enable_prefix_caching=false", given) - plain == {f"rollout.engine_kwargs.vllm.{name}"}


# ---------------------------------------------------------------- images

ROW = {"data_source": "a", "reward_model": {"ground_truth": "1"}, "prompt": [{"role": "user", "content": "q"}]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": [{"bytes": b"x"}]}, "images is not empty"),
        ({"videos": ["a.mp4"]}, "videos is not empty"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "'image_url': only prompts of text are read without model.vision",
        ),
    ],
)
def test_a_row_with_more_than_text_is_set_aside_by_name(change, words):
    parse_row(RawRow("file", 0, ROW | {"images": [], "videos": None}), "prompt")
    with pytest.raises(BadRow, match=words):
        parse_row(RawRow("file", 0, ROW | change), "prompt")


def test_images_of_a_parquet_file_are_seen(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([ROW | {"images": [], "other": 1}, ROW | {"images": ["x"], "other": 2}]), file)
    first, second = read_rows([str(file)], "prompt")
    assert "other" not in first.value
    parse_row(first, "prompt")
    with pytest.raises(BadRow, match="images is not empty"):
        parse_row(second, "prompt")
    assert np.all([row.problem is None for row in (first, second)])
