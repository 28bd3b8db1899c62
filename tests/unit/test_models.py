"""Model specs: names and shapes are those of transformers' own models; counts are the published ones."""

import json
import warnings
from math import prod

import pytest

from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import (
    active_parameter_count,
    forward_flops_per_token,
    gpt_oss,
    load_model_spec,
    model_spec,
    parameter_count,
    read_hf_config,
    tensor_specs,
)
from mrl.model.registry import known_hf_config

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
TINY_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 2,
}
TINY_GLM = {
    "head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "attention_bias": True,
}  # fmt: skip
TINY_LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 1, "q_lora_rank": 24,
    "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_mtp_layers": 0,
}  # fmt: skip
TINY_LITE = {k: v for k, v in TINY_LATENT.items() if k not in ("first_k_dense_replace", "num_mtp_layers")}
TINY_NEXT = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 10, "linear_conv_kernel_dim": 3,
}  # fmt: skip
TINY_KINDS = {key: TINY_NEXT[key] for key in TINY_NEXT if key.startswith("linear_") or key == "head_dim"}
TINY_KINDS_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
TINY_WIDE = {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 16}
TINY_GPT_OSS = {
    "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0,
                        "truncate": False, "original_max_position_embeddings": 32},
}  # fmt: skip
TINY_HY3 = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16,
            "num_shared_experts": 2}  # fmt: skip
