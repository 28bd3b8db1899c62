"""Finds the keys of config.json that transformers' or vLLM's class of a family reads and mrl does not, and those that
mrl reads and vLLM's class does not: engines would compute another model than is trained.

The keys come from those packages' own sources, which are parsed and not imported. A key is read if another value of it
changes the ModelSpec, or is refused by its name. All others need a row here that says why every value means the same
model.
"""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import ModelSpec, model_spec
from mrl.model.hf_config import HfConfig
from mrl.model.registry import FAMILIES

_OBJECTS = {"config", "hf_config", "text_config", "hf_text_config"}  # names of configurations in their sources
_OTHER_CLASSES = ("Vision", "Classification", "QuestionAnswering", "ConditionalGeneration", "ProcessingInfo", "Indexer")
# vLLM's files that a model's own file takes its layers from
_BASES = {
    "qwen3": ("qwen2",),
    "mistral": ("llama",),
    "phi3": ("llama",),
    "glm4_moe_lite": ("deepseek_v2",),
    "qwen3_5": ("qwen3_next",),
}
# key -> why every value of it means the same model
WITHOUT_EFFECT = {
    "attention_dropout": "engines have no dropout, so training has none (bridge.py)",
    "residual_dropout": "engines have no dropout, so training has none (bridge.py)",
    "resid_pdrop": "engines have no dropout, so training has none (bridge.py)",
    "embd_pdrop": "engines have no dropout, so training has none (bridge.py)",
    "initializer_range": "of new weights; a checkpoint has them",
    "output_router_logits": "adds an output and an auxiliary loss; training has its own losses",
    "router_aux_loss_coef": "training moves routers by the reward alone (bridge.py)",
    "use_cache": "of transformers' generation",
    "bos_token_id": "of a tokenizer; no layer reads it",
    "eos_token_id": "of a tokenizer; no layer reads it",
    "pretraining_tp": "read by no layer",
    "max_window_layers": "the first layers with a sliding window, which is refused",
    "_attn_implementation": "another code for the same attention",
    "attn_implementation": "another code for the same attention",
    "rope_parameters": "read as a whole (rotation in hf_config.py)",
    "architectures": "chooses the family",
    "model_type": "must be the family's",
    "name_or_path": "of the folder",
    "index_topk_freq": "read beside index_topk alone, which is refused",
    "index_topk_pattern": "read beside index_topk alone, which is refused",
    "index_skip_topk_offset": "read beside index_topk alone, which is refused",
    "index_n_heads": "read beside index_topk alone, which is refused",
    "index_head_dim": "read beside index_topk alone, which is refused",
    "indexer_rope_interleave": "read beside index_topk alone, which is refused",
    "vision_config": "of the model around it (mrl/model/wrapped.py)",
    "is_mm_prefix_lm": "of models that read images",
    "get_text_config": "a method",
    "ada_rms_norm_t_cond_dim": "read beside ada_rms_norm_t_cond alone, which is refused",
    "num_mtp_layers": "of layers that are left out of training and engines",
}
_BY_A_SWITCH = {"sliding_window": "transformers' class sets it to null without use_sliding_window, which is refused"}
OF_FAMILY = {
    "Qwen2ForCausalLM": _BY_A_SWITCH,
    "Qwen3ForCausalLM": _BY_A_SWITCH,
    "Qwen2MoeForCausalLM": _BY_A_SWITCH,
    "Qwen3MoeForCausalLM": _BY_A_SWITCH,
    "Phi3ForCausalLM": {"original_max_position_embeddings": "of longrope alone, which reads it"},
    "MiniMaxM2ForCausalLM": {
        "max_model_len": "of the engine, for the size of a table of angles",
        "num_mtp_modules": "of layers that are left out of training and engines",
    },
    "HYV3ForCausalLM": {"enable_moe_fp32_combine": "of the rounding of a sum, which vLLM does not read"},
    "Qwen3_5ForCausalLM": {"norm_topk_prob": "of experts, and no layer has any"},
}

# key that training takes, and that no file of vLLM's class names -> how engines get it
_IN_ENGINES = {
    "pad_token_id": "of training's embedding alone",
    "rope_theta": "in rope_parameters, which engines are given whole",
    "partial_rotary_factor": "in rope_parameters, which engines are given whole",
}
_IN_ENGINES_OF_FAMILY = {"HYV3ForCausalLM": {"moe_intermediate_size": "as expert_hidden_dim, which must be equal"}}


@cache
def package_folder(name: str) -> Path:
    """Returns the folder of an installed package, which is not imported. Raises EnvironmentFault."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise EnvironmentFault(f"{name} is not installed, and its classes say which keys of config.json they read")
    return Path(found.origin).parent


@cache
def transformers_folder(model_type: str) -> Path | None:
    """Returns the folder of transformers' class of a model type; None if it has none."""
    wanted = f'model_type = "{model_type}"'
    files = sorted((package_folder("transformers") / "models").glob("*/configuration_*.py"))
    return next((file.parent for file in files if wanted in file.read_text(encoding="utf-8")), None)


@cache
def vllm_file(architecture: str) -> str | None:
    """Returns the name of vLLM's file with the class of an architecture; None if it has none."""
    registry = package_folder("vllm") / "model_executor/models/registry.py"
    found = re.search(rf'"{re.escape(architecture)}": \(\s*"(\w+)"', registry.read_text(encoding="utf-8"))
    return found[1] if found else None


