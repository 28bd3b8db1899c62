"""A signal in the first of a step's slow passes: the ranks leave the others out, and the run is saved in its grace."""

import shutil
import signal
import time
from pathlib import Path

import pytest
from slow_passes import PASS_S
from test_runs import finish, train
from world import make_world, metrics

pytestmark = pytest.mark.real

GRACE_S = 20.0  # less than two passes


def test_a_run_whose_step_is_longer_than_the_grace_is_saved_after_one_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", str(GRACE_S))
    run_dir, loss = tmp_path / "run", tmp_path / "slow_passes.py"
    shutil.copy(Path(__file__).with_name("slow_passes.py"), loss)
    process = train(
        make_world(tmp_path / "world"), run_dir,
        algorithm__policy_loss={"loss_mode": "plain", "loss_agg_mode": "token-mean", "custom": {"path": str(loss)}},
        algorithm__use_kl_loss=True, algorithm__kl_loss_coef=0.01, trainer__save_freq=100, trainer__test_freq=-1,
        trainer__val_before_train=False,
    )  # fmt: skip
    while not (tmp_path / "policy_log_probs").exists():
        assert process.poll() is None, run_dir.with_suffix(".log").read_text()[-3000:]
        time.sleep(0.1)
    stopped = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert finish(process, run_dir) == 5, run_dir.with_suffix(".log").read_text()[-3000:]
    assert time.monotonic() - stopped < GRACE_S + PASS_S
    assert not (tmp_path / "reference_log_probs").exists()
    assert metrics(run_dir)[-1]["training/global_step"] == 1
    assert [folder.name for folder in (run_dir / "checkpoints").glob("step-*")] == ["step-1"]
