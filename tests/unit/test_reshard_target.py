"""What vLLM workers hold: names, shapes and slices worked out by hand from vLLM's layers."""

from dataclasses import replace

import pytest
from reshard_cases import QWEN3_30B, QWEN3_235B, bytes_of_a_worker, random_pairs
from test_reshard_source import MODELS

from mrl.errors import ConfigError
from mrl.model import ModelSpec, tensor_specs
from mrl.model.boxes import Box, cover_fault
from mrl.model.layout import RolloutLayout
from mrl.model.vllm_parameters import TargetParameter, target_parameters


def parameters(
    model: ModelSpec, rollout: RolloutLayout, worker: int, dialect: str = "cuda"
) -> dict[str, TargetParameter]:
    return {p.name: p for p in target_parameters(model, rollout, worker, dialect, "bfloat16")}


def pieces(parameter: TargetParameter) -> list[tuple]:
    return [
        (p.hf_name.removeprefix("model.layers.0."), p.hf_box.ranges, p.local_box.ranges, p.axes)
        for p in parameter.pieces
    ]


def test_modules_come_in_vllms_order():
    names = [
        p.name.removeprefix("model.")
        for p in target_parameters(MODELS["qwen2_moe"], RolloutLayout(), 0, "cpu", "float32")
    ]
    assert names[:14] == [
        "embed_tokens.weight",
        "layers.0.self_attn.qkv_proj.weight",
        "layers.0.self_attn.qkv_proj.bias",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.mlp.gate.weight",
        "layers.0.mlp.shared_expert_gate.weight",
        "layers.0.mlp.shared_expert.gate_up_proj.weight",
        "layers.0.mlp.shared_expert.down_proj.weight",
        "layers.0.mlp.experts.routed_experts.w13_weight",
        "layers.0.mlp.experts.routed_experts.w2_weight",
        "layers.0.input_layernorm.weight",
        "layers.0.post_attention_layernorm.weight",
        "layers.1.self_attn.qkv_proj.weight",
        "layers.1.self_attn.qkv_proj.bias",
    ]
    assert names[-2:] == ["norm.weight", "lm_head.weight"]


def test_module_is_what_is_processed_as_one():
    held = parameters(MODELS["qwen2_moe"], RolloutLayout(), 0)
    experts = "model.layers.0.mlp.experts.routed_experts"
    assert held[f"{experts}.w13_weight"].module == held[f"{experts}.w2_weight"].module == experts
    assert held["lm_head.weight"].module == "lm_head"


def test_heads_are_divided_and_key_value_heads_repeated():
    """8 query and 2 key/value heads of 4 rows over 4 tensor ranks: rank 3 has queries 6, 7 and, as rank 2,
    key/value head 1.
    """
    name = "model.layers.0.self_attn.qkv_proj.weight"
    third, second = (parameters(MODELS["qwen3_moe"], RolloutLayout(1, 4), worker)[name] for worker in (3, 2))
    assert third.local_shape == (16, 8)
    assert pieces(third) == [
        ("self_attn.q_proj.weight", ((24, 32), (0, 8)), ((0, 8), (0, 8)), (0, 1)),
        ("self_attn.k_proj.weight", ((4, 8), (0, 8)), ((8, 12), (0, 8)), (0, 1)),
        ("self_attn.v_proj.weight", ((4, 8), (0, 8)), ((12, 16), (0, 8)), (0, 1)),
    ]
    assert pieces(second)[1:] == pieces(third)[1:]


def test_sliced_experts_have_gate_rows_then_up_rows_of_their_worker():
    """12 rows over 2 x 3 workers: data-parallel rank 1, tensor rank 1 is the fourth
    (number 3) of six and has rows 6 and 7.
    """
    held = parameters(MODELS["qwen3_moe"], RolloutLayout(2, 2, 3), worker=6 + 3)
    w13, w2 = (held[f"model.layers.0.mlp.experts.routed_experts.{leaf}_weight"] for leaf in ("w13", "w2"))
    assert (w13.local_shape, w2.local_shape) == ((8, 4, 8), (8, 8, 2))
    assert pieces(w13)[4:6] == [
        ("mlp.experts.2.gate_proj.weight", ((6, 8), (0, 8)), ((2, 3), (0, 2), (0, 8)), (1, 2)),
        ("mlp.experts.2.up_proj.weight", ((6, 8), (0, 8)), ((2, 3), (2, 4), (0, 8)), (1, 2)),
    ]
    assert pieces(w2)[2] == ("mlp.experts.2.down_proj.weight", ((0, 8), (6, 8)), ((2, 3), (0, 8), (0, 2)), (1, 2))


