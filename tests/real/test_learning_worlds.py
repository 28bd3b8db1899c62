"""A run learns to mend repositories from their tests, and controls do not; and credit by turn learns what a response's
cannot.
"""

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


def learned(world: Path, run_dir: Path, part: str, *given: str) -> float:
    """What a run adds to a held-out part's mean, from before its first step to behind its last one."""
    options = (world / "options").read_text().split()
    more = [word for each in given for word in ("--set", each)]
    done = mrl("train", str(PRESET), "--run-dir", str(run_dir), *options, *more, seconds=RUN_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = metrics(run_dir)
    (name,) = {name for row in rows for name in row if name.endswith(f"/{part}/mean@4")}
    assert name in rows[0] and name in rows[-1]
    return rows[-1][name] - rows[0][name]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_repairs_are_learned_from_their_tests(made, tmp_path, seed):
    """40 points in 60 steps."""
    assert learned(made("repair", seed), tmp_path / "run", "acc") >= 0.40


@pytest.mark.parametrize("kind", ["shuffled", "random"])
def test_repairs_are_not_learned_from_other_tests_or_a_coin(made, tmp_path, kind):
    """At most 5 points; all but the reward is as above."""
    world = made("repair", 0)
    given = {
        "shuffled": (f"data.train_files={world}/data/shuffled.parquet",),
        "random": ("reward.function=exact_match", f"reward.custom_reward_function.path={world}/random_reward.py"),
    }[kind]
    assert learned(world, tmp_path / "run", "acc", *given) <= 0.05


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_credit_by_turn_learns_what_credit_by_response_cannot(made, tmp_path, seed):
    """25 points and a quarter of that, in the same 40 steps of the same rows."""
    world = made("turn", seed)
    by_turn = learned(world, tmp_path / "turn", "right", "algorithm.adv_estimator=grpo_turn", "algorithm.gamma=0.01")
    by_response = learned(world, tmp_path / "response", "right", "algorithm.adv_estimator=grpo")
    assert by_turn >= 0.25 and by_response <= by_turn / 4
