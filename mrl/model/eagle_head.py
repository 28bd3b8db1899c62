"""EAGLE-3 heads (Li et al., arXiv 2503.01840): folders with a small model that drafts for another one.

A head reads three hidden states of the other model's layers, joined, and has an embedding of that model's vocabulary.
It may draft words of a smaller vocabulary alone; `d2t` in its files says which ones they are. vLLM has classes for
heads of several shapes. Here is what their most common one (llama_eagle3.py) needs of config.json and files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.errors import MrlError, shown
from mrl.model.hf_config import ModelSpec
from mrl.model.hf_files import checkpoint_tensors, has_weights
from mrl.model.registry import read_hf_config

# names of one class of vLLM, whose heads were seen to draft
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_JOIN = "fc.weight"
_TO_TARGET = "d2t"
_STATES = 3  # that a head joins which does not say how many
_COUNTS = ("vocab_size", "hidden_size")
_HEADS = 32  # of transformers' LlamaConfig that says nothing
_OPTIONAL_COUNTS = (
    "target_hidden_size", "draft_vocab_size", "num_aux_hidden_states", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_hidden_layers", "max_position_embeddings",
)  # fmt: skip


def head_faults(folder: Path, model: ModelSpec) -> Iterator[str]:
    """Yields why vLLM could not draft for `model` with the head in `folder`: its config.json first, then its files."""
    if not (folder / "config.json").is_file():
        yield "it is no folder with a head's config.json"
        return
    try:
        config = read_hf_config(folder)
        faults = list(_type_faults(config)) or list(_config_faults(config, model))
        yield from faults or list(_file_faults(folder, config, model))
    except MrlError as fault:
        yield str(fault)


def head_bytes(folder: Path) -> int:
    """Returns the bytes of a head's tensors; 0 for a folder without files."""
    if not has_weights(folder):
        return 0
    return sum(tensor.stop - tensor.start for tensor in checkpoint_tensors(folder).values())


def head_cache_elements(folder: Path, tensor: int) -> int:
    """Returns the keys and values of one token in a head's layers, as numbers on one of `tensor` workers."""
    config = read_hf_config(folder)
    heads = config.get("num_attention_heads") or _HEADS
    size = config.get("head_dim") or config["hidden_size"] // heads
    groups = max(1, (config.get("num_key_value_heads") or heads) // tensor)
    return (config.get("num_hidden_layers") or 1) * 2 * groups * size


def head_positions(folder: Path) -> int | None:
    """Returns the positions that a head's config.json names, up to which vLLM's model runner on CPUs drafts with it."""
    return read_hf_config(folder).get("max_position_embeddings")


def _type_faults(config: dict[str, Any]) -> Iterator[str]:
    for key in (*_COUNTS, *_OPTIONAL_COUNTS):
        value = config.get(key)
        if (value is not None or key in _COUNTS) and not (isinstance(value, int) and value > 0):
            yield f"its {key} is {shown(value)}, and must be a whole number above 0"
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        yield f"its architectures = {shown(names)}, and must be a list of names"
    inner = config.get("eagle_config") or {}
    if not isinstance(inner, dict):
        yield f"its eagle_config is {shown(inner)}, and must be a mapping"
        return
    for ids in (config.get(_LAYER_IDS), inner.get(_LAYER_IDS)):
        if ids and not (isinstance(ids, list) and all(isinstance(layer, int) for layer in ids)):
            yield f"its {_LAYER_IDS} are {shown(ids)}, and must be a list of whole numbers"


def _config_faults(config: dict[str, Any], model: ModelSpec) -> Iterator[str]:
    names = config.get("architectures") or []
    if not set(names) & set(ARCHITECTURES):
        yield f"its architectures = {names}, and only {' and '.join(ARCHITECTURES)} were seen to draft"
        return
    for key, value in (("vocab_size", model.vocab_size), ("target_hidden_size", model.hidden_size)):
        found = config.get(key) or config["hidden_size"]
        if found != value:
            yield f"its {key} is {found}, and the model's is {value}"
    states = _state_layers(config, model)
    if len(set(states)) < len(states) or not all(0 <= layer <= model.num_layers for layer in states):
        yield f"it reads hidden states behind layers {states} of a model with {model.num_layers}"
    if len(states) != _joined(config):
        yield f"it joins {_joined(config)} hidden states, and reads those behind layers {states}"
    if config.get("quantization_config"):
        yield "it is quantised"


def _state_layers(config: dict[str, Any], model: ModelSpec) -> list[int]:
    """Returns the layers behind which vLLM reads hidden states for the head: its own, or default ones."""
    inner = config.get("eagle_config") or {}
    own = config.get(_LAYER_IDS) or inner.get(_LAYER_IDS)
    return list(own) if own else [2, model.num_layers // 2, model.num_layers - 3]


def _joined(config: dict[str, Any]) -> int:
    """Returns how many hidden states the head joins, as vLLM's class counts them: by `eagle_config` alone."""
    inner = config.get("eagle_config") or {}
    return config.get("num_aux_hidden_states") or len(inner.get(_LAYER_IDS) or ()) or _STATES


def _file_faults(folder: Path, config: dict[str, Any], model: ModelSpec) -> Iterator[str]:
    if not has_weights(folder):
        yield "it has no safetensors files, and pickled ones are not read"
        return
    shapes = {name: tensor.shape for name, tensor in checkpoint_tensors(folder).items()}
    vocab_size = config.get("draft_vocab_size") or model.vocab_size
    wanted = {_JOIN: (config["hidden_size"], _joined(config) * model.hidden_size)}
    wanted["lm_head.weight"] = (vocab_size, config["hidden_size"])
    if vocab_size != model.vocab_size:
        wanted[_TO_TARGET] = (vocab_size,)
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            found = f"has shape {list(shapes[name])}" if name in shapes else "is missing"
            yield f"{name} {found}, and must have {list(shape)}"
