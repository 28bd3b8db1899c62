"""Sinks: the JSONL record is strict and always there; views neither stop training nor cost a line."""

import errno
import io
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mrl.errors import ConfigError, EnvironmentFault
from mrl.record import console, sinks
from mrl.record.loggers import TensorBoardSink
from mrl.record.run_dir import RunDir, read_metrics
from mrl.record.sinks import JsonlSink, Record, make_sinks
from mrl.record.views import View


class Broken(View):
    """A view whose service is gone."""

    def __init__(self) -> None:
        self.calls = 0

    def write(self, step, metrics):
        self.calls += 1
        raise ConnectionError("service gone")

    def close(self):
        raise ConnectionError("service gone")


class Hanging(View):
    """A view whose service never answers, until the test lets it."""

    def __init__(self) -> None:
        self.let_go, self.calls = threading.Event(), 0

    def write(self, step, metrics):
        self.calls += 1
        self.let_go.wait(30)


class Seeing(View):
    """A view that works."""

    def __init__(self) -> None:
        self.steps, self.texts, self.closed = [], [], False

    def write(self, step, metrics):
        self.steps.append(step)

    def generations(self, step, rows):
        self.texts.append((step, list(rows)))

    def close(self):
        self.closed = True


def test_a_line_holds_the_step_first_and_the_metrics_in_their_order(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(3, {"b": 1.5, "a": np.float32(0.5)})
    assert list(json.loads((tmp_path / "metrics.jsonl").read_text()).items()) == [
        ("training/global_step", 3),
        ("b", 1.5),
        ("a", 0.5),
    ]


def test_numbers_that_json_cannot_hold_become_null(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"a": float("nan"), "b": float("inf"), "c": np.float64("nan")})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"training/global_step": 1, "a": None, "b": None, "c": None}


def test_a_broken_view_is_logged_once_and_costs_no_line(tmp_path, logged):
    broken = Broken()
    record = Record(JsonlSink(tmp_path / "metrics.jsonl"), {"service": broken})
    for step in (1, 2, 3):
        record.write(step, {})
        time.sleep(0.05)
    record.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert broken.calls == 1
    assert [r.getMessage().split(" failed")[0] for r in logged] == ["trainer.logger: service"]


def test_a_hanging_view_is_left_out_and_neither_the_run_nor_its_neighbours_wait(tmp_path, logged):
    hanging, seeing = Hanging(), Seeing()
    record = Record(JsonlSink(tmp_path / "metrics.jsonl"), {"service": hanging, "other": seeing}, timeout_s=0.3)
    begin = time.monotonic()
    for step in range(50):
        record.write(step, {"a": 1.0})
    assert time.monotonic() - begin < 2  # 50 fsyncs, no waiting
    while not hanging.calls:
        time.sleep(0.01)
    time.sleep(0.4)
    record.write(50, {})
    record.close()
    assert [row["training/global_step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(51))
    assert (seeing.steps, seeing.closed) == (list(range(51)), True)
    assert hanging.calls == 1
    assert "busy with one call for more than trainer.logger_timeout_s (0.3 s)" in logged[0].getMessage()
    hanging.let_go.set()


def test_a_view_that_hangs_at_the_end_is_left_to_itself(tmp_path):
    hanging = Hanging()
    record = Record(JsonlSink(tmp_path / "metrics.jsonl"), {"service": hanging}, timeout_s=0.3)
    record.write(1, {})
    begin = time.monotonic()
    record.close()
    assert time.monotonic() - begin < 2
    hanging.let_go.set()


def test_a_view_that_ends_the_process_only_ends_itself(tmp_path):
    class Quitting(View):
        def write(self, step, metrics):
            raise SystemExit(3)

    record = Record(JsonlSink(tmp_path / "metrics.jsonl"), {"service": Quitting()})
    for step in (1, 2):
        record.write(step, {})
    record.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_a_process_with_a_view_that_never_returns_still_ends():
    code = (
        "import time, pathlib, sys\nfrom mrl.record.sinks import *\n"
        "class Hanging(View):\n    def write(self, step, metrics): time.sleep(3600)\n"
        "record = Record(JsonlSink(pathlib.Path(sys.argv[1])), {'service': Hanging()}, timeout_s=0.2)\n"
        "record.write(1, {}); record.close(); print('over')"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code, f"{folder}/m.jsonl"], capture_output=True, text=True, timeout=20
        )
    assert done.stdout == "over\n"


def test_validation_responses_reach_the_views_that_show_text(tmp_path):
    seeing, rows = Seeing(), [{"data_source": "toy", "input": "1+1", "output": "2", "gts": "2", "score": 1.0}]
    stream = io.StringIO()
    views = {
        "seeing": seeing,
        "console": console.PlainConsole(2, stream),
        "tensorboard": TensorBoardSink(tmp_path / "tb"),
    }
    record = Record(JsonlSink(tmp_path / "metrics.jsonl"), views)
    record.generations(2, rows)
    record.close()
    assert seeing.texts == [(2, rows)]
    assert stream.getvalue() == "step 2, toy, score 1\n  prompt: 1+1\n  response: 2\n  truth: 2\n"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert b"score 1 (toy)" in events.Tensors("val/generations/0")[0].tensor_proto.string_val[0]


def test_an_unknown_logger_is_refused_with_the_list_of_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"'wandbb'.*jsonl, console, tensorboard"):
        make_sinks(["wandbb"], RunDir.open(tmp_path, ""), 1)


