"""Words and scales, judged by vLLM alone: its own quantisation of whole tensors, its own models and their loaders.

An export in FP8 is made by vLLM's `per_block_cast_to_fp8` and loaded by vLLM's models, built as each worker of a
layout; they must hold what `mrl.reshard.quantise` and the targets of a plan say, bit for bit. What computes on a CPU is
a stand-in, whose parameters are compared with those of vLLM's own layers in FP8.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from test_reshard_target import MODELS, SIZES, environment

from mrl.engine.loader_check import as_worker, built
from mrl.model import model_spec, tensor_specs
from mrl.model.layout import RolloutLayout
from mrl.model.quantised import SCALES, engine_quantisation, quantised_tensors
from mrl.model.vllm_parameters import target_parameters
from mrl.model.weight_map import DRAFTING
from mrl.reshard.quantise import as_fp8, block_scales, quantised

pytestmark = pytest.mark.real
__all__ = ["environment"]  # a fixture of that module, for this one too

BLOCK = 32
WIDE = {"intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
LAYOUTS = [RolloutLayout(1, 1), RolloutLayout(1, 2), RolloutLayout(1, 2, 1, 2), RolloutLayout(1, 1, 2, 2)]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def vllms(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    return per_block_cast_to_fp8(weight, [block, block], use_ue8m0=False)


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (200, 130), (64, 7)])
@pytest.mark.parametrize("size", [1e-7, 0.02, 30.0])
def test_words_and_scales_have_the_bits_of_vllms_own_quantisation(shape, block, size):
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * size).bfloat16()
    words, scales = vllms(weight, block)
    assert torch.equal(block_scales(weight, block), scales)
    assert torch.equal(raw(as_fp8(weight, scales, block)), raw(words))


def weights_of(spec) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    return {one.name: torch.randn(one.shape, generator=noise).to(torch.bfloat16) for one in tensor_specs(spec)}


def exported(weights: dict, names) -> dict[str, torch.Tensor]:
    """The checkpoint in FP8 of these weights, by vLLM's quantisation alone."""
    found = {}
    for name, tensor in weights.items():
        found[name] = tensor
        if name in names:
            found[name], found[name + SCALES] = vllms(tensor, BLOCK)
    return found


