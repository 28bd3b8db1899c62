"""GLM-4.5 MoE: what its configurations mean, what of them is refused,
and what its routers' constants need everywhere.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from mrl.config.override_rules import override_faults
from mrl.errors import ConfigError
from mrl.model import known_spec, model_spec, tensor_specs
from mrl.model.boxes import Box
from mrl.model.hf_files import check_checkpoint
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.registry import _KNOWN
from mrl.model.vllm_parameters import target_parameters
from mrl.reshard.execute import wire_views
from mrl.reshard.messages import Copy, Message
from mrl.reshard.plan import plan_reshard
from mrl.reshard.proof import rehearse

CONFIG = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 8, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 16, "intermediate_size": 12,
    "moe_intermediate_size": 4, "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "attention_bias": True, "dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
}  # fmt: skip
CONSTANTS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_the_published_configuration_is_that_of_transformers_defaults():
    """Its file is typed from the model's public card."""
    from transformers import Glm4MoeConfig

    published = json.loads((_KNOWN / "GLM-4.5-Air.json").read_text())
    defaults = Glm4MoeConfig().to_dict()
    typed = (
        "architectures",
        "attention_bias",
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "partial_rotary_factor",
        "torch_dtype",
    )
    assert {key: defaults.get(key) for key in published if key not in typed} == {
        k: v for k, v in published.items() if k not in typed
    }
    assert defaults["rope_parameters"]["partial_rotary_factor"] == published["partial_rotary_factor"]
    spec = known_spec("GLM-4.5-Air")
    assert spec.moe_layers == tuple(range(1, 46)) and spec.qkv_bias and not spec.qk_norm


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_group": 2}, "n_group = 2"),
        ({"topk_group": 2}, "topk_group = 2"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"attention_bias": False}, "attention_bias = False"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        model_spec(CONFIG | change)


def test_nothing_may_move_the_constants_or_route_otherwise_than_engines_do():
    def refused(**given) -> list[str]:
        told = override_faults("model.override_transformer_config", given, "cuda", model_spec(CONFIG))
        return [violation.field.rpartition(".")[2] for violation in told]

    assert refused(moe_router_bias_update_rate=0.0, moe_router_score_function="sigmoid") == []
    assert refused(moe_router_bias_update_rate=1e-3) == ["moe_router_bias_update_rate"]
    assert refused(moe_router_score_function="softmax", moe_router_enable_expert_bias=False) == [
        "moe_router_score_function", "moe_router_enable_expert_bias",
    ]  # fmt: skip


def test_layers_for_multi_token_prediction_may_be_in_the_files_and_nothing_else(tmp_path):
    model = model_spec(CONFIG)
    tensors = {spec.name: np.zeros(spec.shape, np.float32) for spec in tensor_specs(model)}
    assert model.left_out_layers == 1 and not any(name.startswith("model.layers.3.") for name in tensors)
    save_file(
        tensors | {"model.layers.3.eh_proj.weight": np.zeros((8, 16), np.float32)}, tmp_path / "model.safetensors"
    )
    check_checkpoint(tmp_path, model)
    save_file(
        tensors | {"model.layers.2.eh_proj.weight": np.zeros((8, 16), np.float32)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(Exception, match="eh_proj"):
        check_checkpoint(tmp_path, model)


def test_constants_are_float32_whatever_the_model_and_routers_are_in_the_engine():
    model = model_spec(CONFIG)
    specs = {spec.name: spec for spec in tensor_specs(model)}
    assert (specs[CONSTANTS].dtype, specs[CONSTANTS].is_constant) == ("float32", True)
    assert specs["model.layers.1.mlp.gate.weight"].dtype == "bfloat16"
    held = {t.name: t.dtype for t in target_parameters(model, RolloutLayout(), 0, "cpu", "bfloat16")}
    wide = {name for name, dtype in held.items() if dtype == "float32"}
    assert wide == {
        f"model.layers.{n}.mlp.gate.{leaf}" for n in (1, 2) for leaf in ("weight", "e_score_correction_bias")
    }


def test_a_plan_with_two_number_formats_holds_and_carries_every_element():
    model = model_spec(CONFIG)
    train = TrainLayout.build(
        {"world_size": 4, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}, model
    )
    plan = plan_reshard(model, train, RolloutLayout(2, 2), dialect="cuda", dtype="bfloat16")
    rehearsal = rehearse(plan)
    assert rehearsal.fault is None and rehearsal.elements > 0


def test_wide_elements_of_a_message_come_first_so_that_all_are_aligned():
    def copy(rows: int, dtype: str | None) -> Copy:
        box = Box(((0, rows),))
        return Copy("t", box, "s", 0, box, "m.p", box, (0,), dtype)

    message = Message(0, 0, 0, (copy(3, None), copy(2, "float32"), copy(1, None)), 3 * 2 + 2 * 4 + 2)
    buffer = torch.zeros(16, dtype=torch.uint8)
    views = wire_views(message, buffer, torch.bfloat16)
    assert [(view.dtype, len(view), view.storage_offset() * view.itemsize) for view in views] == [
        (torch.bfloat16, 3, 8), (torch.float32, 2, 0), (torch.bfloat16, 1, 14),
    ]  # fmt: skip


def test_fields_of_later_families_do_not_change_how_earlier_models_are_described():
    model = model_spec(CONFIG)
    assert {"router_score", "left_out_layers"} <= model.described().keys()
    plain = replace(model, router_score="softmax", left_out_layers=0).described()
    assert not {"router_score", "routed_scaling_factor", "left_out_layers"} & plain.keys()
