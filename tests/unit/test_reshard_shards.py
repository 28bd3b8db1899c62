"""What Megatron ranks hold: every checkpoint element, once but for declared replicas, where Megatron's split puts it.
What vLLM workers hold: names, shapes and slices worked out by hand from vLLM's layers.
"""

import warnings
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from reshard_cases import (
    MODELS,
    QWEN3_30B,
    QWEN3_235B,
    assembled,
    bytes_of_a_worker,
    random_layouts,
    random_pairs,
    tagged,
)
from seldom import seldom

from mrl.errors import ConfigError
from mrl.model import ModelSpec, tensor_specs
from mrl.model.boxes import Box, cover_fault
from mrl.model.layout import RolloutLayout, TrainLayout, padded_vocab_size
from mrl.model.megatron_shards import Shard, source_shards
from mrl.model.vllm_parameters import TargetParameter, target_parameters


def all_shards(model: ModelSpec, layout: TrainLayout) -> list[tuple[int, Shard]]:
    return [(rank, shard) for rank in range(layout.world_size) for shard in source_shards(model, layout, rank)]


def is_vocabulary(shard: Shard) -> bool:
    return shard.megatron_name in ("embedding.word_embeddings.weight", "output_layer.weight")


@pytest.mark.parametrize("seed", seldom(range(10), *range(3)))
def test_primaries_hold_every_checkpoint_element_exactly_once(seed):
    for model, layout in random_layouts(seed, 20):
        boxes: dict[str, list[Box]] = {t.name: [] for t in tensor_specs(model)}
        for rank, shard in all_shards(model, layout):
            if rank == shard.primary:
                for piece in shard.pieces:
                    boxes[piece.hf_name].append(piece.hf_box)
        for tensor in tensor_specs(model):
            assert cover_fault(Box.whole(tensor.shape), boxes[tensor.name]) is None, (tensor.name, layout)


@pytest.mark.parametrize("seed", range(10))
def test_local_parameters_are_filled_exactly_once_but_for_vocabulary_padding(seed):
    for model, layout in random_layouts(100 + seed, 8):
        for _, shard in all_shards(model, layout):
            boxes = [piece.local_box for piece in shard.pieces]
            if is_vocabulary(shard):
                held = sum(box.shape[0] for box in boxes)
                assert cover_fault(Box(((0, held), (0, 8))), boxes) is None if held else not boxes
            else:
                assert cover_fault(Box.whole(shard.local_shape), boxes) is None, shard


def test_padding_rows_are_those_beyond_the_vocabulary():
    model = MODELS["qwen3"]  # 22 words; 8 tensor ranks: 24 rows, the last rank holds one word and two rows of padding
    layout = TrainLayout.build({"world_size": 8, "tensor_model_parallel_size": 8}, model)
    held = []
    for rank in range(8):
        shard = next(s for s in source_shards(model, layout, rank) if s.megatron_name == "output_layer.weight")
        assert shard.local_shape == (3, 8)
        held.append([(p.hf_box.ranges[0], p.local_box.ranges[0]) for p in shard.pieces])
    assert held == [[((3 * r, min(3 * r + 3, 22)), (0, min(3, 22 - 3 * r)))] for r in range(8)]


@pytest.mark.parametrize("seed", range(5))
def test_declared_replicas_are_exactly_the_ranks_that_hold_the_same(seed):
    for model, layout in random_layouts(200 + seed, 10):
        holders: dict[tuple, list[int]] = {}
        shards = [(rank, shard) for rank, shard in all_shards(model, layout) if shard.pieces]
        for rank, shard in shards:
            holders.setdefault(shard.pieces, []).append(rank)
        for rank, shard in shards:
            assert rank in shard.replicas
            assert list(shard.replicas) == sorted(holders[shard.pieces]), (shard.megatron_name, layout)


