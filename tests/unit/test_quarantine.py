"""What a run sets aside is written down once, cut by a resume, bounded, and never what ends a run."""

import errno
import json
import os
from types import SimpleNamespace

import numpy as np

from mrl.driver.reporting import set_failures_aside
from mrl.record import quarantine
from mrl.record.quarantine import QUARANTINE, REWARD, ROW, Quarantine
from mrl.record.run_dir import read_metrics
from mrl.record.sinks import JsonlSink
from mrl.reward.items import OK, RAISED, RewardResult


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / QUARANTINE).read_text().splitlines()]


def test_a_resume_cuts_rewards_of_later_steps_and_rows_that_it_finds_anew(tmp_path):
    aside = Quarantine(tmp_path)
    aside.add(ROW, [{"file": "a", "row": 3, "why": "half of a character: \ud800"}])
    aside.add(REWARD, [{"step": 1, "sample_id": 0}])
    aside.add(REWARD, [{"step": 2, "sample_id": 5}, {"step": 2, "sample_id": 6}])
    assert lines(tmp_path)[0]["why"] == "half of a character: \ud800"
    with (tmp_path / QUARANTINE).open("a") as file:
        file.write('{"kind": "reward", "st')  # killed in the middle
    again = Quarantine(tmp_path)
    again.rewind(1)
    assert lines(tmp_path) == [{"kind": REWARD, "step": 1, "sample_id": 0}]
    again.add(ROW, [{"file": "a", "row": 3}])
    again.add(REWARD, [])
    assert [line["kind"] for line in lines(tmp_path)] == [REWARD, ROW]


def test_what_a_step_fails_at_is_written_down_with_its_ids(tmp_path):
    """Of three responses one reward failed: it alone stands there, with all that finds it again."""
    rows = SimpleNamespace(prompt_id=np.array([7, 7, 9]), sample_id=np.array([0, 1, 8]))
    results = [
        RewardResult(0, 1.0, {}, OK), RewardResult(1, 0.0, {}, RAISED, "KeyError: 'x'", "gsm8k"),
        RewardResult(8, 1.0, {}, OK),
    ]  # fmt: skip
    rollouts = SimpleNamespace(samples=SimpleNamespace(rows=rows), results=results)
    set_failures_aside(SimpleNamespace(path=tmp_path, check_lock=lambda: None), 3, rollouts)
    row = {"kind": REWARD, "step": 3, "prompt_id": 7, "sample_id": 1, "data_source": "gsm8k", "reason": RAISED}
    assert lines(tmp_path) == [row | {"detail": "KeyError: 'x'"}]


def test_the_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(quarantine, "QUARANTINE_BYTES", 1000)
    aside = Quarantine(tmp_path)
    for step in range(50):
        aside.add(REWARD, [{"step": step, "detail": "x" * 100}] * 3)
    assert 800 < (tmp_path / QUARANTINE).stat().st_size <= 1000
    assert lines(tmp_path)


def test_a_disk_that_takes_nothing_is_told_once_and_ends_no_run(tmp_path, capsys):
    (tmp_path / QUARANTINE).symlink_to("/dev/full")
    aside = Quarantine(tmp_path)
    for step in range(3):
        aside.add(REWARD, [{"step": step}])
    aside.rewind(0)
    assert capsys.readouterr().out.count("the run continues") == 1


def test_a_line_that_did_not_reach_the_disk_is_not_there_until_it_does(tmp_path, monkeypatch, capsys):
    """A disk may take bytes and refuse them when they are to be durable."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"a": 1.0})
    one = path.read_text()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        sink.write(2, {"a": 2.0})
    assert path.read_text() == one and "No space left" in capsys.readouterr().out
    sink.close()
    assert [row["a"] for row in read_metrics(path)] == [1.0, 2.0]
