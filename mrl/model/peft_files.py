"""Reads and describes adapters in PEFT's form (peft 0.21.2, save_pretrained).

An adapter is a folder with adapter_config.json and adapter_model.safetensors. Its tensors are
base_model.model.MODULE.lora_A.weight and ...lora_B.weight.

MODULE is a module's place in transformers' class of the checkpoint. In that of a model which also reads images the text
model is model.language_model, whatever names the checkpoint's files have. No adapter is on its vision tower, some of
whose modules have the text model's names (Qwen2.5-VL's gate_proj).
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mrl.errors import ConfigError, EnvironmentFault
from mrl.model.adapters import Lora, adapter_shapes
from mrl.model.hf_config import ModelSpec
from mrl.model.hf_files import TensorBytes, read_safetensors_header, safetensors_metadata, weight_files
from mrl.model.wrapped import INSIDE, VISION_TOWER
from mrl.plain_files import TEXT_BYTES, open_regular, read_json, reason
from mrl.units import MIB

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_TEXT = "model."  # begins names of a text model
BASE_DIGEST = "mrl_base_digest"  # a key in the metadata of the weights' file
_NAME_INSIDE = re.compile(r"\.lora_[AB]\..+\.weight$")
_READ_OF_EACH = 4096  # bytes of each tensor that go into the model's digest
_SHOWN = 3
# dtypes of factors: words, and the bits that are all set in NaN and infinity
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}
# of adapter_config.json: what changes the weights in a way that is not computed here, and its harmless values. Other
# starts than these (pissa, olora, corda, loftq, lora_ga) also change the base, which is not in the adapter's folder.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "lora_bias": (None, False),
    "trainable_token_indices": (None,),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal", "mica"),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "use_bdlora": (None, False),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
}


def base_digest(folder: str | Path) -> str:
    """Returns the digest of a model's tensors. Raises EnvironmentFault for unreadable files."""
    return _digest_of(weight_files(Path(folder)))


def tower_digest(folder: str | Path) -> str:
    """Returns the digest of a vision tower's tensors. Raises EnvironmentFault for unreadable files."""
    return _digest_of(weight_files(Path(folder)), VISION_TOWER)


def adapter_digest(folder: str | Path) -> str:
    """Returns the digest of the tensors of an adapter in PEFT's form. Raises EnvironmentFault for an unreadable one."""
    return _digest_of([Path(folder) / WEIGHTS])


def _digest_of(files: Iterable[Path], begins: str | tuple[str, ...] = "") -> str:
    """Returns SHA-256 over the files' tensors whose names have one of these `begins`: their names, dtypes and shapes,
    and the first bytes of each.

    Models of the same shape differ in those bytes. Reading all bytes of a large model would take minutes.
    """
    digest = hashlib.sha256()
    tensors = {}
    for file in files:
        header = read_safetensors_header(file)
        tensors |= {name: (file, tensor) for name, tensor in header.items() if name.startswith(begins)}
    for name, (file, tensor) in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(_first_bytes(file, tensor))
    return digest.hexdigest()


def _first_bytes(file: Path, tensor: TensorBytes) -> bytes:
    handle = open_regular(file)
    try:
        return os.pread(handle, min(_READ_OF_EACH, tensor.stop - tensor.start), tensor.start)
    finally:
        os.close(handle)


def name_in_file(name: str, model: ModelSpec) -> str:
    """Returns the name of a factor in PEFT's file, given mrl's."""
    if model.is_wrapped:
        name = INSIDE + name.removeprefix(_TEXT)
    return PREFIX + name


def _own_name(name: str, model: ModelSpec) -> str:
    """Undoes `name_in_file`. A name that is not the text model's stays as it is."""
    name = name.removeprefix(PREFIX)
    if model.is_wrapped and name.startswith(INSIDE):
        return _TEXT + name.removeprefix(INSIDE)
    return name


