"""The model families. Turns a checkpoint directory or a published name into a ModelSpec and its weight map.

Reads only JSON; no code of a checkpoint runs. `mrl/model/known/NAME.json` has the public config.json fields of
`Qwen/NAME` (`zai-org/NAME`, `deepseek-ai/NAME`, `moonshotai/NAME`) that a ModelSpec needs. So a preset can be planned
without its checkpoint. Training never reads them.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, EnvironmentFault, MrlError, shortened
from mrl.model import (
    deepseek_v3,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    hy_v3,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    wrapped,
)
from mrl.model.class_keys import as_its_class_reads
from mrl.model.hf_config import (
    POSITION_NAMES,
    HfConfig,
    ModelSpec,
    pad_token_id,
    refuse_impossible,
    refuse_other_names,
    refuse_router,
    refuse_unless,
)
from mrl.model.refused import REFUSED
from mrl.model.tower_sizes import VisionTower
from mrl.model.weight_map import Family, Inner, WeightMap
from mrl.plain_files import TEXT_BYTES, read_json, read_settings, reason
from mrl.units import MIB

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")  # any of them makes a tokenizer
_MODULES = (
    qwen2,
    qwen3,
    qwen2_moe,
    qwen3_moe,
    glm4_moe,
    deepseek_v3,
    glm4_moe_lite,
    qwen3_next,
    qwen3_5,
    qwen3_5_moe,
    llama,
    mistral,
    mixtral,
    phi3,
    seed_oss,
    olmoe,
    minimax_m2,
    gpt_oss,
    hy_v3,
)
FAMILIES = {module.FAMILY.architecture: module.FAMILY for module in _MODULES}
# architectures that also read images -> the family inside
_WRAPPERS = {family.wrapper: family for family in FAMILIES.values() if family.wrapper}
_LINEAR = "linear_(num_key_heads|attn_config|attention)|mamba|ssm_|hybrid_override_pattern"
_EXPERTS = "[Ee]xpert|[Mm]o[Ee]|hybrid_override_pattern .*E"
# what lines of a config.json must contain -> the family that has such layers; the first that matches
_LIKE = (
    (("kv_lora_rank",), deepseek_v3.FAMILY),
    ((_LINEAR, _EXPERTS), qwen3_next.FAMILY),
    ((_LINEAR,), qwen3_5.FAMILY),
    (("shared?_expert|first_k_dense_replace",), glm4_moe.FAMILY),
    ((_EXPERTS,), qwen3_moe.FAMILY),
    (("intermediate_size|ffn|mlp",), qwen3.FAMILY),
)
# keys of models that take more than text, inside of which their text model's configuration lies
_AROUND = ("text_config", "thinker_config", "llm_config", "language_config")
_NEW = (
    "What another family needs is in docs/adding_a_family.md. Supported are Qwen2 to Qwen3.6, GLM-4.5 to 4.7, "
    "DeepSeek-V3 and R1, Moonlight and Kimi-K2, Llama, Mistral, Mixtral, Phi-3 and 4, Seed-OSS, OLMoE, MiniMax-M2, "
    "gpt-oss and Hy3"
)
_NO_FOLDER = "a model must be a Hugging Face checkpoint directory"
TOKENIZER_BYTES = 64 * MIB  # of tokenizer_config.json, which may list thousands of special tokens
_KNOWN = Path(__file__).parent / "known"
# Words after a name that mean other weights: models that read images, no language models, quantised ones.
_OTHER_WEIGHTS = ("vl", "omni", "embedding", "reranker", "awq", "gptq", "gguf", "int4", "int8", "fp8", "mxfp4")
# Releases of Qwen3 with the shape of the first ones but more positions: part of the name -> positions.
_MORE_POSITIONS = {"2507": 262_144}
# Shortened names that are still unique.
_SHORT = {
    "qwen330b": "Qwen3-30B-A3B",
    "qwen3235b": "Qwen3-235B-A22B",
    "kimik2base": "Kimi-K2-Instruct",
    "mistral7binstructv03": "Mistral-7B-v0.3",
    "qwen3635ba3b": "Qwen3.5-35B-A3B",
    "qwen3627b": "Qwen3.5-27B",
}
_SAME_TYPE = {"kimi_k2": "deepseek_v3"}  # model types that are another one under a new name
_HELD = "mrl_predicting_layers"  # key of `with_predicting`
# Names that begin like a known one but mean another model.
_OTHER_MODELS = ("deepseekv32",)


@cache
def weight_map(model: ModelSpec) -> WeightMap:
    """Returns every weight of a model. Raises ConfigError for an unknown model type."""
    return WeightMap.of(model, family_of(model))


def family_of(model: ModelSpec) -> Family:
    """Returns the family of a model. Raises ConfigError for an unknown model type."""
    family = next((family for family in FAMILIES.values() if family.model_type == model.family), None)
    if family is None:
        raise ConfigError(f"config.json: model_type = {model.family!r} is not supported. {_NEW}")
    return family


def inner_tensors(model: ModelSpec, key: str, shape: tuple[int, ...]) -> Iterable[Inner]:
    """Returns the tensors of a model in a stored one. Most families store each tensor by itself."""
    inside = family_of(model).inside
    return (Inner(key, shape, 0),) if inside is None else inside(key, shape, model.hidden_size)


def for_loader(architecture: str, name: str, tensor: Any) -> tuple[str, Any]:
    """Returns a tensor of a model as the loader of vLLM's class takes it. `architecture`: the name of that class."""
    family = FAMILIES.get(architecture)
    if family is None or family.for_loader is None:
        return name, tensor
    return family.for_loader(name, tensor)


