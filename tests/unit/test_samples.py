"""Responses in columns: rows stay whole through every cut, and the files of a run hold what travelled."""

import json
from dataclasses import fields

import numpy as np
import pytest

from mrl.data.batch import TrainBatch
from mrl.data.samples import Sample, Samples, packed
from mrl.errors import DataError
from mrl.record.sample_files import read_samples, write_samples


def sample(i: int, prompt: int, response: int, **more) -> Sample:
    """Token ids, log-probs and seed that no other sample has."""
    ids = tuple(range(100 * i, 100 * i + prompt + response))
    return Sample(
        i, i // 2, i, 2**47 + i, ids[:prompt], ids[prompt:], tuple(-float(t) for t in ids[prompt:]), "stop", i, **more
    )


MANY = [
    sample(0, 3, 4),
    sample(1, 2, 0, later_versions=((7, 8), (9, 10))),
    sample(2, 5, 1),
    sample(3, 1, 6, later_versions=((2, 5),)),
]


def test_the_example_of_the_module():
    rows = packed([
        Sample(0, 0, 0, 1, (7, 8), (1, 2, 3), (-0.1, -0.2, -0.3), "stop", 5, later_versions=((2, 6),)),
        Sample(0, 0, 1, 2, (7, 8), (4,), (-0.4,), "length", 6),
    ])  # fmt: skip
    assert rows.token_ids.tolist() == [7, 8, 1, 2, 3, 7, 8, 4] and rows.token_ids.dtype == np.int32
    np.testing.assert_allclose(rows.rollout_log_probs, [-0.1, -0.2, -0.3, -0.4], rtol=1e-7)
    assert (rows.span_counts.tolist(), rows.span_starts.tolist(), rows.span_versions.tolist()) == (
        [2, 1],
        [0, 2, 0],
        [5, 6, 6],
    )
    assert rows.truncated.tolist() == [False, True] and rows.weight_version.tolist() == [5, 6]


def same(one: Samples, other: Samples) -> bool:
    return one.arrays.keys() == other.arrays.keys() and all(
        np.array_equal(a, other.arrays[name]) for name, a in one.arrays.items()
    )


@pytest.mark.parametrize(
    "index", [slice(1, 3), slice(0, 4), slice(2, 2), slice(None, None, -1), np.array([3, 0, 0]), np.array([], np.int64)]
)
def test_any_rows_are_those_that_would_have_been_packed(index):
    assert same(packed(MANY).rows(index), packed([MANY[i] for i in np.arange(4)[index]]))


def test_consecutive_rows_share_their_memory_and_others_own_theirs():
    rows = packed(MANY)
    assert rows.rows(slice(1, 3)).token_ids.base is rows.token_ids
    assert rows.rows(np.array([1, 2])).token_ids.base is None


def test_parts_join_in_order_and_no_part_at_all_is_refused():
    assert same(Samples.joined([packed(MANY[:1]), packed([]), packed(MANY[1:])]), packed(MANY))
    with pytest.raises(ValueError):
        Samples.joined([])


def test_a_column_has_the_type_it_declares_whatever_was_packed():
    for samples in ([], MANY):
        for f in fields(Samples):
            if f.metadata["dtype"]:
                assert getattr(packed(samples), f.name).dtype == f.metadata["dtype"]


def test_each_row_hands_out_its_prompt_and_its_response():
    rows = packed(MANY)
    assert [p.tolist() for p in rows.prompts()] == [list(s.prompt_ids) for s in MANY]
    assert [r.tolist() for r in rows.responses()] == [list(s.response_ids) for s in MANY]


def test_a_token_of_a_response_costs_eight_bytes():
    one, other = packed([sample(0, 10, 1000)]), packed([sample(0, 10, 2000)])
    assert other.nbytes - one.nbytes == 8 * 1000


def test_an_unknown_stop_reason_is_named():
    with pytest.raises(DataError, match=r"sample 7 ended for 'abort'; known: stop, length"):
        packed([Sample(0, 0, 7, 0, (1,), (2,), (0.0,), "abort", 0)])


def test_a_batch_takes_the_sequences_and_its_rows_take_their_values_along():
    batch = TrainBatch.of(packed(MANY), 0.5)
    values = np.arange(len(batch.rollout_log_probs), dtype=np.float32)
    picked = TrainBatch(**batch.arrays, advantages=values).rows(np.array([3, 0]))
    assert picked.advantages.tolist() == [5, 6, 7, 8, 9, 10, 0, 1, 2, 3] and picked.temperature.tolist() == [0.5, 0.5]
    assert picked.old_log_probs is None and picked.loss_mask.all()


def test_files_keep_token_ids_log_probs_version_and_reward_parts(tmp_path):
    sample = Sample(7, 1, 0, 42, (5, 6), (8, 9), (-0.25, float("nan")), "stop", 3)
    path = write_samples(tmp_path, 12, [packed([sample])], [{"score": 1.0, "reason": "ok", "format": 0.0, "pred": "x"}])
    assert [p.name for p in tmp_path.iterdir()] == ["step-12.parquet"] and path.name == "step-12.parquet"
    (row,) = read_samples(tmp_path, 12)
    assert np.isnan(row["rollout_log_probs"].pop())
    assert row == {
        "prompt_id": 7, "group_id": 1, "sample_id": 0, "seed": 42, "prompt_ids": [5, 6], "response_ids": [8, 9],
        "rollout_log_probs": [-0.25], "stop_reason": "stop", "weight_version": 3,
        "reward": {"score": 1.0, "reason": "ok", "format": 0.0, "pred": "x"},
    }  # fmt: skip


def test_files_of_many_rows_and_of_none_are_read_back_in_order(tmp_path):
    write_samples(tmp_path, 1, [packed(MANY[:1]), packed(MANY[1:])], [{"score": float(i)} for i in range(4)])
    rows = read_samples(tmp_path, 1)
    assert [r["prompt_ids"] for r in rows] == [list(s.prompt_ids) for s in MANY]
    assert [r["response_ids"] for r in rows] == [list(s.response_ids) for s in MANY]
    assert [r["weight_version"] for r in rows] == [s.weight_version for s in MANY] and [
        r["reward"]["score"] for r in rows
    ] == [0, 1, 2, 3]
    write_samples(tmp_path, 2, [], [])
    assert read_samples(tmp_path, 2) == []


def test_samples_of_an_older_run_are_read_alike(tmp_path):
    row = {
        "prompt_id": 7,
        "response_ids": [8, 9],
        "rollout_log_probs": [-0.25, None],
        "weight_version": 3,
        "reward": {"score": 1.0},
    }
    (tmp_path / "step-3.jsonl").write_text(json.dumps(row) + "\n")
    assert read_samples(tmp_path, 3) == [row]
    with pytest.raises(FileNotFoundError):
        read_samples(tmp_path, 4)
