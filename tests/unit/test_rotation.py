"""Rotations read from config.json are those of transformers' ROPE_INIT_FUNCTIONS and of vLLM's rotary classes."""

import copy
import random
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_model import SIZES
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from mrl.config.rollout_rules import FREE_OF_LENGTH
from mrl.errors import ConfigError
from mrl.model import model_spec
from mrl.model.rotation import DEFAULT, Rotation, read_rotation
from mrl.rank.rotary import set_rotation

LONG = 131_072
KINDS = (DEFAULT, "linear", "dynamic", "llama3", "yarn", "longrope")
DRAWS = 200  # of each kind
OF_VLLM = 4  # whose classes compute a table of all positions


def drawn(kind: str, rng: random.Random) -> dict:
    """Settings as config.json has them, and the size of a head."""
    head_dim = rng.choice([8, 32, 64, 80, 96, 128, 256])
    share = rng.choice([1.0, 1.0, 0.25, 0.5, 0.75])
    pairs = int(head_dim * share) // 2
    if head_dim * share % 2 or pairs == 1:
        share, pairs = 1.0, head_dim // 2
    original = rng.choice([2048, 4096, 8192, 32768])
    positions = rng.choice([original, LONG])
    rope = {"rope_type": kind, "rope_theta": rng.choice([1e4, 5e4, 5e5, 1e6, 8e6]), "partial_rotary_factor": share}
    if kind in ("linear", "dynamic"):
        rope["factor"] = rng.choice([1.5, 2.0, 8.0])
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = original
    if kind == "llama3":
        low = rng.choice([1, 1.0, 2.0])
        rope |= {
            "factor": rng.choice([8.0, 32, 3.5]),
            "low_freq_factor": low,
            "high_freq_factor": low * rng.choice([2, 4]),
        }
    if kind == "yarn":
        rope["factor"] = positions / original if positions > original else rng.choice([1.0, 4, 40.0])
        optional = {
            "beta_fast": 24, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3, "mscale": 1.0,
            "mscale_all_dim": rng.choice([0.7, 1.0, 0.0]),
        }  # fmt: skip
        rope |= {key: value for key, value in optional.items() if rng.random() < 0.4}
    if kind == "longrope":
        rope |= {key: [1 + 4 * rng.random() for _ in range(pairs)] for key in ("short_factor", "long_factor")}
    return {
        "head_dim": head_dim, "hidden_size": 2 * head_dim, "num_attention_heads": 2, "rope_parameters": rope,
        "max_position_embeddings": positions,
    }  # fmt: skip


@cache
def cases(kind: str) -> list[dict]:
    rng = random.Random(kind)
    return [drawn(kind, rng) for _ in range(DRAWS)]


def powers(rotation: Rotation, rotated: int) -> np.ndarray:
    """In torch, whose power differs from numpy's by a rounding."""
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    return (rotation.base(rotated) ** exponents).numpy()