def peft_config(lora: Lora, base: str, dropout: float = 0.0, is_wrapped: bool = False) -> dict[str, Any]:
    """Returns the content of adapter_config.json for adapters on the model in `base`.

    `dropout`: the dropout that the adapters were trained with. `is_wrapped`: as in ModelSpec; modules of the text model
    alone are then named, by a regular expression.
    """
    targets: Any = list(lora.targets)
    if is_wrapped:
        targets = rf"{re.escape(INSIDE)}.*\.({'|'.join(lora.targets)})"
    alpha = lora.alpha
    if alpha.is_integer():
        alpha = int(alpha)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "target_modules": targets,
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def read_peft(folder: str | Path, model: ModelSpec, lora: Lora) -> dict[str, TensorBytes]:
    """Returns the location of each factor in the folder's WEIGHTS, by mrl's name of the factor.

    Raises ConfigError for adapters of another kind, rank, alpha or model, EnvironmentFault for unreadable files.
    """
    folder = Path(folder)
    _check_config(folder / CONFIG, lora)
    stored = read_safetensors_header(folder / WEIGHTS)
    found = {_own_name(name, model): tensor for name, tensor in stored.items()}
    wanted = adapter_shapes(model, lora)
    _refuse_names_inside(folder / WEIGHTS, found)
    odd = sorted(found.keys() ^ wanted.keys())
    odd += [name for name in sorted(found.keys() & wanted.keys()) if found[name].shape != wanted[name]]
    if odd:
        shown = ", ".join(odd[:_SHOWN])
        raise ConfigError(
            f"actor.lora.path {folder}: its tensors are not those of actor.lora's adapters on model.path "
            f"({len(odd)} differ): {shown}{' ...' if len(odd) > _SHOWN else ''}; give the adapter's own "
            "target_modules and model"
        )
    for name, tensor in found.items():
        _check_numbers(folder / WEIGHTS, name, tensor)
    return found


def _refuse_names_inside(file: Path, names: Iterable[str]) -> None:
    """Raises ConfigError for names with that of the adapter (`.lora_A.NAME.weight`), as a module's own state_dict has
    them.
    """
    inside = next((name for name in names if _NAME_INSIDE.search(name)), None)
    if inside is not None:
        raise ConfigError(
            f"{file}: {inside} has the name of the adapter after the factor's, as state_dict() gives it; write the "
            "adapter with peft's save_pretrained, which leaves it out"
        )


def _check_numbers(file: Path, name: str, tensor: TensorBytes) -> None:
    """Raises ConfigError for a factor that is no floating-point tensor, or has a number that is not finite."""
    if tensor.dtype not in _EXPONENTS:
        raise ConfigError(f"{file}: {name} is {tensor.dtype}, and factors are {', '.join(_EXPONENTS)}")
    kind, exponent = _EXPONENTS[tensor.dtype]
    handle = open_regular(file)
    try:
        for start in range(tensor.start, tensor.stop, MIB):
            bits = np.frombuffer(os.pread(handle, min(MIB, tensor.stop - start), start), kind)
            if ((bits & exponent) == exponent).any():
                raise ConfigError(f"{file}: {name} has numbers that are not finite; the adapter is damaged")
    finally:
        os.close(handle)


def _check_config(file: Path, lora: Lora) -> None:
    try:
        config = read_json(file, TEXT_BYTES)
    except FileNotFoundError:
        inside = sorted(str(found.parent) for found in file.parent.glob(f"*/{CONFIG}"))
        cure = "it must be in the folder that peft's save_pretrained wrote"
        if inside:
            cure = f"peft gives each named adapter a folder of its own, so set it to {' or '.join(inside[:_SHOWN])}"
        raise EnvironmentFault(f"actor.lora.path {file.parent} has no {CONFIG}: {cure}") from None
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{file} cannot be read as JSON: {reason(error)}") from None
    if not isinstance(config, dict):
        raise EnvironmentFault(f"{file} holds no JSON object")
    strange = [f"{key} {config[key]}" for key, plain in _PLAIN.items() if config.get(key, plain[0]) not in plain]
    if strange:
        raise ConfigError(f"{file}: {strange[0]} is not computed here; only plain LoRA adapters are read")
    for key, ours, value in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if config.get(key) != value:
            raise ConfigError(f"{file}: {key} is {config.get(key)}, and actor.lora.{ours} is {value}; set it to that")


def check_base(folder: str | Path, base: str | Path) -> None:
    """Raises ConfigError if a PEFT adapter was trained on another base model than the one in `base`.

    Only adapters that mrl wrote record the digest of their base model.
    """
    file = Path(folder) / WEIGHTS
    said = safetensors_metadata(file).get(BASE_DIGEST)
    if said is not None and said != base_digest(base):
        raise ConfigError(
            f"actor.lora.path {folder}: trained on another model than model.path {base} (its weights' digest differs); "
            "give the model that it was trained on"
        )
