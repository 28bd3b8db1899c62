"""A micro-batch in memory: what predicts what, where, on which context-parallel rank."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mrl.data.batch import TrainBatch
from mrl.data.samples import RowImage, Sample, packed
from mrl.errors import DataError
from mrl.platforms.packs import pack_of
from mrl.rank.forward import packing_of
from mrl.rank.packing import Shape, kept_positions, micro_batch
from mrl.rank.row_results import check_batch

PACKED, PADDED = Shape(packed=True), Shape(packed=False)
ALL = np.array([0, 1, 2])


def sample(prompt, response):
    return Sample(0, 0, 0, 0, prompt, response, (-1.0,) * len(response), "stop", 0)


def batch_of(*samples):
    return TrainBatch.of(packed(samples), 1.0)


@pytest.fixture
def batch():
    samples = [sample((11, 12, 13), (14, 15)), sample((21,), (22, 23, 24)), sample((31, 32, 33, 34, 35, 36), ())]
    batch = TrainBatch.of(packed(samples), 0.7)
    batch.temperature[1] = 0.5
    return replace(batch, old_log_probs=batch.rollout_log_probs * 2, advantages=np.ones_like(batch.rollout_log_probs))


def test_packed_sequences_stand_end_to_end_and_positions_restart(batch):
    arrays = micro_batch(batch, ALL, PACKED)
    assert arrays.input_ids.tolist() == [[11, 12, 13, 14, 15, 21, 22, 23, 24, 31, 32, 33, 34, 35, 36]]
    assert arrays.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]
    assert arrays.sequence_starts.tolist() == [0, 5, 9, 15]


def test_padded_sequences_have_one_length(batch):
    arrays = micro_batch(batch, np.array([0, 1]), replace(PADDED, tensor=4))
    assert arrays.input_ids.tolist() == [[11, 12, 13, 14, 15, 0, 0, 0], [21, 22, 23, 24, 0, 0, 0, 0]]
    assert arrays.position_ids.tolist() == [list(range(8))] * 2
    assert arrays.sequence_starts is None


@pytest.mark.parametrize("shape", [PACKED, PADDED, Shape(True, tensor=4)])
def test_each_response_token_is_predicted_from_the_position_before_it(batch, shape):
    arrays = micro_batch(batch, ALL, shape)
    assert arrays.targets.tolist() == [14, 15, 22, 23, 24]
    assert arrays.input_ids.reshape(-1)[arrays.predictors].tolist() == [13, 14, 21, 22, 23]
    assert arrays.slots.tolist() == [0, 1, 3, 4, 5]  # of [3, 3]
    assert arrays.token_temperature.tolist() == pytest.approx([0.7, 0.7, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("context", [2, 4])
def test_context_parallel_ranks_share_out_every_token_and_every_prediction(batch, context, packed):
    shape = Shape(packed, context)
    ranks = [micro_batch(batch, ALL, shape, rank) for rank in range(context)]
    assert len({arrays.input_ids.shape for arrays in ranks}) == 1
    ids = np.concatenate([arrays.input_ids.reshape(-1) for arrays in ranks])
    assert sorted(ids[ids > 0]) == sorted(batch.token_ids)
    predicted = {}
    for arrays in ranks:
        states = arrays.input_ids.reshape(-1)[arrays.predictors]
        predicted |= dict(
            zip(arrays.slots.tolist(), zip(states.tolist(), arrays.targets.tolist(), strict=True), strict=True)
        )
    assert predicted == {0: (13, 14), 1: (14, 15), 3: (21, 22), 4: (22, 23), 5: (23, 24)}


def test_a_zigzag_rank_holds_a_chunk_from_either_end_of_every_sequence():
    assert kept_positions(np.array([8, 4]), 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert kept_positions(np.array([8, 4]), 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


def test_memory_lengths_are_multiples_of_what_the_degrees_need():
    lengths = np.array([5, 3, 9])
    assert PACKED.padded(lengths).tolist() == [5, 3, 9]
    assert Shape(True, context=2).padded(lengths).tolist() == [8, 4, 12]
    assert Shape(True, tensor=4).padded(lengths).tolist() == [5, 3, 12]  # the last sequence fills the pack up
    assert Shape(True, context=2, tensor=4).padded(lengths).tolist() == [8, 4, 20]
    assert Shape(False, context=2, tensor=2).padded(lengths).tolist() == [16, 16, 16]


def test_nothing_of_a_filler_counts_and_a_row_without_response_is_no_fault(batch):
    assert micro_batch(batch, ALL, PACKED, is_filler=True).targets.size == 0
    arrays = micro_batch(batch, np.array([2]), PACKED)
    assert arrays.targets.size == 0
    assert arrays.response_mask.shape == (1, 1)


def test_rejected_tokens_are_not_computed(batch):
    keep = np.array([True, True, True, False, True])
    assert micro_batch(replace(batch, keep=keep), ALL, PACKED).targets.tolist() == [14, 15, 22, 24]


@pytest.mark.parametrize("shape", [Shape(True, 2), Shape(False, 2)])
def test_micro_batches_that_differ_in_another_ranks_part_alone_differ_in_content_on_every_rank(shape):
    def cuts(*ids):
        return [micro_batch(batch_of(sample(ids[:4], ids[4:])), np.array([0]), shape, rank) for rank in (0, 1)]

    one, again, other = cuts(*range(8)), cuts(*range(8)), cuts(0, 1, 2, 99, 4, 5, 6, 7)
    assert np.array_equal(one[0].input_ids, other[0].input_ids)
    assert one[0].content == one[1].content == again[0].content == again[1].content
    assert other[0].content == other[1].content != one[0].content


def test_the_same_tokens_cut_into_other_sequences_have_another_content():
    whole, cut = [sample((1, 2), (3, 4))], [sample((1,), (2,)), sample((3,), (4,))]
    one, other = (micro_batch(batch_of(*samples), np.arange(len(samples)), PACKED) for samples in (whole, cut))
    assert np.array_equal(one.input_ids, other.input_ids) and one.content != other.content


def test_rows_of_the_same_tokens_have_contents_of_their_own():
    """Their routes may differ, and in another context-parallel rank's part of them."""
    batch = batch_of(sample((1, 2), (3, 4)), sample((1, 2), (3, 4)))
    one, other = (micro_batch(batch, np.array([row]), PACKED) for row in (0, 1))
    assert np.array_equal(one.input_ids, other.input_ids) and one.content != other.content


