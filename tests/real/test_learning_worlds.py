"""A run learns to mend repositories from their tests, and controls do not; credit by turn learns what a response's
cannot; and a model that sees learns to count and name what is in pictures, and not from pictures of others.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from world import ROOT, metrics, mrl

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(3 * 3600)]
CALLING, SEEING = (ROOT / "parallel_configs" / name / "cpu.yaml" for name in ("tool-moe", "tiny-vision"))
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
    (gain,) = gains(CALLING, world, run_dir, part, *given).values()
    return gain


def gains(preset: Path, world: Path, run_dir: Path, part: str, *given: str) -> dict[str, float]:
    """As `learned`, by data source."""
    options = (world / "options").read_text().split()
    more = [word for each in given for word in ("--set", each)]
    done = mrl("train", str(preset), "--run-dir", str(run_dir), *options, *more, seconds=RUN_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = metrics(run_dir)
    names = {name for row in rows for name in row if name.endswith(f"/{part}/mean@4")}
    assert names and all(name in rows[0] and name in rows[-1] for name in names)
    sources = {name: name.removeprefix("val-core/").removesuffix(f"/{part}/mean@4") for name in names}
    return {sources[name]: rows[-1][name] - rows[0][name] for name in names}


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
    """25 points and a quarter of that, in the same 80 steps of the same rows."""
    world = made("turn", seed)
    by_turn = learned(world, tmp_path / "turn", "right", "algorithm.adv_estimator=grpo_turn", "algorithm.gamma=0.01")
    by_response = learned(world, tmp_path / "response", "right", "algorithm.adv_estimator=grpo")
    assert by_turn >= 0.25 and by_response <= by_turn / 4


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_is_in_pictures_is_learned(made, tmp_path, seed):
    """40 points in 60 steps; of answers to pictures of others at most 5 more are right."""
    found = gains(SEEING, made("vision", seed), tmp_path / "run", "acc")
    assert found["tiny/shapes"] >= 0.40 and found["tiny/shapes/others"] <= 0.05


@pytest.mark.parametrize("kind", ["others", "random"])
def test_what_is_in_pictures_is_not_learned_from_pictures_of_others_or_a_coin(made, tmp_path, kind):
    """At most 5 points; all but the pictures or the reward is as above."""
    world = made("vision", 0)
    given = {
        "others": f"data.train_files={world}/data/others.parquet",
        "random": f"reward.custom_reward_function.path={world}/random_reward.py",
    }[kind]
    assert gains(SEEING, world, tmp_path / "run", "acc", given)["tiny/shapes"] <= 0.05
