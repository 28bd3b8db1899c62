"""What scripts/compare_commits.py calls a difference, and what it lets pass."""

import importlib.util
import sys
from math import nan
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("compare_commits", ROOT / "scripts" / "compare_commits.py")
compare_commits = importlib.util.module_from_spec(_spec)
sys.modules["compare_commits"] = compare_commits
_spec.loader.exec_module(compare_commits)


def row(step: int = 1, **values) -> dict:
    return {"training/global_step": step} | values


def metric_differences(before: list[dict], after: list[dict], tolerance: float = 0.0) -> list[str]:
    return list(compare_commits.metric_differences(before, after, tolerance))


@pytest.mark.parametrize("value", [0.5, 0.0, 3, nan, "vanilla", None])
def test_a_metric_equals_itself_and_nan_is_one_value(value):
    assert metric_differences([row(loss=value)], [row(loss=value)]) == []


def test_a_metric_that_differs_is_named_with_its_step_and_both_values():
    before, after = [row(1, loss=0.5), row(2, loss=0.5)], [row(1, loss=0.5), row(2, loss=0.25)]
    assert metric_differences(before, after) == ["metrics: loss of step 2: 0.5 and 0.25"]


@pytest.mark.parametrize(("a", "b"), [(0.5, nan), (nan, 0.5), (0.5, None), ("gspo", "vanilla")])
def test_no_tolerance_lets_nan_nothing_or_another_word_pass_for_a_number(a, b):
    assert len(metric_differences([row(loss=a)], [row(loss=b)], 0.9)) == 1


@pytest.mark.parametrize(("tolerance", "differing"), [(0.0, 1), (0.05, 1), (0.125, 0)])
def test_the_tolerance_of_a_metric_is_relative_to_the_larger(tolerance, differing):
    """8 and 7 differ by an eighth of 8."""
    assert len(metric_differences([row(loss=8.0)], [row(loss=7.0)], tolerance)) == differing
    assert len(metric_differences([row(loss=-7.0)], [row(loss=-8.0)], tolerance)) == differing


def test_the_last_bit_counts_without_a_tolerance():
    assert len(metric_differences([row(loss=1.0)], [row(loss=float(np.nextafter(1.0, 2.0)))])) == 1


@pytest.mark.parametrize("name", ["timing_s/step", "perf/throughput", "reshard/seconds"])
def test_clocks_may_differ(name):
    assert metric_differences([row(**{name: 1.0})], [row(**{name: 2.0})]) == []


def test_metrics_of_one_side_are_no_difference_but_are_listed():
    before, after = [row(old=1.0), row(2, often=1.0)], [row(new=1.0), row(2, often=1.0)]
    assert metric_differences(before, after) == []
    assert compare_commits.keys_of_one_side(before, after) == {"before": ["old"], "after": ["new"]}


def test_a_metric_that_both_write_in_other_steps_is_of_no_one_side():
    before, after = [row(1, late=1.0), row(2)], [row(1), row(2, late=1.0)]
    assert compare_commits.keys_of_one_side(before, after) == {"before": [], "after": []}


def test_a_run_that_ended_early_differs():
    assert metric_differences([row(1), row(2)], [row(1)]) == ["metrics: 2 and 1 lines"]


WEIGHT = np.array([3.0, 4.0], np.float32)  # of norm 5


def checkpoint(folder: Path, step: int = 2, **tensors: np.ndarray) -> Path:
    """A run directory with one more checkpoint."""
    path = folder / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    return folder


def tensor_differences(folder: Path, before: dict, after: dict, tolerance: float = 0.0) -> list[str]:
    runs = checkpoint(folder / "before", **before), checkpoint(folder / "after", **after)
    return list(compare_commits.tensor_differences(*runs, tolerance))


def test_equal_tensors_do_not_differ_nor_do_those_with_the_same_nan(tmp_path):
    tensors = {"weight": WEIGHT, "broken": np.array([nan, 1.0], np.float32), "count": np.array([2])}
    assert tensor_differences(tmp_path, tensors, tensors) == []


@pytest.mark.parametrize(
    "other",
    [WEIGHT.astype(np.float64), WEIGHT[None], WEIGHT.astype(np.int64), np.array([3.0, nan], np.float32)],
    ids=["float64", "shape", "integers", "nan"],
)
def test_another_dtype_or_shape_differs_and_so_does_nan_whatever_the_tolerance(tmp_path, other):
    differences = tensor_differences(tmp_path, {"weight": WEIGHT}, {"weight": other}, 0.9)
    assert differences == ["tensor model.safetensors:weight differs"]


@pytest.mark.parametrize(("tolerance", "differing"), [(0.0, 1), (0.1, 1), (0.2, 0)])
def test_the_tolerance_of_a_tensor_is_of_norms(tmp_path, tolerance, differing):
    """(3, 4) and (3, 5): a difference of norm 1 over a norm of 5."""
    before, after = (np.array([3.0, last]) for last in (4.0, 5.0))
    assert len(tensor_differences(tmp_path, {"weight": before}, {"weight": after}, tolerance)) == differing


def test_integers_have_no_tolerance(tmp_path):
    assert len(tensor_differences(tmp_path, {"count": np.array([1000])}, {"count": np.array([1001])}, 0.9)) == 1


def test_a_tensor_of_one_side_differs(tmp_path):
    differences = tensor_differences(tmp_path, {"weight": WEIGHT, "bias": WEIGHT}, {"weight": WEIGHT})
    assert differences == ["tensors of one side only: ['model.safetensors:bias']"]


def test_the_newest_checkpoint_is_compared_by_its_number(tmp_path):
    """Step 10 is after step 9, though not as text."""
    for side, old in (("before", WEIGHT), ("after", 2 * WEIGHT)):
        checkpoint(tmp_path / side, 9, weight=old)
        checkpoint(tmp_path / side, 10, weight=WEIGHT)
    assert list(compare_commits.tensor_differences(tmp_path / "before", tmp_path / "after", 0.0)) == []