TINY_MINIMAX = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}
CASES = {
    "llama": ("Llama", "llama", {}),
    "llama tied": ("Llama", "llama", {"tie_word_embeddings": True, "head_dim": 12}),
    "mistral": ("Mistral", "mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", "mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", "phi3", {"pad_token_id": None}),
    "seed_oss": ("SeedOss", "seed_oss", {"head_dim": 12}),
    "seed_oss without biases": ("SeedOss", "seed_oss", {"attention_bias": False}),
    "olmoe": ("Olmoe", "olmoe", {**TINY_WIDE, "rms_norm_eps": 1e-5}),
    "minimax_m2": ("MiniMaxM2", "minimax_m2", TINY_MINIMAX),
    "gpt_oss": ("GptOss", "gpt_oss", TINY_GPT_OSS),
    "hy_v3": ("HYV3", "hy_v3", TINY_HY3),
    "hy_v3 tied, two dense layers": (
        "HYV3",
        "hy_v3",
        {**TINY_HY3, "tie_word_embeddings": True, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2},
    ),
    "qwen2 tied": ("Qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen2 untied": ("Qwen2", "qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 12}),
    "qwen3, head size by default": ("Qwen3", "qwen3", {}),
    "qwen2_moe": ("Qwen2Moe", "qwen2_moe", {**TINY_EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3Moe", "qwen3_moe", {**TINY_EXPERTS, "head_dim": 16}),
    "glm4_moe": ("Glm4Moe", "glm4_moe", TINY_GLM),
    "glm4_moe, norms of heads": ("Glm4Moe", "glm4_moe", {**TINY_GLM, "use_qk_norm": True}),
    "deepseek_v3": ("DeepseekV3", "deepseek_v3", TINY_LATENT),
    "deepseek_v3, queries without a latent": ("DeepseekV3", "deepseek_v3", {**TINY_LATENT, "q_lora_rank": None}),
    "glm4_moe_lite": ("Glm4MoeLite", "glm4_moe_lite", TINY_LITE),
    "qwen3_next": ("Qwen3Next", "qwen3_next", TINY_NEXT),
    "qwen3_5": ("Qwen3_5Text", "qwen3_5_text", {**TINY_KINDS, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5MoeText", "qwen3_5_moe_text", {**TINY_KINDS, **TINY_KINDS_EXPERTS}),
    "qwen3_next, other layers": ("Qwen3Next", "qwen3_next", {**TINY_NEXT, "full_attention_interval": 2}),
    "qwen3_moe, all layers sparse": (
        "Qwen3Moe",
        "qwen3_moe",
        {**TINY_EXPERTS, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
}

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_235B_A22B = {
    **QWEN3_30B_A3B,
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
}
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def transformers_model(prefix: str, keys: dict):
    """(config.json as transformers writes it, {checkpoint name: shape} of its model)."""
    config, model = transformers_pair(prefix, keys)
    return config, checkpoint_shapes(model, config["tie_word_embeddings"])


def transformers_pair(prefix: str, keys: dict):
    """(config.json as transformers writes it, its model built without storage)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers
    known = {k: v for k, v in {**TINY, **keys}.items() if k != "rope_theta"}
    rotation = {"rope_type": "default", "rope_theta": 10000.0}
    config = getattr(transformers, f"{prefix}Config")(**{"rope_parameters": rotation, **known})
    with torch.device("meta"):
        model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config)
    written = json.loads(config.to_json_string(use_diff=False))
    return {**written, "architectures": [type(model).__name__]}, model


def checkpoint_shapes(model, tied: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes as in checkpoint files, where transformers writes its stacked experts one by one and tied
    embeddings once.
    """
    shapes = {}
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        base = name.rsplit(".", 1)[0]
        if model.config.model_type == "gpt_oss" and ".experts." in name:  # mrl/model/gpt_oss.py
            shapes |= {each.name: each.shape for each in gpt_oss.inside(name, shape)}
            continue
        own = ("gate_proj", "up_proj", "down_proj")
        if model.config.model_type == "hy_v3":  # likewise
            name = name.replace("mlp.gate.", "mlp.router.gate.").replace("shared_experts", "shared_mlp")
            name = name.replace("e_score_correction_bias", "expert_bias")
        if model.config.model_type in ("mixtral", "minimax_m2"):  # whose files have the names of their first code
            name, base = name.replace(".mlp.", ".block_sparse_moe."), base.replace(".mlp.", ".block_sparse_moe.")
            own = ("w1", "w3", "w2")
        for e in range(shape[0] if ".experts." in name else 0):
            if name.endswith("gate_up_proj"):
                half = (shape[1] // 2, shape[2])
                shapes |= {f"{base}.{e}.{one}.weight": half for one in own[:2]}
            else:
                shapes[f"{base}.{e}.{own[2]}.weight"] = shape[1:]
        if ".experts." not in name and not (tied and name == "lm_head.weight"):
            shapes[name] = shape
    return shapes


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes_are_those_of_transformers_own_model(case):
    prefix, model_type, keys = CASES[case]
    config, shapes = transformers_model(prefix, keys)
    assert config["model_type"] == model_type
    spec = model_spec(config)
    assert {t.name: t.shape for t in tensor_specs(spec)} == shapes
    assert parameter_count(spec) == sum(map(prod, shapes.values()))
    assert spec.rotation.rope_theta == 10000.0


@pytest.mark.parametrize("token", [None, 0, 7, -1, -60])
@pytest.mark.parametrize("case", CASES)
def test_the_row_without_gradient_is_that_of_transformers_own_embedding(case, token):
    """transformers gives pad_token_id to torch.nn.Embedding, whose padding_idx counts from 0."""
    prefix, _, keys = CASES[case]
    config, model = transformers_pair(prefix, {**keys, "pad_token_id": token})
    assert model_spec(config).pad_token_id == model.get_input_embeddings().padding_idx
    without = model_spec({**config, "pad_token_id": None})
    assert without.pad_token_id is None
    assert without == model_spec(config)  # it is the same model, planned alike
    assert without.described() == model_spec(config).described()


def test_a_wrapped_models_row_without_gradient_is_its_text_models():
    config, _ = transformers_pair(*CASES["qwen3_5"][::2])
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "pad_token_id": 3,
        "tie_word_embeddings": True,
    }
    assert model_spec({**whole, "text_config": {**config, "pad_token_id": 5}}).pad_token_id == 5
    assert model_spec({**whole, "text_config": config}).pad_token_id is None


@pytest.mark.parametrize("token", [60, -61, 151643, True, 1.0, "0", [0]])
def test_a_padding_token_that_transformers_has_no_row_for_is_refused(token):
    config, _ = transformers_pair("Qwen3", {})
    with pytest.raises(ConfigError, match=r"pad_token_id = .*: must be null or a whole number from -60 to 59"):
        model_spec({**config, "pad_token_id": token})


def test_names_do_not_repeat_and_carry_layer_and_expert():
    specs = tensor_specs(model_spec({**QWEN3_30B_A3B, "num_hidden_layers": 2}))
    assert len({t.name for t in specs}) == len(specs)
    for t in specs:
        assert (t.layer is not None) == t.name.startswith("model.layers.")
        assert t.layer is None or t.name.startswith(f"model.layers.{t.layer}.")
        assert (t.expert is not None) == (".experts." in t.name)
        assert t.expert is None or f".experts.{t.expert}." in t.name


@pytest.mark.parametrize(
    ("config", "billions", "active_billions"),
    [(QWEN3_30B_A3B, 30.53, 3.35), (QWEN3_235B_A22B, 235.09, 22.19), (QWEN25_05B, 0.494, 0.494)],
    ids=["Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen2.5-0.5B"],
)
def test_parameter_counts_are_the_published_ones(config, billions, active_billions):
    spec = model_spec(config)
    assert parameter_count(spec) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert active_parameter_count(spec) / 1e9 == pytest.approx(active_billions, rel=2e-3)


def test_flops_of_a_token_by_hand():
    config = {
        **QWEN25_05B,
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
    }
    spec = model_spec({**config, "num_hidden_layers": 3, "vocab_size": 10})
    # head size 2; per layer q 4x4, k and v 2x4 each, o 4x4, three MLP matrices 8x4; the output layer (tied) 10x4
    matmul = 3 * (16 + 8 + 8 + 16 + 3 * 32) + 40
    # scores and values: 2 heads of size 2 over 5 positions, twice
    assert forward_flops_per_token(spec, context=5) == 2 * (matmul + 3 * 2 * 2 * 2 * 5)


def test_only_the_chosen_experts_cost_flops():
    spec = model_spec(QWEN3_30B_A3B)
    one_more = model_spec({**QWEN3_30B_A3B, "num_experts_per_tok": 9})
    assert forward_flops_per_token(one_more, 1) - forward_flops_per_token(spec, 1) == 2 * 48 * 3 * 2048 * 768


def test_old_and_new_spellings_give_the_same_model():
    old = {k: v for k, v in QWEN3_30B_A3B.items() if k not in ("rope_theta", "num_experts", "torch_dtype")}
    new = {
        **old,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "num_local_experts": 128,
        "dtype": "bfloat16",
    }
    assert model_spec(new) == model_spec(QWEN3_30B_A3B)


@pytest.mark.parametrize("name", ["phi-4", "DeepSeek-V3", "MiniMax-M2"])
def test_official_folders_with_code_beside_the_weights_are_read_without_it(name):
    config = known_hf_config(name)
    assert model_spec(config | {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}) == model_spec(config)


def test_sparse_step_and_dense_layers_say_which_layers_have_experts():
    spec = model_spec({**QWEN3_30B_A3B, "num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert spec.moe_layers == (1, 5, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GraniteForCausalLM"]},
            r"GraniteForCausalLM'\] is not supported\. The nearest .* is qwen3_moe\. .*docs/adding_a_family\.md",
        ),
        ({"auto_map": {"AutoModel": "modeling.X"}}, "trust_remote_code"),
        ({"architectures": ["X"], "auto_map": {"AutoModel": "modeling.X"}, "kv_lora_rank": 8}, r"is deepseek_v3\. "),
        ({"architectures": ["X"], "vision_config": {}, "text_config": {}}, r"Only text is trained\. The nearest"),
        # no experts in granite-4.0-micro: what it is counts, not a size that other classes cannot have
        ({"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0}, "residuals and logits are scaled"),
        ({"architectures": ["HunYuanMoEV1ForCausalLM"]}, "norms of queries and keys come after the rotation"),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, "most layers attend within chunks"),
        ({"architectures": ["Qwen3MoeForCausalLM", "LlamaForCausalLM"]}, "are different models; keep one"),
        ({"architectures": []}, "no architectures: write the class of model_type 'qwen3_moe'"),
        ({"architectures": "Qwen3MoeForCausalLM"}, "architectures = .*must be a list"),
        ({"kv_lora_rank": 512}, "kv_lora_rank = 512 is of layers that qwen3_moe has none of"),
        ({"n_routed_experts": 64}, "n_routed_experts = 64 is another name of num_experts, which is 128"),
        ({"num_key_value_heads": 5}, "num_key_value_heads = 5 must divide num_attention_heads = 32"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok = 129 must be at most 128"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.88}},
            "whole magnitude",
        ),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_experts": None}, "num_experts or num_local_experts"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "no original_max_position_embeddings"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 24}, r", \.\.\.\] is not supported \(only None\)"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        model_spec({**QWEN3_30B_A3B, **change})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        # as the published config.json of Qwen3-Omni-30B, Nemotron-3-Nano, gemma-4-26b-a4b and Step-3.5 name their sizes
        (
            {"thinker_config": {"text_config": {"num_experts": 128}, "audio_config": {"d_model": 1280}}},
            "Only text is trained. The nearest supported family is qwen3_moe.",
        ),
        (
            {"hybrid_override_pattern": "MEMEM*E", "n_routed_experts": 128, "mamba_num_heads": 64},
            "The nearest supported family is qwen3_next.",
        ),
        (
            {"hybrid_override_pattern": "M-M-M*-", "intermediate_size": 8},
            "The nearest supported family is qwen3_5_text.",
        ),
        (
            {"text_config": {"num_experts": 128, "top_k_experts": 8, "intermediate_size": 2112}, "vision_config": {}},
            "Only text is trained. The nearest supported family is qwen3_moe.",
        ),
        (
            {"text_config": {"num_experts": None, "enable_moe_block": False, "intermediate_size": 2112}},
            "Only text is trained. The nearest supported family is qwen3.",
        ),
        # Mistral-Small-3.2, Kimi-K2.5 and InternVL-3.5
        (
            {"text_config": {"model_type": "mistral"}, "vision_config": {}},
            "Only text is trained. Its text model is mistral's, which is supported in a folder of its own.",
        ),
        (
            {"text_config": {"model_type": "kimi_k2"}, "vision_config": {}},
            "Only text is trained. Its text model is deepseek_v3's, which is supported in a folder of its own.",
        ),
        (
            {"llm_config": {"model_type": "qwen3"}, "num_local_experts": 0},
            "Only text is trained. Its text model is qwen3's, which is supported in a folder of its own.",
        ),
        ({"moe_num_experts": 288, "share_expert_dim": 1280}, "The nearest supported family is glm4_moe."),
        ({"moe_num_experts": 288, "intermediate_size": 8}, "The nearest supported family is qwen3_moe."),
        ({"hidden_size": 8}, "Its sizes do not tell which supported family is the nearest."),
    ],
)
def test_the_nearest_family_is_one_with_such_layers(config, words):
    with pytest.raises(ConfigError) as raised:
        model_spec({"architectures": ["Other"], "model_type": "other", **config})
    assert f"is not supported. {words} What another family needs is in docs" in str(raised.value)


def test_a_directory_is_read_and_its_faults_are_named(tmp_path):
    with pytest.raises(EnvironmentFault, match="no such directory"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(EnvironmentFault, match=r"config\.json does not exist"):
        load_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(EnvironmentFault, match="cannot be read as JSON"):
        load_model_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_30B_A3B, "architectures": ["Other"]}))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_model_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    assert load_model_spec(tmp_path) == model_spec(QWEN3_30B_A3B)


def test_infinity_as_transformers_writes_it_hides_no_other_reason(tmp_path):
    """Nemotron-H's `time_step_limit` ends with it."""
    nemotron = {"architectures": ["NemotronHForCausalLM"], "time_step_limit": [0.0, float("inf")]}
    (tmp_path / "config.json").write_text(json.dumps(nemotron))
    with pytest.raises(ConfigError, match="state-space layers"):
        load_model_spec(tmp_path)
    wrong = {"rope_theta": float("inf"), "rms_norm_eps": float("nan"), "other": -float("inf")}
    for key, value in (*wrong.items(), ("vision_config", {"num_heads": float("inf")}), ("others", [1, float("nan")])):
        (tmp_path / "config.json").write_text(json.dumps({**QWEN3_30B_A3B, key: value}))
        with pytest.raises(ConfigError, match=rf"{key}(\.num_heads)? = .* must be a finite number"):
            load_model_spec(tmp_path)