@pytest.mark.parametrize(
    "shape", [PACKED, PADDED, Shape(True, context=2), Shape(True, context=2, tensor=4), Shape(False, tensor=4)]
)
def test_the_longest_sequence_is_known_on_the_host(batch, shape):
    arrays = micro_batch(batch, ALL, shape)
    lengths = np.diff(arrays.sequence_starts) if shape.packed else arrays.input_ids.shape[1:]
    assert arrays.longest == max(lengths)


def test_attention_is_told_of_its_sequences_without_a_look_at_the_device(batch):
    """Meta tensors have no values: whoever asked for one would fail here,
    and wait for all that is enqueued on a device.
    """
    inputs = micro_batch(batch, ALL, PACKED).mapped(
        lambda array: torch.from_numpy(np.ascontiguousarray(array)).to("meta")
    )
    told = packing_of(inputs)
    assert (told.max_seqlen_q, told.max_seqlen_kv) == (6, 6)
    assert told.cu_seqlens_q is told.cu_seqlens_q_padded and told.cu_seqlens_kv is told.cu_seqlens_kv_padded


@pytest.mark.parametrize(("context", "parts"), [(1, [[0]]), (2, [[0, 3], [1, 2]])])
def test_the_host_knows_of_a_pack_what_layers_would_read_from_the_device(batch, context, parts):
    """Where sequences begin, and the place of each of a rank's tokens in its own: of four parts the first and the last
    are the first rank's of two, the others the second's.
    """
    for rank, own in enumerate(parts):
        inputs = micro_batch(batch, ALL, Shape(True, context=context), rank).mapped(torch.from_numpy)
        starts = packing_of(inputs).cu_seqlens_q_padded
        known = pack_of(starts)
        assert np.cumsum([0, *known.lengths]).tolist() == starts.tolist()
        places = [np.split(np.arange(length), sum(map(len, parts)))[part] for length in known.lengths for part in own]
        assert known.positions.tolist() == np.concatenate(places).tolist()


