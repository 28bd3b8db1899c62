"""Makes the model of a rehearsal: config.json, tokenizer, and a checkpoint of random weights.

A config.json shrinks to sizes that two CPUs can train. Family, kinds of layers and kinds of tensors stay.

Kept are experts, shared experts, dense layers before them, tied embeddings, norms on queries and keys, and biases.
Several query heads still share a key-value head. Every size divides by the degrees of a rehearsal.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from math import log, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mrl.errors import ConfigError
from mrl.model import ModelSpec, TensorSpec, model_spec, tensor_specs
from mrl.model.hf_config import HfConfig
from mrl.model.hf_files import HF_FILES
from mrl.model.registry import family_of, own_config, wrapper_of
from mrl.model.rotation import settings as rotary_settings
from mrl.model.tensors import as_stored
from mrl.model.trained_tower import NAMES, TRAINED
from mrl.tools.rehearse.small_tower import IMAGE_TOKENS, as_files, small_whole

# vLLM's CPU kernels compute in blocks of 32
HIDDEN = 128
HEADS = 4
HEAD_DIM = 32
# widths; an expert's divides by 4 engine workers into blocks of 32
DENSE = 256
EXPERT = 128
EXPERTS = 8
_WINDOW = 8
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
    "attn_type_list",
)
_SAME_MODEL = {"kimi_k2": "deepseek_v3"}  # model types that are another one under a new name
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SmallForm = Callable[[HfConfig], dict[str, Any]]


def small_hf_config(
    config: HfConfig, layers: int, vocab_size: int, positions: int, sees: bool = False
) -> dict[str, Any]:
    """Shrinks `config`, in float32. Of a model that also reads images only the text model stays, unless it `sees`.

    `positions` is the tokens of the longest sample. Raises ConfigError for a family that has no small form, and for a
    model without a vision tower that is to see.
    """
    if sees:
        return _seeing(config, layers, vocab_size, positions)
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
    small = kept | sizes | form(config)
    return small | _small_rotation(small)


def _seeing(config: HfConfig, *sizes: int) -> dict[str, Any]:
    if wrapper_of(config) is None:
        raise ConfigError(f"model.vision: model_type {config.get('model_type')!r} has no vision tower")
    plain = small_hf_config(config, *sizes)
    return small_whole(config, plain, family_of(model_spec(plain)))


def _small_rotation(config: HfConfig) -> dict[str, Any]:
    """Keeps a factor of longrope for each pair that turns. What follows from lengths is left to be computed."""
    settings = rotary_settings(config)
    pairs = int(HEAD_DIM * settings.get("partial_rotary_factor", 1.0)) // 2
    changed = {}
    for name in ("rope_parameters", "rope_scaling"):
        entry = config.get(name) or {}
        if "short_factor" in entry:
            kept = {key: value for key, value in entry.items() if key not in ("factor", "attention_factor")}
            changed[name] = kept | {key: entry[key][:pairs] for key in ("short_factor", "long_factor")}
    return changed


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


def _plain_experts(config: HfConfig) -> dict[str, Any]:
    """Returns numbers and sizes of experts of families without dense layers, whose experts have intermediate_size."""
    small = {name: value for name, value in _experts(config).items() if name != "moe_intermediate_size"}
    if "rotary_dim" in config:
        small["rotary_dim"] = HEAD_DIM // 2
    return small | {"intermediate_size": EXPERT, "pad_token_id": None}


def _with_windows(config: HfConfig) -> dict[str, Any]:
    """Keeps windows, so short that the samples of a rehearsal are longer."""
    return _plain_experts(config) | {"sliding_window": _WINDOW}


def _without_padding(_: HfConfig) -> dict[str, Any]:
    """Says that no token is padding, for classes that have one where the key is absent."""
    return {"pad_token_id": None}


def _without_window(_: HfConfig) -> dict[str, Any]:
    """Says that there is no window, for classes that have one where the key is absent."""
    return {"sliding_window": None}


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


def _hy3(config: HfConfig) -> dict[str, Any]:
    """Shrinks Hy3, with one dense layer."""
    return _experts(config) | {"num_shared_experts": 1, "mlp_layer_types": None, "pad_token_id": None}


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
    "llama": _dense,
    "mistral": _without_window,
    "phi3": _without_padding,
    "seed_oss": _without_padding,
    "mixtral": _plain_experts,
    "olmoe": _plain_experts,
    "minimax_m2": _plain_experts,
    "gpt_oss": _with_windows,
    "glm4_moe": _glm,
    "hy_v3": _hy3,
    "deepseek_v3": _latent,
    "glm4_moe_lite": _latent,
}


END = "<|im_end|>"
START = "<|im_start|>"
PAD = "<|endoftext|>"
_WHOLE = (PAD, START, END, "<think>", "</think>", "system", "user", "assistant")  # one token each
_OF_TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_MULTIPLE = 64  # the vocabulary's size divides by it, because tensor ranks share its rows
_MESSAGE = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
# a message's content that may have parts, each image as one token between two marks
_SHOWN = (
    "{%- macro shown(content) %}{%- if content is string %}{{ content }}{%- else %}{%- for part in content %}"
    "{%- if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{ part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}"
)
_GENERATION = (
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' "
    "}}{%- endif %}{%- endif %}"
)
_TEMPLATE = f"{{%- for message in messages %}}{_MESSAGE}{{%- endfor %}}{_GENERATION}"
_CALLS = (
    "{{ '<|im_start|>assistant\\n' + message['content'] }}{%- for call in message['tool_calls'] %}"
    "{{ '\\n<tool_call>\\n{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' "
    "+ (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}"
)
_ANSWER = (
    "{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"
)
_TOOL_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{%- endfor %}"
    "{{ '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}{%- if message['role'] == 'tool' %}"
    f"{_ANSWER}{{%- elif message['tool_calls'] %}}{_CALLS}{{%- else %}}{_MESSAGE}{{%- endif %}}{{%- endfor %}}"
    f"{_GENERATION}"
)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies a model's tokenizer, without its configuration and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in HF_FILES:
        for file in source.glob(pattern):
            if file.name not in ("config.json", "generation_config.json") and not file.name.endswith(".index.json"):
                shutil.copy(file, folder / file.name)


def write_tokenizer(folder: Path, with_tools: bool = False, sees: bool = False) -> None:
    """Writes mrl's own tokenizer in the format of transformers: a token a byte, and a ChatML template.

    The template has the thinking switch of Qwen3's templates, so that data.enable_thinking works with it.

    `with_tools` adds the tokens of calls, and a template that has them in Hermes' format. `sees` adds those of images.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = (*_WHOLE[:5], *(IMAGE_TOKENS if sees else ()))
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    core.add_tokens([AddedToken(word, normalized=False) for word in (*_WHOLE[5:], *(_OF_TOOLS if with_tools else ()))])
    core.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    template = _TOOL_TEMPLATE if with_tools else _TEMPLATE
    if sees:
        template = _SHOWN + template.replace("message['content']", "shown(message['content'])")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def vocabulary_size(tokenizer, least: int = 0) -> int:
    """Returns the rows that an embedding needs for a tokenizer. `least` is the model's own number."""
    needed = max(len(tokenizer), least)
    return -(-needed // _MULTIPLE) * _MULTIPLE


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_ROUTER = "mlp.gate.weight"
_COMMON = 2.0  # length of the embeddings' common part, relative to their own part
_QUIET = 0.1  # scale of what a layer adds to its input


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], ends: tuple[int, ...], response: int, seed: int = 0
) -> ModelSpec:
    """Writes config.json and model.safetensors, which `model.path` of a rehearsal names, and returns the model.

    Weights are seeded, and scaled so that activations stay near 1 through the layers. Every embedding has a part in one
    common direction. The end token's row of the output layer has that direction too. So the end comes by chance, about
    once in a response. Responses then differ in length, as those of a trained model do.

    `ends` are tokens that end a response, `response` is the length of the longest one in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    model = model_spec(config, TRAINED)  # so that the tower of a model that sees is among its tensors
    rng = np.random.default_rng(seed)
    drafts = family_of(model).predicting is not None and model.left_out_layers == 1
    specs = tensor_specs(model.holding(drafts))
    tensors = {spec.name: _random(spec, rng, model.zero_centered_norm) for spec in specs}
    _make_ends_likely(tensors, model, ends, response)
    stored = as_files(tensors) if model.is_wrapped else as_stored(model.holding(drafts), tensors)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def _random(spec: TensorSpec, rng: np.random.Generator, zero_centered_norm: bool) -> np.ndarray:
    is_norm = "norm" in spec.name or ".ln_q." in spec.name
    if is_norm and not spec.name.endswith(".bias"):
        is_plain = not zero_centered_norm or ".linear_attn." in spec.name or spec.name.startswith(NAMES)
        return np.full(spec.shape, 1.0 if is_plain else 0.0, np.float32)
    if len(spec.shape) == 1:  # biases
        return rng.normal(0.0, 0.02, spec.shape).astype(np.float32)
    adds_to_stream = spec.name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
    scale = (_QUIET if adds_to_stream else 1.0) / sqrt(prod(spec.shape[1:]))
    return (rng.standard_normal(spec.shape, np.float32) * np.float32(scale)).astype(np.float32)


def _make_ends_likely(tensors: dict[str, np.ndarray], model: ModelSpec, ends: tuple[int, ...], response: int) -> None:
    """Changes `tensors` so that each token ends the response with a probability of about 1 / `response`, over all
    `ends`.

    The last norm scales the stream to a length of sqrt(hidden_size). `share` is its part in the common direction.
    Logits of other tokens have a variance of 1, so their exponentials sum to about vocab_size x sqrt(e).
    """
    direction = np.full(model.hidden_size, 1.0 / sqrt(model.hidden_size), np.float32)
    tensors[EMBEDDING] += _COMMON * direction
    for name in (name for name in tensors if name.endswith(_ROUTER)):
        # routers ignore that direction; otherwise all tokens would choose the same experts
        tensors[name] -= tensors[name].mean(-1, keepdims=True)
    share = _COMMON / sqrt(1.0 + _COMMON**2) * sqrt(model.hidden_size)
    # tied rows have the common part too
    shared_logit = 0.0
    if HEAD not in tensors:
        shared_logit = _COMMON * share
    wanted = log(model.vocab_size / (max(response, 2) * max(len(ends), 1))) + 0.5
    for end in ends:
        row = tensors[HEAD if HEAD in tensors else EMBEDDING]
        row[end] = direction * np.float32((wanted + shared_logit) / share)
