"""A run whose reward fails in its first step ends with one message and nothing left over,
and its directory can be used again.
"""

import os
import time
from pathlib import Path

import pytest
from deadlines import END_S
from world import PRESET, make_world, metrics, mrl, overrides

from mrl.record.run_dir import RunDir
from mrl.record.run_lock import newest_lock

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print("asked about", extra_info["split"], flush=True)
    if extra_info["split"] == "train" and solution_str != "nonsense":  # which it is asked about before anything starts
        raise ValueError("no judge for this")
    return 0.5
"""
MARK = "MRL_TEST_BAD_INPUT"


def marked_processes(value: str) -> list[str]:
    """Command lines of living processes that inherited the mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={value}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.mark.real
def test_a_reward_that_fails_ends_the_run_as_a_fault_of_data(tmp_path):
    world, run_dir, mark = make_world(tmp_path / "world"), tmp_path / "runs: # 1", str(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD)
    settings = overrides(
        world, reward__custom_reward_function__path=tmp_path / "mine.py", trainer__val_before_train=True
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {MARK: mark}
    done = mrl("train", str(PRESET), "--run-dir", str(run_dir), *settings, cwd=tmp_path, env=environment)
    out, err = done.stdout, done.stderr
    assert done.returncode == 3, err
    assert "\nmrl train: the reward failed on " in err and "raised: ValueError: no judge for this" in err
    assert "Traceback" not in err and "Token authentication" not in err
    assert out.startswith(f"plug-in: reward.custom_reward_function.path {tmp_path / 'mine.py'}, SHA-256 ")
    assert "\nloss: gspo, " in out and "\nlayout: actor 2 x cpu" in out

    assert set((run_dir / "logs" / "reward.log").read_text().split("\n")) == {
        "asked about val",
        "asked about train",
        "",
    }
    assert [row["training/global_step"] for row in metrics(run_dir)] == [0]
    RunDir(run_dir).refuse_another_run()  # as the next `mrl train` would

    end = time.monotonic() + END_S  # killed workers take a moment to be gone
    while (left := marked_processes(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left
    assert not list(Path("/tmp").glob(f"mrl-ray-*/session_*_{done.pid}")), "Ray's folder is left over"
    assert newest_lock(run_dir).is_free, "the lock was not given back"