def with_predicting(config: HfConfig, predicting: bool) -> dict[str, Any]:
    """Returns the configuration of a model whose ranks hold its predicting layers, for manifests and weight syncs, if
    `predicting`, else of the model without them. The former is no config.json of an export.
    """
    plain = {name: value for name, value in config.items() if name != _HELD}
    return {**plain, _HELD: model_spec(plain).left_out_layers} if predicting else plain


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """Returns the config.json of a checkpoint directory.

    Raises EnvironmentFault if it is missing or not a JSON object.
    """
    file = Path(path) / "config.json"
    try:
        config = read_json(file, TEXT_BYTES, strict=False)  # transformers writes Infinity, as in Nemotron-H's
    except (FileNotFoundError, NotADirectoryError):
        if os.path.exists(path) and not os.path.isdir(path):
            raise EnvironmentFault(f"{path} is a file: {_NO_FOLDER}") from None
        begins = "" if os.path.isabs(path) else f"; a relative path starts at the current directory, {os.getcwd()}"
        hint = f" (no such directory{begins}; a name on the Hugging Face hub is written hf://ORG/NAME)"
        if os.path.isdir(path):
            hint = ""
        if str(path).startswith("hf:/"):  # Path makes one slash of two
            hint = " (of the Hugging Face hub it is not in this machine's cache, and this command fetches nothing)"
        raise EnvironmentFault(f"{file} does not exist{hint}: {_NO_FOLDER}") from None
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{file} cannot be read as JSON: {reason(error)}") from None
    if not isinstance(config, dict):
        raise EnvironmentFault(f"{file} holds a {type(config).__name__}, not a JSON object")
    return config


def model_spec(config: HfConfig, vision: str | None = None) -> ModelSpec:
    """Makes a ModelSpec from config.json, or from what `with_predicting` returns.

    `vision`: as model.vision; a vision tower that is trained is part of the model.

    Raises ConfigError for remote code, an unsupported architecture, a missing key, or a feature that training would not
    compute.
    """
    if held := config.get(_HELD, 0):
        plain = {key: value for key, value in config.items() if key != _HELD}
        return replace(model_spec(plain, vision), predicting_layers=held)
    names = config.get("architectures") or []
    refuse_impossible({"architectures": names})
    wrapper = wrapper_of(config)
    family = wrapper or next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if names and family is None:  # before its sizes, which may have other meanings there
        reasons = [REFUSED[name] for name in names if name in REFUSED]
        why = "".join(f": {reason}" for reason in reasons[:1])
        raise ConfigError(f"config.json: architectures = {names} is not supported{why}. {_nearest(config)} {_NEW}")
    refuse_impossible(config)
    if family is None:
        raise ConfigError(
            f"config.json has no architectures: write the class of model_type {config.get('model_type')!r} in "
            "transformers, such as Qwen3ForCausalLM"
        )
    if len(known := [name for name in names if name in FAMILIES or name in _WRAPPERS]) > 1:
        raise ConfigError(f"config.json: architectures = {names}: {' and '.join(known)} are different models; keep one")
    if config.get("auto_map") and not family.has_code_beside:
        raise ConfigError(
            f"config.json of {', '.join(names)} has auto_map: the checkpoint wants its own code to run "
            f"(trust_remote_code), which mrl never does; use a checkpoint without it, whose classes are transformers'"
        )
    if wrapper:
        text = _read(wrapper, own_config(config), wrapper.wrapped_type or wrapper.model_type)
        return replace(text, is_wrapped=True, tower=VisionTower.of(config)).with_trained_tower(vision)
    return _read(family, config, family.model_type)


