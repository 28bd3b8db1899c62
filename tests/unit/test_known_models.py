"""Published configurations that ship, so that a preset can be planned without its checkpoint."""

import pytest
from small_model import SIZES, write_model

from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import active_parameter_count, known_models, known_name, known_spec, parameter_count, planning_model_spec

# (all, active) in 10^9, as the model cards and the technical reports (arXiv:2505.09388, arXiv:2412.15115) give them; 12
# active ones of GLM-4.5-Air are without its two vocabulary matrices
PUBLISHED = {
    "Qwen3-30B-A3B": (30.5, 3.3), "Qwen3-235B-A22B": (235, 22), "Qwen3-32B": (32.8, 32.8), "Qwen3-14B": (14.8, 14.8),
    "Qwen3-8B": (8.2, 8.2), "Qwen3-4B": (4.0, 4.0), "Qwen3-1.7B": (1.7, 1.7), "Qwen3-0.6B": (0.6, 0.6),
    "Qwen2.5-72B": (72.7, 72.7),
    "Qwen2.5-32B": (32.5, 32.5), "Qwen2.5-14B": (14.7, 14.7), "Qwen2.5-7B": (7.61, 7.61), "Qwen2.5-3B": (3.09, 3.09),
    "Qwen2.5-1.5B": (1.54, 1.54), "Qwen2.5-0.5B": (0.49, 0.49), "Qwen2-7B": (7.6, 7.6), "GLM-4.5-Air": (106, 13.4),
    "Qwen2.5-Math-7B": (7.62, 7.62), "Qwen2.5-Math-1.5B": (1.54, 1.54), "Qwen1.5-MoE-A2.7B": (14.3, 2.7),
    "DeepSeek-R1-Distill-Qwen-1.5B": (1.78, 1.78), "DeepSeek-R1-Distill-Qwen-7B": (7.62, 7.62),
    "DeepSeek-R1-Distill-Qwen-14B": (14.8, 14.8), "DeepSeek-R1-Distill-Qwen-32B": (32.8, 32.8),
    # arXiv:2412.19437, arXiv:2502.16982 (16 B of 3 B active), arXiv:2507.20534
    "DeepSeek-V3": (671, 37.5), "Moonlight-16B-A3B": (16, 2.9), "Kimi-K2-Instruct": (1026, 32.9),
    "Kimi-K2-Thinking": (1026, 32.9),
    # of the text models, without vision towers; 3 and 17 active ones on the cards
    "Qwen3-VL-30B-A3B": (30.5, 3.3), "Qwen3-VL-8B": (8.2, 8.2), "Qwen3-VL-4B": (4.0, 4.0), "Qwen3-VL-2B": (1.7, 1.7),
    "Qwen2.5-VL-7B": (7.61, 7.61), "Qwen2.5-VL-3B": (3.09, 3.09),
    "Qwen3.5-35B-A3B": (34.7, 3.5), "Qwen3.5-397B-A17B": (396, 17.3), "Qwen3.5-27B": (26.9, 26.9),
    # of the cards and papers: arXiv:2407.21783, 2310.06825, 2401.04088, 2412.08905, 2409.02060, 2508.06471
    "Llama-3.1-8B": (8.03, 8.03), "Mistral-7B-v0.3": (7.25, 7.25), "Mixtral-8x7B": (46.7, 12.9), "phi-4": (14.7, 14.7),
    "Seed-OSS-36B": (36, 36), "OLMoE-1B-7B": (6.9, 1.3), "MiniMax-M2": (230, 11), "GLM-4.6": (355, 33.6),
    "GLM-4.7": (355, 33.6), "GLM-4.7-Flash": (30, 3.9),
    "gpt-oss-20b": (20.9, 4.19), "gpt-oss-120b": (116.8, 5.71),  # arXiv:2508.10925; 0.58 more than there: embeddings
    "Hy3": (295, 21),
    "Qwen3-Next-80B-A3B": (80, 3.9),  # 79.7 on the card; 3 active ones without the vocabulary matrices
}  # fmt: skip


def test_every_known_model_has_the_published_number_of_parameters():
    assert set(known_models()) == set(PUBLISHED)
    for name, (total, active) in PUBLISHED.items():
        spec = known_spec(name)
        assert parameter_count(spec) / 1e9 == pytest.approx(total, rel=0.02), name
        assert active_parameter_count(spec) / 1e9 == pytest.approx(active, rel=0.02), name


