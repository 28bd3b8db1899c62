"""Runs whose conversations go on by newer weights: each token is by the weights that its row names, and a kill in any
state of a conversation changes no bit.
"""

import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from by_version import check_row, models_of, rows_of
from deadlines import RUN_S
from test_runs import finish, wait_for_step
from test_turns import AHEAD, PRESET, N, given, started
from test_turns import world as world  # for all tests here
from world import metrics, succeeded

from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

pytestmark = [pytest.mark.real, pytest.mark.long]

STEPS = 6  # as many as the world has prompts for, with two ahead
LAST = f"checkpoints/step-{STEPS}"
PARTIAL = AHEAD | {
    "trainer__schedule": "bounded", "trainer__max_staleness": 2, "trainer__partial_rollouts": True,
    "trainer__segment_tokens": 20, "trainer__total_training_steps": STEPS, "trainer__max_actor_ckpt_to_keep": STEPS,
    "trainer__test_freq": -1, "trainer__val_before_train": False,
}  # fmt: skip
ASYNCHRONOUS = ("trainer__max_staleness", "trainer__partial_rollouts", "trainer__segment_tokens")
TOOLS = '''"""A tool and an environment that a test can stop at a point: the first that comes to it stays there."""

import os
import random
import signal
import time

import psutil

from mrl.acting.builtin import calculator as compute
from mrl.acting.environment import Environment, Reply


def noted(name):
    """Whether the note was not there."""
    try:
        os.close(os.open(os.path.join(FOLDER, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def at(point, stays=True):
    if os.path.exists(os.path.join(FOLDER, "slow")):
        time.sleep(random.choice((0, 0.2, 1)))
    if os.path.exists(os.path.join(FOLDER, point)) and noted(point + ".reached") and stays:
        time.sleep(600)


def calculator(expression: str) -> str:
    """Computes.

    Args:
        expression: a product
    """
    with open(os.path.join(FOLDER, "calls"), "a") as calls:
        calls.write(expression + "\\n")
    at("a tool works")
    kill_the_engine()
    return compute(expression)


def kill_the_engine():
    """Once, at the sixth call, where a test wants that."""
    with open(os.path.join(FOLDER, "calls")) as calls:
        is_late = len(calls.readlines()) >= 6
    if is_late and os.path.exists(os.path.join(FOLDER, "kills")) and noted("kills.reached"):
        for parent in psutil.Process().parents()[:3]:
            for one in parent.children(recursive=True):
                if "EngineCore" in " ".join(one.cmdline()):
                    return os.kill(one.pid, signal.SIGKILL)
        raise RuntimeError("it has no engine")


class Sum(Environment):
    actions = ("calculator",)
    repeatable = True

    def reset(self, row, seed):
        responses = next(i for i in range(10**6) if noted(f"{seed}-{i}"))
        self.is_anew = responses >= N
        self.began = time.monotonic()
        self.truth = row["ground_truth"]
        at("it is begun anew" if self.is_anew else "it begins")

    def calculator(self, expression: str) -> Reply:
        """Computes.

        Args:
            expression: a product
        """
        is_brought_back = self.is_anew and time.monotonic() - self.began < 0.02  # quicker than any model
        at("it is brought to where it was" if is_brought_back else "it is acted on")
        try:
            text = compute(expression)
        except (ValueError, SyntaxError, ZeroDivisionError):
            text = "?"
        at("it has answered", stays=False)
        right = text == self.truth
        return Reply(text, 0.5 + 0.5 * right, {"right": right}, end=right)

    def close(self):
        at("it is closed")
'''
# where a run is killed, one after the other; as a checkpoint is there conversations in it are held
SAVED = "its checkpoint is written"
KILLS = [
    ("it begins", "a tool works", "it is acted on", "it has answered"),
    ("it is begun anew", "it is brought to where it was", "it is closed", SAVED),
]