@cache
def attributes_read(path: Path) -> frozenset[str]:
    """Returns attributes that a source file reads of configurations, and fields that it declares for them."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and any(word in node.name for word in _OTHER_CLASSES):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load) and _is_config(inner.value):
                found.add(inner.attr)
            if isinstance(inner, ast.Call) and getattr(inner.func, "id", "") in ("getattr", "hasattr", "getattr_iter"):
                found |= _asked(inner)
    return frozenset(found)


def _is_config(node: ast.expr) -> bool:
    return getattr(node, "id", getattr(node, "attr", None)) in _OBJECTS


def _asked(call: ast.Call) -> set[str]:
    if not _is_config(call.args[0]) or not isinstance(call.args[1], ast.Constant):
        return set()
    return {call.args[1].value}


def _declared(path: Path, model_type: str) -> set[str]:
    """Returns the fields of the configuration class of `model_type`; none where it declares none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        fields = {}
        for line in getattr(node, "body", ()):
            if isinstance(line, ast.Assign):
                fields |= {target.id: ast.unparse(line.value) for target in line.targets if hasattr(target, "id")}
        if fields.get("model_type") == repr(model_type):
            return {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}
    return set()


def _names_in(path: Path, *functions: str) -> set[str]:
    """Returns texts in lists of names from which vLLM's functions take the first that exists."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            lists = [inner for inner in ast.walk(node) if isinstance(inner, ast.List)]
            found |= {item.value for each in lists for item in each.elts if isinstance(item, ast.Constant)}
    return found


def keys_of(architecture: str) -> set[str]:
    """Returns the keys that transformers' and vLLM's classes of a family read."""
    family = FAMILIES[architecture]
    folder = transformers_folder(family.model_type)
    if folder is None:
        raise EnvironmentFault(f"the installed transformers has no class of model_type {family.model_type}")
    keys = _declared(folder / f"configuration_{folder.name}.py", family.model_type)
    outside = {"Qwen3_5Model", "Qwen3_5MoeModel"}  # classes of the models that also read images
    tree = ast.parse((folder / f"modeling_{folder.name}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name not in outside and "Vision" not in node.name:
            keys |= {
                inner.attr
                for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load) and _is_config(inner.value)
            } - _of_images(node)
    keys |= _keys_of_engine(architecture)
    vllm = package_folder("vllm")
    keys |= _names_in(
        vllm / "transformers_utils/model_arch_config_convertor.py",
        "get_total_num_kv_heads",
        "get_num_experts",
        "get_num_experts_per_token",
        "derive_max_model_len_and_key",
    )
    keys |= _names_in(vllm / "transformers_utils/config.py", "patch_rope_parameters")
    keys |= {"hidden_size_per_head", "attention_chunk_size", "sliding_window", "compression_config", "head_dtype"}
    return {key for key in keys if not key.startswith("to_")} - {"quantization_config", "text_config"}


def _keys_of_engine(architecture: str) -> frozenset[str]:
    """Returns the keys that vLLM's class of a family reads; none where it has none."""
    file = vllm_file(FAMILIES[architecture].engine_architecture or architecture)
    files = () if file is None else (file, *_BASES.get(file, ()))
    folder = package_folder("vllm") / "model_executor/models"
    return frozenset().union(*(attributes_read(folder / f"{name}.py") for name in files))


def _of_images(node: ast.ClassDef) -> set[str]:
    if "ConditionalGeneration" not in node.name:
        return set()
    return {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def _other_values(value: Any) -> list[Any]:
    """Returns values of which one at least means something else than `value`, or than an absent key for None."""
    if value is None:
        return [True, False, 3, {"chunk_size": 4}, "other"]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 2 or 1.0]
    return [["other"], {"other": 3}]


def answer(config: HfConfig) -> ModelSpec | str:
    """Returns the ModelSpec, or the words of the refusal."""
    try:
        return model_spec(config)
    except ConfigError as error:
        return str(error)


def unread_keys(config: HfConfig) -> list[str]:
    """Returns the keys that the classes of the model's family read, mrl does not, and no row explains."""
    (architecture,) = config["architectures"]
    plain = model_spec(config)
    explained = WITHOUT_EFFECT.keys() | OF_FAMILY.get(architecture, {}).keys()
    unread = []
    for key in sorted(keys_of(architecture) - explained):
        answers = [answer({**config, key: value}) for value in _other_values(config.get(key))]
        if all(_is_same(said, plain) or (isinstance(said, str) and key not in said) for said in answers):
            unread.append(key)
    return unread


def unread_by_engines(config: HfConfig) -> list[str]:
    """Returns the keys of which mrl takes several values, and which vLLM's class does not read at all."""
    (architecture,) = config["architectures"]
    of_engine = _keys_of_engine(architecture)
    if not of_engine:
        return []
    plain = model_spec(config)
    explained = _IN_ENGINES.keys() | _IN_ENGINES_OF_FAMILY.get(architecture, {}).keys()
    unread = []
    for key in sorted(keys_of(architecture) - of_engine - explained):
        answers = [answer({**config, key: value}) for value in _other_values(config.get(key))]
        if any(not isinstance(said, str) and not _is_same(said, plain) for said in answers):
            unread.append(key)
    return unread


def _is_same(said: ModelSpec | str, plain: ModelSpec) -> bool:
    """Tells whether a configuration is read as the same model, with the same padding token."""
    return said == plain and said.pad_token_id == plain.pad_token_id
