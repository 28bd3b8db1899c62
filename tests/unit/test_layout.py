"""Layouts: ranks, groups and stages are Megatron's own; every broken rule is reported at once,
with values that mend it.
"""

import math
import random
import warnings
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
from seldom import seldom

from mrl.errors import ConfigError
from mrl.model.layout import RolloutLayout, TrainLayout, check_train_layout, padded_vocab_size


@dataclass(frozen=True)
class Facts:
    """A Qwen3-30B-A3B-like model."""

    num_layers: int = 48
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 128
    intermediate_size: int = 6144
    moe_layers: tuple[int, ...] = tuple(range(48))
    num_experts: int = 128
    moe_intermediate_size: int = 768
    shared_expert_intermediate_size: int = 0
    linear_num_key_heads: int = 0
    attn_output_gate: bool = False
    wide_qk_norm: bool = False
    clamped_experts: bool = False

    def with_layers(self, n: int) -> "Facts":
        return replace(self, num_layers=n, moe_layers=tuple(range(n)))


DENSE = replace(Facts(), num_experts=0, moe_layers=())


@cache
def megatron():
    """Megatron-core's rank generator and layer split, the oracle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
        from megatron.core.transformer.transformer_block import get_num_layers_to_build
        from megatron.core.transformer.transformer_config import TransformerConfig
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    return (
        parallel_state.RankGenerator,
        TransformerConfig,
        get_num_layers_to_build,
        get_transformer_layer_offset,
        PipelineParallelLayerLayout,
    )


def random_degrees(rng: random.Random) -> dict:
    """Degrees of a legal layout of Facts, up to a few hundred ranks."""
    tp, pp, cp = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3])
    ep, etp = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 3])
    dense, expert = tp * cp, ep * etp
    data = rng.choice([1, 2])
    return {
        "world_size": dense * expert * pp * data,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }


def group_of(generator, axes: str, rank: int) -> tuple[int, ...]:
    return next(tuple(g) for g in generator.get_ranks(axes) if rank in g)


@pytest.mark.parametrize("seed", seldom(range(25), *range(6)))
def test_groups_and_coordinates_are_megatrons(seed):
    rng = random.Random(seed)
    layout = TrainLayout.build(random_degrees(rng), Facts())
    rank_generator = megatron()[0]
    order = "tp-cp-ep-dp-pp"
    dense = rank_generator(tp=layout.tensor, ep=1, dp=layout.data, pp=layout.pipeline, cp=layout.context, order=order)
    expert = rank_generator(
        tp=layout.expert_tensor, ep=layout.expert, dp=layout.expert_data, pp=layout.pipeline, cp=1, order=order
    )
    for rank in rng.sample(range(layout.world_size), min(8, layout.world_size)):
        for axes in ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "tp-pp"):
            assert layout.dense_group(rank, *axes.split("-")) == group_of(dense, axes, rank)
        for axes, ours in {
            "tp": ("etp",),
            "ep": ("ep",),
            "dp": ("edp",),
            "pp": ("pp",),
            "tp-ep": ("etp", "ep"),
        }.items():
            assert layout.expert_group(rank, *ours) == group_of(expert, axes, rank)
        for axis in ("tp", "cp", "dp", "pp"):
            assert getattr(layout.dense_coords(rank), axis) == group_of(dense, axis, rank).index(rank)
        for axis, theirs in {"etp": "tp", "ep": "ep", "edp": "dp"}.items():
            assert getattr(layout.expert_coords(rank), axis) == group_of(expert, theirs, rank).index(rank)


def numbered(coords: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """The number of a point of a grid whose first axis changes fastest."""
    strides = [math.prod(sizes[:axis]) for axis in range(len(sizes))]
    return sum(coord * stride for coord, stride in zip(coords, strides, strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_rank_to_coordinates_and_back_is_the_identity(seed):
    layout = TrainLayout.build(random_degrees(random.Random(seed)), Facts())
    for rank in range(layout.world_size):
        assert numbered(layout.dense_coords(rank), layout.dense_sizes) == rank
        assert numbered(layout.expert_coords(rank), layout.expert_sizes) == rank
    with pytest.raises(IndexError):
        layout.dense_coords(layout.world_size)


def uneven_splits() -> list[tuple[int, dict]]:
    """Legal (num_layers, pipeline keys): even, first/last, and counted embedding and loss,
    with and without virtual stages.
    """
    rng = random.Random(7)
    cases = []
    while len(cases) < 150:
        pp, vp = rng.choice([1, 2, 3, 4]), rng.choice([None, None, 2, 3])
        keys: dict = {
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vp if pp > 1 else None,
        }
        notation = rng.choice(["even", "ends", "counted"])
        if notation == "ends":
            keys["num_layers_in_first_pipeline_stage"] = rng.choice([None, rng.randint(1, 6)])
            keys["num_layers_in_last_pipeline_stage"] = rng.choice([None, rng.randint(1, 6)])
        if notation == "counted":
            keys["account_for_embedding_in_pipeline_split"] = rng.random() < 0.6
            keys["account_for_loss_in_pipeline_split"] = rng.random() < 0.6
        layers = rng.randint(pp, 30)
        if not check_train_layout({"world_size": pp, **keys}, Facts().with_layers(layers)):
            cases.append((layers, keys))
    return cases


def test_stage_layers_are_megatrons_for_even_and_uneven_splits():
    _, config_class, count, offset, _ = megatron()
    for layers, keys in uneven_splits():
        layout = TrainLayout.build(
            {"world_size": keys["pipeline_model_parallel_size"], **keys}, Facts().with_layers(layers)
        )
        config = config_class(num_layers=layers, hidden_size=8, num_attention_heads=1, pipeline_dtype=object, **keys)
        vp_size = keys["virtual_pipeline_model_parallel_size"]
        for pp in range(layout.pipeline):
            for vp in range(layout.virtual_pipeline):
                stage = None if vp_size is None else vp
                start = offset(config, stage, pp)
                theirs = range(start, start + count(config, stage, pp))
                assert list(layout.stage_layers(pp, vp)) == list(theirs), (layers, keys, pp, vp)


def test_an_illegal_uneven_split_is_illegal_for_megatron_too():
    rng = random.Random(3)
    _, config_class, count, *_ = megatron()
    refused = 0
    for _ in range(300):
        pp = rng.choice([2, 3, 4])
        keys = {
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": rng.choice([None, 2]),
            "num_layers_in_first_pipeline_stage": rng.choice([None, 1, 2, 4]),
            "num_layers_in_last_pipeline_stage": rng.choice([None, 2, 3]),
            "account_for_loss_in_pipeline_split": rng.random() < 0.3,
        }
        layers = rng.randint(pp, 16)
        ours = check_train_layout({"world_size": pp, **keys}, Facts().with_layers(layers))
        try:
            config = config_class(
                num_layers=layers, hidden_size=8, num_attention_heads=1, pipeline_dtype=object, **keys
            )
            built = [
                [count(config, v, p) for v in range(keys["virtual_pipeline_model_parallel_size"] or 1)]
                for p in range(pp)
            ]
            # Megatron lets negative counts through
            theirs = sum(map(sum, built)) == layers and min(map(min, built)) >= 0
        except (ValueError, AssertionError):
            theirs = False
        refused += not theirs
        assert (not ours) == theirs, (layers, keys, ours)
    assert 50 < refused < 290


def test_an_explicit_list_means_what_megatrons_layout_means():
    *_, explicit = megatron()
    degrees = {
        "world_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_layers": [0, 3, 1, 2],
    }
    layout = TrainLayout.build(degrees, Facts().with_layers(6))
    theirs = explicit(layout.pipeline_rows(), 2)
    theirs.validate_layer_layout(6, None)
    held = [[theirs.layout[p][v].count(theirs.flatten_layout[1]) for v in range(2)] for p in range(2)]
    assert held == [[0, 1], [3, 2]]
    assert [list(layout.stage_layers(p, v)) for v in range(2) for p in range(2)] == [[], [0, 1, 2], [3], [4, 5]]


PIPELINE, CHUNKS, LISTED = (
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "pipeline_layers",
)  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "chunks", "listed", "nearest"),
    [
        (3, 1, [2, 0, 2], ((1, 1, 2), (2, 1, 1), (0, 4, 0))),
        (2, 2, [2, 0, 1, 1], ((1, 1, 1, 1), (0, 2, 2, 0))),  # the first chunk of the last stage
        (4, 1, [0, 0, 4, 0], ((0, 1, 3, 0), (1, 1, 1, 1), (0, 2, 2, 0))),
        (3, 2, [0, 1, 1, 2, 0, 0], ((0, 1, 1, 1, 1, 0),)),
        (3, 1, [2, 2, -1], ((2, 1, 1), (0, 4, 0))),
    ],
)
def test_a_chunk_without_any_weight_is_refused_with_the_nearest_cuts(stages, chunks, listed, nearest):
    """The first has the embedding and the last the head; one between them would have no parameters at all."""
    degrees = {"world_size": stages, PIPELINE: stages, CHUNKS: chunks, LISTED: listed}
    (found,) = check_train_layout(degrees, Facts().with_layers(4))
    assert found.field == LISTED and "only the first and the last may be 0" in found.rule
    assert found.allowed == nearest


@pytest.mark.parametrize(
    ("stages", "chunks", "listed"), [(3, 1, [0, 4, 0]), (2, 1, [0, 4]), (2, 2, [0, 3, 1, 0]), (1, 1, [4])]
)
def test_the_first_and_the_last_chunk_may_have_no_layers(stages, chunks, listed):
    degrees = {"world_size": stages, PIPELINE: stages, CHUNKS: chunks, LISTED: listed}
    assert check_train_layout(degrees, Facts().with_layers(4)) == []


def test_no_other_way_to_say_an_uneven_cut_leaves_an_inner_chunk_empty():
    first, last = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
    embedding, loss = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
    ways = [{}, {first: 1}, {last: 1}, {first: 1, last: 1}, {first: 2, last: 3}]
    ways += [{embedding: True}, {loss: True}, {embedding: True, loss: True}]
    legal = 0
    for layers, stages, chunks, way in product(range(1, 9), range(1, 6), (None, 2, 3), ways):
        degrees = {"world_size": stages, PIPELINE: stages, CHUNKS: chunks} | way
        model = Facts().with_layers(layers)
        if not check_train_layout(degrees, model):
            counts = TrainLayout.build(degrees, model).chunk_layers
            in_order = [stage[chunk] for chunk in range(chunks or 1) for stage in counts]
            assert min(in_order[1:-1], default=1) > 0, degrees
            legal += 1
    assert legal > 40


def test_all_violations_are_reported_at_once():
    degrees = {
        "world_size": 12,
        "tensor_model_parallel_size": 5,
        "pipeline_model_parallel_size": 7,
        "virtual_pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 48,
        "expert_tensor_parallel_size": 5,
        "sequence_parallel": False,
    }
    fields = {v.field for v in check_train_layout(degrees, Facts())}
    assert fields == {
        "world_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
    }
    with pytest.raises(ConfigError, match="expert_model_parallel_size = 48"):
        TrainLayout.build(degrees, Facts())


@pytest.mark.parametrize(
    ("field", "value", "others", "model", "allowed"),
    [
        # divisors of 32 that fit 4 key/value heads
        ("tensor_model_parallel_size", 6, {"world_size": 48}, Facts(), (1, 2, 4, 8)),
        ("tensor_model_parallel_size", 64, {"world_size": 64}, Facts(), (4, 8, 16, 32)),
        ("expert_model_parallel_size", 3, {"world_size": 3}, Facts(), (1, 2, 4, 8)),  # divisors of 128
        ("expert_model_parallel_size", 2, {"world_size": 2}, DENSE, (1,)),
        ("expert_tensor_parallel_size", 5, {"world_size": 5}, Facts(), (2, 3, 4, 6)),  # divisors of 768
        ("pipeline_model_parallel_size", 5, {"world_size": 5}, Facts(), (2, 3, 4, 6)),  # divisors of 48
        ("world_size", 20, {"tensor_model_parallel_size": 8}, Facts(), (8, 16, 24, 32)),
        ("sequence_parallel", True, {"world_size": 1}, Facts(), (False,)),
        (
            "virtual_pipeline_model_parallel_size",
            5,
            {"world_size": 4, "pipeline_model_parallel_size": 4},
            Facts(),
            (2, 3, 4, 6),
        ),
        (
            "num_layers_in_first_pipeline_stage",
            3,
            {"world_size": 4, "pipeline_model_parallel_size": 4, "num_layers_in_last_pipeline_stage": 4},
            Facts(),
            (2, 4, 6, 8),  # 48 - 4 - first must be even
        ),
    ],
)
def test_a_violation_names_the_nearest_legal_values(field, value, others, model, allowed):
    degrees = {"world_size": 1, **others, field: value}
    violation = next(v for v in check_train_layout(degrees, model) if v.field == field)
    assert violation.value == value
    assert violation.allowed == allowed
    for mended in violation.allowed:
        assert field not in {v.field for v in check_train_layout({**degrees, field: mended}, model)}


def test_more_tensor_ranks_than_key_value_heads_are_legal_when_they_share_evenly():
    assert check_train_layout({"world_size": 8, "tensor_model_parallel_size": 8}, Facts()) == []
    three_heads = replace(Facts(), num_key_value_heads=3, num_attention_heads=24)
    assert check_train_layout({"world_size": 4, "tensor_model_parallel_size": 4}, three_heads) != []


def test_unset_expert_tensor_size_is_one_and_unset_sequence_parallel_follows_tensor_size():
    layout = TrainLayout.build(
        {"world_size": 4, "tensor_model_parallel_size": 4, "expert_tensor_parallel_size": None}, Facts()
    )
    assert (layout.expert_tensor, layout.expert_data, layout.sequence_parallel) == (1, 4, True)
    assert not TrainLayout.build({"world_size": 4}, Facts()).sequence_parallel


def test_padded_vocabulary_is_the_least_multiple_of_the_tensor_size():
    assert [padded_vocab_size(151_936, tp) for tp in (1, 8, 128)] == [151_936] * 3
    assert padded_vocab_size(10, 4) == 12


def test_rollout_workers_are_numbered_engine_then_data_then_tensor():
    layout = RolloutLayout(num_engines=2, tensor=2, data=2, expert=4)
    assert layout.world_size == 8
    assert [tuple(layout.coords(w)) for w in (0, 1, 2, 5, 7)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 1), (1, 1, 1)]
    sizes = (layout.tensor, layout.data, layout.num_engines)
    assert all(numbered(layout.coords(w)[::-1], sizes) == w for w in range(8))
    assert [layout.expert_coords(w) for w in (0, 3, 4)] == [(0, 0), (3, 0), (0, 0)]
    whole = RolloutLayout(tensor=2, data=2)
    assert (whole.expert_tensor, whole.expert_coords(3)) == (4, (0, 3))


def test_rollout_expert_parallelism_is_all_or_nothing():
    with pytest.raises(ConfigError, match="allowed: 1, 4"):
        RolloutLayout(tensor=4, expert=2)
