"""Figures of the comparison of schedules, worked by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("schedule_bench", ROOT / "scripts" / "bench" / "schedule.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def row(step, tokens=100.0, gen=2.0, seconds=5.0):
    return {
        "training/global_step": step, "perf/total_num_tokens": tokens, "timing_s/gen": gen, "timing_s/reward": 0.5,
        "timing_s/step": seconds,
    }  # fmt: skip


def test_only_steps_count_in_which_both_are_at_work(bench):
    rows = [row(0, 1e9), *(row(step, 1e9) for step in range(1, 7)), row(7), row(8, 300.0, 4.0), *(row(9, 1e9),) * 5]
    assert bench.speed(rows) == 40.0  # 400 tokens in 10 s
    assert bench.phases(rows) == (3.5, 1.5)


def test_an_engine_of_two_seats_makes_its_longest_last(bench):
    assert bench.engine_steps([3, 1, 1, 5], 2) == 2 + 5  # 1 and 1 beside the 3, then the 5 beside what is left of it
    assert bench.engine_steps([3, 1, 1, 5], 4) == 5


def test_seconds_of_a_step_and_of_a_response_in_it_are_found_again(bench):
    lengths = [[10, 2, 2], [4, 4, 4], [7, 1, 3], [12, 11, 1]]
    seconds = [0.02 * bench.engine_steps(each, 2) + 0.003 * sum(each) for each in lengths]
    found = bench.fitted_engine(lengths, seconds, 2)
    assert (found.step_s, found.each_s) == (pytest.approx(0.02), pytest.approx(0.003))
    alike = bench.fitted_engine([[4, 4]] * 3, [8.0] * 3, 2)
    assert 4 * alike.step_s + 8 * alike.each_s == pytest.approx(8.0)


def test_every_schedule_of_the_comparison_is_one_that_can_run(bench, tmp_path):
    from mrl.config.load import load_config
    from mrl.config.schedule_rules import schedule_of

    for name, staleness in bench.STALENESS.items():
        own = [f"{key}={value}" for key, value in bench.settings(name, 30, 32, tmp_path, tmp_path / "run").items()]
        schedule = schedule_of(load_config(bench.PRESET, overrides=own).config)
        assert (schedule.max_staleness if schedule else 0) == staleness
        assert schedule is None or (schedule.batch, schedule.responses) == (bench.BATCH, bench.N)
        assert schedule is None or schedule.max_tokens == bench.LONGEST
