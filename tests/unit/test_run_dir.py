"""The run directory: one run at a time, continued without a line lost or doubled."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mrl.checkpoint.step_folders import Newest
from mrl.config.load import load_config
from mrl.config.schedule_rules import schedule_of
from mrl.driver.reporting import AdvisedRecord
from mrl.driver.resume import generated_again, rewind
from mrl.errors import ConfigError
from mrl.record import attempts
from mrl.record.attempts import UnderWay, attempt, generated_after, note_under_way, read_attempts
from mrl.record.run_dir import RunDir, append_lines, json_line, read_metrics
from mrl.record.sample_files import write_differences, write_samples
from mrl.record.sinks import JsonlSink

TINY = "parallel_configs/tiny-moe/cpu.yaml"


def _with_steps(path, steps) -> RunDir:
    run = RunDir.open(path, "a: 1\n")
    sink = JsonlSink(run.metrics)
    for step in steps:
        sink.write(step, {"actor/lr": 0.1})
    sink.close()
    return run


def test_a_new_run_gets_its_folders_and_configuration(tmp_path):
    run = RunDir.open(tmp_path / "a" / "b", "model:\n  path: x\n")
    assert run.config.read_text() == "model:\n  path: x\n"
    assert all(folder.is_dir() for folder in (run.samples, run.checkpoints, run.logs))


def test_a_folder_that_holds_another_run_is_refused_unless_resumed(tmp_path):
    _with_steps(tmp_path, [1]).close()
    with pytest.raises(ConfigError, match=r"--resume.*--run-dir"):
        RunDir.open(tmp_path, "")
    RunDir.open(tmp_path, "", resume=True).close()


def test_a_run_that_died_before_its_first_line_is_no_obstacle(tmp_path):
    _with_steps(tmp_path, []).close()
    RunDir.open(tmp_path, "").close()


def test_a_checkpoint_alone_makes_it_another_run(tmp_path):
    run = RunDir.open(tmp_path, "")
    (run.checkpoints / "step-1").mkdir()
    run.close()
    with pytest.raises(ConfigError, match="another run"):
        RunDir.open(tmp_path, "")


def test_two_live_runs_cannot_share_a_folder(tmp_path):
    RunDir.open(tmp_path, "")
    code = f"from mrl.record.run_dir import RunDir; RunDir.open({str(tmp_path)!r}, '', resume=True)"
    other = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=False)
    assert f"EnvironmentFault: trainer.run_dir: {tmp_path} is in use by process {os.getpid()}" in other.stderr


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.run_dir"):
        RunDir.open(tmp_path / "file", "")


def test_resuming_replaces_the_lines_past_the_checkpoint(tmp_path):
    run = _with_steps(tmp_path, [0, 1, 2, 3, 4])
    assert run.truncate_metrics(after_step=2) == 3
    sink = JsonlSink(run.metrics)
    sink.write(3, {})
    assert [row["training/global_step"] for row in read_metrics(run.metrics)] == [0, 1, 2, 3]


def test_resuming_drops_samples_and_event_files_past_the_checkpoint(tmp_path):
    run = _with_steps(tmp_path, [1, 2])
    for step in (1, 2, 10):
        write_samples(run.samples, step, [], [])
        write_differences(run.samples, step, np.array([0]), np.array([1]), np.array([0.5]))
    (run.samples / "step-11.jsonl").write_text("")  # of an older version
    run.tensorboard.mkdir()
    run.truncate_metrics(after_step=2)
    kept = [f"step-{step}{kind}" for step in (1, 2) for kind in (".log_probs.parquet", ".parquet")]
    assert sorted(file.name for file in run.samples.iterdir()) == kept
    assert not run.tensorboard.exists()


@pytest.mark.parametrize("resume", [True, False])
def test_opening_removes_files_whose_writer_was_killed_and_no_others(tmp_path, resume):
    (run := RunDir.open(tmp_path, "")).close()
    run.validation.mkdir()
    killed = (
        "import os; from pathlib import Path; from mrl.whole_file import appears_whole\n"
        "names = 'samples/step-3.parquet', 'samples/step-2.log_probs.parquet', 'validation/step-3.jsonl'\n"
        "files = [appears_whole(Path(name)) for name in names]\n"
        "for file in files: file.__enter__().write_text('half')\n"
        "os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", killed], cwd=tmp_path, timeout=60, check=False)
    (run.samples / "step-0.parquet").write_text("whole")
    assert [len(list(folder.iterdir())) for folder in (run.samples, run.validation)] == [3, 1]
    RunDir.open(tmp_path, "", resume=resume).close()
    assert [file.name for file in run.samples.iterdir()] == (["step-0.parquet"] if resume else [])
    assert not list(run.validation.iterdir())


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_a_text_that_holds_another_line_separator_stays_one_line(tmp_path, separator):
    path = tmp_path / "metrics.jsonl"
    rows = [{"training/global_step": step, "note": f"a{separator}b"} for step in (1, 2)]
    path.write_text("".join(map(json_line, rows)), encoding="utf-8")
    assert read_metrics(path) == rows


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, "b\n"), ("", "b\n"), ("a\n", "a\nb\n"), ('{"a": ', '{"a": \nb\n'), ("ä", "ä\nb\n"), ("\n", "\nb\n")],
)
def test_lines_are_added_after_the_end_of_the_last(tmp_path, before, after):
    path = tmp_path / "lines.jsonl"
    if before is not None:
        path.write_text(before, encoding="utf-8")
    append_lines(path, "b\n")
    assert path.read_text(encoding="utf-8") == after


def test_a_torn_line_takes_no_attempt_and_no_step_with_it(tmp_path):
    run = _with_steps(tmp_path, [1])
    for file, torn in ((run.path / "attempts.jsonl", '{"event": "beg'), (run.metrics, '{"training/glo')):
        with file.open("a") as lines:
            lines.write(torn)
    with attempt(run.path, 7, {}):
        pass
    assert [(one.step, one.exit_code) for one in read_attempts(run.path)] == [(7, 0)]
    JsonlSink(run.metrics).write(2, {})
    assert run.metrics.read_text().splitlines()[-1] == '{"training/global_step": 2}'


def test_a_torn_last_line_is_dropped_even_where_it_parses(tmp_path):
    run = _with_steps(tmp_path, [1, 2])
    with run.metrics.open("a") as file:
        file.write('{"training/global_step": 3}')  # no newline: the write was cut
    assert len(read_metrics(run.metrics)) == 2
    assert run.truncate_metrics(after_step=9) == 2
    assert run.metrics.read_text().endswith("}\n")


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    run = _with_steps(tmp_path, [1])
    run.metrics.write_text("garbage\n" + run.metrics.read_text())
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:1"):
        read_metrics(run.metrics)


def test_truncating_a_run_without_metrics_is_nothing(tmp_path):
    assert RunDir.open(tmp_path, "").truncate_metrics(5) == 0


def test_what_a_lost_node_took_along_is_generated_again_and_counted(tmp_path, capsys):
    """Steps 3 and 4 were done after the checkpoint of step 2, step 5 was under way."""
    config, run = load_config(TINY, None, ["rollout.n=4", "data.train_batch_size=16"]).config, RunDir.open(tmp_path, "")
    note_under_way(run.path, 1, 64)
    lines = [{"training/global_step": step, "train/trained_groups": 16.0 - step} for step in range(5)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert generated_after(run.path, 2, 4) == 4 * (13 + 12) and generated_after(run.path, 4, 4) == 0
    note_under_way(run.path, 5, 60)
    assert generated_after(run.path, 2, 4) == 4 * (13 + 12) + 60 and generated_after(run.path, 5, 4) == 0
    saved_nothing = Newest(None, None, {})
    again = generated_again(schedule_of(config), run, saved_nothing)
    assert again == 4 * (15 + 14 + 13 + 12) + 60 and f"{again} responses" in capsys.readouterr().out
    assert generated_again(schedule_of(config), run, saved_nothing, left=100) == again - 100
    assert generated_again(schedule_of(config), run, saved_nothing, left=again + 1) == 0
    ahead = load_config(TINY, None, ["trainer.schedule=one_step_off"]).config
    assert generated_again(schedule_of(ahead), run, saved_nothing) == 0
    assert generated_again(schedule_of(config), run, None) == 0
    with attempt(run.path, 0, {}) as notes:
        notes.generated_again(again)
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines[:1]))
    assert read_attempts(run.path)[-1].generated_again == again
    (run.path / "under_way.json").write_text('{"step": 5, "resp')
    assert generated_after(run.path, 0, 4) == 0


def test_responses_of_a_step_that_is_lost_while_it_is_generated_are_counted_too(tmp_path, monkeypatch):
    """The file is written at most once a second, at the end of generation, and when the run ends."""
    run = _with_steps(tmp_path, [])
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(attempts, "time", clock)
    sink = SimpleNamespace(write=lambda *_: None, progress=lambda *_: None, close=lambda: None)
    record = AdvisedRecord(sink, [], UnderWay(run.path, 2))
    seen = []
    moments = [(0, "train", 1), (0.5, "train", 7), (0.9, "val", 9), (1.1, "train", 8), (1.2, "train", 64)]
    for clock.now, phase, done in moments:
        record.progress(f"{phase} responses", done, 64)
        seen.append(generated_after(run.path, 2, 4))
    assert seen == [1, 1, 1, 8, 64]

    run.metrics.write_text(json_line({"training/global_step": 3, "train/trained_groups": 16}))
    record.write(3, {})
    record.close()
    assert generated_after(run.path, 2, 4) == 16 * 4  # once
    clock.now = 1.3
    record.progress("train responses", 5, 64)
    assert generated_after(run.path, 2, 4) == 16 * 4
    record.close()  # as an engine is lost
    assert generated_after(run.path, 2, 4) == 16 * 4 + 5


def test_what_one_start_lost_is_counted_by_the_next_and_by_none_after_it(tmp_path):
    """The second start ends before its first responses are there: the third has lost nothing."""
    config, run = load_config(TINY, None, ["rollout.n=4"]).config, _with_steps(tmp_path, [])
    run.metrics.write_text(json_line({"training/global_step": 1, "train/trained_groups": 16}))
    note_under_way(run.path, 2, 60)
    counted = []
    for _ in range(2):
        counted.append(generated_again(schedule_of(config), run, no_checkpoint := Newest(None, None, {})))
        rewind(run, no_checkpoint)
    assert counted == [4 * 16 + 60, 0]