def seeing(prompt, response, *images):
    return replace(sample(prompt, response), images=images)


@pytest.fixture
def seen():
    """Three rows: two images, none, and one whose last tokens are in the response."""
    return batch_of(
        seeing(range(10, 20), (1, 2), RowImage("aa", 1, 3, (1, 2, 6)), RowImage("bb", 6, 2, (1, 2, 4))),
        sample((31, 32), (33,)),
        seeing((41, 42, 43), (44, 45, 46), RowImage("aa", 2, 3, (1, 2, 6))),
    )


@pytest.mark.parametrize("shape", [PACKED, PADDED, Shape(True, context=2), Shape(False, context=2, tensor=2)])
def test_each_token_of_an_image_is_at_its_place_on_one_rank(seen, shape):
    rows = np.array([2, 0, 1])
    ids = seen.token_ids.astype(np.int64)
    told = {("aa", row): ids[place : place + 3] for row, place in ((0, 1), (2, 17))} | {("bb", 0): ids[6:8]}
    found = {}
    for rank in range(shape.context):
        micro = micro_batch(seen, rows, shape, rank)
        flat = micro.input_ids.reshape(-1)
        for name, places, parts in zip(micro.images.names, micro.images.places, micro.images.parts, strict=True):
            for place, part in zip(places, parts, strict=True):
                found.setdefault((name, int(flat[place])), []).append(int(part))
    expected = {(name, int(token)): [part] for (name, _), ids in told.items() for part, token in enumerate(ids)}
    assert found == expected


def test_positions_go_with_their_tokens_and_padding_has_plain_ones(seen):
    numbers = np.arange(len(seen.token_ids), dtype=np.int32)[:, None] * 10 + np.arange(3, dtype=np.int32)
    given = replace(seen, positions=numbers)
    shape = Shape(True, context=2)
    for rank in range(2):
        micro = micro_batch(given, np.array([1, 0]), shape, rank)
        of_token = {int(token): place.tolist() for token, place in zip(seen.token_ids, numbers, strict=True)}
        for token, place, plain, real in zip(
            micro.input_ids[0], micro.positions[0], micro.position_ids[0], micro.real[0], strict=True
        ):
            assert place.tolist() == (of_token[int(token)] if real else [plain] * 3)


def test_a_pack_with_three_positions_a_token_has_a_row_of_angles_for_each_token(seen):
    micro = micro_batch(replace(seen, positions=np.zeros((len(seen.token_ids), 3), np.int32)), ALL, PACKED)
    assert pack_of(packing_of(micro.mapped(torch.as_tensor)).cu_seqlens_q).positions.tolist() == list(range(21))
    assert micro_batch(seen, ALL, PACKED).positions is None


def test_rows_without_images_are_joined_to_rows_with_some(seen):
    plain = batch_of(sample((1,), (2,)))
    assert plain.image_counts is None and plain.rows(np.array([0])).image_names is None
    both = TrainBatch.joined([plain, seen])
    assert both.image_counts.tolist() == [0, 2, 0, 1]
    assert both.rows(np.array([3, 0])).image_names.tolist() == [b"aa"]
    assert both.rows(np.array([1])).image_starts.tolist() == [1, 6]
    with pytest.raises(DataError, match="without its vision tower"):
        check_batch(both, None, 0)