def _nearest(config: HfConfig) -> str:
    """Names the family whose layers are most like those of a model that is not supported, by names of its sizes.

    Names none if the configuration does not say whether layers have experts, as one that relies on defaults of a class.
    """
    lines = list(_lines(config))
    said = ""
    if any(line.startswith(("vision", "audio", "image_", *_AROUND)) for line in lines):
        said = "Only text is trained. "
    inside = [config[key].get("model_type") for key in _AROUND if isinstance(config.get(key), dict)]
    for family in FAMILIES.values():
        if any(family.model_type == _SAME_TYPE.get(str(own), own) for own in inside):
            return f"{said}Its text model is {family.model_type}'s, which is supported in a folder of its own."
    for patterns, family in _LIKE:
        if all(any(re.search(pattern, line) for line in lines) for pattern in patterns):
            return f"{said}The nearest supported family is {family.model_type}."
    return f"{said}Its sizes do not tell which supported family is the nearest."


def _lines(config: HfConfig) -> Iterator[str]:
    """Yields the set keys of a configuration and of its text model, with values that are names."""
    for key, value in config.items():
        if key in _AROUND and isinstance(value, dict):
            yield key
            yield from _lines(value)
        elif value and isinstance(value, str | list):
            yield f"{key} {value}"
        elif value:
            yield key


def _read(family: Family, config: HfConfig, model_type: str) -> ModelSpec:
    """`model_type`: of the class by which transformers reads this configuration."""
    own = config.get("model_type")
    refuse_unless("model_type", _SAME_TYPE.get(own, own), family.model_type)
    config = as_its_class_reads(dict(config), model_type)
    model = family.read(config)
    refuse_other_names(config, model)
    refuse_router(model)
    return replace(model, pad_token_id=pad_token_id(config))


def wrapper_of(config: HfConfig) -> Family | None:
    """Returns the family of the text model inside a model that also reads images; None for a plain text model."""
    names = config.get("architectures") or []
    return next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)


def positions_of(config: HfConfig, positions: int) -> dict[str, int]:
    """Returns what a text model's config.json has to say for another number of positions, under all of its names."""
    return {name: positions for name in POSITION_NAMES if name in config}


def own_config(config: HfConfig) -> HfConfig:
    """Returns the config.json of the text model alone. Raises ConfigError as `model_spec`."""
    family = wrapper_of(config)
    if family is None:
        return config
    inside = (family.wrapped_type, family.wrapped_always, family.wrapped_ties)
    return wrapped.text_config(config, family.architecture, family.model_type, *inside)


def load_model_spec(path: str | Path, vision: str | None = None) -> ModelSpec:
    """Returns the model in a checkpoint directory. `vision`: as in `model_spec`.

    Raises EnvironmentFault and ConfigError that name the directory.
    """
    config = read_hf_config(path)
    _refuse_own_tokenizer(Path(path))
    try:
        return model_spec(config, vision)
    except ConfigError as error:
        raise ConfigError(shortened(f"model.path {path}: {error}")) from None


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a model's folder has a tokenizer."""
    return any((Path(folder) / name).is_file() for name in _TOKENIZERS)