def computed(config: dict) -> tuple[Rotation, np.ndarray]:
    rotation = read_rotation(config, config["head_dim"], 1.0, is_latent=False)
    return rotation, rotation.frequencies(powers(rotation, rotation.rotated(config["head_dim"])))


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers_to_the_bit(kind):
    for config in cases(kind):
        rotation, ours = computed(config)
        rope = config["rope_parameters"]
        theirs = LlamaConfig(**{**config, "rope_parameters": {**rope}})
        length = min(rotation.longest(config["max_position_embeddings"]), 64)
        if kind == DEFAULT:  # which each class has by itself, and Llama's for whole heads
            share = rope["partial_rotary_factor"]
            rotated = int(config["head_dim"] * share)
            expected = 1.0 / rope["rope_theta"] ** (torch.arange(0, rotated, 2).float() / rotated)
            magnitude = 1.0
        else:
            expected, magnitude = ROPE_INIT_FUNCTIONS[kind](theirs, seq_len=length)
        np.testing.assert_array_equal(ours, expected.numpy(), err_msg=str(config))
        assert abs(rotation.magnitude - magnitude) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_cosines_are_those_of_vllm_up_to_the_longest_sample(kind):
    """vLLM's own table, which an engine reads, has them to the last position that a sample may have."""
    for number, config in enumerate(cases(kind)[:OF_VLLM]):
        rotation, ours = computed(config)
        head_dim, positions = config["head_dim"], config["max_position_embeddings"]
        longest = rotation.longest(positions)
        table, rows = table_of_vllm(config, longest)
        assert rows == rotation.rows(positions), config
        assert len(table) >= longest
        steps = torch.arange(longest)[:: 1 + longest // 500] if number else torch.arange(longest)
        steps = torch.cat([steps, torch.tensor([longest - 1])])
        angles = torch.outer(steps.float(), torch.from_numpy(ours))
        expected = torch.cat([angles.cos(), angles.sin()], -1) * rotation.magnitude
        assert table.shape[1] == rotation.rotated(head_dim)
        # vLLM's linear divides positions, transformers' frequencies; an angle of 1e5 has steps of 0.008
        bound = 2e-2 if kind == "linear" else 1e-6
        torch.testing.assert_close(table[steps], expected, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", FREE_OF_LENGTH)
def test_another_number_of_positions_changes_no_angle_of_these_kinds(kind):
    """What model.max_position_embeddings is allowed for: neither transformers nor vLLM turn a head otherwise."""
    for config in cases(kind)[:OF_VLLM]:
        longer = config | {"max_position_embeddings": 2 * config["max_position_embeddings"]}
        if kind != DEFAULT:
            theirs = [ROPE_INIT_FUNCTIONS[kind](LlamaConfig(**copy.deepcopy(each)))[0] for each in (config, longer)]
            assert torch.equal(*theirs)
        own, more = (table_of_vllm(each, 128)[0] for each in (config, longer))
        assert len(more) >= longer["max_position_embeddings"] and torch.equal(more[: len(own)], own)


def table_of_vllm(config: dict, max_model_len: int) -> tuple[torch.Tensor, int]:
    """Cosines and sines that vLLM looks up, for an engine of so many tokens, and the rows of its table."""
    vllm = VllmConfig()
    vllm.model_config = SimpleNamespace(max_model_len=max_model_len)
    with set_current_vllm_config(vllm):
        module = get_rope(
            config["head_dim"], config["max_position_embeddings"], True, {**config["rope_parameters"]}, torch.float32
        )
    table = getattr(module, "long_short_cos_sin_cache", None)
    if table is None:
        return module.cos_sin_cache, len(module.cos_sin_cache)
    first = module.original_max_position_embeddings if module.use_long_rope else 0
    return table[first:], len(table)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_calls_of_any_allowed_length_are_turned_alike_in_transformers_and_longer_ones_are_not(kind):
    whole_heads = (c for c in cases(kind) if c["rope_parameters"]["partial_rotary_factor"] == 1.0)
    config = next(c for c in whole_heads if c["max_position_embeddings"] == LONG)
    rotation, ours = computed(config)
    module = LlamaRotaryEmbedding(LlamaConfig(**{**config, "rope_parameters": {**config["rope_parameters"]}}))
    longest = rotation.longest(LONG)
    assert longest == config["rope_parameters"].get("original_max_position_embeddings", LONG)
    for length in (1, 7, longest // 2, longest, 3):
        module(torch.zeros(1), torch.tensor([[length - 1]]))
        np.testing.assert_array_equal(module.inv_freq.numpy(), ours)
    module(torch.zeros(1), torch.tensor([[longest]]))
    assert not np.array_equal(module.inv_freq.numpy(), ours)


def test_alpha_of_hunyuan():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0}
    config = {"head_dim": 64, "max_position_embeddings": 512, "rope_parameters": rope}
    rotation, ours = computed(config)
    theirs = SimpleNamespace(
        **config, rope_scaling=rope, hidden_size=128, num_attention_heads=2, standardize_rope_params=lambda: None
    )
    np.testing.assert_allclose(ours, HunYuanMoEV1RotaryEmbedding(theirs).inv_freq.numpy(), rtol=2e-7)
    table, _ = table_of_vllm(config, 512)
    angles = torch.outer(torch.arange(512.0), torch.from_numpy(ours))
    torch.testing.assert_close(table, torch.cat([angles.cos(), angles.sin()], -1), rtol=0, atol=1e-6)
    assert np.allclose(rotation.powers(64), powers(rotation, 64), rtol=1e-6)
    with pytest.raises(ConfigError, match="alpha"):  # of a family whose class does not read it
        model_spec(SIZES | {"rope_theta": None, "rope_parameters": rope})


def test_megatrons_module_is_given_them_with_the_magnitude():
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        _yarn_get_concentration_factor_from_config as magnitude_in_megatron,
    )

    for config in [case for kind in KINDS for case in cases(kind)[:8]]:
        rotation, ours = computed(config)
        chunk = SimpleNamespace(
            rotary_pos_emb=SimpleNamespace(inv_freq=torch.zeros(3), seq_len_interpolation_factor=8.0),
            config=SimpleNamespace(),
        )
        model = SimpleNamespace(rotation=rotation, rotated_head_dim=rotation.rotated(config["head_dim"]))
        set_rotation(model, chunk)
        np.testing.assert_array_equal(chunk.rotary_pos_emb.inv_freq.numpy(), ours)
        assert chunk.rotary_pos_emb.seq_len_interpolation_factor is None
        assert magnitude_in_megatron(chunk.config) == pytest.approx(rotation.magnitude, rel=1e-14)


ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "su"}, r"rope_type = 'su' .*only default, linear, dynamic, llama3, yarn, longrope"),
        ({"rope_type": "linear", "factor": 2}, r"factor = 2 .* write 2\.0"),
        ({"rope_type": "linear"}, "no factor"),
        ({"rope_type": "dynamic"}, "no factor"),
        ({"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 7}, "max_trained_positions"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "must be above"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "no low_freq_factor"),
        ({"rope_type": "longrope", **FACTORS, "long_factor": [2.0] * 7}, "long_factor = .*7 numbers.* must be 8"),
        ({"rope_type": "longrope", **FACTORS, "short_factor": ["x"] * 8}, "more than numbers"),
        ({"rope_type": "longrope", **FACTORS, "factor": 3.0}, "factor = 3.0 .* = 4.0, which vLLM takes"),
        ({"rope_type": "longrope", **FACTORS, "attention_factor": 2.0}, "attention_factor = 2.0 .* which vLLM takes"),
        ({"rope_type": "longrope", **FACTORS, "short_mscale": 2.0}, "short_mscale"),
        ({"rope_type": "yarn", "factor": None}, "factor = None"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, "truncate = 1"),
        ({"rope_type": "yarn", "factor": 4.0, "mrope_section": [2, 3, 3]}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ],
)  # fmt: skip
def test_what_readers_would_turn_differently_is_refused(rope, words):
    config = {key: value for key, value in SIZES.items() if key != "rope_theta"} | {"head_dim": 16}
    with pytest.raises(ConfigError, match=words):
        model_spec(config | {"max_position_embeddings": 256, "rope_parameters": ROPE | rope})


def test_an_odd_number_of_rotated_numbers_is_refused():
    for share in (0.1875, 0.01, 1.5):
        with pytest.raises(ConfigError, match="must be an even number"):
            read_rotation({"rope_theta": 1e4, "partial_rotary_factor": share}, 16, 1.0, is_latent=False)
