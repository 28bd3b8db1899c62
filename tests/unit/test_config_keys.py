"""Every key of config.json that transformers' or vLLM's class of a family reads is computed, refused or without effect.

The keys come from those packages' own sources. What an absent or other value means comes from transformers' classes,
with which vLLM reads config.json, too.
"""

import ast
import itertools
import json
import random
from functools import cache
from pathlib import Path

import pytest
import transformers
import vllm
from test_models import (
    TINY,
    TINY_EXPERTS,
    TINY_GLM,
    TINY_KINDS,
    TINY_KINDS_EXPERTS,
    TINY_LATENT,
    TINY_LITE,
    TINY_NEXT,
)

from mrl.errors import ConfigError
from mrl.model import model_spec
from mrl.model.hf_config import INNER_CONFIGS
from mrl.model.registry import FAMILIES

_TRANSFORMERS = Path(transformers.__file__).parent / "models"
_VLLM = Path(vllm.__file__).parent
_OBJECTS = {"config", "hf_config", "text_config", "hf_text_config"}  # names of configurations in their sources
_OTHER_CLASSES = ("Vision", "Classification", "QuestionAnswering", "ConditionalGeneration", "ProcessingInfo", "Indexer")
# architecture -> folder in transformers, files in vLLM, keys of a tiny model
_SOURCES = {
    "Qwen2ForCausalLM": ("qwen2", ["qwen2"], {}),
    "Qwen3ForCausalLM": ("qwen3", ["qwen3", "qwen2"], {"head_dim": 16}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", ["qwen2_moe"], {**TINY_EXPERTS, "shared_expert_intermediate_size": 24}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", ["qwen3_moe"], {**TINY_EXPERTS, "head_dim": 16}),
    "Glm4MoeForCausalLM": ("glm4_moe", ["glm4_moe"], TINY_GLM),
    "DeepseekV3ForCausalLM": ("deepseek_v3", ["deepseek_v2"], TINY_LATENT),
    "Glm4MoeLiteForCausalLM": (
        "glm4_moe_lite",
        ["glm4_moe_lite", "deepseek_v2"],
        {**TINY_LITE, "first_k_dense_replace": 1},
    ),
    "Qwen3NextForCausalLM": ("qwen3_next", ["qwen3_next"], TINY_NEXT),
    "Qwen3_5ForCausalLM": ("qwen3_5", ["qwen3_5", "qwen3_next"], TINY_KINDS),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe", ["qwen3_5", "qwen3_next"], {**TINY_KINDS, **TINY_KINDS_EXPERTS}),
}
# key -> why every value of it means the same model
WITHOUT_EFFECT = {
    "attention_dropout": "engines have no dropout, so training has none (bridge.py)",
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
    "rope_parameters": "read as a whole: test_rotations_are_those_of_transformers_and_vllm",
    "architectures": "chooses the family",
    "model_type": "must be the family's: test_a_model_type_of_another_family_is_refused",
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
    "num_mtp_layers": "of layers that are left out of training and engines",
}
_BY_A_SWITCH = {"sliding_window": "transformers' class sets it to null without use_sliding_window, which is refused"}
_OF_FAMILY = {
    "Qwen2ForCausalLM": _BY_A_SWITCH,
    "Qwen3ForCausalLM": _BY_A_SWITCH,
    "Qwen2MoeForCausalLM": _BY_A_SWITCH,
    "Qwen3MoeForCausalLM": _BY_A_SWITCH,
    "Qwen3_5ForCausalLM": {"norm_topk_prob": "of experts, and no layer has any"},
}


@cache
def _reads(path: Path) -> frozenset[str]:
    """Attributes that a source file reads of configurations, and the fields that it declares for them."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
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
    """Fields of the configuration class of `model_type`."""
    for node in ast.parse(path.read_text()).body:
        fields = {}
        for line in getattr(node, "body", ()):
            if isinstance(line, ast.Assign):
                fields |= {target.id: ast.unparse(line.value) for target in line.targets if hasattr(target, "id")}
        if fields.get("model_type") == repr(model_type):
            return {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}
    raise AssertionError(f"{path} has no class of {model_type}")


def _names_in(path: Path, *functions: str) -> set[str]:
    """Texts in lists of names from which vLLM's functions take the first that exists."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            lists = [inner for inner in ast.walk(node) if isinstance(inner, ast.List)]
            found |= {item.value for each in lists for item in each.elts if isinstance(item, ast.Constant)}
    return found


