"""Adapters in Megatron's linear layers compute W0 x + (alpha / r) B A x, eq. 3 of LoRA (arXiv:2106.09685), are left out
for the reference, and are merged into the same weights. Every rank's part is computed in this process.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from small_model import SIZES

from mrl.model import model_spec, tensor_specs
from mrl.model.adapters import (
    FIRST,
    SECOND,
    TARGETS,
    Lora,
    adapted_layers,
    adapted_modules,
    adapter_shapes,
    adapter_shards,
    factor_name,
    is_adapter,
)
from mrl.model.boxes import Box
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import source_shards
from mrl.rank import lora_layers
from mrl.rank.lora_layers import Adapter, Adapters, attach, drawing_noise, hidden

MODEL = model_spec(SIZES)
SHAPES = {spec.name: spec.shape for spec in tensor_specs(MODEL)}
LORA = Lora(3, 12.0, TARGETS)  # scale 4
LAYOUTS = {
    "one rank": {"world_size": 1},
    "two tensor ranks": {"world_size": 2, "tensor_model_parallel_size": 2},
    "two expert ranks": {"world_size": 2, "expert_model_parallel_size": 2},
    "experts cut": {"world_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    "two stages": {"world_size": 2, "pipeline_model_parallel_size": 2},
}
TOKENS = (2, 0, 3, 1)  # of each expert
EPS = 1e-6


@pytest.fixture(scope="module", autouse=True)
def alone():
    """Groups of this process, and Megatron's generators without CUDA."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    with pytest.MonkeyPatch.context() as patch:
        tracker = Tracker()
        patch.setattr(lora_layers, "get_cuda_rng_tracker", lambda: tracker)
        yield
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


class Tracker:
    """Megatron's generators by name, on the host."""

    def __init__(self):
        self.states = {}

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = states

    @contextmanager
    def fork(self, name):
        before = torch.get_rng_state()
        torch.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = torch.get_rng_state()
            torch.set_rng_state(before)


class Layer(torch.nn.Module):
    """One of Megatron's linear layers: behind its norm where it has one, or one matrix for each local expert."""

    explicit_expert_comm = True  # others exchange its tokens, so each rank computes its part alone

    def forward(self, x, tokens=None):
        if hasattr(self, "layer_norm_weight"):
            x = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, EPS)
        if tokens is None:
            return F.linear(x, self.weight), None
        parts = x.split(list(tokens))
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]), None


class Rank:
    """A rank's chunk with random weights and factors; the weights W0 + scale B A, by the definition."""

    def __init__(self, degrees: dict, rank: int, dropout: float = 0.0, dtype=torch.float32, seed: int = 5):
        self.layout = TrainLayout.build(degrees, MODEL)
        self.shards = source_shards(MODEL, self.layout, rank)
        self.layers = adapted_layers(MODEL, self.layout, rank, LORA)
        self.chunk = torch.nn.Module()
        self.chunk.pre_process = False
        for shard in self.shards:
            self._put(shard.megatron_name, base(shard).to(dtype))
        config = SimpleNamespace(
            params_dtype=dtype, sequence_parallel=False, layernorm_epsilon=EPS, layernorm_zero_centered_gamma=False
        )
        attach(self.chunk, self.layers, LORA, config, seed, dropout)
        described = adapter_shards(MODEL, self.layout, rank, LORA)
        self.begun = {name: p.detach().clone() for name, p in self.chunk.named_parameters() if ".adapter." in name}
        with torch.no_grad():
            for shard in described:
                for piece in shard.pieces:
                    values = factor(piece.hf_name)[piece.hf_box.slices].to(dtype)
                    self.chunk.get_parameter(shard.megatron_name)[piece.local_box.slices] = values
        self.adapters = Adapters([self.chunk], LORA, described)

    def _put(self, name: str, values: torch.Tensor) -> None:
        *path, leaf = name.split(".")
        module = self.chunk
        for part in path:
            if part not in module._modules:
                module.add_module(part, Layer())
            module = module._modules[part]
        module.register_parameter(leaf, torch.nn.Parameter(values))

    def merged(self, shard) -> torch.Tensor:
        """The shard with each of its pieces merged, float64."""
        whole = base(shard).double()
        for piece in shard.pieces:
            if piece.hf_name.split(".")[-2] in TARGETS:
                first, second = (factor(factor_name(piece.hf_name, name)).double() for name in (FIRST, SECOND))
                whole[piece.local_box.slices] += (LORA.alpha / LORA.rank) * (second @ first)[piece.hf_box.slices]
        return whole

    def expected(self, layer, x: torch.Tensor, tokens, of_shard) -> torch.Tensor:
        """What the layer gives for `x` with weights `of_shard`."""
        weights = [of_shard(shard) for shard in self.shards if shard.megatron_name.startswith(f"{layer.module}.weight")]
        norm = next((s for s in self.shards if s.megatron_name == f"{layer.module}.layer_norm_weight"), None)
        x = x.double()
        if norm is not None:
            x = base(norm).double() * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        parts = (x,) if tokens is None else x.split(list(tokens))
        return torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)])

    def given(self, layer) -> tuple[torch.Tensor, tuple[int, ...] | None]:
        module = self.chunk.get_submodule(layer.module)
        weight = module.weight0 if layer.is_expert else module.weight
        tokens = TOKENS[: len(layer.targets[0].weights)] if layer.is_expert else None
        drawn = torch.Generator().manual_seed(len(layer.module))
        return torch.randn(sum(tokens) if tokens else 5, weight.shape[1], generator=drawn), tokens

    def out(self, layer, x, tokens) -> torch.Tensor:
        module = self.chunk.get_submodule(layer.module)
        return (module(x) if tokens is None else module(x, tokens))[0]