def test_a_missing_package_is_a_configuration_error(tmp_path, monkeypatch):
    def missing(run_dir, total_steps, info):
        raise ModuleNotFoundError("No module named 'x'", name="x")

    monkeypatch.setitem(sinks.VIEWS, "tensorboard", missing)
    with pytest.raises(ConfigError, match="needs the package x"):
        make_sinks(["tensorboard"], RunDir.open(tmp_path, ""), 1)


def test_a_package_that_breaks_while_it_is_loaded_is_a_configuration_error(tmp_path, monkeypatch):
    def broken(run_dir, total_steps, info):
        raise TypeError("descriptors cannot be created")

    monkeypatch.setitem(sinks.VIEWS, "wandb", broken)
    with pytest.raises(
        ConfigError,
        match=r"wandb cannot be started \(TypeError: descriptors cannot be created\); repair it, or remove wandb from",
    ):
        make_sinks(["wandb"], RunDir.open(tmp_path, ""), 1)


def test_a_view_that_the_disk_or_the_network_refuses_is_the_environments_fault(tmp_path, monkeypatch):
    def full(run_dir, total_steps, info):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(sinks.VIEWS, "tensorboard", full)
    with pytest.raises(
        EnvironmentFault, match=r"tensorboard cannot be started \(OSError: \[Errno 28\] No space left on device\)"
    ) as refused:
        make_sinks(["tensorboard"], RunDir.open(tmp_path, ""), 1)
    assert refused.value.exit_code == 4


def _scalars(folder) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("actor/lr")]


