"""Adapters that peft itself makes and merges: names, shapes, configuration, merged weights."""

import json
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

PEERS = ("peft", "transformers", "torch")
SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=64,
    pad_token_id=None,
)
MODELS = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}
TARGETS = (
    ["q_proj"],
    ["q_proj", "v_proj"],
    ["o_proj", "down_proj"],
    ["gate_proj", "up_proj", "down_proj"],
    "all-linear",
    r".*self_attn\.(q|k|v|o)_proj",
)


def cases() -> list[dict]:
    torch.manual_seed(8)
    return [
        _case(family, targets, rank, alpha)
        for family in MODELS
        for targets in TARGETS
        for rank, alpha in ((1, 1), (4, 8), (3, 2.5))
    ]


def _case(family: str, targets: list[str] | str, rank: int, alpha: float) -> dict:
    config_class, model_class, more = MODELS[family]
    config = config_class(**SIZES, **more)
    model = model_class(config)
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        stored = load_file(Path(folder) / "adapter_model.safetensors")
        written = json.loads((Path(folder) / "adapter_config.json").read_text())
    first = next(name for name in stored if "layers.1" in name and name.endswith("lora_A.weight"))
    module = first.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
    base = adapted.get_submodule(f"base_model.model.{module}").base_layer.weight.detach().clone()
    merged = adapted.merge_and_unload().get_submodule(module).weight.detach()
    return {
        "family": family,
        "config": json.loads(config.to_json_string()) | {"architectures": [model_class.__name__]},
        "rank": rank,
        "alpha": alpha,
        "adapter_config": written,
        "shapes": {name: list(tensor.shape) for name, tensor in stored.items()},
        # a corner of one merged weight, with what makes it
        "base": base[:5, :6].tolist(),
        "first": stored[first][:, :6].tolist(),
        "second": stored[first.replace("lora_A", "lora_B")][:5].tolist(),
        "merged": merged[:5, :6].tolist(),
    }
