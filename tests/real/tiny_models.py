"""Tiny Hugging Face models whose errors show: a freshly made model is nearly uniform,
so these have large matrices and uneven norms.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}


def tiny_moe(**changes) -> PreTrainedModel:
    """Qwen3-MoE, 8 experts, top 2. 127 words do not divide by 2, so tensor parallelism pads the vocabulary.

    `changes`: to its configuration.
    """
    sizes = _COMMON | {
        "vocab_size": 127,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    return _uneven(Qwen3MoeForCausalLM, Qwen3MoeConfig(**(sizes | changes)))


def wide_moe(layers: int) -> PreTrainedModel:
    """Qwen3-MoE whose weights can be told from a process's noise: 54 MB a layer and 134 MB of vocabulary,
    in float32.
    """
    sizes = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": layers,
    }
    config = Qwen3MoeConfig(
        **(_COMMON | sizes), vocab_size=32768, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=256,
        norm_topk_prob=True
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).to(torch.float32).eval()


def tiny_shared(**changes) -> PreTrainedModel:
    """Qwen2-MoE: a gated shared expert, biases on q, k and v, router weights that are not renormalised.

    `changes`: to its configuration.
    """
    sizes = {k: v for k, v in _COMMON.items() if k != "head_dim"} | {
        "vocab_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": False,
    }
    config = Qwen2MoeConfig(**(sizes | changes))
    return _uneven(Qwen2MoeForCausalLM, config)


def tiny_dense(**changes) -> PreTrainedModel:
    """Dense Qwen3 with tied embeddings, as its small sizes have. `changes`: to its configuration."""
    sizes = _COMMON | {"vocab_size": 128, "tie_word_embeddings": True}
    return _uneven(Qwen3ForCausalLM, Qwen3Config(**(sizes | changes)))


def turned(kind: str) -> dict:
    """Changes to a configuration: a rotation of that kind, which changes the angles of tens of positions."""
    own = {
        "linear": {"factor": 2.0, "partial_rotary_factor": 0.25},
        "llama3": {
            "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
        # half of each head, with a magnitude of 1.21
        "yarn": {"factor": 8.0, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5},
        # with a magnitude of 1.07
        "longrope": {
            "original_max_position_embeddings": 128, "short_factor": [1 + i / 4 for i in range(16)],
            "long_factor": [4.0] * 16,
        },
    }  # fmt: skip
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **own[kind]}}


def tiny_qwen2() -> PreTrainedModel:
    """Dense Qwen2 or 2.5: biases on q, k and v, no norm of heads, embeddings that are not tied."""
    sizes = {k: v for k, v in _COMMON.items() if k != "head_dim"}
    return _uneven(Qwen2ForCausalLM, Qwen2Config(**sizes, vocab_size=128, tie_word_embeddings=False))


def tiny_glm(**changes) -> PreTrainedModel:
    """GLM-4.5 MoE: a dense layer before those with experts, two shared experts, half of each head rotated, sigmoid
    routers whose constants change the choice of experts. `changes`: to its configuration.
    """
    sizes = _COMMON | {
        "vocab_size": 127,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_mtp_layers": 0,
    }
    model = _uneven(Glm4MoeForCausalLM, Glm4MoeConfig(**(sizes | changes)))
    _move_constants(model)
    return model


def tiny_latent(**changes) -> PreTrainedModel:
    """DeepSeek-V3: latent attention with yarn, a dense layer first, two shared experts, two of four groups of experts.

    vLLM's CPU kernel has no other latent than 512 and 64. `changes`: to its configuration.
    """
    sizes = {k: v for k, v in _COMMON.items() if k != "head_dim"} | {
        "num_key_value_heads": 4,
        "vocab_size": 127,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "num_mtp_layers": 0,
        "rope_parameters": YARN,
    }
    model = _uneven(DeepseekV3ForCausalLM, DeepseekV3Config(**(sizes | changes)))
    _move_constants(model)
    return model


def tiny_next(**changes) -> PreTrainedModel:
    """Qwen3-Next: every second layer with gated delta attention, of two values a key, the others with a gate on their
    output; a gated shared expert, zero-centred norms, a quarter of each head rotated.

    States are forgotten more slowly than they would begin with: of faster ones transformers' own gradients are 2e-5
    from float64's. `changes`: to its configuration.
    """
    sizes = _COMMON | {
        "vocab_size": 127,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": True,
        "full_attention_interval": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    }
    return _slower(_uneven(Qwen3NextForCausalLM, Qwen3NextConfig(**(sizes | changes))))


_KINDS = {
    "vocab_size": 127,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    # three sections of the four angles of a head of 32, a quarter of which turns
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}  # fmt: skip


def tiny_kinds(**changes) -> PreTrainedModel:
    """Qwen3.5, dense, as a text model: Qwen3-Next's layers, whose linear projections lie kind by kind, without experts;
    embeddings are tied, as its small sizes have them. `changes`: to its configuration.
    """
    sizes = _COMMON | _KINDS | {"tie_word_embeddings": True}
    return _slower(_uneven(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**(sizes | changes))))


def tiny_kinds_moe(**changes) -> PreTrainedModel:
    """Qwen3.5-MoE as a text model. `changes`: to its configuration."""
    experts = {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
    }  # fmt: skip
    sizes = {name: size for name, size in _COMMON.items() if name != "intermediate_size"}
    return _slower(_uneven(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**(sizes | _KINDS | experts | changes))))


def _slower(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(3.0)
    return model


# angles of 4 are stretched to 8 times as many positions, of which no layout's samples see the end
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip


def _move_constants(model: PreTrainedModel) -> None:
    """Far from 0, so that rounding to bfloat16 would move them by 0.02."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(4 + 0.2 * torch.randn_like(buffer))


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with weights of `dtype`; what checkpoints always have in float32 stays so, as in `from_pretrained`."""
    precise = {
        name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    }
    model.to(dtype)
    for name, buffer in precise.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, buffer)
    return model


def _uneven(architecture: type, config) -> PreTrainedModel:
    torch.manual_seed(0)
    model = architecture(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def with_head(folder: Path, uneven: bool = False) -> Path:
    """Gives a checkpoint a layer for multi-token prediction, as its family's have one: its last layer, and what joins
    it to the words. GLM's and DeepSeek's have copies of embedding and output layer, too. `uneven`: with norms that are
    not one.
    """
    file = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(file)
    if config["model_type"].startswith("qwen3"):
        save_file(tensors | _head_of_qwen(tensors, config, uneven), file, metadata={"format": "pt"})
        layers = {"mtp_num_hidden_layers": 1} if "qwen3_5" in config["model_type"] else {}
        (folder / "config.json").write_text(json.dumps(config | layers))
        return folder
    last, hidden = config["num_hidden_layers"], config["hidden_size"]
    head = {
        name.replace(f"layers.{last - 1}.", f"layers.{last}."): tensor.clone()
        for name, tensor in tensors.items()
        if f".layers.{last - 1}." in name
    }
    words = tensors["model.embed_tokens.weight"]
    torch.manual_seed(1)
    own = {"eh_proj.weight": (0.1 * torch.randn(hidden, 2 * hidden)).to(words.dtype)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        own[f"{name}.weight"] = (1 + 0.3 * uneven * torch.randn(hidden)).to(words.dtype)
    own |= {"shared_head.head.weight": tensors["lm_head.weight"].clone(), "embed_tokens.weight": words.clone()}
    head |= {f"model.layers.{last}.{name}": tensor for name, tensor in own.items()}
    save_file(tensors | head, file, metadata={"format": "pt"})
    layers = {"num_nextn_predict_layers": 1, "num_mtp_layers": 1}
    if config["model_type"] == "deepseek_v3":  # keys of its official config.json, which transformers does not write
        layers |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    (folder / "config.json").write_text(json.dumps(config | layers))
    return folder


def _head_of_qwen(tensors: dict[str, torch.Tensor], config: dict, uneven: bool) -> dict[str, torch.Tensor]:
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    inside = f"model.layers.{last}."
    head = {f"mtp.layers.0.{n.removeprefix(inside)}": t.clone() for n, t in tensors.items() if n.startswith(inside)}
    dtype = tensors["model.embed_tokens.weight"].dtype
    torch.manual_seed(1)
    head["mtp.fc.weight"] = (0.1 * torch.randn(hidden, 2 * hidden)).to(dtype)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        head[f"mtp.{name}.weight"] = (0.3 * uneven * torch.randn(hidden)).to(dtype)
    return head


def eagle_head(folder: Path, config, words: int) -> Path:
    """A random EAGLE-3 head for a model of this configuration, as published ones lie in their folders: it drafts every
    second word, `words` of them, and reads the states behind the first three layers.
    """
    torch.manual_seed(2)
    hidden, heads, size = config.hidden_size, config.num_attention_heads, config.head_dim
    of_keys = config.num_key_value_heads * size
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (of_keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (of_keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * size),
        "midlayer.mlp.gate_proj.weight": (96, hidden),
        "midlayer.mlp.up_proj.weight": (96, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, 96),
        "lm_head.weight": (words, hidden),
    }
    tensors = {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    for norm in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = 1 + 0.1 * torch.randn(hidden)
    drafted = 2 * torch.arange(words)
    tensors["d2t"] = drafted - torch.arange(words)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, drafted, True)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    own = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": config.num_key_value_heads,
        "head_dim": size, "intermediate_size": 96, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "vocab_size": config.vocab_size, "draft_vocab_size": words, "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings, "attention_bias": False, "mlp_bias": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(own))
    return folder


def save(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    return path
