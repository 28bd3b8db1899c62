"""What Megatron ranks hold: every checkpoint element is there, once but for declared replicas,
and where Megatron's split puts it.
"""

import random
import warnings
from functools import cache
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from seldom import seldom

from mrl.model import ModelSpec, tensor_specs
from mrl.model.boxes import Box, cover_fault
from mrl.model.layout import TrainLayout, check_train_layout, padded_vocab_size
from mrl.model.megatron_shards import Shard, source_shards
from mrl.model.rotation import Rotation

BASE = {
    "num_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 22,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "rotation": Rotation(1e4),
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
EXPERTS = {"moe_layers": (0, 1, 2, 3), "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
DELTA = {
    "linear_layers": (0, 2),
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
    "zero_centered_norm": True,
}
MODELS = {
    "qwen2": ModelSpec(**BASE | {"family": "qwen2", "qkv_bias": True, "qk_norm": False, "tie_word_embeddings": True}),
    "qwen3": ModelSpec(**BASE | {"family": "qwen3", "qkv_bias": False, "qk_norm": True}),
    "qwen2_moe": ModelSpec(
        **BASE
        | EXPERTS
        | {"family": "qwen2_moe", "qkv_bias": True, "qk_norm": False, "shared_expert_intermediate_size": 8}
    ),
    "qwen3_moe": ModelSpec(**BASE | EXPERTS | {"family": "qwen3_moe", "qkv_bias": False, "qk_norm": True}),
    "glm4_moe": ModelSpec(
        **BASE
        | EXPERTS
        | {
            "family": "glm4_moe",
            "qkv_bias": True,
            "qk_norm": False,
            "moe_layers": (1, 2, 3),
            "shared_expert_intermediate_size": 8,
        },
        router_score="sigmoid",
    ),
    "deepseek_v3": ModelSpec(
        **BASE
        | EXPERTS
        | {
            "family": "deepseek_v3",
            "qkv_bias": False,
            "qk_norm": False,
            "num_key_value_heads": 8,
            "moe_layers": (1, 2, 3),
            "shared_expert_intermediate_size": 8,
            "q_lora_rank": 6,
            "kv_lora_rank": 10,
            "qk_rope_head_dim": 2,
            "v_head_dim": 3,
        },
        router_score="sigmoid",
    ),
    "qwen3_next": ModelSpec(
        **BASE
        | EXPERTS
        | {"family": "qwen3_next", "qkv_bias": False, "qk_norm": True, "shared_expert_intermediate_size": 8},
        **DELTA,
    ),
    "qwen3_5_text": ModelSpec(
        **BASE | {"family": "qwen3_5_text", "qkv_bias": False, "qk_norm": True, "tie_word_embeddings": True},
        **DELTA,
        linear_by_kind=True,
    ),
    "qwen3_5_moe_text": ModelSpec(
        **BASE
        | EXPERTS
        | {"family": "qwen3_5_moe_text", "qkv_bias": False, "qk_norm": True, "shared_expert_intermediate_size": 8},
        **DELTA,
        linear_by_kind=True,
    ),
    "mixed": ModelSpec(
        **BASE
        | EXPERTS
        | {"family": "qwen3_moe", "qkv_bias": False, "qk_norm": True, "moe_layers": (1, 3), "num_key_value_heads": 8}
    ),
}
# uneven pipelines of four layers, in all notations
PIPELINES = [
    {},
    {"pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
    {
        "pipeline_model_parallel_size": 3,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_layers": (0, 2, 1, 1)},
]


def random_layouts(seed: int, count: int) -> list[tuple[ModelSpec, TrainLayout]]:
    """Legal layouts of random models, at most 24 ranks."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        model = rng.choice(list(MODELS.values()))
        tp, cp, ep, etp = (
            rng.choice([1, 2, 4, 8]),
            rng.choice([1, 1, 2]),
            rng.choice([1, 2, 4, 8]),
            rng.choice([1, 2, 3]),
        )
        pipeline = rng.choice(PIPELINES)
        degrees = {
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
            **pipeline,
            "world_size": rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 24]),
        }
        if not check_train_layout(degrees, model):
            found.append((model, TrainLayout.build(degrees, model)))
    return found


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


def tagged(model: ModelSpec) -> dict[str, np.ndarray]:
    """A checkpoint in which every element is a number of its own, so that no mistake can cancel out;
    0 is kept for padding.
    """
    arrays, next_tag = {}, 1
    for t in tensor_specs(model):
        arrays[t.name] = np.arange(next_tag, next_tag + t.numel).reshape(t.shape)
        next_tag += t.numel
    return arrays


def assembled(shard: Shard, hf: dict[str, np.ndarray]) -> np.ndarray:
    local = np.zeros(shard.local_shape, dtype=np.int64)
    for piece in shard.pieces:
        local[piece.local_box.slices] = hf[piece.hf_name][piece.hf_box.slices]
    return local


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