def test_ascend_stores_experts_transposed():
    held = parameters(MODELS["qwen3_moe"], RolloutLayout(1, 2, 1, 2), 1, "npu")
    w13, w2 = (held[f"model.layers.0.mlp.experts.routed_experts.{leaf}_weight"] for leaf in ("w13", "w2"))
    assert (w13.local_shape, w2.local_shape) == ((4, 8, 24), (4, 12, 8))
    assert pieces(w13)[3] == ("mlp.experts.5.up_proj.weight", ((0, 12), (0, 8)), ((1, 2), (0, 8), (12, 24)), (2, 1))
    assert pieces(w2)[1] == ("mlp.experts.5.down_proj.weight", ((0, 8), (0, 12)), ((1, 2), (0, 12), (0, 8)), (2, 1))


def test_spread_experts_that_cannot_be_divided_go_to_the_first_workers():
    held = [parameters(MODELS["qwen3_moe"], RolloutLayout(1, 1, 3, 3), worker) for worker in range(3)]
    w2 = [one["model.layers.0.mlp.experts.routed_experts.w2_weight"] for one in held]
    assert [[p.hf_name.split(".")[5] for p in one.pieces] for one in w2] == [
        ["0", "1", "2"],
        ["3", "4", "5"],
        ["6", "7"],
    ]


def test_vocabulary_is_padded_to_64_and_ranks_may_hold_padding_only():
    """22 words, 64 rows, 16 a rank: the first has 16 words, the second 6, the others none."""
    held = [parameters(MODELS["qwen3"], RolloutLayout(1, 4), worker)["lm_head.weight"] for worker in range(4)]
    assert {one.local_shape for one in held} == {(16, 8)}
    assert [[p.hf_box.ranges[0] for p in one.pieces] for one in held] == [[(0, 16)], [(16, 22)], [], []]


def test_boundaries_of_the_published_vocabulary():
    """151936 rows are a multiple of 64 already: 37984, 18992 and 9496 rows a rank at TP 4, 8 and 16."""
    model = replace(QWEN3_30B, num_layers=1)
    for tensor, rows in ((4, 37984), (8, 18992), (16, 9496)):
        last = parameters(model, RolloutLayout(1, tensor), tensor - 1)["model.embed_tokens.weight"]
        assert last.local_shape == (rows, 2048)
        assert last.pieces[0].hf_box.ranges[0] == (151936 - rows, 151936)


def test_tied_embeddings_are_one_parameter():
    assert "lm_head.weight" not in parameters(MODELS["qwen2"], RolloutLayout(), 0)


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_a_parameter_are_disjoint_and_all_workers_of_an_engine_have_everything(seed):
    for pair in random_pairs(seed, 8):
        boxes: dict[str, set[Box]] = {spec.name: set() for spec in tensor_specs(pair.model)}
        for worker in range(pair.rollout.workers_per_engine):
            for parameter in target_parameters(pair.model, pair.rollout, worker, pair.dialect, pair.dtype):
                fault = cover_fault(Box.whole(parameter.local_shape), [p.local_box for p in parameter.pieces])
                assert fault is None or (
                    "not covered" in fault and parameter.module.endswith(("embed_tokens", "lm_head"))
                )
                for piece in parameter.pieces:
                    boxes[piece.hf_name].add(piece.hf_box)
        for spec in tensor_specs(pair.model):
            assert cover_fault(Box.whole(spec.shape), sorted(boxes[spec.name])) is None, (spec.name, pair.rollout)


@pytest.mark.parametrize(
    ("model", "rollout", "gigabytes"),
    [
        (QWEN3_30B, RolloutLayout(1, 16), 3.88),
        (QWEN3_30B, RolloutLayout(1, 4, 2, 8), 8.04),
        (QWEN3_30B, RolloutLayout(1, 8, 4, 32), 2.24),
        (QWEN3_235B, RolloutLayout(1, 4, 32, 128), 7.62),
    ],
)
def test_bytes_of_a_worker_are_those_of_the_closed_formula(model, rollout, gigabytes):
    """R of the table of lower bounds, in GB."""
    held = sum(p.hf_box.volume for parameter in parameters(model, rollout, 0).values() for p in parameter.pieces) * 2
    assert held == bytes_of_a_worker(model, rollout)
    assert round(held / 1e9, 2) == gigabytes


@pytest.mark.parametrize(
    ("name", "rollout", "what"),
    [
        ("qwen3", RolloutLayout(1, 3), "padded vocabulary = 64 cannot be divided over 3 workers"),
        ("qwen3_moe", RolloutLayout(1, 8), "moe_intermediate_size = 12 cannot be divided over 8 workers"),
        ("qwen3_moe", RolloutLayout(1, 2, 5, 10), "8 experts cannot be spread over 10 workers"),
    ],
)
def test_layouts_that_vllm_could_not_have_are_refused(name, rollout, what):
    with pytest.raises(ConfigError, match=what):
        target_parameters(MODELS[name], rollout, 0, "cuda", "bfloat16")