@pytest.fixture(scope="module")
def tools(world, tmp_path_factory) -> Path:
    """The file, with a folder for its notes beside it."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "notes").mkdir()
    (folder / "tools.py").write_text(TOOLS.replace("FOLDER", repr(str(folder / "notes"))).replace(">= N", f">= {N}"))
    return folder


def schedule_of(tools: Path, **more) -> dict:
    own = {"rollout__turns__path": tools / "tools.py", "rollout__turns__folders": [tools / "notes"]}
    return PARTIAL | own | more


@pytest.fixture(scope="module")
def whole(world, tools, tmp_path_factory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    succeeded("train", str(PRESET), *given(world, folder, **schedule_of(tools)))
    return folder


def test_conversations_are_of_several_versions_within_the_bound(whole):
    rows = [row for row in metrics(whole) if row["training/global_step"]]
    staleness = [row["training/off_policy/trajectory_staleness/max"] for row in rows]
    assert staleness == [0, 1, *[2] * (STEPS - 2)]
    assert rows[-1]["async/versions_per_sample"] > 1.5
    for row in rows:
        assert row["turns/mean"] > 1.2 and row["turns/ended/environment"] == 0 and row["reshard/verified"] == 1
    assert rows[0]["training/rollout_log_probs_abs_diff_max"] < 1e-3


def test_transformers_says_of_each_token_what_the_engine_said_by_the_weights_that_its_row_names(whole, world, tmp_path):
    """Over whole rows, context too, which the engine read by the weights of the token that follows."""
    models = models_of(whole, world / "model", range(STEPS), tmp_path)
    rows = [row for step in range(1, STEPS + 1) for row in rows_of(whole, step)]
    several = sum(check_row(row, models) > 1 and len(row["turns"]) > 1 for row in rows)
    assert several >= 8, "a border fell behind context"


@pytest.mark.parametrize("engines", [1, 2])
def test_slow_tools_and_a_second_engine_change_no_bit(whole, world, tools, tmp_path, engines):
    folder = slow_run(world, tools, tmp_path / "run", engines, schedule_of(tools))
    check_same(folder, whole, LAST)


def test_slow_tools_and_a_second_engine_change_no_bit_of_a_synchronous_run(world, tools, tmp_path):
    own = {key: value for key, value in schedule_of(tools).items() if key not in ASYNCHRONOUS}
    own |= {"trainer__schedule": "sync", "trainer__total_training_steps": 2}
    renewed(tools / "notes")
    succeeded("train", str(PRESET), *given(world, tmp_path / "quick", **own))
    check_same(slow_run(world, tools, tmp_path / "slow", 2, own), tmp_path / "quick", "checkpoints/step-2")


def slow_run(world: Path, tools: Path, folder: Path, engines: int, schedule: Mapping) -> Path:
    """A run whose calls take no time, 0.2 s or 1 s, drawn anew for each."""
    renewed(tools / "notes")
    (tools / "notes" / "slow").touch()
    own = {
        "rollout__num_engines": engines, "cluster__n_gpus_per_node": 2 + engines,
        "cluster__cpus_per_engine": 1 / engines,
    }  # fmt: skip
    succeeded("train", str(PRESET), *given(world, folder, **schedule, **own))
    return folder


def check_same(run: Path, other: Path, last: str) -> None:
    """All but what is about engines themselves."""
    found, expected = (
        [{name: row[name] for name in row if not name.startswith(("reshard/", "fleet/"))} for row in metrics(each)]
        for each in (run, other)
    )
    assert metrics_difference(found, expected) is None
    assert checkpoint_difference(run / last, other / last) is None


def renewed(folder: Path) -> None:
    """An empty folder in its place."""
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("schedule", ["sync", "partial"])
def test_an_engine_that_dies_while_tools_work_costs_turns_and_no_call(world, tools, tmp_path, schedule):
    """Tools are called as often as in the run that nobody disturbed: no conversation begins again."""
    own = schedule_of(tools)
    if schedule == "sync":
        own = {key: value for key, value in own.items() if key not in ASYNCHRONOUS}
        own |= {"trainer__schedule": "sync", "trainer__total_training_steps": 2}
    calls = {}
    for name in ("whole", "dying"):
        renewed(tools / "notes")
        if name == "dying":
            (tools / "notes" / "kills").touch()
        process = started(world, tmp_path / name, own)
        assert finish(process, tmp_path / name) == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
        calls[name] = sorted((tools / "notes" / "calls").read_text().split())
    assert " is lost: " in (tmp_path / "dying.log").read_text()
    check_same(tmp_path / "dying", tmp_path / "whole", f"checkpoints/step-{own['trainer__total_training_steps']}")
    assert calls["dying"] == calls["whole"]


@pytest.mark.parametrize("points", KILLS, ids=["as it goes", "as it goes on"])
def test_a_run_that_is_killed_in_states_of_a_conversation_goes_on_bit_by_bit(whole, world, tools, tmp_path, points):
    run_dir = tmp_path / "run"
    more: tuple[str, ...] = ()
    for step, point in enumerate(points, start=1):
        killed_at(point, step, world, tools, run_dir, *more)
        more = ("--resume",)
    renewed(tools / "notes")
    process = started(world, run_dir, schedule_of(tools), *more)
    assert finish(process, run_dir) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    assert metrics_difference(metrics(run_dir), metrics(whole)) is None
    assert checkpoint_difference(run_dir / LAST, whole / LAST) is None


def killed_at(point: str, step: int, world: Path, tools: Path, run_dir: Path, *more: str) -> None:
    """A start that is killed at the point once a step is done."""
    notes = tools / "notes"
    renewed(notes)
    process = started(world, run_dir, schedule_of(tools), *more)
    try:
        wait_for_step(process, run_dir, step)
        if point != SAVED:
            (notes / point).touch()
            wait_for_note(notes / f"{point}.reached", process, run_dir)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_note(note: Path, process, run_dir: Path) -> None:
    end = time.monotonic() + RUN_S
    while not note.exists():
        assert process.poll() is None, f"it ended before {note.stem}: {run_dir.with_suffix('.log').read_text()[-3000:]}"
        assert time.monotonic() < end, f"it never came to {note.stem}"
        time.sleep(0.005)


def test_conversations_that_engines_hold_over_an_update_go_on_after_a_signal(world, tmp_path):
    """Ready first: no two runs are alike. What a saved step gives back goes on, in its environment too."""
    run_dir = tmp_path / "run"
    schedule = {key: value for key, value in PARTIAL.items() if key != "trainer__segment_tokens"}
    schedule |= {
        "trainer__order": "ready_first", "rollout__max_num_seqs": 4, "trainer__deterministic": False,
        "trainer__total_training_steps": 4,
    }  # fmt: skip
    process = started(world, run_dir, schedule)
    wait_for_step(process, run_dir, 2)
    process.send_signal(signal.SIGTERM)
    assert finish(process, run_dir) == 5, run_dir.with_suffix(".log").read_text()[-3000:]
    process = started(world, run_dir, schedule, "--resume")
    assert finish(process, run_dir) == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    rows = [row for row in metrics(run_dir) if row["training/global_step"]]
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["async/versions_per_sample"] for row in rows) > 1, "some were held over an update, or given back"
    for row in rows:
        assert row["turns/ended/environment"] == 0 and row["turns/mean"] > 1
        assert row["training/off_policy/trajectory_staleness/max"] <= 2 and row["reshard/verified"] == 1
