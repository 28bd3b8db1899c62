"""Engines in FP8 of a bfloat16 actor: words and scales of any pair of layouts, what is refused, and what a plan counts.

The reference below is written anew, block by block, with a table of all e4m3 numbers in the place of torch's cast.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reshard_cases import QWEN3_30B, QWEN3_235B, TRAIN_235B
from reshard_world import World, expected, hf_weights, setup_for, shards_of, sums_of
from seldom import seldom
from small_model import write_model
from test_config_rules import DENSE_MODEL, GPU, TINY, TINY_MODEL, broken, only
from test_glm4_moe import CONFIG as GLM
from test_lora import LORA, WholeFactors, factors_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mrl.config.load import ResolvedConfig, load_config
from mrl.config.rules import notes, violations
from mrl.driver.advice import MISMATCH, MismatchWatch
from mrl.engine import handshake, requests
from mrl.errors import ConfigError
from mrl.model import known_spec, load_model_spec, tensor_specs, with_predicting
from mrl.model.boxes import Box
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.quantised import SCALES, engine_quantisation, is_quantised, quantised_tensors, with_scales
from mrl.model.registry import weight_map
from mrl.model.vllm_parameters import TargetParameter, target_parameters
from mrl.model.weight_map import DRAFTING
from mrl.plan.activations import Recompute
from mrl.plan.engine_memory import engine_memory, worker_weight_bytes
from mrl.plan.plan_inputs import device_for
from mrl.plan.run_plan import reshard_plan_of
from mrl.plan.sync_times import reshard_summary
from mrl.platforms.versions import MEGATRON
from mrl.reshard import quantise
from mrl.reshard.digest import merged
from mrl.reshard.execute import Sender
from mrl.reshard.plan import plan_reshard
from mrl.reshard.proof import verify
from mrl.reshard.quantise import as_fp8, block_scales, quantised
from mrl.tools import run_search
from mrl.tools.import_verl.translate import import_overrides
from mrl.tools.rehearse.compose import WorkFolder, compose
from mrl.tools.search import SearchResult, legal_layouts, search
from mrl.tools.search_report import run_with, search_problem, search_report

TP, EP, ETP = "tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
SMALL = 16  # rows and columns of a block of the small model: one head
WORDS = torch.float8_e4m3fn
BF16 = ("model.dtype=bfloat16", "rollout.quantization=fp8")
ON = (*BF16, "rollout.quantization_block=32")
ITEM = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}


# --- words and scales -------------------------------------------------------------------------------------------------


def e4m3() -> list[float]:
    """All finite numbers that are not negative, by their code: four bits of exponent, three of fraction."""
    codes = range(127)
    values = [(code & 7) / 8 * 2**-6 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) for code in codes]
    return values


def nearest_word(value: float, table: list[float]) -> float:
    """The nearest number of the format; of two equally near ones that with the even code."""
    gap = [abs(number - abs(value)) for number in table]
    least = min(gap)
    best = [code for code, each in enumerate(gap) if each == least]
    code = next((code for code in best if code % 2 == 0), best[0])
    return table[code] * (-1 if value < 0 else 1)


def reference(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(words as float64, scales) of a matrix, one element after the other."""
    table = e4m3()
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // block), -(-columns // block))
    words = torch.zeros(rows, columns, dtype=torch.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = weight[i * block : (i + 1) * block, j * block : (j + 1) * block].float()
            largest = max(float(part.abs().max()), float(torch.tensor(1e-4)))
            scales[i, j] = torch.tensor(largest) / torch.tensor(448.0)
            scaled = part * (torch.tensor(1.0) / scales[i, j])
            for (row, column), value in zip(
                torch.cartesian_prod(torch.arange(part.shape[0]), torch.arange(part.shape[1])).view(-1, 2).tolist(),
                scaled.reshape(-1).double().tolist(),
                strict=True,
            ):
                words[i * block + row, j * block + column] = nearest_word(value, table)
    return words, scales


@pytest.mark.parametrize("shape", [(32, 48), (37, 21), (5, 40)])
def test_words_and_scales_are_those_of_the_definition_element_by_element(shape):
    noise = torch.Generator().manual_seed(sum(shape))
    weight = (torch.randn(shape, generator=noise) * 0.02).bfloat16()
    weight[0] = 0
    weight[-1, -1] = -3.0  # the largest of its block is negative
    weight[:, 0] *= 1e-6  # words below the smallest normal one
    words, scales = reference(weight, 16)
    assert torch.equal(block_scales(weight, 16), scales)
    made = as_fp8(weight, scales, 16)
    assert made.dtype is WORDS and torch.equal(made.double(), words)
    assert torch.equal(as_fp8(weight[3:, 5:], scales, 16, (3, 5)).double(), words[3:, 5:])


def test_words_between_two_are_rounded_as_their_products_with_the_inverse_scale():
    """vLLM multiplies by 1 / scale. Where a quotient would be halfway between two words the product may not be."""
    largest = torch.tensor([float(number) for number in range(33, 86, 2) if number % 7])  # three times as much fits
    weight = torch.zeros(16, 16 * len(largest))
    weight[0, ::16] = largest
    for row, tie in enumerate((10.5, 21.0, 42.0, 84.0), start=1):  # 21 lies between the words 20 and 22
        weight[row, ::16] = largest * tie / 448
    assert torch.equal(weight.bfloat16().float(), weight)
    words, scales = reference(weight.bfloat16(), 16)
    made = as_fp8(weight.bfloat16(), scales, 16)
    assert torch.equal(made.double(), words)
    each = scales.repeat_interleave(16, 1).repeat_interleave(16, 0)
    assert not torch.equal((weight / each).to(WORDS).double(), words), "a quotient would be another word"


def test_a_block_of_zeros_has_words_of_zero_and_the_least_scale():
    weight = torch.zeros(16, 16, dtype=torch.bfloat16)
    scales = block_scales(weight, 16)
    assert scales.tolist() == [[pytest.approx(1e-4 / 448)]] and not as_fp8(weight, scales, 16).float().any()


def test_a_full_tensor_is_quantised_where_it_has_words_and_otherwise_left():
    weight = torch.randn(32, 32).bfloat16()
    names = [name for name, _ in quantised("a.weight", weight, {"a.weight"}, 16)]
    assert names == ["a.weight", "a.weight_scale_inv"]
    for words, block in ((set(), 16), ({"a.weight"}, 0)):
        ((name, same),) = quantised("a.weight", weight, words, block)
        assert name == "a.weight" and same is weight


# --- syncs ------------------------------------------------------------------------------------------------------------

PAIRS = [
    ({"world_size": 1}, {}, "shm"),
    ({"world_size": 2, TP: 2, ETP: 2}, {"tensor": 2}, "shm"),
    ({"world_size": 4, TP: 2, EP: 2, "pipeline_model_parallel_size": 2}, {"data": 2, "expert": 2}, "shm"),
    ({"world_size": 2, EP: 2}, {"num_engines": 2}, "p2p"),
]


def whole(weights: dict, names, block: int) -> dict:
    return dict(pair for name, tensor in weights.items() for pair in quantised(name, tensor, names, block))


@pytest.mark.parametrize(("train", "rollout", "transport"), seldom(PAIRS, 2, 3))
def test_engines_get_the_words_and_scales_of_whole_tensors_and_both_sides_have_their_digests(train, rollout, transport):
    setup = setup_for(train, rollout, transport, dtype="bfloat16", fp8_block=SMALL)
    weights = hf_weights(setup, dtype=torch.bfloat16)
    names = quantised_tensors(setup.model)
    with World(setup, weights) as world:
        for update in (1, 2):
            outcome = world.sync(update)
            assert outcome.errors() == []
            for worker, writer in outcome.writers.items():
                wanted = expected(setup, worker, whole(weights, names, SMALL))
                assert {n for n, t in writer.tensors.items() if t.dtype is WORDS} == {
                    n.removesuffix(SCALES) for n in wanted if n.endswith(SCALES)
                }
                assert writer.tensors.keys() == wanted.keys()
                for name, tensor in wanted.items():
                    assert torch.equal(writer.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name
                assert sums_of(outcome.sends.values(), worker) == writer.digests
            weights = {name: tensor * 3 + 0.01 for name, tensor in weights.items()}  # other scales and other words
            for rank, held in world.held.items():
                moved = shards_of(setup, rank, weights)
                for key, tensor in held.items():
                    tensor.copy_(moved[key])


def test_engines_get_words_of_a_layer_that_predicts_too():
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64}
    held = with_predicting(GLM | sizes, True)
    layout = {"world_size": 2, TP: 2, EP: 2}
    setup = setup_for(layout, {"tensor": 2}, dtype="bfloat16", fp8_block=SMALL, hf_config=held)
    weights = hf_weights(setup, dtype=torch.bfloat16)
    with World(setup, weights) as world:
        outcome = world.sync(1)
    assert outcome.errors() == []
    for worker, writer in outcome.writers.items():
        wanted = expected(setup, worker, whole(weights, quantised_tensors(setup.model), SMALL))
        drafting = {name: tensor for name, tensor in writer.tensors.items() if name.startswith(DRAFTING)}
        assert sum(tensor.dtype is WORDS for tensor in drafting.values()) == 6
        for name, tensor in drafting.items():
            assert torch.equal(tensor.view(torch.uint8), wanted[name].view(torch.uint8)), name
        assert sums_of(outcome.sends.values(), worker) == writer.digests


def counted(monkeypatch, name: str, calls: list) -> None:
    """Writes down where in memory the block lies that each call of a quantising function is given."""
    function = getattr(quantise, name)

    def counting(values, *arguments):
        calls.append((values.data_ptr(), values.shape))
        return function(values, *arguments)

    monkeypatch.setattr(quantise, name, counting)


def test_a_rank_finds_scales_once_for_all_engines_and_makes_words_once_a_box_that_it_packs(monkeypatch):
    """Digests of what was sent make none again."""
    scales, words = [], []
    counted(monkeypatch, "block_scales", scales)
    counted(monkeypatch, "as_fp8", words)
    found = []
    for engines in (1, 2):
        scales.clear(), words.clear()
        setup = setup_for({"world_size": 1}, {"num_engines": engines}, dtype="bfloat16", fp8_block=SMALL)
        with World(setup, hf_weights(setup, dtype=torch.bfloat16)) as world:
            assert world.sync(1).errors() == []
            packed = [copy for message in world.senders[0].plan.sends(0) for copy in message.copies]
        assert len(set(scales)) == len(scales) >= len(quantised_tensors(setup.model))
        assert len(words) == sum(copy.dtype == "float8_e4m3fn" for copy in packed)
        found.append(len(scales))
    assert found[0] == found[1]


def test_a_scale_of_one_worker_that_changes_on_the_way_is_found_and_named():
    setup = setup_for({"world_size": 1}, {"tensor": 2}, dtype="bfloat16", fp8_block=SMALL)
    name = "model.layers.1.self_attn.qkv_proj.weight_scale_inv"

    def spoil(parameter, tensor):
        if parameter == name:
            tensor.view(torch.int32)[0, 0] ^= 1

    with World(setup, hf_weights(setup, dtype=torch.bfloat16)) as world:
        outcome = world.sync(1, spoil=spoil)
    for worker, writer in outcome.writers.items():
        sent = sums_of(outcome.sends.values(), worker)
        assert [n for n, digest in writer.digests.items() if sent[n] != digest] == [name]


def test_adapters_are_merged_and_rounded_before_words_are_made():
    setup = setup_for({"world_size": 2, TP: 2}, {"tensor": 2}, dtype="bfloat16", fp8_block=SMALL)
    weights = hf_weights(setup, dtype=torch.bfloat16)
    merge = WholeFactors(factors_of(setup.model, LORA), LORA)
    exported = {
        name: merged(merge, name, Box.whole(t.shape), t, torch.bfloat16) if merge.adapts(name) else t
        for name, t in weights.items()
    }
    with World(setup, weights, merge=merge) as world:
        outcome = world.sync(1)
    assert outcome.errors() == []
    of_export = whole(exported, quantised_tensors(setup.model), SMALL)
    for worker, writer in outcome.writers.items():
        for name, tensor in expected(setup, worker, of_export).items():
            assert torch.equal(writer.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert sums_of(outcome.sends.values(), worker) == writer.digests


class Seen(TorchDispatchMode):
    """The operations of this thread, with the dtypes that they get: each is a kernel that a device loads."""

    def __init__(self):
        super().__init__()
        self.kernels = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        groups = zip(*args[:2], strict=True) if "_foreach" in str(func) else [tree_leaves((args, kwargs))]
        for group in groups:
            self.kernels.add((str(func), *[a.dtype for a in group if isinstance(a, torch.Tensor)][:2]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("block", [0, SMALL])
@pytest.mark.parametrize("adapted", [False, True])
def test_no_kernel_is_loaded_in_a_sync_that_was_not_before_it(block, adapted):
    setup = setup_for({"world_size": 1}, {"tensor": 2}, dtype="bfloat16", fp8_block=block)
    merge = WholeFactors(factors_of(setup.model, LORA), LORA) if adapted else None
    held = shards_of(setup, 0, hf_weights(setup, dtype=torch.bfloat16))
    slots = SimpleNamespace(
        begin=lambda update, workers: None, is_remote=lambda message: False, lasting=lambda message: True,
        slot=lambda message: torch.empty(message.nbytes, dtype=torch.uint8), post=lambda message: None,
        wait=lambda messages: None, staging_bytes=0,
    )  # fmt: skip
    shards, dtype = (lambda name, chunk: held[name, chunk]), torch.bfloat16
    with Seen() as before:
        Sender(setup.plan(), 0, shards, slots, dtype, merge=merge).warm_up()
    with Seen() as within:
        report = Sender(setup.plan(), 0, shards, slots, dtype, merge=merge).send(1, [0, 1])
    assert report.digests and within.kernels
    assert within.kernels - before.kernels == set()


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_of_words_is_proved_and_carried_out_in_small():
    few = replace(QWEN3_30B, num_layers=2, moe_layers=(0, 1))
    dense = replace(DENSE_MODEL, num_layers=2)
    for model, train, rollout in (
        (few, TrainLayout.build({"world_size": 8, TP: 2, EP: 4}, few), RolloutLayout(2, 2, 1, 2)),
        (dense, TrainLayout.build({"world_size": 4, TP: 4}, dense), RolloutLayout(1, 8)),
    ):
        plan = plan_reshard(model, train, rollout, dialect="cuda", dtype="bfloat16", fp8_block=128)
        verdict = verify(plan)
        assert verdict.fault is None and verdict.proof.copies and verdict.rehearsal.elements
        plain = plan_reshard(model, train, rollout, dialect="cuda", dtype="bfloat16")
        assert plan.hash != plain.hash and 0.5 < plan.bytes_required / plain.bytes_required < 0.9


def test_bytes_of_a_sync_are_a_word_an_element_and_four_bytes_a_block():
    """By hand, of Qwen3-235B on engines of eight devices: attention and experts in words, the rest in bfloat16."""
    m, rollout = QWEN3_235B, RolloutLayout(2, 4, 2, 8)
    plan = plan_reshard(m, TRAIN_235B, rollout, dialect="cuda", dtype="bfloat16", fp8_block=128)
    wide, narrow = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    words = m.num_layers * m.hidden_size * (2 * wide // 4 + 2 * narrow // 4)
    words += m.num_layers * m.num_experts // 8 * 3 * m.moe_intermediate_size * m.hidden_size
    plain = m.num_layers * (m.num_experts * m.hidden_size + 2 * m.hidden_size + 2 * m.head_dim) + m.hidden_size
    plain += 2 * m.vocab_size * m.hidden_size // 4
    assert plan.bytes_required == 16 * (words + words // 128**2 * 4 + 2 * plain)


def test_a_plan_counts_the_seconds_in_which_words_are_made():
    """By hand, of one layer of Qwen3-30B on two ranks that share its experts, at a byte a second."""
    m = replace(QWEN3_30B, num_layers=1, moe_layers=(0,))
    train = TrainLayout.build({"world_size": 2, EP: 2}, m)
    arguments = {"dialect": "cuda", "dtype": "bfloat16"}
    plan = plan_reshard(m, train, RolloutLayout(1, 1), **arguments, fp8_block=128)
    held = m.hidden_size * m.head_dim * 2 * (m.num_attention_heads + m.num_key_value_heads)
    held += m.num_experts // 2 * 3 * m.moe_intermediate_size * m.hidden_size
    summary = reshard_summary(plan, memory_rate=1.0)
    assert summary["seconds_of"]["words"] == 4 * held + 19 * max(summary["sent_bytes"])
    assert summary["predicted_seconds"] == pytest.approx(sum(summary["seconds_of"].values()))
    plain = plan_reshard(m, train, RolloutLayout(1, 1), **arguments)
    assert "words" not in reshard_summary(plain)["seconds_of"]


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 1, 1), (4, 2, 8)])
@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B", "GLM-4.5-Air"])
def test_the_memory_of_an_engine_is_that_of_its_parameters(name, shape):
    model, rollout = known_spec(name), RolloutLayout(1, *shape)
    if model.moe_layers == () and shape[1:] != (1, 1):
        pytest.skip("a dense model has no such engine")
    if name == "Qwen3-30B-A3B" and shape == (4, 1, 1):
        pytest.skip("experts of 768 columns over 4 workers are cut through blocks")
    try:
        held = target_parameters(model, rollout, 0, "cuda", "bfloat16", 128)
    except ConfigError:
        pytest.skip("cut through a block")
    padding = sum(
        prod(p.local_shape) - sum(piece.local_box.volume for piece in p.pieces) for p in held if "embed" in p.name
    )
    nbytes = sum(prod(p.local_shape) * ITEM[p.dtype] for p in held)
    floats = sum(2 * prod(p.local_shape) for p in held if p.dtype == "float32" and not p.name.endswith(SCALES))
    assert padding >= 0 and worker_weight_bytes(model, rollout, 2, 128) == nbytes - floats
    memory = partial(engine_memory, model, rollout, 80 * 10**9)
    assert memory(fp8_block=128).weights < 0.6 * memory().weights
    assert memory(fp8_block=128).cache_tokens > memory().cache_tokens


def test_scales_lie_behind_their_words_in_vllms_module_order_and_shapes():
    held = {p.name: p for p in target_parameters(QWEN3_30B, RolloutLayout(1, 2, 1, 2), 1, "cuda", "bfloat16", 128)}
    experts = "model.layers.3.mlp.experts.routed_experts."
    assert held[f"{experts}w13_weight"].dtype == "float8_e4m3fn"
    assert held[f"{experts}w13_weight_scale_inv"].local_shape == (64, 12, 16)
    assert held[f"{experts}w2_weight_scale_inv"].local_shape == (64, 16, 6)
    attention = "model.layers.3.self_attn."
    assert held[f"{attention}qkv_proj.weight_scale_inv"].local_shape == (20, 16)
    assert held[f"{attention}o_proj.weight_scale_inv"].local_shape == (16, 16)
    assert all(p.dtype == "bfloat16" for n, p in held.items() if "embed" in n or "norm" in n or "gate." in n)
    assert {p.dtype for n, p in held.items() if n.endswith(SCALES)} == {"float32"}


# --- what has words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B", "GLM-4.5-Air"])
def test_linear_layers_and_experts_have_words_and_routers_and_the_vocabulary_have_not(name):
    model = known_spec(name)
    words = quantised_tensors(model)
    kept = {spec.name for spec in tensor_specs(model)} - words
    ends = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
    assert all(n.endswith((*ends, "gate_proj.weight", "up_proj.weight", "down_proj.weight")) for n in words)
    assert not any("proj.weight" in n for n in kept)
    specs = with_scales(model, 128)
    assert len(specs) == len(tensor_specs(model)) + len(words) and with_scales(model, 0) == tensor_specs(model)


def test_vllm_is_told_of_routers_that_they_stay():
    told = engine_quantisation(QWEN3_30B, 128)
    assert told["modules_to_not_convert"] == [f"model.layers.{n}.mlp.gate" for n in range(48)]
    assert told["weight_block_size"] == [128, 128] and told["quant_method"] == "fp8"
    assert engine_quantisation(DENSE_MODEL, 128)["modules_to_not_convert"] == []


def test_no_family_has_a_cut_matrix_that_would_be_left_out_unnoticed():
    for name in ("Qwen3-30B-A3B", "GLM-4.5-Air"):
        for kind, _ in weight_map(known_spec(name)).layers:
            for weight in kind.hf:
                matrix = all(part.matmul for part in weight.parts)
                assert is_quantised(weight) == (matrix and weight.split != "copied")


# --- engines ----------------------------------------------------------------------------------------------------------


def test_engines_start_without_weights_and_know_their_words(tmp_path):
    write_model(tmp_path / "model")
    given = [f"model.path={tmp_path / 'model'}", *BF16, "rollout.quantization_block=16", "reshard.path=slow"]
    model = load_model_spec(tmp_path / "model")
    settings = requests.engine_settings(load_config(TINY, overrides=given).config, model, 0, Path("logs"))
    assert settings.awaits_weights
    told = settings.arguments["hf_overrides"]["quantization_config"]
    assert told["weight_block_size"] == [16, 16] and "quantization" not in settings.arguments
    shapes = dict(settings.expected)
    assert shapes["model.layers.0.self_attn.k_proj.weight_scale_inv"] == (2, 4)
    plain = requests.engine_settings(load_config(TINY, overrides=given[:1]).config, model, 0, Path("logs"))
    assert not plain.awaits_weights and "hf_overrides" not in plain.arguments
    assert not any(name.endswith(SCALES) for name, _ in plain.expected)
    device = [*given[:1], *GPU]
    for words, backend in ((BF16, "cutlass"), ((), None)):
        config = load_config(TINY, overrides=[*device, *words]).config
        there = requests.engine_settings(config, model, 0, Path("logs")).arguments
        assert there.get("linear_backend") == backend and "linear_backend" not in settings.arguments


def test_numbers_that_vllms_loader_is_asked_with_are_exact_in_words_and_tell_all_places_apart():
    words = TargetParameter("a.weight", "a", (300, 20), "float8_e4m3fn", ())
    form = handshake._format([words, replace(words, name="a.weight_scale_inv", dtype="float32")])
    passes = list(handshake._passes(["x", "y"], {"x": (300, 20), "y": (5, 2)}, form))
    for numbered in passes:
        assert all(torch.equal(t.to(WORDS).to(t.dtype), t) for t in numbered.values())
    places = torch.stack([numbered[name] for numbered in passes for name in ("x",)])
    assert places.flatten(1).unique(dim=1).shape[1] == 300 * 20
    assert any(not torch.equal(numbered["x"][0, 0], numbered["y"][0, 0]) for numbered in passes)


def test_kernels_that_would_hold_other_words_are_refused_by_name():
    handshake.check_fp8_backend("CutlassFp8BlockScaledMMKernel")
    said = "is MarlinFP8ScaledMMLinearKernel, which keeps FP8 values or scales"
    with pytest.raises(handshake.HandshakeError, match=said):
        handshake.check_fp8_backend("MarlinFP8ScaledMMLinearKernel")


# --- configurations ---------------------------------------------------------------------------------------------------


def test_the_tiny_preset_is_legal_in_fp8_with_blocks_of_a_head():
    assert broken(*ON) == []


def test_experts_that_an_engine_cannot_spread_are_a_violation_among_others():
    found = {violation.field for violation in broken(*ON, "rollout.expert_parallel_size=2", "trainer.save_freq=0")}
    assert found == {"rollout.expert_parallel_size", "trainer.save_freq"}


def test_the_gap_is_corrected_where_nothing_is_said_of_it():
    resolved = load_config(TINY, overrides=ON)
    assert resolved.config.algorithm.rollout_correction.level == "token"
    assert resolved.where("algorithm.rollout_correction.level") == "rollout.quantization"
    assert not any("without algorithm.rollout_correction" in note for note in notes(resolved, TINY_MODEL))
    assert load_config(TINY).config.algorithm.rollout_correction.level is None
    kept = load_config(TINY, overrides=[*ON, "algorithm.rollout_correction.level=sequence"])
    assert kept.config.algorithm.rollout_correction.level == "sequence"


@pytest.mark.parametrize(
    ("said", "is_noted"),
    [("algorithm.rollout_correction.level=null", True), ("algorithm.anchor=rollout", False)],  # which weighs it itself
)
def test_a_correction_that_is_off_is_left_off_and_noted(said, is_noted, tmp_path):
    resolved = load_config(TINY, overrides=[*ON, said])
    assert resolved.config.algorithm.rollout_correction.level is None and violations(resolved, TINY_MODEL) == []
    assert any("without algorithm.rollout_correction" in note for note in notes(resolved, TINY_MODEL)) == is_noted
    (tmp_path / "again.yaml").write_text(resolved.to_yaml())
    assert load_config(tmp_path / "again.yaml").config == resolved.config


def test_advice_on_a_gap_knows_that_words_are_rounded():
    config = load_config(TINY, overrides=ON).config
    said = MismatchWatch(config.algorithm, config.rollout).advice({MISMATCH: 0.5})
    assert "weights rounded to fp8" in said and "rollout.dtype" not in said
    plain = load_config(TINY).config
    assert "rollout.dtype" in MismatchWatch(plain.algorithm, plain.rollout).advice({MISMATCH: 0.5})


def test_what_a_cpu_computes_otherwise_is_noted():
    assert any(
        "compute with the products in rollout.dtype" in note
        for note in notes(load_config(TINY, overrides=ON), TINY_MODEL)
    )


@pytest.mark.parametrize(
    ("overrides", "field", "said"),
    [
        (["model.dtype=float32"], "model.dtype", "must be bfloat16"),
        (["rollout.dtype=float32"], "rollout.dtype", "must be bfloat16"),
        (["rollout.engine_kwargs.vllm.load_format=auto"], "rollout.engine_kwargs.vllm.load_format", "left out"),
        (["rollout.engine_kwargs.vllm.hf_overrides={}"], "rollout.engine_kwargs.vllm.hf_overrides", "left out"),
        (["rollout.quantization_block=64"], "rollout.quantization", "needs cuts between blocks of 64 x 64"),
    ],
)
def test_what_cannot_go_with_words_is_refused_by_one_sentence(overrides, field, said):
    violation = only(*ON, *overrides)
    assert violation.field == field and said in str(violation)


def test_a_block_without_quantisation_is_refused():
    assert only("rollout.quantization_block=32").field == "rollout.quantization_block"


def test_devices_have_blocks_of_128_and_npus_none():
    dense = partial(broken, model=DENSE_MODEL)
    found = {v.field for v in dense(*ON, *GPU)}
    assert "rollout.quantization_block" in found
    assert "rollout.quantization_block" not in {v.field for v in dense(*BF16, *GPU)}
    npu = [v for v in dense(*BF16, "cluster.device=npu") if v.field == "rollout.quantization"]
    assert ["must be null on npu" in str(v) for v in npu] == [True]
    old = [v for v in dense(*BF16, *GPU, "cluster.versions={vllm: 0.23.0}") if v.field == "rollout.quantization"]
    assert any("needs vLLM 0.32" in str(v) for v in old)


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Qwen3-Next-80B-A3B"])
def test_families_without_such_engines_are_refused(name):
    found = [v for v in broken(*BF16, *GPU, model=known_spec(name)) if v.field == "rollout.quantization"]
    assert len(found) == 1 and "must be null for a model of the" in str(found[0])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        # 768 columns of an expert over 4: 192 each
        (["rollout.tensor_model_parallel_size=4"], "down_proj.weight is cut to rows 0 to 2048 and columns 0 to 192"),
        (["actor.layout.world_size=8", f"actor.layout.{EP}=2", f"actor.layout.{ETP}=4"], "on a rank of actor.layout"),
    ],
)
def test_a_layout_that_cuts_a_block_is_refused_by_the_tensor_and_the_side(overrides, said):
    found = [v for v in broken(*BF16, *GPU, *overrides, model=QWEN3_30B) if v.field == "rollout.quantization"]
    assert len(found) == 1 and "needs cuts between blocks of 128 x 128" in str(found[0])
    assert said in str(found[0]) or "gate_proj" in str(found[0])


def test_a_plan_refuses_what_validate_would_have_refused():
    train = TrainLayout.build({"world_size": 8, TP: 2, ETP: 4, EP: 2}, QWEN3_30B)
    for layouts in ((train, RolloutLayout(1, 2, 1, 2)), (TRAIN_235B, RolloutLayout(1, 16))):
        model = QWEN3_30B if layouts[0] is train else QWEN3_235B
        with pytest.raises(ConfigError, match=r"rollout\.quantization: .* is cut to rows"):
            plan_reshard(model, *layouts, dialect="cuda", dtype="bfloat16", fp8_block=128)


CUT_RANKS = ["actor.layout.world_size=8", f"actor.layout.{EP}=2", f"actor.layout.{ETP}=4"]


def test_ranks_that_join_whole_tensors_may_cut_blocks_and_workers_never(monkeypatch):
    slow = [*BF16, *GPU, *CUT_RANKS, "cluster.nnodes=2", "reshard.path=slow"]
    assert [v for v in broken(*slow, model=QWEN3_30B) if v.field == "rollout.quantization"] == []
    workers = broken(*slow, "rollout.tensor_model_parallel_size=4", model=QWEN3_30B)
    assert ["a worker of an engine" in str(v) for v in workers if v.field == "rollout.quantization"] == [True]
    few = replace(QWEN3_30B, num_layers=1, moe_layers=(0,))
    monkeypatch.setattr("mrl.plan.run_plan.plan_reshard", lambda *_, fp8_block, **__: fp8_block)
    for overrides, block in ((slow, 0), ([*BF16, *GPU, "reshard.path=slow"], 128), ([*BF16, *GPU], 128)):
        config = load_config(TINY, overrides=overrides).config
        assert reshard_plan_of(config, few, TrainLayout.build(config.actor.layout.model_dump(), few)) == block


def test_a_search_lists_no_layout_that_cuts_a_block():
    preset = TINY.parents[1] / "qwen3-30b-a3b" / "h100-1x8.yaml"
    plain = load_config(preset).config
    config = load_config(preset, overrides=["rollout.quantization=fp8"]).config
    device = device_for(config)
    problems = [search_problem(each, QWEN3_30B, device, 8, 8, MEGATRON) for each in (plain, config)]
    every, whole = ({layout: degrees for degrees, layout in legal_layouts(problem)} for problem in problems)

    def is_refused(degrees: dict) -> bool:
        found = violations(ResolvedConfig(run_with(config, degrees, Recompute()), {}), QWEN3_30B)
        return any(violation.field == "rollout.quantization" for violation in found)

    assert whole and whole.keys() == {layout for layout, degrees in every.items() if not is_refused(degrees)}
    assert len(whole) < len(every)
    report = search_report(config, problems[1], 0, result=SearchResult((), 0, Counter()))
    assert [line.partition(":")[0] for line in report["engines"]] == ["engine of 1", "engine of 2"]


def test_engines_are_found_for_a_configuration_whose_own_ranks_cut_blocks(monkeypatch):
    preset = TINY.parents[1] / "qwen3-30b-a3b" / "h100-1x8.yaml"
    config = load_config(preset, overrides=["rollout.quantization=fp8", f"actor.layout.{ETP}=4"]).config
    problem = search_problem(config, QWEN3_30B, device_for(config), 8, 8, MEGATRON)
    for name, few in (("_SAMPLES", (1,)), ("_SHARES", (0.7,)), ("_SEQUENCES", (512,)), ("_LAYOUTS", 2)):
        monkeypatch.setattr(run_search, name, few)
    best = run_search.fastest_run(config, problem, search(problem))
    assert best is not None and best.config.rollout.quantization == "fp8"


@pytest.mark.parametrize(("value", "carried"), [("fp8", "fp8"), ("null", None)])
def test_verls_key_is_carried_over(value, carried):
    key = "actor_rollout_ref.rollout.quantization"
    given = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=Qwen/Qwen3-8B", f"{key}={value}"]
    found = import_overrides(given)
    assert found.values.get("rollout.quantization") == carried
    assert not [entry for entry in found.of("unsupported") if entry.key == key]


def test_a_rehearsal_has_blocks_that_fit_its_small_model(tmp_path):
    given = [*BF16, *GPU, "rollout.num_engines=1", "rollout.tensor_model_parallel_size=2"]
    rehearsal = compose(load_config(TINY, overrides=given).config, WorkFolder(tmp_path), cpus=2)
    assert rehearsal.config.rollout.fp8_block == 32
    (change,) = [c for c in rehearsal.changes if c.key == "rollout.quantization_block"]
    assert change.was == 128 and "small model" in change.why
    plain = compose(load_config(TINY).config, WorkFolder(tmp_path), cpus=2)
    assert not [c for c in plain.changes if c.key.startswith("rollout.quantization")]
