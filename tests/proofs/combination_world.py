"""The tiny world with an untrained model of each family under its tokenizer, the world of a tool, and one of images:
for combinations.py.
"""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

sys.path += [str(Path(__file__).resolve().parents[2] / folder) for folder in ("scripts", "tests/real")]
import make_tool_world
from combination_axes import DRAFTING, folder_of
from make_tiny_world import data_rows, make_model, make_tokenizer, save_model, split_problems
from seeing_world import make_seeing_world
from tiny_models import with_head

MADE = "made"  # written last
PROMPTS = 64
HELD_OUT = 16
CALLING = make_tool_world.Calling(steps=60, batch=16, share=0.9, label_smoothing=0.02)  # nearly every answer calls
COMMON = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "eos_token_id", "pad_token_id", "initializer_range",
)  # fmt: skip

# vLLM's CPU kernel has no other latent than 512 and 64
LATENT = dict(
    num_experts_per_tok=4, moe_intermediate_size=64, n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1,
    n_group=4, topk_group=2, routed_scaling_factor=1.5, q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=32,
    qk_rope_head_dim=64, v_head_dim=32, num_mtp_layers=0,
)  # fmt: skip


def make_world(folder: Path, calling: make_tool_world.Calling = CALLING) -> Path:
    """Models and data in `folder`, which is returned; nothing where they are there.

    `calling`: how long the model is trained that calls a tool.
    """
    if (folder / MADE).exists():
        return folder
    tokenizer = make_tokenizer()
    save_model(make_model(seed=0), tokenizer, folder / "Qwen3-MoE")
    usual = json.loads((folder / "Qwen3-MoE" / "config.json").read_text())
    common = {name: usual[name] for name in COMMON if name in usual}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
    dense = Qwen3Config(**common, head_dim=32, tie_word_embeddings=True)
    shared = Qwen2MoeConfig(
        **common, **experts, num_experts=8, shared_expert_intermediate_size=128, norm_topk_prob=False
    )
    glm = Glm4MoeConfig(
        **common, **experts, head_dim=32, n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1,
        routed_scaling_factor=1.5, attention_bias=True, use_qk_norm=True, num_mtp_layers=0,
    )  # fmt: skip
    # transformers would repeat keys of fewer heads
    latent = DeepseekV3Config(**common | LATENT | {"num_key_value_heads": usual["num_attention_heads"]})
    delta = Qwen3NextConfig(
        **common, **experts, num_experts=8, shared_expert_intermediate_size=128, norm_topk_prob=True, head_dim=32,
        full_attention_interval=2, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16,
        linear_value_head_dim=32, linear_conv_kernel_dim=4,
    )  # fmt: skip
    for name, architecture, config in (
        ("dense-tied", Qwen3ForCausalLM, dense),
        ("shared-experts", Qwen2MoeForCausalLM, shared),
        ("GLM", Glm4MoeForCausalLM, glm),
        ("latent", DeepseekV3ForCausalLM, latent),
        ("gated-delta", Qwen3NextForCausalLM, delta),
    ):
        torch.manual_seed(0)
        architecture(config).to(torch.float32).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    _add_head(folder / "GLM", folder / folder_of(DRAFTING))
    _write_data(folder / "data", data_rows, *split_problems(seed=0))
    _make_tools(folder / "tools", calling)
    make_seeing_world(folder / "images", experts=8, calls=True)
    (folder / MADE).touch()
    return folder


def _add_head(model: Path, folder: Path) -> None:
    """Copies a model, and gives it a layer that predicts a further token."""
    shutil.copytree(model, folder)
    with_head(folder)


def _make_tools(folder: Path, calling: make_tool_world.Calling) -> None:
    tokenizer = make_tool_world.make_tokenizer()
    model = make_model(0, make_tool_world.POSITIONS)
    train, held_out = make_tool_world.split_products(seed=0)
    make_tool_world.warm_up(model, make_tool_world.Answers(tokenizer), train, calling, 0)
    make_tool_world.write_model(model, tokenizer, folder / "model")
    (folder / "reward.py").write_text(make_tool_world.REWARD)
    _write_data(folder / "data", make_tool_world.data_rows, train, held_out)


def _write_data(folder: Path, rows: Callable[[Sequence, str], list[dict]], train: Sequence, held_out: Sequence) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems in (("train", train[:PROMPTS]), ("val", held_out[:HELD_OUT])):
        pq.write_table(pa.Table.from_pylist(rows(problems, name)), folder / f"{name}.parquet")