def test_tied_embeddings_stand_again_on_the_last_stage_and_nowhere_else():
    model = MODELS["qwen2"]
    one = TrainLayout.build({"world_size": 2, "tensor_model_parallel_size": 2}, model)
    assert not [s for _, s in all_shards(model, one) if s.megatron_name == "output_layer.weight"]
    two = TrainLayout.build(
        {"world_size": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, model
    )
    copies = [(rank, s) for rank, s in all_shards(model, two) if s.megatron_name == "output_layer.weight"]
    assert [(rank, s.replicas) for rank, s in copies] == [(2, (0, 2)), (3, (1, 3))]
    assert all(p.hf_name == "model.embed_tokens.weight" for _, s in copies for p in s.pieces)


# Megatron's split, written anew in numpy from its definition: each rank of a column-parallel layer has equal
# consecutive rows of the fused weight; fused qkv interleaves by key/value head; a gated layer is cut before its two
# halves are stacked.


def megatron_parameter(model: ModelSpec, layout: TrainLayout, rank: int, name: str, layer: int, hf: dict) -> np.ndarray:
    """The local parameter `name` (of global layer `layer`) that Megatron would hold."""
    tp = layout.dense_coords(rank).tp
    at = f"model.layers.{layer}."
    if "linear_qkv" in name and "layer_norm" not in name:
        fused = fused_qkv(model, *(hf[f"{at}self_attn.{part}_proj.{name.rsplit('.', 1)[1]}"] for part in "qkv"))
        return np.split(fused, layout.tensor)[tp]
    if ".experts." in name:
        coords = layout.expert_coords(rank)
        expert = coords.ep * (model.num_experts // layout.expert) + int(name.rsplit("weight", 1)[1])
        return gated(hf, f"{at}mlp.experts.{expert}.", name, layout.expert_tensor, coords.etp)
    if "linear_fc" in name and "layer_norm" not in name:
        of_family = "shared_expert." if model.family.startswith("qwen") else "shared_experts."
        shared = of_family if "shared_experts" in name else ""
        return gated(hf, f"{at}mlp.{shared}", name, layout.tensor, tp)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tied = model.tie_word_embeddings or name.startswith("embedding")
        words = hf["model.embed_tokens.weight" if tied else "lm_head.weight"]
        padding = np.zeros(
            (padded_vocab_size(model.vocab_size, layout.tensor) - len(words), model.hidden_size), words.dtype
        )
        return np.split(np.concatenate([words, padding]), layout.tensor)[tp]
    if f"{at}linear_attn.norm.weight" in hf and ".self_attention." in name:
        return delta_parameter(model, hf, f"{at}linear_attn.", name.split(".self_attention.")[1], layout.tensor, tp)
    if name.endswith("linear_proj.weight"):
        return np.split(hf[f"{at}self_attn.o_proj.weight"], layout.tensor, axis=1)[tp]
    up = {"linear_q_proj": "q_proj", "linear_q_up_proj": "q_b_proj", "linear_kv_up_proj": "kv_b_proj"}
    if name.endswith("proj.weight") and (cut := up.get(name.split(".")[-2])):
        return np.split(hf[f"{at}self_attn.{cut}.weight"], layout.tensor)[tp]
    return next(hf[source] for suffix, source in copied_sources(at).items() if name.endswith(suffix))


def copied_sources(at: str) -> dict[str, str]:
    """Names in the checkpoint of what every rank holds whole, by the ends of Megatron's names; `at` a layer."""
    return {
        "decoder.final_layernorm.weight": "model.norm.weight",
        ".input_layernorm.weight": f"{at}input_layernorm.weight",
        "linear_q_down_proj.weight": f"{at}self_attn.q_a_proj.weight",
        "linear_q_up_proj.layer_norm_weight": f"{at}self_attn.q_a_layernorm.weight",
        "linear_kv_down_proj.weight": f"{at}self_attn.kv_a_proj_with_mqa.weight",
        "linear_kv_up_proj.layer_norm_weight": f"{at}self_attn.kv_a_layernorm.weight",
        "linear_qkv.layer_norm_weight": f"{at}input_layernorm.weight",
        "linear_fc1.layer_norm_weight": f"{at}post_attention_layernorm.weight",
        "pre_mlp_layernorm.weight": f"{at}post_attention_layernorm.weight",
        "q_layernorm.weight": f"{at}self_attn.q_norm.weight",
        "k_layernorm.weight": f"{at}self_attn.k_norm.weight",
        "router.weight": f"{at}mlp.gate.weight",
        "router.expert_bias": f"{at}mlp.gate.e_score_correction_bias",
        "shared_experts.gate_weight": f"{at}mlp.shared_expert_gate.weight",
    }


def fused_qkv(model: ModelSpec, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Weights or biases of attention, interleaved by key/value head."""
    kv = model.num_key_value_heads
    if model.attn_output_gate:  # behind each query its gate; in Megatron behind the queries of a group their gates
        by_head = q.reshape(kv, model.num_attention_heads // kv, 2, model.head_dim, -1)
        q = by_head.transpose(0, 2, 1, 3, 4).reshape(q.shape)
    per_group = [np.concatenate([a, b, c]) for a, b, c in zip(*(np.split(x, kv) for x in (q, k, v)), strict=True)]
    return np.concatenate(per_group)


def gated(hf: dict, prefix: str, name: str, parts: int, index: int) -> np.ndarray:
    if "linear_fc2" in name:
        return np.split(hf[f"{prefix}down_proj.weight"], parts, axis=1)[index]
    return np.concatenate([np.split(hf[f"{prefix}{half}_proj.weight"], parts)[index] for half in ("gate", "up")])


def global_layer(layout: TrainLayout, rank: int, shard: Shard) -> int:
    if not shard.megatron_name.startswith("decoder.layers."):
        return -1
    return layout.stage_layers(layout.dense_coords(rank).pp, shard.vp_chunk)[int(shard.megatron_name.split(".")[2])]


@pytest.mark.parametrize("seed", range(6))
def test_tagged_parameters_are_what_megatrons_split_gives(seed):
    for model, layout in random_layouts(300 + seed, 6):
        hf = tagged(model)
        for rank, shard in all_shards(model, layout):
            if rank != shard.primary:
                continue
            layer = global_layer(layout, rank, shard)
            theirs = megatron_parameter(model, layout, rank, shard.megatron_name, layer, hf)
            np.testing.assert_array_equal(
                assembled(shard, hf), theirs, err_msg=f"{shard.megatron_name} on {rank} of {layout}"
            )


def delta_parameter(model: ModelSpec, hf: dict, at: str, name: str, tensor: int, tp: int) -> np.ndarray:
    """Of gated delta attention: heads one after the other, and of the convolution queries, keys and values apart."""
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    if model.linear_by_kind and name.startswith("in_proj"):  # each kind cut by itself
        if name == "in_proj_ba.weight":
            kinds = [hf[f"{at}in_proj_b.weight"], hf[f"{at}in_proj_a.weight"]]
        else:
            kinds = [*np.split(hf[f"{at}in_proj_qkv.weight"], [keys, 2 * keys]), hf[f"{at}in_proj_z.weight"]]
        return np.concatenate([np.split(kind, tensor)[tp] for kind in kinds])
    whole = hf[at + name]
    if name == "norm.weight":
        return whole
    if name == "out_proj.weight":
        return np.split(whole, tensor, axis=1)[tp]
    if name == "conv1d.weight":
        return np.concatenate([np.split(part, tensor)[tp] for part in np.split(whole, [keys, 2 * keys])])
    return np.split(whole, tensor)[tp]


@cache
def bridge_of(model: ModelSpec, ours: bool):
    """mbridge's bridge of a family, or ours in its registry, without its Megatron state:
    only its name map and its pure weight conversions are used.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mbridge.models.deepseek_v3 import DeepseekV3Bridge
        from mbridge.models.glm4moe import GLM4MoEBridge
        from mbridge.models.qwen2 import Qwen2Bridge
        from mbridge.models.qwen2moe import Qwen2MoEBridge
        from mbridge.models.qwen3 import Qwen3Bridge
        from mbridge.models.qwen3moe import Qwen3MoEBridge

        from mrl.rank.mapped_bridge import MappedBridge, bridge_config
    classes = {
        "qwen2": Qwen2Bridge,
        "qwen3": Qwen3Bridge,
        "qwen2_moe": Qwen2MoEBridge,
        "qwen3_moe": Qwen3MoEBridge,
        "glm4_moe": GLM4MoEBridge,
        "deepseek_v3": DeepseekV3Bridge,
    }
    bridge = object.__new__(MappedBridge if ours else classes[model.family])
    bridge.hf_config = bridge_config(model)
    bridge.config = SimpleNamespace(gated_linear_unit=True, mtp_num_layers=None)
    bridge.make_vocab_size_divisible_by, bridge.dtype = 1, None
    bridge.vocab_size = bridge.padded_vocab_size = model.vocab_size
    return bridge


OURS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # which mbridge has not
OF_BOTH = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3")


@pytest.mark.parametrize(("family", "ours"), [*product(OF_BOTH, (False, True)), *product(OURS, (True,))])
def test_names_and_contents_are_mbridges_and_those_of_our_bridge(family, ours):
    model = MODELS[family]
    import torch

    degrees = {"world_size": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    if model.is_moe:
        degrees |= {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    layout, bridge = TrainLayout.build(degrees, model), bridge_of(model, ours)
    hf = tagged(model)
    for rank, shard in all_shards(model, layout):
        name = global_name(model, layout, rank, shard)
        sources = bridge._weight_name_mapping_mcore_to_hf(name)
        if name == "output_layer.weight" and model.tie_word_embeddings:
            sources = ["model.embed_tokens.weight"]
        assert set(sources) == {p.hf_name for p in shard.pieces}
        whole = bridge._weight_to_mcore_format(name, [torch.from_numpy(hf[s]) for s in sources])
        expert, dense = layout.expert_coords(rank), layout.dense_coords(rank)
        parts, index = (layout.expert_tensor, expert.etp) if shard.is_expert else (layout.tensor, dense.tp)
        theirs = bridge._weight_split_across_tp(name, whole, torch.empty(shard.local_shape), parts)[index]
        np.testing.assert_array_equal(assembled(shard, hf), theirs.numpy(), err_msg=f"{name} on rank {rank}")


def test_a_layers_number_in_its_stage_says_nothing_of_its_kind():
    """mbridge loads by such numbers: layer 1 of a stage may have what layer 1 of the model has not."""
    bridge = bridge_of(MODELS["qwen3_5_moe_text"], True)
    for layer in range(4):
        at = f"decoder.layers.{layer}.self_attention."
        assert bridge._sections(f"{at}conv1d.weight") and bridge._joined(f"{at}in_proj_qkvz.weight")
        assert bridge._joined(f"{at}linear_qkv.weight").is_gated and not bridge._sections(f"{at}linear_proj.weight")


def global_name(model: ModelSpec, layout: TrainLayout, rank: int, shard: Shard) -> str:
    """The name with global layer and expert numbers, as mbridge makes it before it looks a name up."""
    name = shard.megatron_name
    if not name.startswith("decoder.layers."):
        return name
    words = name.split(".")
    words[2] = str(global_layer(layout, rank, shard))
    name = ".".join(words)
    if not shard.is_expert:
        return name
    stem, local = name.split(".weight")
    first = layout.expert_coords(rank).ep * (model.num_experts // layout.expert)
    return f"{stem}.weight{first + int(local)}"


# ---------------------------------------------------------------- vLLM workers


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