def keys_of(architecture: str) -> set[str]:
    folder, files, _ = _SOURCES[architecture]
    at = _TRANSFORMERS / folder
    keys = _declared(at / f"configuration_{folder}.py", FAMILIES[architecture].model_type)
    outside = {"Qwen3_5Model", "Qwen3_5MoeModel"}  # classes of the models that also read images
    tree = ast.parse((at / f"modeling_{folder}.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name not in outside and "Vision" not in node.name:
            keys |= {
                inner.attr
                for inner in ast.walk(node)
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load) and _is_config(inner.value)
            } - _of_images(node)
    for file in files:
        keys |= _reads(_VLLM / f"model_executor/models/{file}.py")
    convertor = _VLLM / "transformers_utils/model_arch_config_convertor.py"
    keys |= _names_in(
        convertor,
        "get_total_num_kv_heads",
        "get_num_experts",
        "get_num_experts_per_token",
        "derive_max_model_len_and_key",
    )
    keys |= _names_in(_VLLM / "transformers_utils/config.py", "patch_rope_parameters")
    keys |= {"hidden_size_per_head", "attention_chunk_size", "sliding_window", "compression_config", "head_dtype"}
    return {key for key in keys if not key.startswith("to_")} - {"quantization_config", "text_config"}


def _of_images(node: ast.ClassDef) -> set[str]:
    if "ConditionalGeneration" not in node.name:
        return set()
    return {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def config_of(architecture: str) -> dict:
    return {
        **TINY,
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "routed_scaling_factor": 1.5,
        **_SOURCES[architecture][2],
    }


def _other_values(value) -> list:
    """Values of which one at least means something else than `value`, or than an absent key for None."""
    if value is None:
        return [True, False, 3, {"chunk_size": 4}, "other"]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 2]
    return [["other"], {"other": 3}]


def _read(config: dict):
    """The ModelSpec, or the refusal's words."""
    try:
        return model_spec(config)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("architecture", _SOURCES)
def test_every_key_that_their_classes_read_is_computed_refused_or_without_effect(architecture):
    config = config_of(architecture)
    plain = model_spec(config)
    unread = []
    for key in sorted(keys_of(architecture) - WITHOUT_EFFECT.keys() - _OF_FAMILY.get(architecture, {}).keys()):
        answers = [_read({**config, key: value}) for value in _other_values(config.get(key))]
        if all(answer == plain or (isinstance(answer, str) and key not in answer) for answer in answers):
            unread.append((key, [answer if isinstance(answer, str) else "accepted" for answer in answers]))
    assert not unread


def test_a_model_type_of_another_family_is_refused():
    for one, other in itertools.permutations(_SOURCES, 2):
        answer = _read({**config_of(one), "model_type": FAMILIES[other].model_type})
        assert isinstance(answer, str) and "model_type" in answer, (one, other)


@pytest.mark.parametrize("architecture", _SOURCES)
@pytest.mark.parametrize("inner", [{}, {"hidden_size": 64}, "a copy"])
def test_a_configuration_inside_that_of_a_text_model_is_refused_because_vllm_reads_it(architecture, inner, tmp_path):
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    config = config_of(architecture)
    inside = config if inner == "a copy" else inner
    for name in INNER_CONFIGS:
        changed = {**config, name: inside}
        answer = _read(changed)
        assert isinstance(answer, str) and f"{name} = " in answer, name
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="num_attention_heads"):
            get_hf_text_config(get_config(tmp_path, trust_remote_code=False))


def _whole(architecture: str) -> dict:
    family = FAMILIES[architecture]
    made = transformers.AutoConfig.for_model(
        family.model_type.removesuffix("_text"), text_config=config_of(architecture)
    )
    outer = json.loads(made.to_json_string(use_diff=False))
    tokens = {key: value for key, value in outer.items() if key.endswith("_token_id")}
    return {
        "architectures": [family.wrapper],
        "model_type": outer["model_type"],
        "tie_word_embeddings": False,
        **tokens,
        "vision_config": {"depth": 2},
        "text_config": config_of(architecture),
    }


_WRAPPED = [architecture for architecture, family in FAMILIES.items() if family.wrapper]


@pytest.mark.parametrize("architecture", _WRAPPED)
def test_keys_around_a_text_model_mean_what_they_mean_to_transformers_or_are_refused(architecture):
    whole = _whole(architecture)
    plain = model_spec(whole)
    taken = set()
    for key in whole.keys() - {"architectures", "text_config"}:
        rest = {name: value for name, value in whole.items() if name != key}
        for changed in (rest, *({**rest, key: value} for value in (None, "llama", 1.5, 0, True, [3]))):
            if not isinstance(ours := _read(changed), str):
                assert _as_transformers(changed) is not None, (key, changed.get(key, "absent"))
                assert ours == plain
                taken.add(key)
    assert {"vision_config", "image_token_id", "tie_word_embeddings"} <= taken
    for name in ("llm_config", "decoder", "generator", "text_encoder"):
        assert f"{name} = " in _read({**whole, name: whole["text_config"]})


