"""How a batch is cut: every row once, equal counts, equal cost, under the limits."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mrl.config.load import load_config
from mrl.data.batch import TrainBatch
from mrl.data.samples import Sample, packed
from mrl.driver.step_batch import load_metrics
from mrl.errors import DataError
from mrl.model import planning_model_spec
from mrl.model.layout import TrainLayout
from mrl.rank.cut import MiniBatchLoad, RowLengths, Splitter, mini_batches, trained_rows
from mrl.rank.packing import Shape
from mrl.rank.row_results import check_batch

MODEL = planning_model_spec("Qwen/Qwen3-30B-A3B")[0]
PACKED, PADDED = Shape(packed=True), Shape(packed=False)


def random_cuts():
    rng = np.random.default_rng(0)
    for number in range(200):
        rows, data_parallel, micro = rng.integers(1, 40), rng.integers(1, 9), rng.integers(1, 9)
        yield rng.integers(1, 50, rows), Splitter(PACKED if number % 2 else PADDED, int(data_parallel), int(micro))


def test_every_row_is_in_exactly_one_micro_batch_that_counts():
    for lengths, splitter in random_cuts():
        assert sorted(np.concatenate(trained_rows(splitter.shares(RowLengths(lengths))))) == list(range(len(lengths)))


def test_every_rank_has_the_same_number_of_micro_batches_and_none_is_empty_or_too_large():
    for lengths, splitter in random_cuts():
        ranks = splitter.shares(RowLengths(lengths))
        assert len(ranks) == splitter.data_parallel
        rows = math.ceil(len(lengths) / splitter.data_parallel)
        assert {len(rank) for rank in ranks} == {math.ceil(rows / splitter.micro_batch_size)}
        assert all(1 <= len(m.rows) <= splitter.micro_batch_size for rank in ranks for m in rank)


def test_an_interleaved_pipeline_gets_a_multiple_of_its_stages():
    for lengths, splitter in random_cuts():
        ranks = replace(splitter, count_multiple=3).shares(RowLengths(lengths))
        assert {len(rank) % 3 for rank in ranks} == {0}
        assert sorted(np.concatenate(trained_rows(ranks))) == list(range(len(lengths)))


def test_ranks_differ_by_at_most_one_row():
    for lengths, splitter in random_cuts():
        counts = [len(rows) for rows in trained_rows(splitter.shares(RowLengths(lengths)))]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("context", [1, 2])
def test_a_token_limit_holds_for_every_micro_batch_alignment_included(context):
    rng = np.random.default_rng(1)
    for _ in range(100):
        lengths = rng.integers(1, 50, rng.integers(1, 40))
        splitter = Splitter(Shape(True, context, tensor=2), int(rng.integers(1, 5)), 1, max_tokens=60)
        ranks = splitter.shares(RowLengths(lengths))
        assert sorted(np.concatenate(trained_rows(ranks))) == list(range(len(lengths)))
        assert len({len(rank) for rank in ranks}) == 1
        assert all(splitter.shape.tokens(lengths[m.rows]) <= 60 * context for rank in ranks for m in rank)


def test_a_row_above_the_token_limit_is_refused_by_number_and_key():
    with pytest.raises(DataError, match=r"row 2 .* 61 tokens.*ppo_max_token_len_per_gpu"):
        Splitter(PACKED, 1, 1, max_tokens=60).shares(RowLengths(np.array([5, 61, 7])))


def test_padded_rows_of_one_micro_batch_have_neighbouring_lengths():
    (rank,) = Splitter(PADDED, 1, 2).shares(RowLengths(np.array([3, 50, 4, 49])))
    assert [m.rows.tolist() for m in rank] == [[1, 3], [2, 0]]


def test_packed_micro_batches_have_equal_loads():
    (rank,) = Splitter(PACKED, 1, 2).shares(RowLengths(np.array([3, 50, 4, 49])))
    assert sorted(m.rows.tolist() for m in rank) == [[0, 1], [2, 3]]


TINY = Path(__file__).parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"
BY_TOKENS = ["actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=4000"]
REF = "ref.log_prob_"


@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        ([], None),
        ([REF + "micro_batch_size_per_gpu=5"], (5, None)),
        (BY_TOKENS, None),
        ([*BY_TOKENS, REF + "max_token_len_per_gpu=900"], (3, 900)),
        ([*BY_TOKENS, REF + "use_dynamic_bsz=false"], (3, None)),
        ([*BY_TOKENS, REF + "use_dynamic_bsz=false", REF + "micro_batch_size_per_gpu=5"], (5, None)),
        ([*BY_TOKENS, REF + "use_dynamic_bsz=false", "actor.log_prob_micro_batch_size_per_gpu=6"], (6, None)),
        ([REF + "use_dynamic_bsz=true", REF + "max_token_len_per_gpu=900"], (3, 900)),
        ([REF + "use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=4000"], (3, 4000)),
    ],
)
def test_the_reference_model_is_cut_by_its_own_kind_of_limit(overrides, limits):
    """(samples, tokens) of a micro-batch; None: cut as the update.

    Switched to another kind than the actor's it has the update's limit.
    """
    config = load_config(TINY, overrides=["actor.ppo_micro_batch_size_per_gpu=3", *overrides]).config
    cut = Splitter.for_reference(
        config.actor, config.ref, TrainLayout.build(config.actor.layout.model_dump(), MODEL), MODEL
    )
    assert (cut and (cut.micro_batch_size, cut.max_tokens)) == limits


def test_padding_counts_alignment_and_fillers():
    splitter = Splitter(Shape(True, context=2, tensor=2), 2, 8)  # sequences to 4 tokens, a pack to 8
    lengths = RowLengths(np.array([5]))
    shares = splitter.shares(lengths)
    assert splitter.padding_share(lengths, shares) == pytest.approx(1 - 5 / 16)


def test_mini_batches_are_consecutive_and_the_last_may_be_short():
    assert list(mini_batches(10, 4)) == [slice(0, 4), slice(4, 8), slice(8, 10)]


def test_an_empty_prompt_is_refused_by_row():
    samples = [Sample(0, 0, 0, 0, (1, 2, 3), (4,), (-1.0,), "stop", 0)] * 3
    batch = TrainBatch.of(packed(samples), 0.7)
    with pytest.raises(DataError, match="row 2"):
        check_batch(replace(batch, prompt_lengths=np.array([3, 0, 3])), MODEL, 48)


def test_routes_of_another_model_are_refused():
    samples = [Sample(0, 0, 0, 0, (1, 2, 3), (4,), (-1.0,), "stop", 0)] * 3
    batch = TrainBatch.of(packed(samples), 0.7)
    check_batch(replace(batch, routes=np.zeros((12, 48, 8), np.int8)), MODEL, 48)
    with pytest.raises(DataError, match=r"\[12, 47, 8\], expected \[12, 48, 8\]"):
        check_batch(replace(batch, routes=np.zeros((12, 47, 8), np.int8)), MODEL, 48)


def test_the_load_of_a_mini_batch_worked_by_hand():
    """Four sequences of 8, 6, 3 and 1 tokens on two ranks: 9 tokens each; cost is the tokens, and nothing is padded."""
    splitter, lengths = (
        Splitter(Shape(True, context=1, tensor=1), data_parallel=2, micro_batch_size=2),
        RowLengths(np.array([8, 6, 3, 1])),
    )
    load = splitter.load(lengths, splitter.shares(lengths))
    assert (load.tokens, load.imbalance, load.padding_share) == ((9, 9), 0.0, 0.0)
    alone = RowLengths(lengths.sequences[:1])
    load = splitter.load(alone, splitter.shares(alone))  # the other rank repeats the row as a filler
    assert (sorted(load.tokens), load.imbalance, load.padding_share) == ([0, 8], 1.0, 0.5)


LENGTHS = RowLengths(np.array([10, 20, 30, 40]))


def load_of(shape: Shape, max_tokens: int | None) -> MiniBatchLoad:
    """Four sequences on one rank: two a micro-batch, or as a budget has it."""
    splitter = Splitter(shape, data_parallel=1, micro_batch_size=2, max_tokens=max_tokens)
    return splitter.load(LENGTHS, splitter.shares(LENGTHS))


def test_packed_rows_tell_how_many_sequences_they_hold():
    assert load_of(PACKED, max_tokens=None).packed_sequences == 2
    assert load_of(PADDED, max_tokens=None).packed_sequences is None


def test_the_share_of_a_budget_is_that_of_the_fullest_micro_batch():
    """100 tokens in two micro-batches of 50 under a budget of 80."""
    load = load_of(PACKED, max_tokens=80)
    assert load.budget_share == pytest.approx(50 / 80)
    assert load_of(PACKED, max_tokens=None).budget_share is None


def test_the_metrics_of_a_step_are_the_mean_of_packing_and_the_largest_of_budgets():
    loads = [MiniBatchLoad(0.0, 0.0, (50,), 2.0, 0.5), MiniBatchLoad(0.0, 0.0, (50,), 4.0, 0.75)]
    metrics = load_metrics(LENGTHS.sequences, loads)
    assert (metrics["actor/packed_sequences"], metrics["actor/token_budget_share"]) == (3.0, 0.75)
    plain = load_metrics(LENGTHS.sequences, [MiniBatchLoad(0.0, 0.0, (100,))])
    assert not {"actor/packed_sequences", "actor/token_budget_share"} & plain.keys()
