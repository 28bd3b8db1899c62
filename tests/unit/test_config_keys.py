"""Every key of config.json that transformers' or vLLM's class of a family reads is computed, refused or without effect.

The keys come from those packages' own sources. What an absent or other value means comes from transformers' classes,
with which vLLM reads config.json, too.
"""

import importlib.util
import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
import vllm
from test_models import (
    TINY,
    TINY_EXPERTS,
    TINY_GLM,
    TINY_GPT_OSS,
    TINY_HY3,
    TINY_KINDS,
    TINY_KINDS_EXPERTS,
    TINY_LATENT,
    TINY_LITE,
    TINY_MINIMAX,
    TINY_NEXT,
    TINY_WIDE,
)

from mrl.errors import ConfigError
from mrl.model import class_keys, model_spec
from mrl.model.hf_config import INNER_CONFIGS
from mrl.model.registry import FAMILIES, known_hf_config, known_models, known_spec
from mrl.tools.family.config_keys import answer, attributes_read, unread_by_engines, unread_keys

_VLLM = Path(vllm.__file__).parent
_SCRIPT = Path(__file__).parents[2] / "scripts/generate_class_keys.py"
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
    "LlamaForCausalLM": ("llama", ["llama"], {}),
    "MistralForCausalLM": ("mistral", ["llama", "mistral"], {"sliding_window": None}),
    "MixtralForCausalLM": ("mixtral", ["mixtral"], {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "Phi3ForCausalLM": ("phi3", ["llama", "phi3"], {"pad_token_id": 3}),
    "SeedOssForCausalLM": ("seed_oss", ["llama"], {"head_dim": 8, "pad_token_id": 3}),
    "OlmoeForCausalLM": ("olmoe", ["olmoe"], {**TINY_WIDE, "rms_norm_eps": 1e-5, "pad_token_id": 3}),
    "MiniMaxM2ForCausalLM": ("minimax_m2", ["minimax_m2"], TINY_MINIMAX),
    "GptOssForCausalLM": ("gpt_oss", ["gpt_oss"], {**TINY_GPT_OSS, "rope_theta": 10000.0}),
    "HYV3ForCausalLM": ("hy_v3", ["hy_v3"], TINY_HY3),
    "Qwen3NextForCausalLM": ("qwen3_next", ["qwen3_next"], TINY_NEXT),
    "Qwen3_5ForCausalLM": ("qwen3_5", ["qwen3_5", "qwen3_next"], TINY_KINDS),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe", ["qwen3_5", "qwen3_next"], {**TINY_KINDS, **TINY_KINDS_EXPERTS}),
}


def optional_keys(model_type: str) -> set[str]:
    """The keys of a class that may be absent."""
    return class_keys._keys()[model_type].keys() - class_keys._SIZES


def config_of(architecture: str) -> dict:
    return {
        **TINY,
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "routed_scaling_factor": 1.5,
        **_SOURCES[architecture][2],
    }


_read = answer


@pytest.mark.parametrize("architecture", _SOURCES)
def test_every_key_that_their_classes_read_is_computed_refused_or_without_effect(architecture):
    assert unread_keys(config_of(architecture)) == unread_by_engines(config_of(architecture)) == []


def test_what_vllms_class_has_as_a_constant_is_named(monkeypatch):
    for refusal in ("refuse_unless", "refuse_tied"):
        monkeypatch.setattr(f"mrl.model.olmoe.{refusal}", lambda *_: None)
    assert unread_by_engines(config_of("OlmoeForCausalLM")) == ["rms_norm_eps", "tie_word_embeddings"]


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
    inside = family.wrapped_type or family.model_type
    inner = {**config_of(architecture), "model_type": inside}
    made = transformers.AutoConfig.for_model(inside.removesuffix("_text"), text_config=inner)
    outer = json.loads(made.to_json_string(use_diff=False))
    tokens = {key: value for key, value in outer.items() if key.endswith("_token_id")}
    return {
        "architectures": [family.wrapper],
        "model_type": outer["model_type"],
        "tie_word_embeddings": False,
        **tokens,
        "vision_config": {"depth": 2},
        "text_config": inner,
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
                theirs = _as_transformers(changed)
                assert theirs is not None, (key, changed.get(key, "absent"))
                assert ours == replace(plain, tie_word_embeddings=theirs["tie_word_embeddings"])
                taken.add(key)
    assert {"vision_config", "image_token_id", "tie_word_embeddings"} <= taken
    for name in ("llm_config", "decoder", "generator", "text_encoder"):
        assert f"{name} = " in _read({**whole, name: whole["text_config"]})


@pytest.mark.parametrize("architecture", _WRAPPED)
def test_embeddings_of_a_whole_are_tied_where_transformers_ties_them(architecture):
    """transformers 5 writes the default of the text model's class beside the outer key, which alone decides.
    transformers 4 wrote Qwen2.5-VL's inner key alone.
    """
    whole = {key: value for key, value in _whole(architecture).items() if key != "tie_word_embeddings"}
    said = ({}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True})
    read = set()
    for outer, inner in itertools.product(said, repeat=2):
        changed = {**whole, **outer, "text_config": whole["text_config"] | inner}
        if not isinstance(ours := _read(changed), str):
            assert ours.tie_word_embeddings is _as_transformers(changed)["tie_word_embeddings"]
            read.add((str(outer), str(inner)))
    # of the others, vLLM's class reads the inner key
    assert len(read) == (9 if FAMILIES[architecture].wrapped_type else 5)


@pytest.mark.parametrize("name", [name for name in known_models() if "text_config" in known_hf_config(name)])
def test_a_whole_that_transformers_writes_again_is_the_same_model(name):
    written = _as_transformers({key: value for key, value in known_hf_config(name).items() if key != "architectures"})
    assert model_spec(written | {"architectures": known_hf_config(name)["architectures"]}) == known_spec(name)


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


@pytest.mark.parametrize("architecture", _SOURCES)
def test_keys_that_say_no_sizes_may_be_absent_and_mean_the_classs_own_value(architecture):
    """Of configurations as they are published, too, and with several keys absent."""
    model_type = FAMILIES[architecture].model_type
    published = [config for config in map(known_hf_config, known_models()) if config.get("model_type") == model_type]
    rng = random.Random(architecture)
    refused = []
    for config in (config_of(architecture), *published[:2]):
        plain = _as_transformers(config)
        everything = {**plain, **{key: value for key, value in config.items() if key not in plain}}
        optional = sorted(optional_keys(model_type) & everything.keys() - {"rope_theta"})
        for count in (1, 2, 4, len(optional)):
            absent = set(rng.sample(optional, min(count, len(optional))))
            rest = {key: value for key, value in config.items() if key not in absent}
            ours, theirs = _read(rest), _read(_as_transformers(rest))
            if isinstance(ours, str) != isinstance(theirs, str) or (not isinstance(ours, str) and ours != theirs):
                refused.append((absent, ours, theirs))
    assert not refused


@pytest.mark.parametrize("architecture", _SOURCES)
def test_values_of_a_kind_that_transformers_class_refuses_are_refused_with_what_it_takes(architecture):
    config = config_of(architecture)
    for key in optional_keys(FAMILIES[architecture].model_type):
        for value in (None, 1, 0.5, True, "other", [1]):
            changed = {**config, key: value}
            if _as_transformers(changed) is None:
                ours = _read(changed)
                assert isinstance(ours, str) and key in ours, (key, value)


def test_the_keys_of_classes_are_those_of_the_installed_transformers():
    spec = importlib.util.spec_from_file_location("generate_class_keys", _SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.TARGET.read_text() == script.text(), "python scripts/generate_class_keys.py writes it"


def test_sizes_of_layers_that_the_class_has_none_of_are_refused():
    latent = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64}
    for changes, key in ((latent, "kv_lora_rank"), ({"linear_num_key_heads": 4}, "linear_num_key_heads")):
        for architecture in ("Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM"):
            answer = _read({**config_of(architecture), **changes})
            assert f"{key} = {changes[key]} is of layers that " in answer and "architectures" in answer
    assert model_spec({**config_of("Qwen3ForCausalLM"), "q_lora_rank": None}).family == "qwen3"


@pytest.mark.parametrize("name", ["banana", "half", "torch.bfloat16", "float8_e4m3fn", "auto"])
def test_a_format_of_weights_that_is_none_is_refused(name):
    for key in ("dtype", "torch_dtype"):
        with pytest.raises(ConfigError, match=rf"{key} = {re.escape(name)}: must be one of bfloat16, float16, float32"):
            model_spec({**config_of("Qwen3ForCausalLM"), key: name})
    assert model_spec({**config_of("Qwen3ForCausalLM"), "torch_dtype": "float16"}).dtype == "float16"


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM"])
def test_a_window_that_no_sample_fills_is_none(architecture):
    config = config_of(architecture)
    longest = config["max_position_embeddings"]
    plain = model_spec({**config, "sliding_window": None})
    for window in (longest, longest + 1):
        assert model_spec({**config, "sliding_window": window}) == plain
    for window in (0, longest - 1):
        assert f"sliding_window = {window} is not supported" in _read({**config, "sliding_window": window})


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


_ONE_ROTATION = {"GptOssForCausalLM": TINY_GPT_OSS["rope_parameters"]}  # vLLM's class always turns by yarn


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
    assert accepted > (1 if architecture in _ONE_ROTATION else 2)


def _share_without_key(architecture: str) -> float:
    return 0.5 if architecture == "Glm4MoeForCausalLM" else 1.0


@pytest.mark.parametrize("architecture", _SOURCES)
def test_two_rotations_are_refused_with_both_values(architecture):
    base = {key: value for key, value in config_of(architecture).items() if key != "rope_theta"}
    one = {"rope_type": "default", **_ONE_ROTATION.get(architecture, {}), "rope_theta": 1e6}
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
    ties = "tie_word_embeddings" in attributes_read(_VLLM / f"model_executor/models/{own_file}.py")
    answer = _read({**config_of(architecture), "tie_word_embeddings": True})
    if ties:
        assert answer.tie_word_embeddings
    else:
        assert "tie_word_embeddings" in answer and "lm_head.weight" in answer
