"""Engines whose processes are killed, or stopped, in the middle of a run: it goes on. In order it ends with the bits of
the run that nobody disturbed; ready first nothing is lost, and nothing is trained on twice.
"""

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from by_version import check_row, models_of, rows_of
from test_ahead_runs import ONE_OFF, PARTIAL, READY_FIRST
from test_lost_worker import engine_core, rank_one
from test_runs import PRESET, finish, train, wait_for_step
from world import make_world, metrics

from mrl.checkpoint.manifest import read_manifest
from mrl.record.attempts import read_attempts
from mrl.record.sample_files import read_samples
from mrl.schedule.ledger import Ledger
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

pytestmark = pytest.mark.real

STEPS = 3
NOTICED_S = 60.0  # deadline of what a stopped engine's own deadline, of 8 s, should tell
SETTINGS = {
    "trainer__total_training_steps": STEPS, "trainer__save_freq": STEPS, "trainer__test_freq": -1,
    "trainer__val_before_train": False, "trainer__deterministic": True,
}  # fmt: skip
TWO = {"rollout__num_engines": 2, "cluster__n_gpus_per_node": 4, "cluster__cpus_per_engine": 0.5}
SHARED = {
    "preset": PRESET.with_name("cpu-colocated.yaml"), "actor__param_offload": True, "actor__grad_offload": True,
    "actor__optimizer_offload": True,
}  # fmt: skip
KINDS = {"sync": {}, "one step off": ONE_OFF, "two off, partial": PARTIAL, "colocated": SHARED}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def trained(world: Path, run_dir: Path, **settings) -> Path:
    process = train(world, run_dir, **SETTINGS | settings)
    assert finish(process, run_dir) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    return run_dir


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """Trains a run of a kind that nobody disturbs, once; its directory."""
    done: dict[str, Path] = {}

    def whole(kind: str) -> Path:
        if kind not in done:
            done[kind] = trained(world, tmp_path_factory.mktemp("undisturbed") / "whole", **KINDS[kind])
        return done[kind]

    return whole


def go_on_once_lost(pid: int, process, run_dir: Path) -> None:
    """Tells a stopped process to go on as soon as the run says that its engine is lost: too late to count."""
    log = run_dir.with_suffix(".log")
    end = time.monotonic() + NOTICED_S
    while "engine 0 is lost: " not in log.read_text() and process.poll() is None:
        assert time.monotonic() < end, "nobody noticed"
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def disturbed(world: Path, run_dir: Path, sent: signal.Signals, stands_s: float = 0.0, **settings) -> Path:
    """A run whose first engine's process gets a signal in its second step, after it stood still for a while."""
    process = train(world, run_dir, **SETTINGS | settings)
    try:
        wait_for_step(process, run_dir, 1)
        victim = engine_core(psutil.Process(process.pid), run_dir)
        if stands_s:
            os.kill(victim.pid, signal.SIGSTOP)
            time.sleep(stands_s)
        else:
            time.sleep(0.15)
        os.kill(victim.pid, sent)
        if sent == signal.SIGSTOP:
            go_on_once_lost(victim.pid, process, run_dir)
        assert finish(process, run_dir) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
        assert not psutil.pid_exists(victim.pid), "of one that was stopped, too, nothing is left"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return run_dir


def assert_same(found: Path, expected: Path, steps: int = STEPS) -> None:
    """But for how many engines weights went to in steps in which one was missing."""
    assert metrics_difference(metrics(found), metrics(expected)) is None
    assert checkpoint_difference(*(folder / "checkpoints" / f"step-{steps}" for folder in (found, expected))) is None
    assert " is lost: " in found.with_suffix(".log").read_text(), "it was killed too late to be missed"
    counted = [sum(row[f"fleet/{name}"] for row in metrics(found)) for name in ("quarantined", "late_answers")]
    assert counted == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_only_engine_is_killed_and_the_run_has_the_bits_of_the_undisturbed_one(world, undisturbed, tmp_path, kind):
    found = disturbed(world, tmp_path / "killed", signal.SIGKILL, **KINDS[kind])
    assert_same(found, undisturbed(kind))
    rows = metrics(found)
    if not rows[-1]["trainer/restarts"]:
        assert sum(row["fleet/lost"] for row in rows) == sum(row["fleet/restarted"] for row in rows) == 1
    assert rows[-1]["fleet/engines_ready"] == 1
    (attempt,) = read_attempts(found)
    assert [engine for engine, _ in attempt.engines_restarted] == ["engine 0"], "a resume counts it"
    assert all(row["reshard/verified"] == 1 for row in rows if row["reshard/engines"])