def drawn(name: str, shape) -> torch.Tensor:
    """Numbers that depend on a tensor's name alone."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 31 + len(name))
    return torch.randn(*shape, generator=generator)


def base(shard) -> torch.Tensor:
    whole = torch.zeros(shard.local_shape)
    for piece in shard.pieces:
        whole[piece.local_box.slices] = drawn(piece.hf_name, SHAPES[piece.hf_name])[piece.hf_box.slices] / 8
    return whole


def factor(name: str) -> torch.Tensor:
    return drawn(name, adapter_shapes(MODEL, LORA)[name]) / 8


RANKS = [(name, rank) for name, degrees in LAYOUTS.items() for rank in range(degrees["world_size"])]


@pytest.mark.parametrize(("layout", "number"), RANKS)
def test_each_layer_adds_the_factors_product(layout, number):
    rank = Rank(LAYOUTS[layout], number)
    assert {adapted.target for layer in rank.layers for adapted in layer.targets} == set(adapted_modules(MODEL, LORA))
    for layer in rank.layers:
        x, tokens = rank.given(layer)
        expected = rank.expected(layer, x, tokens, rank.merged)
        torch.testing.assert_close(rank.out(layer, x, tokens).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layout", "number"), RANKS)
def test_the_reference_is_the_weights_alone_and_adapters_are_back_behind_it(layout, number):
    rank = Rank(LAYOUTS[layout], number)
    for layer in rank.layers:
        x, tokens = rank.given(layer)
        with rank.adapters.in_place():
            plain = rank.out(layer, x, tokens)
        expected = rank.expected(layer, x, tokens, lambda shard: base(shard).double())
        torch.testing.assert_close(plain.double(), expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(rank.out(layer, x, tokens), plain)
    with pytest.raises(KeyError), rank.adapters.in_place():
        raise KeyError
    assert not torch.allclose(rank.out(layer, x, tokens), plain)


@pytest.mark.parametrize(("layout", "number"), RANKS)
def test_any_box_of_a_weight_is_merged_as_the_layer_computes(layout, number, monkeypatch):
    monkeypatch.setattr(lora_layers, "_TILE", {"cpu": 200})  # elements at once: some rows of a weight
    rank = Rank(LAYOUTS[layout], number)
    merging = rank.adapters.merging(rank.shards)
    for shard in rank.shards:
        parameter = rank.chunk.get_parameter(shard.megatron_name)
        before = parameter.detach().clone()
        whole = merging(parameter)
        torch.testing.assert_close(whole.double(), rank.merged(shard), rtol=1e-5, atol=1e-5)
        assert torch.equal(parameter, before), "the parameter itself stays"
        for piece in shard.pieces:
            if not rank.adapters.adapts(piece.hf_name):
                continue
            # a box within the piece: rows and columns from the second on
            (row, last_row), (column, last_column) = piece.hf_box.ranges
            box = Box(((row + 1, last_row), (column + 1, last_column)))
            block = parameter.detach()[piece.local_box.slices][1:, 1:]
            out = torch.empty_like(block)
            rank.adapters.merge(piece.hf_name, box, block, out)
            assert torch.equal(out, whole[piece.local_box.slices][1:, 1:])


def test_a_bfloat16_weight_is_merged_in_float32_and_rounded_once():
    rank = Rank(LAYOUTS["one rank"], 0, dtype=torch.bfloat16)
    merging = rank.adapters.merging(rank.shards)
    shard = next(s for s in rank.shards if s.megatron_name.endswith("linear_proj.weight"))
    parameter = rank.chunk.get_parameter(shard.megatron_name)
    (piece,) = shard.pieces
    first, second = (factor(factor_name(piece.hf_name, name)).bfloat16().double() for name in (FIRST, SECOND))
    exact = parameter.double() + LORA.scale * second @ first
    merged = merging(parameter)
    assert merged.dtype is torch.bfloat16
    wide = torch.empty(parameter.shape)
    rank.adapters.merge(piece.hf_name, piece.hf_box, parameter.detach(), wide)
    assert torch.equal(wide, merged.float())
    spacing = torch.ldexp(torch.ones(()), torch.frexp(exact)[1] - 8)  # bfloat16 has 8 bits of fraction, one implied
    assert ((merged.double() - exact).abs() <= 0.5001 * spacing).all()


def test_only_factors_are_trained_and_what_walks_over_weights_does_not_see_them():
    rank = Rank(LAYOUTS["one rank"], 0)
    trained = {name for name, p in rank.chunk.named_parameters() if p.requires_grad}
    assert trained == {shard.megatron_name for shard in rank.adapters.described}
    assert {name for name, _ in rank.chunk.named_parameters() if is_adapter(name)} == trained
    with hidden([rank.chunk]):
        assert {name for name, _ in rank.chunk.named_parameters()} == {shard.megatron_name for shard in rank.shards}
    assert {name for name, p in rank.chunk.named_parameters() if p.requires_grad} == trained


def test_the_first_stages_embedding_passes_a_gradient_on():
    """Recomputed layers are left out of a backward pass whose input has none."""
    chunk = torch.nn.Module()
    chunk.pre_process = True
    chunk.embedding = torch.nn.Embedding(3, 2)
    attach(chunk, (), LORA, SimpleNamespace(), 0)
    assert chunk.embedding(torch.tensor([1])).requires_grad and not chunk.embedding.weight.requires_grad


# ---------------------------------------------------------------- first values


def test_first_values_depend_on_the_weights_name_and_the_seed_alone():
    """A is uniform within 1/sqrt(columns), as PEFT begins (kaiming_uniform_ with a = sqrt(5)), and B is zero."""
    whole = begun_of(Rank(LAYOUTS["one rank"], 0))
    for name, values in whole.items():
        if FIRST in name:
            limit = values.shape[1] ** -0.5
            assert values.abs().max() <= limit and values.std() == pytest.approx(limit / 3**0.5, rel=0.15)
        else:
            assert not values.any()
    firsts = [values for name, values in whole.items() if FIRST in name and "q_proj" in name]
    assert not torch.equal(*firsts)
    other = begun_of(Rank(LAYOUTS["one rank"], 0, seed=6))
    assert not any(torch.equal(values, other[name]) for name, values in whole.items() if FIRST in name)
    for layout, number in RANKS:
        rank = Rank(LAYOUTS[layout], number)
        for shard in rank.adapters.described:
            for piece in shard.pieces:
                found = rank.begun[shard.megatron_name][piece.local_box.slices]
                assert torch.equal(found, whole[piece.hf_name][piece.hf_box.slices]), (layout, piece.hf_name)


def begun_of(rank: Rank) -> dict[str, torch.Tensor]:
    """Whole factors by their names in the checkpoint, of one rank that has them all."""
    return {
        piece.hf_name: rank.begun[shard.megatron_name][piece.local_box.slices]
        for shard in rank.adapters.described
        for piece in shard.pieces
    }


# ---------------------------------------------------------------- dropout

SHARE = 0.25


def dropped(seed: int, update: int, kind: str = "linear_proj", training: bool = True) -> torch.Tensor:
    """What a layer adds for an input of ones: one number a token is its own draw."""
    rank = Rank(LAYOUTS["one rank"], 0, dropout=SHARE)
    rank.chunk.train(training)
    layer = next(layer for layer in rank.layers if layer.module.endswith(kind))
    x, tokens = rank.given(layer)
    with rank.adapters.in_place():
        plain = rank.out(layer, x, tokens)
    with drawing_noise(SHARE, seed, update, torch.device("cpu")):
        return rank.out(layer, x, tokens) - plain


@pytest.mark.parametrize("kind", ["linear_proj", "linear_qkv", "experts.linear_fc1", "experts.linear_fc2"])
def test_dropout_is_another_in_every_update_and_the_same_when_it_is_repeated(kind):
    first = dropped(1, 1, kind)
    assert torch.equal(first, dropped(1, 1, kind))
    assert not torch.equal(first, dropped(1, 2, kind))
    assert not torch.equal(first, dropped(2, 1, kind))


def test_dropout_is_of_updates_alone():
    whole = dropped(1, 1, training=False)
    assert torch.equal(whole, dropped(2, 5, training=False))
    assert not torch.allclose(whole, dropped(1, 1))
    rank = Rank(LAYOUTS["one rank"], 0)
    with drawing_noise(0.0, 1, 1, torch.device("cpu")):
        assert lora_layers.get_cuda_rng_tracker().states == {}, "nothing is drawn without dropout"
    for layer in rank.layers:
        x, tokens = rank.given(layer)
        expected = rank.expected(layer, x, tokens, rank.merged)
        torch.testing.assert_close(rank.out(layer, x, tokens).double(), expected, rtol=1e-5, atol=1e-5)


def test_what_is_kept_is_scaled_up_so_that_the_mean_stays():
    """F.dropout's own: kept elements are divided by 1 - p, and about p of them are dropped."""
    layer = next(layer for layer in Rank(LAYOUTS["one rank"], 0).layers if layer.module.endswith("linear_proj"))
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False)
    adapter = Adapter(layer, LORA, config, is_outside=True, dropout=SHARE)
    with drawing_noise(SHARE, 1, 1, torch.device("cpu")):
        x = adapter._dropped(torch.ones(100, 64))
    assert x.unique().tolist() == [0.0, pytest.approx(1 / (1 - SHARE))]
    assert (x == 0).float().mean() == pytest.approx(SHARE, abs=0.02)


