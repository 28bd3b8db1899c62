"""Responses in columns: rows stay whole through every cut, and the files of a run hold what travelled."""

import json
import pickle
import time
import tracemalloc
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

import mrl.cli.samples as samples_command
from mrl.checkpoint.group_files import GroupRecord, read_group, write_group
from mrl.cli.main import main
from mrl.data.batch import TrainBatch
from mrl.data.routes import is_missing, missing_in
from mrl.data.samples import NO_ENGINE, Sample, SampleRows, Samples, packed
from mrl.driver import sample_writer
from mrl.driver.sample_writer import SampleWriter, kept_rows
from mrl.engine import outbox
from mrl.errors import ConfigError, DataError, EnvironmentFault
from mrl.record.sample_files import (
    StepFile,
    keep_within,
    read_samples,
    write_differences,
    write_routes,
    write_samples,
)
from mrl.reward.items import RewardResult
from mrl.tools.compare_runs import of_run
from mrl.tools.report.samples import looked_at


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
            column = getattr(packed(samples), f.name)
            if column is not None and f.metadata["dtype"]:
                assert column.dtype == f.metadata["dtype"]


def test_each_row_hands_out_its_prompt_and_its_response():
    rows = packed(MANY)
    assert [p.tolist() for p in rows.prompts()] == [list(s.prompt_ids) for s in MANY]
    assert [r.tolist() for r in rows.responses()] == [list(s.response_ids) for s in MANY]


def test_a_token_of_a_response_costs_eight_bytes():
    one, other = packed([sample(0, 10, 1000)]), packed([sample(0, 10, 2000)])
    assert other.nbytes - one.nbytes == 8 * 1000


def test_an_unknown_stop_reason_is_named():
    with pytest.raises(DataError, match=r"sample 7 has the unknown stop reason 'abort'; known: stop, length"):
        packed([Sample(0, 0, 7, 0, (1,), (2,), (0.0,), "abort", 0)])


def test_a_batch_takes_the_sequences_and_its_rows_take_their_values_along():
    batch = TrainBatch.of(packed(MANY), 0.5)
    values = np.arange(len(batch.rollout_log_probs), dtype=np.float32)
    picked = TrainBatch(**batch.arrays, advantages=values).rows(np.array([3, 0]))
    assert picked.advantages.tolist() == [5, 6, 7, 8, 9, 10, 0, 1, 2, 3] and picked.temperature.tolist() == [0.5, 0.5]
    assert picked.old_log_probs is None and picked.loss_mask.all()


def test_files_keep_token_ids_log_probs_version_and_reward_parts(tmp_path):
    sample = Sample(7, 1, 0, 42, (5, 6), (8, 9), (-0.25, float("nan")), "stop", 3, engine=1)
    path = write_samples(tmp_path, 12, [packed([sample])], [{"score": 1.0, "reason": "ok", "format": 0.0, "pred": "x"}])
    assert [p.name for p in tmp_path.iterdir()] == ["step-12.parquet"] and path.name == "step-12.parquet"
    (row,) = read_samples(tmp_path, 12)
    assert np.isnan(row["rollout_log_probs"].pop())
    assert row == {
        "prompt_id": 7, "group_id": 1, "sample_id": 0, "seed": 42, "engine": 1, "prompt_ids": [5, 6],
        "response_ids": [8, 9], "rollout_log_probs": [-0.25], "stop_reason": "stop", "weight_version": 3,
        "reward": {"score": 1.0, "reason": "ok", "format": 0.0, "pred": "x"},
    }  # fmt: skip


