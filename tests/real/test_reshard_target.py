"""What a worker must hold, judged by vLLM alone: its own models, built as each rank of a layout, take numbered tensors
by their loaders.

How: mrl/engine/loader_check.py, which `mrl family check` runs, too.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mrl.engine import loader_check
from mrl.engine.loader_check import differences
from mrl.model.layout import RolloutLayout
from mrl.model.vllm_parameters import TargetParameter, target_parameters

# 90 words in 128 rows: of eight tensor ranks the last two hold padding only. 8 query heads share 2 key/value heads
SIZES = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 90,
    "intermediate_size": 32, "max_position_embeddings": 64, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 40, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8, "v_head_dim": 4, "norm_topk_prob": True, "q_lora_rank": None, "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc", "routed_scaling_factor": 1.0,
}  # fmt: skip
KINDS = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}
MODELS = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen2-tied": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
    "qwen3-tied": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen2-moe": EXPERTS
    | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "shared_expert_intermediate_size": 16},
    "qwen3-moe": EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 32},
    "glm4-moe": EXPERTS
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "deepseek-v3": LATENT | {"q_lora_rank": 24},
    "deepseek-v3-direct-queries": LATENT,
    "glm4-moe-lite": LATENT
    | {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "q_lora_rank": 24},
    "qwen3-next": EXPERTS
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "head_dim": 32,
        "shared_expert_intermediate_size": 16,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 4,
    },
    "qwen3.5": KINDS | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
    "qwen3.5-moe": KINDS
    | EXPERTS
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": 16,
    },
    "qwen3-moe-mixed": EXPERTS
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 32, "decoder_sparse_step": 2},
}
DENSE = [RolloutLayout(1, 1), RolloutLayout(1, 2), RolloutLayout(1, 4), RolloutLayout(1, 8), RolloutLayout(1, 2, 2)]
MOE = [
    *DENSE,
    RolloutLayout(1, 2, 1, 2),
    RolloutLayout(1, 4, 1, 4),
    RolloutLayout(1, 8, 1, 8),
    RolloutLayout(1, 1, 3, 3),  # 8 experts over 3 workers: 3, 3 and 2
    RolloutLayout(1, 2, 2, 4),
    RolloutLayout(1, 1, 4),  # experts sliced over data parallelism alone
]


def stored(loaded: torch.Tensor, name: str, dialect: str) -> torch.Tensor:
    """What the device's MoE kernel reads, of what the loader filled.

    `cuda`: as vLLM's own function for the Triton kernels leaves it. `npu`: vllm-ascend's
    AscendUnquantizedFusedMoEMethod, which is not here, documents `w.transpose(1, 2).contiguous()` of both.
    """
    if not name.endswith(("w13_weight", "w2_weight")):
        return loaded
    if dialect == "cuda":
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
            UnquantizedMoeBackend,
            convert_to_unquantized_kernel_format,
        )

        kernel = convert_to_unquantized_kernel_format(UnquantizedMoeBackend.TRITON, SimpleNamespace(), loaded, loaded)
        return kernel[0 if name.endswith("w13_weight") else 1]
    return loaded.transpose(1, 2) if dialect == "npu" else loaded


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Importing vLLM sets variables, which later tests would hand to the processes that they start."""
    before = dict(os.environ)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def folder(request, tmp_path) -> Path:
    """A model's configuration, which is all that vLLM needs of it here."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES | MODELS[request.param]))
    return tmp_path


@pytest.mark.real
@pytest.mark.parametrize("folder", MODELS, indirect=True)
def test_every_worker_of_every_layout_holds_what_vllms_loader_puts_there(folder):
    text = (folder / "config.json").read_text()
    layouts = MOE if "_experts" in text else DENSE
    # refused: vLLM has shared experts whole on every worker then
    if any(name in text for name in ("deepseek_v3", "qwen3_next", "qwen3_5_moe")):
        layouts = [layout for layout in layouts if min(layout.tensor, layout.data, layout.expert) == 1]
    found = {str(layout): differences(folder, layout, "cpu") for layout in layouts}
    assert {layout: faults for layout, faults in found.items() if faults} == {}


@pytest.mark.real
@pytest.mark.parametrize("dialect", ["cuda", "npu"])
@pytest.mark.parametrize("folder", ["qwen2-moe", "qwen3-moe"], indirect=True)
def test_experts_lie_as_the_devices_kernels_read_them(folder, dialect):
    for layout in (RolloutLayout(1, 2), RolloutLayout(1, 2, 1, 2)):
        assert differences(folder, layout, dialect, partial(stored, dialect=dialect)) == []


def exchanged(target: TargetParameter) -> TargetParameter:
    """The description with the places of its last two pieces exchanged: key and value, gate and up, two experts."""
    *rest, one, two = target.pieces
    pieces = (*rest, replace(one, local_box=two.local_box), replace(two, local_box=one.local_box))
    return replace(target, pieces=pieces)


@pytest.mark.real
@pytest.mark.parametrize("folder", ["qwen3-moe"], indirect=True)
@pytest.mark.parametrize("leaf", ["self_attn.qkv_proj.weight", "routed_experts.w13_weight", "routed_experts.w2_weight"])
def test_a_wrong_description_is_noticed_and_its_parameter_named(folder, leaf, monkeypatch):
    right = target_parameters

    def wrong(*of):
        return [exchanged(target) if target.name.endswith(leaf) else target for target in right(*of)]

    monkeypatch.setattr(loader_check, "target_parameters", wrong)
    faults = differences(folder, RolloutLayout(), "cpu")
    assert len(faults) == 2 and all(leaf in fault and "holds other elements" in fault for fault in faults)


@pytest.mark.real
@pytest.mark.parametrize("folder", ["qwen3-moe"], indirect=True)
def test_parameters_in_another_order_than_vllms_are_named(folder, monkeypatch):
    right = target_parameters
    monkeypatch.setattr(loader_check, "target_parameters", lambda *of: sorted(right(*of), key=lambda each: each.name))
    (fault,) = differences(folder, RolloutLayout(), "cpu")
    assert fault.startswith("worker 0: vLLM has model.") and " where vllm_order has " in fault
