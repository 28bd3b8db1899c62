"""How a batch is cut into micro-batches."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mrl.data.batch import Sample, collate
from mrl.errors import DataError
from mrl.megatron.batching import check_batch, micro_arrays, mini_batches, split_micro_batches


def random_cuts():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows, data_parallel, micro = rng.integers(1, 40), rng.integers(1, 9), rng.integers(1, 9)
        yield rng.integers(1, 50, rows), int(data_parallel), int(micro)


def test_every_row_is_in_exactly_one_micro_batch_that_counts():
    for lengths, data_parallel, micro in random_cuts():
        ranks = split_micro_batches(lengths, data_parallel, micro)
        rows = np.concatenate([m.rows for rank in ranks for m in rank if not m.is_filler])
        assert sorted(rows) == list(range(len(lengths)))


def test_every_rank_has_the_same_number_of_micro_batches_and_none_is_empty_or_too_large():
    for lengths, data_parallel, micro in random_cuts():
        ranks = split_micro_batches(lengths, data_parallel, micro)
        assert len(ranks) == data_parallel
        assert {len(rank) for rank in ranks} == {math.ceil(math.ceil(len(lengths) / data_parallel) / micro)}
        assert all(1 <= len(m.rows) <= micro for rank in ranks for m in rank)


def test_an_interleaved_pipeline_gets_a_multiple_of_its_stages():
    for lengths, data_parallel, micro in random_cuts():
        ranks = split_micro_batches(lengths, data_parallel, micro, count_multiple=3)
        assert {len(rank) % 3 for rank in ranks} == {0}
        rows = np.concatenate([m.rows for rank in ranks for m in rank if not m.is_filler])
        assert sorted(rows) == list(range(len(lengths)))


def test_ranks_differ_by_at_most_one_row():
    for lengths, data_parallel, micro in random_cuts():
        counts = [sum(len(m.rows) for m in rank if not m.is_filler) for rank in split_micro_batches(lengths, data_parallel, micro)]
        assert max(counts) - min(counts) <= 1


def test_rows_of_one_micro_batch_have_neighbouring_lengths():
    (rank,) = split_micro_batches(np.array([3, 50, 4, 49]), 1, 2)
    assert [m.rows.tolist() for m in rank] == [[1, 3], [2, 0]]


def test_mini_batches_are_consecutive_and_the_last_may_be_short():
    assert list(mini_batches(10, 4)) == [slice(0, 4), slice(4, 8), slice(8, 10)]


def sample(prompt, response):
    return Sample(0, 0, 0, 0, prompt, response, (-1.0,) * len(response), "stop", 0)


@pytest.fixture
def batch():
    samples = [sample((11, 12, 13), (14, 15)), sample((21,), (22, 23, 24)), sample((31, 32, 33, 34, 35, 36), ())]
    batch = collate(samples, 0.7, pad_id=9)
    return replace(batch, old_log_probs=batch.rollout_log_probs * 2, advantages=np.ones_like(batch.rollout_log_probs))


def only(batch, *rows, align=1, micro_batch_size=8):
    """The arrays of a micro-batch that holds just these rows."""
    (rank,) = split_micro_batches(np.ones(len(rows), dtype=int), 1, micro_batch_size)
    return micro_arrays(batch.rows(np.array(rows)), rank[0], align)


def test_each_response_token_is_predicted_from_the_position_before_it(batch):
    arrays = only(batch, 0, 1)
    assert arrays.predictors[arrays.response_mask].tolist() == [2, 3, 0, 1, 2]
    assert arrays.targets[arrays.response_mask].tolist() == [14, 15, 22, 23, 24]


def test_arrays_are_no_wider_than_their_own_rows_but_for_the_alignment(batch):
    assert only(batch, 1).input_ids.shape == (1, 4)
    assert only(batch, 1).response_mask.shape == (1, 3)
    assert only(batch, 0, align=4).input_ids.tolist() == [[11, 12, 13, 14, 15, 0, 0, 0]]


def test_a_row_without_response_has_legal_indices_and_an_empty_mask(batch):
    arrays = only(batch, 2)
    assert not arrays.response_mask.any()
    assert (arrays.predictors >= 0).all()
    assert (arrays.predictors < arrays.input_ids.shape[1]).all()


def test_nothing_of_a_filler_counts(batch):
    ranks = split_micro_batches(np.array([5]), 2, 8)
    assert [rank[0].is_filler for rank in ranks] == [False, True]
    assert not micro_arrays(batch, ranks[1][0], 1).response_mask.any()


def test_an_empty_prompt_is_refused_by_row(batch):
    with pytest.raises(DataError, match="row 1"):
        check_batch(replace(batch, prompt_lengths=np.array([3, 0, 6])))
