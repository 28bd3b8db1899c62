"""EAGLE-3 heads (Li et al., arXiv 2503.01840): folders with a small model that drafts for another one.

A head reads three hidden states of the other model's layers, joined, and has an embedding of that model's vocabulary.
It may draft words of a smaller vocabulary alone; `d2t` in its files says which ones they are. vLLM has classes for
heads of several shapes. Here is what their most common one (llama_eagle3.py) needs of config.json and files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.errors import EnvironmentFault
from mrl.model.hf_config import ModelSpec
from mrl.model.hf_files import checkpoint_tensors, has_weights
from mrl.model.registry import read_hf_config

# names of one class of vLLM, whose heads were seen to draft
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_JOIN = "fc.weight"
_WORDS = "d2t"


def head_faults(folder: Path, model: ModelSpec) -> Iterator[str]:
    """Yields why vLLM could not draft for `model` with the head in `folder`: its config.json first, then its files."""
    try:
        config = read_hf_config(folder)
    except EnvironmentFault as fault:
        yield f"{fault}".replace("a model must be a Hugging Face checkpoint directory", "it is no folder of a head")
        return
    faults = list(_config_faults(config, model))
    yield from faults or _file_faults(folder, config, model)


def head_bytes(folder: Path) -> int:
    """Returns the bytes of a head's tensors; 0 for a folder without files."""
    if not has_weights(folder):
        return 0
    return sum(tensor.stop - tensor.start for tensor in checkpoint_tensors(folder).values())


def _config_faults(config: dict[str, Any], model: ModelSpec) -> Iterator[str]:
    names = config.get("architectures") or []
    if not set(names) & set(ARCHITECTURES):
        yield f"its architectures = {names}, and only {' and '.join(ARCHITECTURES)} were seen to draft"
        return
    for key, value in (("vocab_size", model.vocab_size), ("target_hidden_size", model.hidden_size)):
        found = config.get(key, config.get("hidden_size") if key == "target_hidden_size" else None)
        if found != value:
            yield f"its {key} is {found}, and the model's is {value}"
    states = _state_layers(config, model)
    if len(set(states)) < len(states) or not all(0 <= layer <= model.num_layers for layer in states):
        yield f"it reads hidden states behind layers {states} of a model with {model.num_layers}"
    if config.get("quantization_config"):
        yield "it is quantised"


def _state_layers(config: dict[str, Any], model: ModelSpec) -> list[int]:
    """Returns the layers behind which the head reads hidden states: its own, or vLLM's default ones."""
    inner = config.get("eagle_config") or {}
    own = config.get(_LAYER_IDS) or inner.get(_LAYER_IDS)
    return list(own) if own else [2, model.num_layers // 2, model.num_layers - 3]


def _file_faults(folder: Path, config: dict[str, Any], model: ModelSpec) -> Iterator[str]:
    if not has_weights(folder):
        yield "it has no safetensors files, and pickled ones are not read"
        return
    shapes = {name: tensor.shape for name, tensor in checkpoint_tensors(folder).items()}
    words = config.get("draft_vocab_size") or model.vocab_size
    wanted = {_JOIN: (config["hidden_size"], len(_state_layers(config, model)) * model.hidden_size)}
    wanted["lm_head.weight"] = (words, config["hidden_size"])
    if words != model.vocab_size:
        wanted[_WORDS] = (words,)
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            found = f"has shape {list(shapes[name])}" if name in shapes else "is missing"
            yield f"{name} {found}, and must have {list(shape)}"
