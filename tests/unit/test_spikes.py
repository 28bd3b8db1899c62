"""An update whose gradient is far larger than those before is told, with its samples, and a usual one never."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from mrl.driver.reporting import SPIKE, SPIKE_LEAST, SPIKE_WINDOW, SpikeWatch, in_ranges, note_warning
from mrl.driver.step_batch import gradient_norms
from mrl.record.run_dir import RunDir
from mrl.tools.report.run_record import RunRecord


def updates(first: int, count: int = 1) -> list[np.ndarray]:
    """Ids of four samples an update."""
    return [np.arange(first + 4 * i, first + 4 * i + 4) for i in range(count)]


@pytest.fixture
def watch() -> SpikeWatch:
    made = SpikeWatch()
    made.look(1, 1.0, [0.5, 2.0] * (SPIKE_LEAST // 2), updates(0, SPIKE_LEAST))
    return made


def test_a_spike_is_told_with_the_ids_of_its_samples_and_what_clipping_did(watch, capsys):
    watch.look(2, 1.0, [1.0, 1e4, 1.0], updates(64, 3))
    said = capsys.readouterr().out
    assert "step 2: warning: the gradient of update 2 of 3 has norm 1e+04" in said
    assert "it was clipped to 1 (actor.optim.clip_grad)" in said and "its samples: 68-71;" in said
    assert said.count("warning") == 1


def test_what_the_log_warned_of_is_kept_for_the_report(watch, tmp_path):
    run = RunDir(tmp_path)
    for step in (2, 2, 9):  # a step done again after a resume, and one that the run went back from
        watch.look(step, 1.0, [1.0, 1e4], updates(64, 2), partial(note_warning, run))
    with run.warnings.open("a") as file:
        file.write('{"step": 2, "te')
    record = SimpleNamespace(path=tmp_path, by_step={1: {}, 2: {}})
    ((step, text),) = RunRecord.warnings.func(record)
    assert step == 2 and text.startswith("the gradient of update 2 of 2 has norm 1e+04") and "68-71" in text


@pytest.mark.parametrize("clip_grad", [0.0, 1e5])
def test_what_is_not_clipped_is_said_not_to_be(watch, capsys, clip_grad):
    watch.look(2, clip_grad, [1e4], updates(0))
    said = capsys.readouterr().out
    assert f"clip_grad ({clip_grad:g}) leaves it as it is" in said and "was clipped" not in said


def test_usual_gradients_are_passed_over(watch, capsys):
    drawn = np.random.default_rng(0).lognormal(sigma=0.7, size=2000).tolist()
    watch.look(2, 1.0, drawn, updates(0, len(drawn)))
    assert not capsys.readouterr().out


def test_nothing_is_judged_before_enough_was_seen_nor_by_updates_that_were_passed_over(capsys):
    watch = SpikeWatch()
    watch.look(1, 1.0, [math.nan] * SPIKE_LEAST + [1.0] * (SPIKE_LEAST - 1) + [1e4], updates(0, 2 * SPIKE_LEAST))
    assert not capsys.readouterr().out
    watch.look(2, 1.0, [1e4], updates(0))
    assert "norm 1e+04" in capsys.readouterr().out


def test_one_spike_does_not_hide_the_next_and_what_stays_large_becomes_usual(watch, capsys):
    watch.look(2, 1.0, [1e4, 1e4], updates(0, 2))
    assert capsys.readouterr().out.count("warning") == 2
    watch.look(3, 1.0, [1e4] * SPIKE_WINDOW, updates(0, SPIKE_WINDOW))
    capsys.readouterr()
    watch.look(4, 1.0, [SPIKE * 0.9e4], updates(0))
    assert not capsys.readouterr().out


def test_norms_of_all_updates_are_read_off_what_ranks_hand_out():
    """Two ranks of two updates; the second rank has losses alone. The second update was passed over."""
    first = [
        {"actor/grad_norm": (2.0, 1.0), "actor/skipped_updates": (0.0, 1.0)}, {"actor/skipped_updates": (1.0, 1.0)},
    ]  # fmt: skip
    second = [{"actor/pg_loss": (0.5, 8.0)}] * 2
    norms = gradient_norms([*first, *second])
    assert norms[0] == 2.0 and math.isnan(norms[1]) and len(norms) == 2


@pytest.mark.parametrize(
    ("ids", "words"), [([3], "3"), ([5, 3, 4], "3-5"), ([1, 2, 9, 11, 12], "1-2, 9, 11-12"), ([], "")]
)
def test_ids_that_follow_each_other_are_a_range(ids, words):
    assert in_ranges(np.array(ids, np.int64)) == words


def test_updates_of_nothing_make_none_unusual(capsys):
    watch = SpikeWatch()
    watch.look(1, 1.0, [0.0] * SPIKE_LEAST + [0.1], updates(0, SPIKE_LEAST + 1))
    assert not capsys.readouterr().out


def test_a_line_has_a_bound():
    assert in_ranges(np.arange(0, 100, 2)).endswith("36, 38, and 30 more ranges")