def test_equal_groups_of_two_engines_are_equal_files_which_name_none(tmp_path):
    groups = [packed([replace(MANY[0], engine=engine)]) for engine in (0, 1)]
    facts = [
        write_group(tmp_path / f"{number}.npz", GroupRecord(7, 0, group, {})) for number, group in enumerate(groups)
    ]
    assert facts[0] == facts[1]
    found = read_group(tmp_path / "1.npz").samples
    assert found.engine.tolist() == [NO_ENGINE]
    rows = []
    for step, piece in enumerate((found, *groups, packed([replace(MANY[0], seed=43)]))):
        write_samples(tmp_path, step, [piece], [{"score": 0.0}])
        rows += read_samples(tmp_path, step)
    assert [row["engine"] for row in rows[:3]] == [None, 0, 1]
    assert of_run(rows[0]) == of_run(rows[1]) == of_run(rows[2]) != of_run(rows[3])


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


# --- which are kept, and reading some of them -------------------------------------------------------------------------


def scored(count: int) -> list[dict]:
    return [{"score": float((7 * i) % count), "reason": "ok", "length": float(i)} for i in range(count)]


def a_step(folder, step: int, count: int = 150) -> list[Sample]:
    rng = np.random.default_rng(step)
    made = []
    for i in range(count):
        ids = rng.integers(0, 99, int(rng.integers(0, 9))).tolist()
        log_probs = (-rng.random(len(ids))).tolist()
        made.append(Sample(i // 8, i // 8, i, 5 * i, (1, 2), ids, log_probs, "stop", 3))
    write_samples(folder, step, [packed(made[:100]), packed(made[100:])], scored(count))
    return made


def test_some_rows_are_read_as_all_of_them_are(tmp_path):
    a_step(tmp_path, 4)
    file, every = StepFile(tmp_path, 4), read_samples(tmp_path, 4)
    for rows in ([149, 0, 70], [], [5], list(range(60, 130))):
        assert file.read(np.array(rows, np.int64)) == [every[row] for row in rows]
    worst = file.worst(5)
    assert [every[row]["reward"]["score"] for row in worst] == sorted(row["reward"]["score"] for row in every)[:5]
    assert file.prompt_ids.tolist() == [row["prompt_id"] for row in every]


def test_a_response_whose_environment_failed_is_not_the_worst(tmp_path):
    rewards = [
        {"score": 1.0, "reason": "ok"},
        {"score": 0.0, "reason": "environment"},
        {"score": 0.5, "reason": "raised"},
    ]
    made = [Sample(0, 0, i, i, (1, 2), (), (), "stop", 3) for i in range(3)]
    write_samples(tmp_path, 5, [packed(made)], rewards)
    assert StepFile(tmp_path, 5).worst(3).tolist() == [2, 0]


def test_differences_are_found_by_sample_in_any_order(tmp_path):
    made = a_step(tmp_path, 2, 40)
    lengths = np.array([len(sample.response_ids) for sample in made])
    order = np.random.default_rng(0).permutation(40)
    found = [np.full(lengths[row], row / 64) for row in order]
    write_differences(tmp_path, 2, order, lengths[order], np.concatenate(found))
    some = StepFile(tmp_path, 2).differences([7, 39, 1000])
    assert some == [[7 / 64] * lengths[7], [39 / 64] * lengths[39], None]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_routes_are_found_by_sample_and_missing_ones_stay_missing(tmp_path, dtype):
    """In the dtype in which engines' routes travel. Routes that an engine did not return are all missing, whether other
    rows of the piece have some or not; None is a response that has no row.
    """
    rng = np.random.default_rng(0)
    made = a_step(tmp_path, 2, 6)
    experts = [np.tile(np.arange(8), (len(s.prompt_ids) + len(s.response_ids), 3, 1)) for s in made]
    routes = [rng.permuted(each, axis=-1)[..., :2].astype(dtype) for each in experts]
    routes[1][-1] = missing_in(routes[1].dtype)
    pieces = [packed([replace(made[row], routes=routes[row]) for row in rows]) for rows in ((3, 0), (5, 1))]
    write_routes(tmp_path, 2, [packed(made[4:5]), *pieces, packed([replace(made[2], routes=None)])])
    found = StepFile(tmp_path, 2).routes([1, 5, 4, 2, 3, 99])
    assert [each is None for each in found] == [False, False, False, False, False, True]
    for number, own in zip((4, 2), found[2:4], strict=True):
        assert own.dtype == dtype and own.shape == routes[number].shape and is_missing(own).all()
    for number, own in zip((1, 5, 3), (found[0], found[1], found[4]), strict=True):
        assert own.dtype == dtype and np.array_equal(own, routes[number])
    write_routes(tmp_path, 3, [packed(made)])
    assert not (tmp_path / "step-3.routes.parquet").exists()


def test_only_a_responses_own_routes_are_read_and_no_number_becomes_an_object(tmp_path):
    routes = np.random.default_rng(0).integers(0, 99, (20_000, 3, 2)).astype(np.int8)
    made = [Sample(0, 0, row, row, (1,) * 19_999, (1,), (0.0,), "stop", 0, routes=routes + row) for row in range(8)]
    write_samples(tmp_path, 2, [packed(made)], [{"score": 0.0, "reason": "ok"}] * 8)
    write_routes(tmp_path, 2, [packed(made)])
    file = StepFile(tmp_path, 2)
    before = pa.total_allocated_bytes()
    (found,) = file.routes([5])
    assert np.array_equal(found, routes + 5)
    until = time.monotonic() + 10  # Arrow's threads may give back what they decoded a moment later
    while pa.total_allocated_bytes() - before >= 2 * routes.nbytes:
        assert time.monotonic() < until, "it keeps more than the response's own routes"
        time.sleep(0.01)
    tracemalloc.start()
    every = file.routes([7, 6, 5, 4, 3, 2, 1, 0])
    _, peak = tracemalloc.get_traced_memory()  # NumPy's and Python's, and not Arrow's
    tracemalloc.stop()
    assert all(np.array_equal(own, routes + 7 - row) for row, own in enumerate(every))
    assert not any(own.flags.owndata for own in every), "views of what Arrow has read"
    # lists would have a reference of eight bytes for each number; other threads of this process allocate some, too
    assert peak < 4 * len(every) * routes.nbytes


def test_the_oldest_steps_go_when_the_budget_is_used_up_and_the_newest_never(tmp_path):
    for step in (2, 9, 10, 11):
        a_step(tmp_path, step, 20)
    write_differences(tmp_path, 9, np.arange(1), np.ones(1, int), np.zeros(1))
    sizes = {step: sum(f.stat().st_size for f in tmp_path.glob(f"step-{step}.*")) for step in (2, 9, 10, 11)}
    assert keep_within(tmp_path, sum(sizes.values())) == []
    assert keep_within(tmp_path, sizes[10] + sizes[11]) == [2, 9]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-10.parquet", "step-11.parquet"]
    assert keep_within(tmp_path, 1) == [10] and (tmp_path / "step-11.parquet").exists()


@pytest.mark.parametrize(
    ("kept", "rows"), [("all", list(range(8))), (9, list(range(8))), (4, [0, 2, 4, 6]), (3, [0, 2, 5])]
)
def test_so_many_are_kept_evenly(kept, rows):
    assert kept_rows(8, kept).tolist() == rows


def test_of_a_file_that_fails_nothing_stays(tmp_path):
    def pieces():
        yield packed(a_step(tmp_path, 1, 8))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        write_samples(tmp_path, 5, pieces(), scored(8))
    assert [file.name for file in tmp_path.iterdir()] == ["step-1.parquet"]


class Store:
    """Responses as the driver refers to them."""

    def __init__(self, samples: Samples):
        self._samples = samples
        self.rows = SimpleNamespace(prompt_id=samples.prompt_id, turn_counts=None, branch_counts=None)

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, rows: np.ndarray) -> "Store":
        return Store(self._samples.rows(rows))

    def read(self) -> Samples:
        return self._samples


def test_the_rows_ground_truth_stands_beside_each_response_and_in_the_report(tmp_path):
    """verl's dumps have it (`gts`): without it nobody sees why an answer is wrong."""
    truths = {0: "42", 1: ["a", "b"], 2: "x" * 3000, 3: {"n": 1}}
    asked, written = [], []

    def truth_of(prompt_id: int):
        asked.append(prompt_id)
        return truths[prompt_id]

    writer = SampleWriter.__new__(SampleWriter)
    writer._kept, writer._under_way, writer._timeout_s = "all", {}, 1.0
    writer._has_images_of_turns = False
    remote = SimpleNamespace(remote=lambda *given: written.append(given))
    writer._writer = SimpleNamespace(write=remote)
    results = [RewardResult(i, float(i), {"acc": 1.0} if i else {"ground_truth": "its own"}, "ok") for i in range(4)]
    store = Store(packed(MANY))
    writer.write(7, store, results, truth_of)
    assert asked == [0, 1, 2, 3]  # once a prompt
    ((step, taken, chosen, known),) = written
    sample_writer._Writer(tmp_path, float("inf")).write(step, taken, chosen, known)
    rewards = [row["reward"] for row in read_samples(tmp_path, 7)]
    assert [reward["ground_truth"] for reward in rewards] == ["its own", ["a", "b"], "x" * 2000 + "...", {"n": 1}]
    assert rewards[1] == {"ground_truth": ["a", "b"], "acc": 1.0, "score": 1.0, "reason": "ok"}
    shown = {each.prompt_id: each.truth for kind in looked_at(tmp_path, 7, None).values() for each in kind}
    assert shown[1] == '["a", "b"]' and shown[0] == "its own"


def test_a_full_disk_costs_samples_and_is_counted(monkeypatch, capsys):
    writer = SampleWriter.__new__(SampleWriter)
    writer.failed, writer._timeout_s, writer._under_way = 0, 1.0, {"samples of step 3": "ref"}

    def full(refs, timeout_s, phase):
        raise EnvironmentFault(f"{phase}: the writer of samples found no space left to write to")

    monkeypatch.setattr(sample_writer, "gather_all", full)
    writer.finish()
    assert writer.failed == 1 and "samples of step 3 are not kept" in capsys.readouterr().out
    writer.finish()
    assert writer.failed == 1


def test_the_command_shows_the_worst_and_exports_lines(tmp_path, monkeypatch, capsys):
    (tmp_path / "samples").mkdir()
    made = a_step(tmp_path / "samples", 6, 30)
    lengths = np.array([len(sample.response_ids) for sample in made])
    write_differences(tmp_path / "samples", 6, np.arange(30), lengths, np.full(lengths.sum(), 0.25))
    monkeypatch.setattr(samples_command, "_decoder", lambda config, stored: lambda ids: f"<{ids}>")
    every = read_samples(tmp_path / "samples", 6)
    main(["samples", str(tmp_path), "--worst", "2", "--log-probs"])
    shown = capsys.readouterr().out
    assert "score 0 " in shown and "score 1 " in shown and "score 2 " not in shown
    assert shown.count("+2.5e-01") == sum(len(row["response_ids"]) for row in every if row["reward"]["score"] < 2)
    main(["samples", str(tmp_path), "--step", "6", "--prompt", "1", "--jsonl"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [row for row in every if row["prompt_id"] == 1]
    for wrong in (["--step", "5"], ["--prompt", "77"]):
        with pytest.raises(SystemExit) as ended:
            main(["samples", str(tmp_path), *wrong])
        assert ended.value.code == 2


def test_a_step_without_its_responses_is_not_the_newest_that_the_command_reads(tmp_path, capsys):
    """Its log-probs alone are there: of the other file the disk took no more."""
    (folder := tmp_path / "samples").mkdir()
    a_step(folder, 9, 3)
    a_step(folder, 4, 3)
    write_differences(folder, 10, np.arange(1), np.ones(1, int), np.zeros(1))
    main(["samples", str(tmp_path), "--jsonl"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == read_samples(folder, 9)
    with pytest.raises(SystemExit):
        main(["samples", str(tmp_path), "--step", "10"])
    assert "it has 4, 9\n" in capsys.readouterr().err


def test_texts_are_those_of_the_models_tokenizer_which_is_not_loaded_for_them(tmp_path, monkeypatch):
    """Loading it takes seconds; the whole of it is asked where the folder has no tokenizer.json."""
    from tokenizers import Tokenizer, models

    whole = SimpleNamespace(decode=lambda ids: "by the whole one")
    monkeypatch.setattr("mrl.data.dataset.load_tokenizer", lambda path: whole)
    (config := tmp_path / "config.yaml").write_text(f"model: {{path: {tmp_path}}}")
    assert samples_command._decoder(config)([1]) == "by the whole one"
    Tokenizer(models.WordLevel({"<unk>": 0, "four": 1, "two": 2}, "<unk>")).save(str(tmp_path / "tokenizer.json"))
    assert samples_command._decoder(config)([1, 2, 0]) == "four two <unk>"


@pytest.mark.parametrize("config", ["model: {path: tiny-world/model}", None])
def test_from_any_folder_texts_are_those_of_a_checkpoints_tokenizer(tmp_path, monkeypatch, capsys, config):
    """A relative model.path is one of the folder that the run was started in."""
    from tokenizers import Tokenizer, models

    run = tmp_path / "run"
    for folder in ("samples", "checkpoints/step-2/hf"):
        (run / folder).mkdir(parents=True)
    made = a_step(run / "samples", 2, 1)
    if config:
        (run / "config.resolved.yaml").write_text(config)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(SystemExit):
        main(["samples", str(run)])
    assert "--jsonl needs no" in capsys.readouterr().err
    words = {f"w{token}": token for token in (*made[0].prompt_ids, *made[0].response_ids)} | {"<unk>": 10**6}
    Tokenizer(models.WordLevel(words, "<unk>")).save(str(run / "checkpoints/step-2/hf/tokenizer.json"))
    main(["samples", str(run)])
    assert " ".join(f"w{token}" for token in made[0].response_ids) in capsys.readouterr().out


def test_a_run_without_its_configuration_is_told_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.yaml is missing, .* --jsonl needs none"):
        samples_command._decoder(tmp_path / "config.yaml")


def test_numbers_of_rows_come_through_bytes_as_they_were():
    for some in (packed(MANY), packed(MANY[1:2]), packed([])):
        told = some.numbers.to_bytes()
        found = SampleRows.from_bytes(told).arrays
        assert found.keys() == some.numbers.arrays.keys()
        for name, column in some.numbers.arrays.items():
            assert np.array_equal(found[name], column) and found[name].dtype == column.dtype
    assert len(packed(MANY[:1]).numbers.to_bytes()) < 120


def test_numbers_of_as_many_rows_as_are_told_of_at_once_are_below_a_kilobyte():
    rng = np.random.default_rng(0)
    rows, prompts = outbox.MANY, rng.integers(0, 100_000, outbox.MANY)
    seeds, lengths = rng.integers(0, 2**62, rows).tolist(), rng.integers(1000, 20000, rows).tolist()
    made = [
        Sample(int(prompts[i]), 7 * i, 60 * i, seeds[i], [1] * 99, [1] * lengths[i], [0.0] * lengths[i], "stop", 5,
            later_versions=((lengths[i] // 3, 6), (lengths[i] // 2, 7)))
        for i in range(rows)
    ]  # fmt: skip
    numbers = packed(made).numbers.to_bytes()
    told = outbox.FinishedRows(numbers, (1,) * rows, True, 1234, tuple(range(100, 110)), 2.0)
    assert len(pickle.dumps(tuple(told))) < 1024 - 128  # and some 100 bytes are of Ray