def test_tensorboard_reads_back_what_was_written(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write(1, {"actor/lr": 0.5})
    sink.write(2, {"actor/lr": np.float32(0.25)})
    sink.close()
    assert _scalars(tmp_path) == [(1, 0.5), (2, 0.25)]


def test_event_files_of_a_resumed_run_hold_each_step_once(tmp_path):
    run = RunDir.open(tmp_path, "")
    record = make_sinks(["tensorboard"], run, 4)
    for step in (1, 2, 3):
        record.write(step, {"actor/lr": float(step)})
    record.close()
    run.truncate_metrics(after_step=2)
    record = make_sinks(["tensorboard"], run, 4)
    record.write(3, {"actor/lr": 30.0})
    record.close()
    assert _scalars(run.tensorboard) == [(1, 1.0), (2, 2.0), (3, 30.0)]


METRICS = {
    "critic/score/mean": 0.25,
    "perf/throughput": 1234.0,
    "timing_s/gen": 2.0,
    "timing_s/reshard": 0.5,
    "timing_s/step": 3.0,
}


def test_without_a_terminal_a_step_is_one_plain_line():
    stream = io.StringIO()
    view = console.make_console(total_steps=11, stream=stream)
    view.write(1, METRICS | {"val-core/tiny/reward/mean@1": 0.5})
    assert stream.getvalue() == "step 1/11 | reward 0.25 | val 0.5 | 3.0 s | left 0:00:30\n"


def test_with_verbose_a_line_has_all_phases_and_headline_metrics(monkeypatch):
    monkeypatch.setenv("MRL_VERBOSE", "1")
    line = console.format_line(1, 11, METRICS, "0:00:30")
    assert line == "step 1/11 | reward 0.25 | tok/s/dev 1234 | 3.0 s (gen 2.0, reshard 0.5) | left 0:00:30"


def test_a_step_is_a_line_of_what_one_looks_at_in_its_order():
    metrics = METRICS | {
        "training/rollout_probs_diff_mean": 2.016e-07, "actor/pg_clipfrac": 0.3594, "response_length/mean": 1234.5,
        "actor/entropy": 0.7, "actor/grad_norm": 0.2, "timing_s/record": 0.0,
    }  # fmt: skip
    assert console.format_line(1, 11, metrics, "0:00:30") == (
        "step 1/11 | reward 0.25 | mismatch 2.02e-07 | clip 0.359 | length 1234 | 3.0 s | left 0:00:30"
    )


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["openai/gsm8k/acc/mean@4"], ["val"]),
        (["openai/gsm8k/acc/mean@4", "aime/reward/mean@4"], ["val gsm8k", "val aime"]),
        (["a/math/acc/mean@4", "b/math/acc/mean@4"], ["val a/math/acc", "val b/math/acc"]),
    ],
)
def test_validation_has_a_short_name(names, short):
    scores = {f"val-core/{name}": 0.5 for name in names}
    others = {"val-core/aime/acc/best@4/mean": 0.9, "val-aux/num_turns": 1.0}
    assert list(console.validation(scores | others)) == short


def test_time_left_is_unknown_before_the_first_timed_step():
    assert console.TimeLeft(10).after(0, {}) == "?"


def test_on_a_terminal_the_table_shows_steps_rewards_and_phases():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    view = console.make_console(2, stream, Path("runs/one/logs"))
    assert isinstance(view, console.LiveConsole)
    view.write(1, METRICS)
    view.write(2, METRICS | {"critic/score/mean": None})
    view.close()
    said = stream.getvalue()
    assert (
        "step 2 of 2" in said
        and "0:00:00 left" in said
        and said.splitlines()[-2].endswith("logs: runs/one/logs\x1b[0m")
    )


def test_a_table_shows_the_columns_that_have_numbers_and_the_phases_longest_first():
    table = console.make_table([(1, METRICS | {"timing_s/reshard": 2.5})], 2, "0:00:03")
    assert [column.header for column in table.columns] == ["step", "reward", "seconds"]
    assert [next(iter(column.cells)) for column in table.columns] == ["1", "0.25", "3"]
    assert table.caption == "seconds: reshard 2.5, gen 2.0"


def test_a_long_phase_says_how_far_it_is_now_and_then():
    seconds = iter([0.0, 10.0, 31.0, 31.0, 32.0, 62.0, 62.0])
    stream = io.StringIO()
    view = console.PlainConsole(5, stream, console.Pace(30.0, lambda: next(seconds)))
    for done in (1, 2, 3, 4):  # at 10, 31, 32 and 62 seconds
        view.progress("responses", done, 4)
    assert stream.getvalue() == "responses: 2 of 4\nresponses: 4 of 4\n"


def test_progress_reaches_the_views_and_is_dropped_while_they_are_busy(tmp_path):
    class Slow(Hanging):
        seen = ()

        def progress(self, phase, done, total):
            self.seen = (*self.seen, done)

    slow = Slow()
    record = Record(JsonlSink(tmp_path / "metrics.jsonl"), {"slow": slow})
    record.write(1, {})
    while not slow.calls:
        time.sleep(0.01)
    for done in range(1000):  # a view that is busy is not told what is old by the time it listens
        record.progress("responses", done, 1000)
    slow.let_go.set()
    record.close()
    assert slow.seen == ()