def stop_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Returns the model's end-of-sequence ids: those of config.json and of generation_config.json (a list in Qwen3)
    together.

    vLLM reads the second file only with the model's sampling defaults, which training must not use. Raises
    EnvironmentFault for a file that cannot be read, and for what is no token of the model.
    """
    found: set[int] = set()
    vocab_size = inf
    for name in ("config.json", "generation_config.json"):
        file = Path(folder) / name
        if not file.exists():
            continue
        settings = own_config(read_settings(file, TEXT_BYTES))
        vocab_size = settings.get("vocab_size", vocab_size)
        given = settings.get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if wrong := [each for each in ids if type(each) is not int or not 0 <= each < vocab_size]:
            raise EnvironmentFault(
                f"{file}: eos_token_id has {wrong[0]!r}, which is no token of the model: whole numbers from 0, below "
                f"vocab_size {vocab_size}; it is the number of the token that ends a response, or a list of such"
            )
        found.update(ids)
    return tuple(sorted(found))


def _refuse_own_tokenizer(folder: Path) -> None:
    """Raises ConfigError for a tokenizer that is code of the checkpoint."""
    file = folder / "tokenizer_config.json"
    if not file.exists():
        return
    try:
        settings = read_json(file, TOKENIZER_BYTES, strict=False)
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{file} cannot be read as JSON: {reason(error)}") from None
    if not isinstance(settings, dict) or settings.get("auto_map"):
        raise ConfigError(
            f"model.path {folder}: tokenizer_config.json has auto_map: the checkpoint wants its own code to run "
            f"(trust_remote_code), which mrl never does; {_as_transformers_own(folder)}"
        )


def _as_transformers_own(folder: Path) -> str:
    """Tells how to convert a tokenizer with its own code into one of transformers.

    Moonlight's and Kimi-K2's use tiktoken.model.
    """
    if not (folder / "tiktoken.model").exists():
        return "save the tokenizer as one of transformers' classes"
    return f"mrl convert tokenizer {folder} -o NEW writes one without code: replace these files by its files"


@cache
def known_models() -> tuple[str, ...]:
    """Returns the known names, e.g. Qwen3-30B-A3B."""
    return tuple(sorted(file.stem for file in _KNOWN.glob("*.json")))


def known_name(path: str | Path) -> str | None:
    """Returns the known model with which the last part of a path or hub name begins, ignoring case and punctuation.

    `-Base`, `-Instruct` and additions of users do not change the shape of the weights. Returns None if the rest of the
    name means other weights.
    """
    text = _plain(Path(path).name)
    names = {_plain(name): name for name in known_models()} | _SHORT
    prefixes = [name for name in names if text.startswith(name)]
    if not prefixes or text.startswith(_OTHER_MODELS):
        return None
    longest = max(prefixes, key=len)
    if any(word in text[len(longest) :] for word in _OTHER_WEIGHTS):
        return None
    return names[longest]


def known_hf_config(name: str) -> dict[str, Any]:
    """Returns the fields of the public config.json of a known name."""
    return json.loads((_KNOWN / f"{name}.json").read_text(encoding="utf-8"))


@cache
def known_spec(name: str) -> ModelSpec:
    """Returns the ModelSpec of a known name."""
    return model_spec(known_hf_config(name))


def planning_model_spec(path: str | Path) -> tuple[ModelSpec, str]:
    """Returns the model for commands that only calculate, and a note if the published configuration is used.

    An existing folder is always read, and refused if it has no config.json or needs remote code. Only a path that does
    not exist here falls back to its name. Raises what `load_model_spec` raises if the name is unknown too.
    """
    if os.path.isdir(path) or (name := known_name(path)) is None:
        try:
            return load_model_spec(path), ""
        except MrlError as error:
            here = (
                ""
                if os.path.isdir(path)
                else f"; known by name for planning are {len(known_models())} models, {known_like(path)}"
            )
            raise type(error)(shortened(f"{error}", here)) from None
    spec = known_spec(name)
    longer = next(
        (positions for release, positions in _MORE_POSITIONS.items() if release in Path(path).name),
        spec.max_position_embeddings,
    )
    spec = replace(spec, max_position_embeddings=longer)
    return spec, f"model.path {path} is not on this machine: the published configuration of {name} is used instead"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def is_size_of_known(path: str | Path) -> bool:
    """Whether a path's name is a known model's but for its size: Qwen2.5-VL-32B-Instruct beside Qwen2.5-VL-7B."""
    return _before_size(Path(path).name) in {_before_size(name) for name in known_models()}


def _before_size(name: str) -> str:
    """Returns a model's name up to its number of parameters, or all of it where there is none."""
    return _plain(re.split(r"[-_]\d+(\.\d+)?b\b", name, maxsplit=1, flags=re.IGNORECASE)[0])


def known_like(path: str | Path) -> str:
    """Returns the known names that are most like a path's, or an example of one."""
    names = {_plain(name): name for name in known_models()}
    close = get_close_matches(_plain(Path(path).name), names, n=3, cutoff=0.6)
    return ", ".join(names[name] for name in close) or "such as Qwen3-30B-A3B"
