"""A whole run whose checkpoint folder is a disk too small for a second checkpoint; responses for which neither Ray's
object store nor the disk that it spills to has room.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from safetensors.torch import load_file
from test_runs import finish, train, wait_for_step
from world import PRESET, make_world, metrics

from mrl.checkpoint.manifest import check_digests, read_manifest
from mrl.checkpoint.step_folders import newest_checkpoint
from mrl.cluster.engine_fleet import EngineFleet
from mrl.cluster.rollout_group import RolloutGroup, request_limit
from mrl.cluster.scoring import Channel, PoolSettings, Scorer, ScorerGroup
from mrl.config.deployment import Deployment
from mrl.config.load import load_config
from mrl.data.samples import Sample, packed
from mrl.engine.engine_worker import EngineWorker
from mrl.engine.outbox import Outboxes
from mrl.engine.requests import Request, Sampling
from mrl.errors import Interrupted
from mrl.generate.rollouts import generate
from mrl.reward.items import Question, RewardSpec
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference


@contextmanager
def disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes at `folder`."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system can be mounted only by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    """20 MB at run/checkpoints: the world's checkpoints have 12, and 4 MiB more are asked for."""
    with disk(tmp_path / "run" / "checkpoints", 20_000_000) as folder:
        yield folder


@pytest.fixture
def crowded_node(tmp_path):
    """A Ray cluster whose object store holds 80 MiB, and spills to a disk of 40 MB."""
    with disk(tmp_path / "spilled", 40_000_000) as spilled:
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
            object_store_memory=80 * 1024**2, object_spilling_directory=str(spilled),
        )  # fmt: skip
        yield
        ray.shutdown()


@pytest.mark.real
def test_responses_without_room_in_the_object_store_or_on_its_disk_are_a_stop_that_can_be_resumed(
    crowded_node, tmp_path
):
    class LongAnswers:
        """An engine whose every response has 10 MB of tokens, and as much again of log-probs."""

        async def generate(self, requests, sampling):
            for r in requests:
                ids, log_probs = np.ones(2_500_000, np.int32), np.full(2_500_000, -1.0, np.float32)
                yield packed([Sample(r.prompt_id, r.group_id, r.sample_id, 0, r.prompt_ids, ids, log_probs, "stop", 0)])

    class Engine(EngineWorker):  # here, so that Ray sends it as it is
        def __init__(self):
            self.engine, self.outboxes = LongAnswers(), Outboxes()

    config = load_config(PRESET, overrides=["rollout.num_engines=1"]).config
    engines = RolloutGroup.__new__(RolloutGroup)
    engines.cluster, engines.rollout, engines.poll = config.cluster, config.rollout, lambda: None
    engines.max_requests = request_limit(Deployment.of(config), config.trainer.deterministic)
    engines.workers, engines.names, engines.engine_ranks = [ray.remote(Engine).remote()], ["engine 0"], 1
    engines.fleet = EngineFleet(engines, 60.0)
    engines.nodes = {"engine 0": ray.get_runtime_context().get_node_id()}
    requests = [Request(i, (7,), 0, i, i) for i in range(12)]  # 240 MB
    samples = generate(engines, [[request] for request in requests], Sampling(1.0, 2_500_000, ()))
    assert len(samples) == 12, "the driver knows of all: only what is behind the references has no room"
    with pytest.raises(Interrupted, match="no room on this node: its object store and the disk that Ray spills to"):
        samples.read()

    scorer = ray.remote(Scorer).remote(lambda: SimpleNamespace(decode=lambda ids, **_: "text"))
    pool = PoolSettings(RewardSpec("exact_match"), 1, 60.0, 0.0, tmp_path / "log", dict(os.environ), str(tmp_path))
    ray.get(scorer.start.remote(pool))
    scorers = ScorerGroup([Channel("scorer 0", scorer)], {"engine 0": 0})
    scorers.submit(samples, [Question(i, "source", "x", {}) for i in range(12)], "engine 0")
    with pytest.raises(Interrupted, match="scorer 0 found the object store of its node full, and its disk too"):
        scorers.drain()


@pytest.mark.real
@pytest.mark.long
def test_training_goes_on_and_the_old_checkpoint_stays_and_the_end_says_so(small_disk: Path, tmp_path):
    world, run_dir = make_world(tmp_path / "world"), tmp_path / "run"
    settings = dict(
        trainer__total_training_steps=3, trainer__save_freq=1, trainer__max_actor_ckpt_to_keep=1, trainer__test_freq=-1,
        trainer__val_before_train=False,
    )  # fmt: skip
    code = finish(train(world, run_dir, **settings), run_dir)
    said = run_dir.with_suffix(".log").read_text()
    assert code == 4, said[-3000:]
    assert "error: step 2 is not saved" in said and "The checkpoints before it are as they were" in said
    assert "step 3 is not saved" in said and "the newest checkpoint is that of step 1" in said
    assert [row["training/failed_saves"] for row in metrics(run_dir)] == [0.0, 1.0, 2.0]
    assert [path.name for path in small_disk.iterdir()] == ["step-1"]
    newest = newest_checkpoint(small_disk)
    assert newest.path is not None and newest.damaged == {}
    check_digests(newest.path, read_manifest(newest.path))
    assert load_file(newest.path / "rank-00000.safetensors")


AHEAD = dict(
    trainer__total_training_steps=12, trainer__save_freq=1, trainer__max_actor_ckpt_to_keep=1, trainer__test_freq=3,
    trainer__val_before_train=False, trainer__schedule="bounded", trainer__max_staleness=2,
    trainer__partial_rollouts=True, trainer__segment_tokens=1, trainer__deterministic=True, trainer__max_failed_saves=0,
)  # fmt: skip


@pytest.mark.real
@pytest.mark.long
def test_a_run_directory_without_a_byte_of_room_for_some_steps_costs_these_checkpoints_and_no_bit(tmp_path):
    """Metrics, samples, spool, validation, logs of ranks and checkpoints are all on the disk that is full."""
    world = make_world(tmp_path / "world")
    expected = tmp_path / "expected"
    assert finish(train(world, expected, **AHEAD), expected) == 0
    with disk(tmp_path / "run", 150_000_000) as run_dir:
        process = train(world, run_dir, **AHEAD)
        wait_for_step(process, run_dir, 2)
        log = run_dir.with_suffix(".log")
        deadline = time.monotonic() + 300
        while "not written yet: the line of step" not in said_by(log) and time.monotonic() < deadline:
            assert process.poll() is None, said_by(log)[-3000:]
            fill(run_dir / "filler")  # a save that failed leaves room
            time.sleep(0.02)
        (run_dir / "filler").unlink()
        assert finish(process, run_dir) == 0, said_by(log)[-3000:]
        assert "is not saved" in said_by(log) and "Traceback" not in said_by(log)
        rows = metrics(run_dir)
        assert [row["training/global_step"] for row in rows] == list(range(1, 13))
        assert rows[-1]["training/failed_saves"] >= 1
        found = [without_failures(row) for row in rows]
        assert metrics_difference(found, [without_failures(row) for row in metrics(expected)]) is None
        assert checkpoint_difference(*(folder / "checkpoints" / "step-12" for folder in (run_dir, expected))) is None


def said_by(log: Path) -> str:
    return log.read_text(errors="replace")


def without_failures(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.startswith(("training/failed_", "reshard/"))}


def fill(path: Path) -> None:
    """Leaves not one byte."""
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 512, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
