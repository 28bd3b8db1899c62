"""Engines that wait for their first sync: what their parameters hold until then, and who may start so."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mrl.config.load import load_config
from mrl.driver.assemble_processes import first_sync_brings_all
from mrl.engine import requests
from mrl.engine.awaited_weights import fill
from mrl.model import known_spec


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    made = nn.Module()
    made.matrix = nn.Parameter(torch.zeros(64, 256, dtype=dtype), requires_grad=False)
    made.experts = nn.Parameter(torch.zeros(4, 32, 16, dtype=dtype), requires_grad=False)
    made.norm = nn.Parameter(torch.zeros(16, dtype=dtype), requires_grad=False)
    made.empty = nn.Parameter(torch.zeros(0, dtype=dtype), requires_grad=False)
    made.number = nn.Parameter(torch.arange(3), requires_grad=False)
    made.register_buffer("table", torch.arange(4.0))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_every_parameter_is_drawn_and_buffers_and_whole_numbers_stay(dtype):
    made = model(dtype)
    fill(made.parameters())
    for drawn in (made.matrix, made.experts, made.norm):
        values = drawn.float()
        assert values.isfinite().all() and values.unique().numel() > 3
    assert made.norm.float().min() >= 0.5 and made.norm.float().max() <= 1.5
    assert torch.equal(made.table, torch.arange(4.0)) and torch.equal(made.number, torch.arange(3))


def test_what_goes_through_a_matrix_stays_as_large_as_it_was():
    made = model()
    fill(made.parameters())
    given = torch.randn(1000, 256, generator=torch.Generator().manual_seed(1))
    assert float((given @ made.matrix.T).std() / given.std()) == pytest.approx(1, rel=0.1)


def test_the_same_model_gets_the_same_numbers():
    one, other = model(), model()
    fill(one.parameters())
    fill(other.parameters())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.matrix[0], one.matrix[1])


@pytest.mark.parametrize(
    ("by_sync", "own", "awaits"),
    [
        (True, None, True),
        (False, None, False),
        (True, "auto", False),  # the user's own word stands
        (False, "dummy", True),  # and such an engine answers as little as any other without weights
    ],
)
def test_an_engine_waits_for_weights_where_it_loads_none(by_sync, own, awaits):
    overrides = []
    if own is not None:
        overrides = [f"rollout.engine_kwargs.vllm={{load_format: {own}}}"]
    config = load_config("parallel_configs/tiny-moe/cpu.yaml", overrides=overrides).config
    settings = requests.engine_settings(config, known_spec("Qwen3-30B-A3B"), 0, Path("logs"), by_sync=by_sync)
    assert settings.awaits_weights is awaits


@pytest.mark.parametrize(("path", "may"), [("fast", True), ("slow", False)])
def test_only_a_sync_that_is_proven_stands_in_for_a_load(path, may):
    config = load_config("parallel_configs/tiny-moe/cpu.yaml", overrides=[f"reshard.path={path}"]).config
    assert first_sync_brings_all(config.reshard) is may


def test_an_output_layer_is_tied_though_the_folder_stores_a_copy_of_the_embedding(tmp_path, monkeypatch):
    """vLLM 0.32 unties such a model, and ties it again when its loader has found both equal; none is loaded here."""
    from vllm.config import LoadConfig, ModelConfig
    from vllm.model_executor.model_loader import BaseModelLoader, get_model_loader

    from mrl.engine import v0_32
    from mrl.engine.engine_state import AWAITED

    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    whole = SimpleNamespace(tie_word_embeddings=True, text=SimpleNamespace(tie_word_embeddings=True))
    whole.get_text_config = lambda: whole.text
    untied = SimpleNamespace(model=str(tmp_path), revision=None, hf_config=whole, hf_text_config=whole.text)
    ModelConfig.maybe_untie_word_embeddings(untied)
    assert (whole.tie_word_embeddings, whole.text.tie_word_embeddings) == (False, False)
    loader = get_model_loader(LoadConfig(load_format=AWAITED))
    assert type(loader) is v0_32.AwaitedWeightsTied
    monkeypatch.setattr(BaseModelLoader, "create_model", lambda self, of_all, of_model, prefix: of_model)
    assert loader.create_model(None, untied) is untied
    assert (whole.tie_word_embeddings, whole.text.tie_word_embeddings) == (True, True)
    assert not untied.word_embeddings_untied_by_checkpoint
