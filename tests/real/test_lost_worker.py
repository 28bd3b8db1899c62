"""A process that dies below a run whose engines are not started again ends it with exit code 5, without a traceback,
whoever notices first; nothing is left behind.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from deadlines import END_S
from test_runs import finish, train, wait_for_step
from world import make_world

from mrl.record.attempts import generated_after
from mrl.record.run_dir import read_metrics


def rank_one(below: psutil.Process, run_dir: Path) -> psutil.Process | None:
    """The actor's rank 1: it writes to that rank's log."""
    log = str(run_dir / "logs" / "actor-rank-1.log")
    for one in called(below, "ActorWorker"):
        with suppress(psutil.Error):
            if log in {file.path for file in one.open_files()}:
                return one
    return None


def engine_core(below: psutil.Process, run_dir: Path) -> psutil.Process | None:
    """vLLM's own process, below the Ray actor that holds the engine."""
    return next(called(below, "EngineCore"), None)


def called(below: psutil.Process, word: str) -> Iterator[psutil.Process]:
    """Processes whose command line has the word; others may end meanwhile."""
    for one in below.children(recursive=True):
        with suppress(psutil.Error):
            if word in " ".join(one.cmdline()):
                yield one


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize(
    ("find", "named"),
    [
        (rank_one, "rank 1 died"),
        (engine_core, "engine 0: vLLM's process below it died"),
    ],
)
def test_a_lost_process_ends_the_run_as_resumable(tmp_path, find, named):
    run_dir = tmp_path / "run"
    process = train(
        make_world(tmp_path / "world"), run_dir, trainer__total_training_steps=500, trainer__val_before_train=False,
        trainer__restart_limit=0,
        rollout__restart_limit=0,
    )  # fmt: skip
    try:
        wait_for_step(process, run_dir, 1)
        victim = find(psutil.Process(process.pid), run_dir)
        assert victim is not None
        time.sleep(0.3)  # somewhere in the middle of a step
        os.kill(victim.pid, signal.SIGKILL)
        code = finish(process, run_dir, END_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    said = run_dir.with_suffix(".log").read_text()
    assert code == 5, said[-3000:]
    assert named in said
    own_words = [line for line in said.splitlines() if not line.startswith("  | ")]  # without a log's tail
    assert "Traceback" not in "\n".join(own_words)
    assert generated_after(run_dir, 0, 1) > 0  # counted by the start that generates them again
    assert not [p for p in Path("/dev/shm").glob("mrl-sync-*") if str(p) in _noted(run_dir)]


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _is_killed(process: psutil.Process) -> bool:
    """Whether SIGKILL is on its way: on a busy machine a process of low priority may take seconds to end of it."""
    with suppress(OSError):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
        return any(bits >> (signal.SIGKILL - 1) & 1 for bits in pending)
    return True


def _noted(run_dir: Path) -> str:
    return "".join(file.read_text() for file in (run_dir / "logs").glob("*.segments"))


@pytest.mark.real
@pytest.mark.long
def test_a_second_signal_leaves_nothing_running(tmp_path):
    """Neither engine nor ranks nor Ray's own processes, nor its folder, nor shared memory; what it wrote is whole."""
    run_dir = tmp_path / "run"
    process = train(
        make_world(tmp_path / "world"), run_dir, trainer__total_training_steps=500, trainer__val_before_train=False
    )
    wait_for_step(process, run_dir, 1)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) > 5
    try:
        with pytest.raises(ProcessLookupError):  # two that come at once are one to a process that is busy
            while True:
                os.kill(process.pid, signal.SIGTERM)
                if process.poll() is not None:
                    raise ProcessLookupError
                time.sleep(0.2)
        assert process.returncode == 5
        left = [p for p in below if _lives(p) and not _is_killed(p)]
        assert not left
    finally:
        for each in [*below, process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    owners = [json.loads(file.read_text())["pid"] for file in Path("/tmp").glob("mrl-ray-*/owner.json")]
    assert process.pid not in owners
    assert not [path for path in Path("/dev/shm").iterdir() if str(path) in _noted(run_dir)]
    assert [row["training/global_step"] for row in read_metrics(run_dir / "metrics.jsonl")][:1] == [1]
