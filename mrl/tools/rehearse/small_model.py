"""Shrinks a config.json to sizes that two CPUs can train. Family, kinds of layers and kinds of tensors stay.

Kept are experts, shared experts, dense layers before them, tied embeddings, norms on queries and keys, and biases.
Several query heads still share a key-value head. Every size divides by the degrees of a rehearsal.
"""

from collections.abc import Callable
from typing import Any

from mrl.errors import ConfigError
from mrl.model.hf_config import HfConfig
from mrl.model.registry import own_config

# vLLM's CPU kernels compute in blocks of 32
HIDDEN = 128
HEADS = 4
HEAD_DIM = 32
# widths; an expert's divides by 4 engine workers into blocks of 32
DENSE = 256
EXPERT = 128
EXPERTS = 8
CHOSEN = 2
_EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)  # the names that families and releases have for it
# Lists with an entry a layer, kinds of attention that mrl does not train, weights in another format.
_LEFT_OUT = (
    "layer_types",
    "mlp_layer_types",
    "max_window_layers",
    "sliding_window",
    "quantization_config",
    "auto_map",
)
_SAME_MODEL = {"kimi_k2": "deepseek_v3"}  # model types that are another one under a new name
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SmallForm = Callable[[HfConfig], dict[str, Any]]


def small_hf_config(config: HfConfig, layers: int, vocab_size: int, positions: int) -> dict[str, Any]:
    """Shrinks `config`, in float32. Of a model that also reads images only the text model stays.

    `positions` is the tokens of the longest sample. Raises ConfigError for a family that has no small form.
    """
    config = own_config(config)
    form = SMALL_FORMS.get(_SAME_MODEL.get(config.get("model_type"), config.get("model_type")))
    if form is None:
        raise ConfigError(
            f"mrl rehearse has no small form of model_type {config.get('model_type')!r}; there is one of "
            f"{', '.join(SMALL_FORMS)}"
        )
    kept = {key: value for key, value in config.items() if key not in (*_LEFT_OUT, *_ENDS, "dtype")}
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": small_kv_heads(config),
        "head_dim": HEAD_DIM,
        "vocab_size": vocab_size,
        "max_position_embeddings": positions,
        "torch_dtype": "float32",
    }
    return kept | sizes | form(config)


def small_kv_heads(config: HfConfig) -> int:
    """Returns the key-value heads of the small model.

    They are as many as the heads where the large model has that. Otherwise two heads share one.
    """
    heads = config["num_attention_heads"]
    if (config.get("num_key_value_heads") or heads) == heads:
        return HEADS
    return HEADS // 2


def _dense(_: HfConfig) -> dict[str, Any]:
    return {}


def _experts(config: HfConfig) -> dict[str, Any]:
    """Returns numbers and sizes of experts, under the family's names."""
    counts = {name: EXPERTS for name in _EXPERT_COUNTS if config.get(name) is not None}
    return counts | {"num_experts_per_tok": min(config["num_experts_per_tok"], CHOSEN), "moe_intermediate_size": EXPERT}


def _qwen_experts(config: HfConfig) -> dict[str, Any]:
    """Keeps a dense first layer where the model has dense ones. Every second layer has experts where some lack them."""
    dense = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step") or 1
    return _experts(config) | {"mlp_only_layers": [0] if dense else [], "decoder_sparse_step": min(step, 2)}


def _qwen_shared(config: HfConfig) -> dict[str, Any]:
    shared = {}
    if config.get("shared_expert_intermediate_size"):
        shared = {"shared_expert_intermediate_size": EXPERT}
    return _qwen_experts(config) | shared


def _glm(config: HfConfig) -> dict[str, Any]:
    """Shrinks GLM. Layers for multi-token prediction are counted in config.json and left out, as everywhere."""
    kinds = config.get("mlp_layer_types")  # where transformers lists them
    dense = kinds.count("dense") if kinds else config["first_k_dense_replace"]
    return _experts(config) | {"first_k_dense_replace": min(dense, 1), "n_shared_experts": 1}


def _latent(config: HfConfig) -> dict[str, Any]:
    """Keeps the latent's size, for which vLLM's CPU kernel is compiled. Groups of experts stay, of two experts each."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM}
    sizes |= {
        "head_dim": 64,
        "q_lora_rank": HEAD_DIM if config.get("q_lora_rank") else None,
        "num_key_value_heads": HEADS,
    }
    chosen = {}
    if (config.get("n_group") or 1) > 1:
        chosen = {"n_group": EXPERTS // 2, "topk_group": CHOSEN // 2}
    return _glm(config) | sizes | chosen


def _hybrid(config: HfConfig) -> dict[str, Any]:
    """Gives every second layer full attention, so that two layers have both kinds.

    Heads of gated delta attention have the smallest size that vLLM's kernel accepts.
    """
    values = config["linear_num_value_heads"] // config["linear_num_key_heads"]
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": HEADS}
    kinds = {"full_attention_interval": 2, "linear_num_value_heads": HEADS * values}
    return sizes | kinds


def _expert_hybrid(config: HfConfig) -> dict[str, Any]:
    return _qwen_shared(config) | _hybrid(config)


SMALL_FORMS: dict[str, SmallForm] = {
    "qwen2": _dense,
    "qwen3": _dense,
    "qwen2_moe": _qwen_shared,
    "qwen3_moe": _qwen_experts,
    "qwen3_next": _expert_hybrid,
    "qwen3_5_text": _hybrid,
    "qwen3_5_moe_text": _expert_hybrid,
    "glm4_moe": _glm,
    "deepseek_v3": _latent,
    "glm4_moe_lite": _latent,
}