@pytest.mark.parametrize("architecture", _WRAPPED)
@pytest.mark.parametrize("model_type", [None, "llama", "qwen3", "qwen3_5_text", "absent"])
def test_a_whole_of_another_model_type_is_refused(architecture, model_type):
    whole = {**_whole(architecture), "model_type": model_type}
    if model_type == "absent":
        del whole["model_type"]
    assert "model_type" in _read(whole)


def _as_transformers(config: dict) -> dict | None:
    """config.json as transformers' class, and so vLLM, understands it; None if it raises."""
    try:
        made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
        return json.loads(made.to_json_string(use_diff=False))
    except Exception:  # of whatever kind: neither it nor vLLM starts with this configuration
        return None


@pytest.mark.parametrize("architecture", _SOURCES)
def test_absent_and_empty_keys_mean_what_they_mean_to_transformers_or_are_refused(architecture):
    config = config_of(architecture)
    differing = []
    for key in sorted(config.keys() - {"architectures", "model_type"}):
        rest = {name: value for name, value in config.items() if name != key}
        for changed in (rest, {**rest, key: None}):
            ours = _read(changed)
            theirs = _as_transformers(changed)
            if not isinstance(ours, str) and (theirs is None or _read(theirs) != ours):
                differing.append((key, "null" if key in changed else "absent", ours, theirs and _read(theirs)))
    assert not differing


_ROTATIONS: dict[str, list] = {
    "rope_theta": [None, 1e4, 1e6],
    "partial_rotary_factor": [None, 0.25, 0.5, 1.0],
    "rope_parameters": [
        None,
        {},
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_theta": 1e6},
    ],
    "rope_scaling": [
        None,
        {},
        {"type": "default"},
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
        {"type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {"type": "yarn", "rope_type": "default", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
}


@pytest.mark.parametrize("architecture", _SOURCES)
def test_rotations_are_those_of_transformers_and_vllm(architecture, tmp_path):
    from vllm.transformers_utils.config import get_config

    base = {key: value for key, value in config_of(architecture).items() if key != "rope_theta"}
    accepted = 0
    combinations = list(itertools.product(*_ROTATIONS.values()))
    for number, values in enumerate(random.Random(1).sample(combinations, 160)):
        chosen = {key: value for key, value in zip(_ROTATIONS, values, strict=True) if value is not None}
        config = {**base, **json.loads(json.dumps(chosen))}
        ours = _read(config)
        if isinstance(ours, str):
            continue
        accepted += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        for theirs in (_as_transformers(config), get_config(folder, trust_remote_code=False).to_dict()):
            rope = theirs["rope_parameters"]
            read = ours.rotation
            assert rope["rope_theta"] == read.rope_theta, chosen
            assert rope["rope_type"] == read.kind, chosen
            assert rope.get("partial_rotary_factor", _share_without_key(architecture)) == read.partial_rotary_factor
            for name, value in vars(read.stretch).items():
                assert rope.get(name, value) == value, chosen
    assert accepted > 2


def _share_without_key(architecture: str) -> float:
    return 0.5 if architecture == "Glm4MoeForCausalLM" else 1.0


@pytest.mark.parametrize("architecture", _SOURCES)
def test_two_rotations_are_refused_with_both_values(architecture):
    base = {key: value for key, value in config_of(architecture).items() if key != "rope_theta"}
    one = {"rope_type": "default", "rope_theta": 1e6}
    other = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    with pytest.raises(ConfigError, match=r"rope_parameters = .*1000000\.0.* and rope_scaling = .*yarn.*different"):
        model_spec({**base, "rope_parameters": one, "rope_scaling": other})
    assert model_spec({**base, "rope_parameters": one, "rope_scaling": {}}).rotation.rope_theta == 1e6
    assert model_spec({**base, "rope_parameters": one, "rope_scaling": {**one}}).rotation.rope_theta == 1e6
    with pytest.raises(ConfigError, match=r"rope_parameters.rope_theta = 1000000\.0 beside rope_theta = 10000"):
        model_spec({**base, "rope_parameters": one, "rope_theta": 10000})


@pytest.mark.parametrize("architecture", _SOURCES)
def test_embeddings_are_tied_where_vllms_class_ties_them(architecture):
    own_file = _SOURCES[architecture][1][0]
    ties = "tie_word_embeddings" in _reads(_VLLM / f"model_executor/models/{own_file}.py")
    answer = _read({**config_of(architecture), "tie_word_embeddings": True})
    if ties:
        assert answer.tie_word_embeddings
    else:
        assert "tie_word_embeddings" in answer and "lm_head.weight" in answer