@pytest.mark.long
def test_where_the_only_engine_is_lost_after_the_update_ranks_go_back_to_weights_that_it_can_be_brought_to(
    world, undisturbed, tmp_path
):
    slow = ONE_OFF | {"rollout__max_num_seqs": 4}  # so that it is at something when it stops
    found = disturbed(world, tmp_path / "killed", signal.SIGKILL, stands_s=20.0, **slow)
    assert_same(found, undisturbed("one step off"))
    assert metrics(found)[-1]["trainer/restarts"] == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", [*KINDS, "ready first"])
def test_an_engine_is_killed_and_later_a_rank_and_nothing_differs_or_is_lost(world, tmp_path, kind):
    """In one run; the undisturbed one runs beside it."""
    steps, whole, broken = 5, tmp_path / "whole", tmp_path / "broken"
    settings = SETTINGS | (KINDS | {"ready first": READY_FIRST})[kind]
    settings |= {"trainer__total_training_steps": steps, "trainer__save_freq": 2}
    runs = [train(world, broken, **settings)]
    if kind != "ready first":
        runs.append(train(world, whole, **settings))
    try:
        wait_for_step(runs[0], broken, 1)
        os.kill(engine_core(psutil.Process(runs[0].pid), broken).pid, signal.SIGKILL)
        wait_for_step(runs[0], broken, 3)
        before = restarts(broken)
        os.kill(rank_one(psutil.Process(runs[0].pid), broken).pid, signal.SIGKILL)
        for run, folder in zip(runs, (broken, whole), strict=False):
            assert finish(run, folder) == 0, folder.with_suffix(".log").read_text()[-3000:]
    finally:
        for run in runs:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert restarts(broken) == before + 1 == metrics(broken)[-1]["trainer/restarts"]
    if kind == "ready first":
        assert_nothing_lost_or_twice(broken, steps)
    else:
        assert_same(broken, whole, steps)


def restarts(run_dir: Path) -> int:
    """Of ranks, so far."""
    return sum(len(attempt.restarted_at) for attempt in read_attempts(run_dir))


@pytest.mark.long
@pytest.mark.parametrize("kind", [name for name in KINDS if name != "colocated"])
def test_one_of_two_engines_is_killed(world, undisturbed, tmp_path, kind):
    found = disturbed(world, tmp_path / "killed", signal.SIGKILL, **KINDS[kind], **TWO)
    assert_same(found, undisturbed(kind))


@pytest.mark.long
@pytest.mark.parametrize("engines", [1, 2])
def test_ready_first_every_group_is_trained_on_once_dropped_or_on_its_way(world, tmp_path, engines):
    """With responses that go on by newer weights, so that an engine is lost with tokens of several. Transformers says
    of each token what the engine said, by the weights that its row names.
    """
    settings = READY_FIRST | (TWO if engines == 2 else {})
    settings |= {"trainer__save_freq": 1, "trainer__max_actor_ckpt_to_keep": STEPS}
    found = disturbed(world, tmp_path / "killed", signal.SIGKILL, **settings)
    assert_nothing_lost_or_twice(found, STEPS)
    models = models_of(found, world / "model", range(STEPS), tmp_path)
    rows = [row for step in range(1, STEPS + 1) for row in rows_of(found, step)]
    assert max(check_row(row, models) for row in rows) > 1, "none went on by newer weights"
    assert sum(row["fleet/lost"] for row in metrics(found)) == 1


def assert_nothing_lost_or_twice(found: Path, steps: int) -> None:
    """By the ledger of its last checkpoint, the samples that it trained on, and what its steps say of themselves."""
    trainer = read_manifest(found / "checkpoints" / f"step-{steps}").trainer
    ledger = Ledger.from_json(trainer["ahead"]["ledger"])
    dropped = sum(tally.groups for tally in ledger.counts.dropped.values())
    assert ledger.counts.kept.groups + dropped + len(ledger.groups) == ledger.next_number
    samples = {step: read_samples(found / "samples", step) for step in range(1, steps + 1)}
    of_group = Counter((step, sample["group_id"]) for step, rows in samples.items() for sample in rows)
    (responses,) = set(of_group.values())
    trained = int(sum(row["train/trained_groups"] for row in metrics(found)))
    assert len(of_group) == trained and responses * trained == sum(map(len, samples.values()))
    seeds = [(sample["prompt_id"], sample["seed"]) for rows in samples.values() for sample in rows]
    assert len(seeds) == len(set(seeds)), "a response is trained on twice"
    for row in metrics(found):
        assert row["training/off_policy/trajectory_staleness/max"] <= READY_FIRST["trainer__max_staleness"]
        assert row["rollout/stale_prefix_tokens"] == 0 and row["fleet/quarantined"] == 0


@pytest.mark.long
def test_an_engine_is_stopped_and_noticed_by_its_deadline(world, undisturbed, tmp_path):
    found = disturbed(
        world, tmp_path / "stopped", signal.SIGSTOP, rollout__generate_timeout_s=8, cluster__step_timeout_s=60
    )
    assert_same(found, undisturbed("sync"))