@pytest.fixture
def in_fp8(monkeypatch):
    """vLLM's CPU platform chooses the stand-in, as in an engine's worker."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    from mrl.engine.cpu_fp8 import quant_method

    monkeypatch.setattr(Fp8Config, "get_quant_method", quant_method)


@pytest.mark.parametrize("name", ["qwen2", "qwen3-tied", "qwen3-moe", "glm4-moe"])
def test_every_worker_has_what_vllms_loader_makes_of_an_export_in_fp8(name, tmp_path, in_fp8):
    config = SIZES | MODELS[name] | WIDE | ({"n_shared_experts": 1} if name == "glm4-moe" else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = model_spec(config)
    weights, names = weights_of(spec), quantised_tensors(spec)
    export = exported(weights, names)
    ours = dict(pair for n, tensor in weights.items() for pair in quantised(n, tensor, names, BLOCK))
    told = {"hf_overrides": {"quantization_config": engine_quantisation(spec, BLOCK)}}
    for layout in LAYOUTS if spec.is_moe else LAYOUTS[:2]:
        for worker in range(layout.workers_per_engine):
            model = built(tmp_path, layout, worker, "bfloat16", **told)
            with as_worker(layout, worker), torch.no_grad():
                model.load_weights(iter(export.items()))
            held = dict(model.named_parameters())
            wanted = {t.name: t for t in target_parameters(spec, layout, worker, "cpu", "bfloat16", BLOCK)}
            assert held.keys() == wanted.keys()
            for parameter, target in wanted.items():
                assert str(held[parameter].dtype) == f"torch.{target.dtype}", parameter
                for piece in target.pieces:
                    block = held[parameter].data[piece.local_box.slices].reshape(piece.hf_box.shape)
                    sent = ours[piece.hf_name][piece.hf_box.slices].to(block.dtype)  # GLM's routers are float32 there
                    assert torch.equal(raw(block), raw(sent)), parameter


DRAFTERS = {"glm4-moe": "Glm4MoeMTPModel", "qwen3.5": "Qwen3_5MTP", "qwen3.5-moe": "Qwen3_5MoeMTP"}  # vLLM's
SHARED = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")  # with the model


@pytest.mark.parametrize(
    ("name", "block"), [("glm4-moe", BLOCK), *(pytest.param(n, 0, marks=pytest.mark.long) for n in DRAFTERS)]
)
def test_every_worker_drafts_with_what_vllms_loader_makes_of_the_predicting_layer(name, block, tmp_path, in_fp8):
    layers = {"num_nextn_predict_layers": 1} if name == "glm4-moe" else {"mtp_num_hidden_layers": 1}
    config = SIZES | MODELS[name] | WIDE | ({"n_shared_experts": 1} if name == "glm4-moe" else {}) | layers
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = model_spec(config).holding(True)
    weights, names = weights_of(spec), quantised_tensors(spec) if block else ()
    export = exported(weights, names)
    ours = dict(pair for n, tensor in weights.items() for pair in quantised(n, tensor, names, block))
    told = {"architectures": [DRAFTERS[name]]}
    if block:
        told["quantization_config"] = engine_quantisation(model_spec(config), block)
    for layout in LAYOUTS if spec.is_moe else LAYOUTS[:2]:
        for worker in range(layout.workers_per_engine):
            model = built(tmp_path, layout, worker, "bfloat16", hf_overrides=told)
            with as_worker(layout, worker), torch.no_grad():
                model.load_weights(iter(export.items()))
            inside = model if name == "glm4-moe" else model.model
            held = {DRAFTING + n: p for n, p in inside.named_parameters() if not n.endswith(SHARED)}
            targets = target_parameters(spec, layout, worker, "cpu", "bfloat16", block)
            wanted = {target.name: target for target in targets if target.name.startswith(DRAFTING)}
            assert held.keys() == wanted.keys() and len(wanted) > 8
            for parameter, target in wanted.items():
                assert str(held[parameter].dtype) == f"torch.{target.dtype}", parameter
                for piece in target.pieces:
                    part = held[parameter].data[piece.local_box.slices].reshape(piece.hf_box.shape)
                    sent = ours[piece.hf_name][piece.hf_box.slices].to(part.dtype)
                    assert torch.equal(raw(part), raw(sent)), parameter


# --- the stand-in -----------------------------------------------------------------------------------------------------


def parameters_of(method, in_size: int, outs: list[int]) -> dict[str, tuple]:
    layer = torch.nn.Module()
    layer.tp_size = 1
    method.create_weights(layer, in_size, outs, in_size, sum(outs), torch.bfloat16, weight_loader=lambda *given: None)
    assert layer.weight_block_size == [128, 128]
    return {n: (type(p), tuple(p.shape), p.dtype) for n, p in layer.named_parameters()}


def test_a_stand_in_has_the_parameters_of_vllms_own_layers(monkeypatch, tmp_path):
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization import fp8

    from mrl.engine.cpu_fp8 import Fp8Experts, Fp8Linear

    (tmp_path / "config.json").write_text(json.dumps(SIZES | MODELS["qwen3-moe"] | WIDE))
    model = ModelConfig(model=str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=32)
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **given: None)
    quantisation = fp8.Fp8Config(weight_block_size=[128, 128])
    with as_worker(RolloutLayout(), 0), set_current_vllm_config(VllmConfig(model_config=model)):
        own = fp8.Fp8LinearMethod(quantisation)
        for sizes in ((256, [256]), (200, [256, 128, 100])):
            assert parameters_of(Fp8Linear([128, 128]), *sizes) == parameters_of(own, *sizes)
    assert Fp8Experts.create_weights is fp8.Fp8MoEMethod.create_weights


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 15, 16, 17, 33, 64])
def test_a_stand_in_multiplies_words_times_scales_alike_in_any_batch(rows):
    from mrl.engine.cpu_fp8 import Fp8Linear

    noise = torch.Generator().manual_seed(3)
    weight, x = (torch.randn(shape, generator=noise).bfloat16() for shape in ((96, 64), (64, 64)))
    scales = block_scales(weight, BLOCK)
    layer = SimpleNamespace(weight=as_fp8(weight, scales, BLOCK), weight_scale_inv=scales)
    method = Fp8Linear([BLOCK, BLOCK])
    answer = method.apply(layer, x)
    assert torch.equal(method.apply(layer, x[:rows]), answer[:rows])
    factors = scales.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    exact = x.double() @ (layer.weight.double() * factors).bfloat16().double().t()
    assert torch.allclose(answer.double(), exact, rtol=2**-7, atol=2**-7)
    assert float((answer.double() - x.double() @ weight.double().t()).abs().mean()) > 0.01  # words are not weights
