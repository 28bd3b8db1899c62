"""A recipe and what it switches on, in a whole run: dynamic sampling, over-long responses, corrections, a user's own
loss.

GRPO with a KL to the start and replayed routes is what test_runs stops and resumes.
"""

from pathlib import Path

import pytest
from metric_names import PENALTY, R3, SAVING, check_names
from world import PRESET, ROOT, make_world, metrics, overrides, succeeded

from mrl.record.sample_files import read_samples

pytestmark = [pytest.mark.real, pytest.mark.long]


def test_dapo_with_icepop_and_a_users_loss_by_the_engines_routes(tmp_path):
    """Two steps: groups of one mind are replaced, the reward is penalised for length, and the file's loss is what
    trains.

    Training chooses the experts that the engine chose; both compute in float32, so that they seldom disagree.
    """
    world, run_dir = make_world(tmp_path / "world"), tmp_path / "run"
    settings = overrides(
        world, trainer__total_training_steps=2, trainer__val_before_train=False, trainer__test_freq=-1, rollout__n=4,
        algorithm__rollout_correction={"level": "token", "mode": "icepop", "low": 0.5, "high": 5.0},
        algorithm__policy_loss__custom={"path": str(ROOT / "tests" / "real" / "users_loss.py"),
            "parameters": {"beta": 0.1}},
        algorithm__policy_loss__loss_mode="leashed", actor__router_replay="R3",
    )  # fmt: skip
    said = succeeded("train", str(PRESET), "--recipe", "dapo", "--run-dir", str(run_dir), *settings)
    rows = metrics(run_dir)
    check_names(rows, R3, SAVING, PENALTY)
    assert [row["training/global_step"] for row in rows] == [1, 2]
    for row, samples in zip(rows, (read(run_dir, step) for step in (1, 2)), strict=True):
        groups = {s["group_id"] for s in samples}
        assert groups == set(range(len(groups))) and len(groups) == row["train/trained_groups"] <= 8
        assert [s["sample_id"] for s in samples] == list(range(len(samples)))
        for group in groups:  # what is trained on differs in score
            assert len({s["reward"]["score"] for s in samples if s["group_id"] == group}) > 1
        penalties = [-1.0 if len(s["response_ids"]) == 4 else 0.0 for s in samples]  # a buffer of one token
        assert row["critic/rewards/mean"] - row["critic/score/mean"] == pytest.approx(sum(penalties) / len(samples))
        assert row["rollout_corr/rejected_token_share"] == 0 and row["rollout_corr/weight_mean"] == pytest.approx(
            1.0, abs=1e-3
        )
        assert row["actor/pg_clipfrac"] == 0 and row["actor/grad_norm"] > 0
        assert row["router/missing_routes"] == row["router/drift"] == 0 and row["router/rollout_drift"] < 0.01
    assert "loss: leashed, token-mean" in said


def read(run_dir: Path, step: int) -> list[dict]:
    return read_samples(run_dir / "samples", step)
