"""A Qwen3-MoE checkpoint folder that takes milliseconds to write: weights of zeros, one token a character."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from mrl.model import model_spec, tensor_specs

SIZES = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "intermediate_size": 64,
    "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "float32",
}  # fmt: skip
# the model that scripts/make_tiny_world.py makes, with room for the long answers of the other tiny world
TINY = SIZES | {
    "hidden_size": 128, "num_hidden_layers": 4, "head_dim": 32, "intermediate_size": 256, "num_experts": 8,
    "max_position_embeddings": 1024,
}  # fmt: skip

# a model that reads images, and the text model inside of it
_ROTATION = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
SEEING_TEXT = {
    "model_type": "qwen3_vl_text", "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_parameters": _ROTATION,
    "attention_bias": False,
}  # fmt: skip
SEEING_WHOLE = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": False,
    "image_token_id": 8, "dtype": "float32", "text_config": SEEING_TEXT,
    "vision_config": {"deepstack_visual_indexes": [0, 1]},
}  # fmt: skip


def write_model(folder: Path) -> None:
    """A checkpoint of zeros with a tokenizer of one token a character."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    specs = tensor_specs(model_spec(SIZES))
    save_file({spec.name: np.zeros(spec.shape, np.float32) for spec in specs}, folder / "model.safetensors")
    words = ["<unk>", "<eos>", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}:")