def test_ranks_with_the_same_input_drop_the_same_and_others_do_not(monkeypatch):
    """The generator of shared inputs is that of the group's first rank; any other is a rank's own."""
    seen = {}
    for rank in (0, 1, 5):
        monkeypatch.setattr(lora_layers.dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(lora_layers.mpu, "get_tensor_model_parallel_src_rank", lambda rank=rank: rank // 2 * 2)
        monkeypatch.setattr(lora_layers.dist, "get_global_rank", lambda *_, rank=rank: rank // 2 * 2)
        with drawing_noise(SHARE, 1, 1, torch.device("cpu")):
            seen[rank] = {
                name: bytes(state.numpy()) for name, state in lora_layers.get_cuda_rng_tracker().states.items()
            }
        assert lora_layers.get_cuda_rng_tracker().states == {}
    for name in seen[0]:
        assert (seen[0][name] == seen[1][name]) == ("same True" in name)
        assert seen[0][name] != seen[5][name]
    assert len(set(seen[1].values())) == 4


LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 31, "intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "q_lora_rank": 6, "kv_lora_rank": 10,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "max_position_embeddings": 64, "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
}  # fmt: skip


def test_factors_of_a_whole_down_projection_are_summed_over_tensor_ranks_as_its_weight_is():
    """Each tensor rank has its own tokens there, and nothing is exchanged. Transformer Engine's layer has no mode."""
    model = model_spec(LATENT)
    layout = TrainLayout.build({"world_size": 2, "tensor_model_parallel_size": 2}, model)
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=True)
    downs = [layer for layer in adapted_layers(model, layout, 1, LORA) if "_down_proj" in layer.module]
    assert len(downs) == 4
    for layer in downs:
        module = torch.nn.Module()
        module.parallel_mode = None
        adapter = Adapter(layer, LORA, config, lora_layers._is_outside(module, layer))
        (adapted,) = layer.targets
        for parameter in adapter.parameters():
            torch.nn.init.normal_(parameter)
            assert parameter.sequence_parallel and not getattr(parameter, "tensor_model_parallel", False)
        first, second = (getattr(adapter, f"{adapted.target}_{name}") for name in (FIRST, SECOND))
        x = torch.randn(5, 1, 24)
        out = adapter(x, torch.zeros(5, 1, layer.rows), None)
        torch.testing.assert_close(out, LORA.scale * x @ first.T @ second.T)
