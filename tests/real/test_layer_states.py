"""A fresh engine against transformers, layer by layer: what one of them computes otherwise is named."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from world import PRESET, make_world

from mrl.config.load import load_config
from mrl.config.schema import with_values
from mrl.tools.explain import by_transformers
from mrl.tools.explain.by_transformers import StoredRow, against_transformers

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def rows_of(words: int) -> list[StoredRow]:
    """Responses whose stored log-probs are 0: what is compared here are the fresh engine and transformers."""
    rng = np.random.default_rng(0)
    return [StoredRow(number, rng.integers(3, words, 14).tolist(), 8, np.zeros(6), np.zeros(6)) for number in range(6)]


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("wrong", ["nothing", "positions", "expert"])
def test_the_first_layer_token_and_expert_of_an_engine_that_differ_from_transformers_are_named(
    world, tmp_path, wrong, monkeypatch
):
    """The engine is given YaRN, or loads a folder in which one expert is another one."""
    monkeypatch.setattr(
        by_transformers, "AGREES", 1e-4
    )  # of the difference from log-probs of 0, which is that of no engine
    settings = {"model.path": str(world / "model"), "data.max_prompt_length": 16}
    if wrong == "positions":
        settings["rollout.engine_kwargs"] = {"vllm": {"hf_overrides": {"rope_parameters": YARN}}}
    if wrong == "expert":
        shutil.copytree(world / "model", tmp_path / "other")
        (file,) = (tmp_path / "other").glob("*.safetensors")
        weights = load_file(file)
        weights[EXPERT] = torch.zeros_like(weights[EXPERT])
        save_file(weights, file, {"format": "pt"})
        settings["rollout.engine_kwargs"] = {"vllm": {"model": str(tmp_path / "other")}}
    config = with_values(load_config(PRESET).config, settings)
    found = against_transformers(config, world / "model", rows_of(100), 300.0)
    assert found.responses == 6 and found.engines > 1  # log-probs of 0 are nobody's
    if wrong == "nothing":
        assert found.fresh < 1e-4 and not found.place
    elif wrong == "positions":
        assert found.fresh > 1e-3 and found.place.startswith("layer 0 is the first") and "its attention" in found.place
    else:
        assert found.fresh > 1e-4 and found.place.startswith("layer 1 is the first") and "its expert 2," in found.place
