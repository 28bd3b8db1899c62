"""What generation reads and no sync brings is as it was when the engine started, or the sync says what is not."""

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from mrl.engine.constants import Constants


class Router:
    """What vLLM's experts are routed by; it holds the gate's own bias."""

    __module__ = "vllm.model_executor.layers.fused_moe"

    def __init__(self, bias):
        self.e_score_correction_bias = bias


@pytest.fixture
def model(default_vllm_config):
    made = nn.Module()
    made.rotary_emb = RotaryEmbedding(8, 8, 32, 10000.0, True, torch.float32)
    made.attn = nn.Module()
    made.attn._k_scale = torch.tensor(1.0)
    made.attn.kv_cache = torch.zeros(2)
    made.attn.W_UV = torch.zeros(3)  # made from weights
    made.gate = nn.Module()
    made.gate.e_score_correction_bias = nn.Parameter(torch.zeros(4), requires_grad=False)
    made.experts = nn.Module()
    made.experts.router = Router(made.gate.e_score_correction_bias)
    return made


@pytest.fixture
def default_vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def test_what_syncs_and_steps_write_may_change(model):
    noted = Constants.of(model)
    model.attn.kv_cache.fill_(3), model.attn.W_UV.fill_(3), model.gate.e_score_correction_bias.fill_(3)
    noted.check(model, ())
    assert Constants.of(model) is noted, "it is noted once, before anything has slept"


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda model: model.rotary_emb.cos_sin_cache.view(-1)[5:6].add_(1e-3), r"rotary_emb\.cos_sin_cache"),
        (lambda model: model.attn._k_scale.fill_(0), r"attn\._k_scale"),
        (lambda model: delattr(model.attn, "_k_scale"), r"attn\._k_scale"),
        (
            lambda model: setattr(model.gate, "e_score_correction_bias", nn.Parameter(torch.zeros(4))),
            r"experts\.router\.e_score_correction_bias, which is no longer gate\.e_score_correction_bias",
        ),
    ],
    ids=["rotary cache", "scale", "a scale that is gone", "a bias that the router does not see"],
)
def test_what_is_not_as_it_was_is_named(model, spoil, named):
    noted = Constants.of(model)
    noted.check(model, ())
    spoil(model)
    with pytest.raises(RuntimeError, match=f"{named}; no sync brings it, so start the engine again"):
        noted.check(model, ())


def test_buffers_that_a_sync_brings_are_its_own(model):
    noted = Constants.of(model)
    model.rotary_emb.cos_sin_cache.fill_(0)
    noted.check(model, {"rotary_emb.cos_sin_cache"})