def test_kimi_k2_thinking_has_its_own_epsilon():
    """As slime's scripts/models/kimi-k2-thinking.sh has it; kimi-k2.sh has 1e-6."""
    assert known_spec("Kimi-K2-Thinking").rms_norm_eps == 1e-5
    assert known_spec("Kimi-K2-Instruct").rms_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("/data/models/qwen3-30b-a3b-base", "Qwen3-30B-A3B"),
        ("xx/weight/Qwen3_30B/Qwen3_30B", "Qwen3-30B-A3B"),
        ("Qwen3-235B-A22B-Thinking-2507", "Qwen3-235B-A22B"),
        ("XX/Qwen25-3B-Instruct", "Qwen2.5-3B"),
        ("/data/Qwen3-30B-A3B-No-think", "Qwen3-30B-A3B"),
        ("Qwen2.5-72B-Instruct", "Qwen2.5-72B"),
        ("Qwen3-8B-sft-step400", "Qwen3-8B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "DeepSeek-R1-Distill-Qwen-7B"),
        ("Qwen/Qwen2.5-Math-7B-Instruct", "Qwen2.5-Math-7B"),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", "Qwen1.5-MoE-A2.7B"),
        ("Qwen/Qwen2.5-Math-72B", None),
        ("Qwen/Qwen3.5-35B-A3B-Base", "Qwen3.5-35B-A3B"),
        ("Qwen/Qwen3.6-35B-A3B", "Qwen3.5-35B-A3B"),
        ("Qwen/Qwen3.5-35B-A3B-FP8", None),
        ("Qwen/Qwen3-30B-A3B-FP8", None),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen3-VL-30B-A3B"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL-7B"),
        ("Qwen/Qwen2.5-VL-72B-Instruct", None),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "Moonlight-16B-A3B"),
        ("moonshotai/Kimi-K2-Base", "Kimi-K2-Instruct"),
        ("moonshotai/Kimi-K2-Thinking", "Kimi-K2-Thinking"),
        ("moonshotai/Kimi-K2.5", None),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("mistralai/Mistral-7B-Instruct-v0.2", None),
        ("deepseek-ai/DeepSeek-V3-0324", "DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", None),
    ],
)
def test_a_path_is_known_by_its_last_part(path, name):
    assert known_name(path) == name


def test_a_checkpoint_that_is_there_is_read_itself(tmp_path):
    folder = tmp_path / "Qwen3-30B-A3B"
    write_model(folder)
    spec, note = planning_model_spec(folder)
    assert (spec.num_layers, note) == (SIZES["num_hidden_layers"], "")


def test_a_path_that_is_not_there_falls_back_and_says_so():
    spec, note = planning_model_spec("/nowhere/Qwen3-8B-Base")
    assert spec == known_spec("Qwen3-8B")
    assert "not on this machine" in note and "Qwen3-8B" in note


@pytest.mark.parametrize(
    "name", ["Qwen3-30B-A3B-Instruct-2507", "Qwen3-4B-Thinking-2507", "Qwen3-235B-A22B-Instruct-2507"]
)
def test_a_later_release_of_the_same_shape_has_its_own_limit_of_positions(name):
    spec, first = planning_model_spec(f"Qwen/{name}")[0], known_spec(known_name(name))
    assert (spec.max_position_embeddings, first.max_position_embeddings) == (262_144, 40_960)
    assert parameter_count(spec) == parameter_count(first)


def test_a_folder_without_config_is_refused_whatever_its_name(tmp_path):
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    with pytest.raises(EnvironmentFault, match=r"config\.json does not exist"):
        planning_model_spec(folder)


def test_a_folder_that_wants_its_own_code_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"auto_map": {"AutoConfig": "x.Y"}, "architectures": ["Qwen3MoeForCausalLM"]}'
    )
    with pytest.raises(ConfigError, match="auto_map"):
        planning_model_spec(tmp_path)


def test_an_unknown_name_lists_what_is_known():
    with pytest.raises(EnvironmentFault, match=r"known by name for planning are \d+ models, .*Llama"):
        planning_model_spec("/nowhere/Llama-9")
