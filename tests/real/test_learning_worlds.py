"""A run learns to mend repositories from their tests, and controls do not."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from world import ROOT, metrics, mrl

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(3 * 3600)]
PRESET = ROOT / "parallel_configs" / "tool-moe" / "cpu.yaml"
RUN_S = 3000.0  # of one run on a machine that others use


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str, int], Path]:
    """Makes a world of a kind and a seed, once."""

    @cache
    def make(kind: str, seed: int) -> Path:
        out = tmp_path_factory.mktemp("worlds") / f"{kind}-{seed}"
        command = [
            sys.executable,
            str(ROOT / "scripts" / f"make_{kind}_world.py"),
            "--out",
            str(out),
            "--seed",
            str(seed),
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        return out

    return make


def learned(world: Path, run_dir: Path, part: str, *more: str) -> tuple[float, float]:
    """A held-out part's mean before and after a run."""
    done = mrl(
        "train", str(PRESET), "--run-dir", str(run_dir), *(world / "options").read_text().split(), *more, seconds=RUN_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (name,) = {name for row in metrics(run_dir) for name in row if name.endswith(f"/{part}/mean@4")}
    found = [row[name] for row in metrics(run_dir) if name in row]
    return found[0], found[-1]


@pytest.mark.parametrize("kind", ["trained", "shuffled", "random"])
def test_repairs_are_learned_from_tests_and_from_nothing_else(made, tmp_path, kind):
    """40 points in 60 steps; of other repositories' tests, and of a coin, at most 5."""
    world = made("repair", 0)
    controls = {
        "shuffled": (f"data.train_files={world}/data/shuffled.parquet",),
        "random": ("reward.function=exact_match", f"reward.custom_reward_function.path={world}/random_reward.py"),
    }
    more = [word for given in controls.get(kind, ()) for word in ("--set", given)]
    first, last = learned(world, tmp_path / "run", "acc", *more)
    assert last - first >= 0.40 if kind == "trained" else last - first <= 0.05
