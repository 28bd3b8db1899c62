"""Engines of several data-parallel ranks: who is named, whose answers belong together,
and who stands still before an update.
"""

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from mrl.cluster import rollout_group
from mrl.cluster.calls import Late
from mrl.cluster.process_logs import log_file
from mrl.cluster.rollout_group import RolloutGroup
from mrl.cluster.weight_sync import _of_engine
from mrl.errors import Interrupted
from mrl.vllm.engine_calls import EngineCalls
from mrl.vllm.process_watch import ProcessWatch, end_with_parent, stopped_below
from mrl.vllm.requests import log_name, rank_name

# a core with a worker below it, which ends both when it reads a line; the worker's number comes first
CORE = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(worker.pid, flush=True)
sys.stdin.readline()
worker.kill()
worker.wait()
"""


@pytest.fixture
def core():
    """A process with one below it, and the number of that one."""
    process = subprocess.Popen([sys.executable, "-c", CORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.worker = int(process.stdout.readline())
    yield process
    for pid in (process.worker, process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


# an actor that spawned a core of vLLM's, which began to watch and computes; its number comes first
ACTOR = """
import multiprocessing, time
from mrl.vllm.process_watch import end_with_parent

def core(told):
    end_with_parent()
    end_with_parent()
    told.send(None)
    while True:
        time.sleep(0.001)

if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=core, args=(there,))
    child.start()
    here.recv()
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_a_core_ends_with_the_actor_that_spawned_it():
    actor = subprocess.Popen([sys.executable, "-c", ACTOR], stdout=subprocess.PIPE, text=True)
    core = os.pidfd_open(int(actor.stdout.readline()))
    assert not select.select([core], [], [], 0.05)[0]
    actor.kill()
    actor.wait()
    ended, _, _ = select.select([core], [], [], 20)
    if not ended:
        signal.pidfd_send_signal(core, signal.SIGKILL)
    assert ended, "it outlived its actor"
    os.close(core)


def test_nothing_ends_with_a_parent_that_did_not_spawn_it():
    before = threading.enumerate()
    end_with_parent()
    assert threading.enumerate() == before


def settled(watch: ProcessWatch) -> str | None:
    deadline = time.monotonic() + 20
    while not watch.has_seen and time.monotonic() < deadline:
        time.sleep(0.01)
    return watch.lost


def test_a_worker_that_dies_while_vllm_is_well_is_the_lost_one(core):
    watch = ProcessWatch(lambda: False)
    assert watch.lost is None
    os.kill(core.worker, signal.SIGKILL)
    assert "sleep(60)" in settled(watch)


def test_a_core_that_dies_first_is_the_lost_one_whatever_vllm_says_then(core):
    watch = ProcessWatch(lambda: True)
    os.kill(core.pid, signal.SIGKILL)
    assert settled(watch)


def test_a_core_that_gives_up_and_ends_its_worker_lost_somebody_else(core):
    watch = ProcessWatch(lambda: True)
    core.stdin.write("\n")
    core.stdin.flush()
    assert settled(watch) is None


def test_a_stopped_process_is_told(core):
    assert stopped_below() == []
    os.kill(core.worker, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while not stopped_below() and time.monotonic() < deadline:
        time.sleep(0.01)
    (said,) = stopped_below()
    assert f"(process {core.worker}) is stopped" in said


def test_of_ranks_that_are_late_together_the_stopped_one_is_named(group, monkeypatch):
    made, _ = group(2)

    def late(refs, timeout_s, phase):
        if phase.startswith("looking"):
            return {
                name: ["VLLM::Worker_DP1 (process 7) is stopped"] if name == "engine 0 rank 1" else [] for name in refs
            }
        raise Late(f"{phase}: no answer from engine 0 rank 0, engine 0 rank 1 within 60 s")

    monkeypatch.setattr(rollout_group, "gather", late)
    with pytest.raises(
        Late, match=r"rank 0, engine 0 rank 1 within 60 s; engine 0 rank 1: VLLM::Worker_DP1 \(process 7\) is stopped$"
    ):
        made.call("pause")


@pytest.fixture
def calls(monkeypatch):
    """A maker of a rank's calls to a vLLM that has died, with what the watch saw."""
    dead = type("EngineDeadError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", SimpleNamespace(EngineDeadError=dead))

    def make(watch) -> EngineCalls:
        made = EngineCalls("engine 1 rank 0")
        made.llm, made._watch, made._has_peers = SimpleNamespace(errored=True), watch, watch is not None
        return made

    return make


@pytest.mark.parametrize(
    ("watch", "error", "said"),
    [
        (None, Interrupted, r"^engine 1 rank 0: vLLM's process below it died; see logs/engine-1-rank-0\.log"),
        (SimpleNamespace(lost="Worker_DP0"), Interrupted, r"died \(Worker_DP0\)"),
        (SimpleNamespace(lost=None), ConnectionError, r"connection closed: vLLM gave up, as it does when another rank"),
    ],
)
def test_a_rank_says_whether_it_died_or_lost_another(calls, watch, error, said):
    made = calls(watch)
    with pytest.raises(error, match=said):
        asyncio.run(made.check_there())


async def _failing():
    raise Exception("Call to pause_scheduler method failed: cancelled")


def test_a_call_that_a_dying_core_cancels_is_a_death_and_another_failure_is_not(calls):
    dying, living = calls(SimpleNamespace(lost="VLLM::Worker_TP1")), calls(SimpleNamespace(lost=None))
    dying.llm.errored = living.llm.errored = False
    with pytest.raises(Interrupted, match=r"died \(VLLM::Worker_TP1\)"):
        asyncio.run(dying.ask(_failing()))
    with pytest.raises(Exception, match="failed: cancelled"):
        asyncio.run(living.ask(_failing()))


def test_names_of_ranks_and_of_their_logs():
    assert rank_name(2, 0, 1) == "engine 2" and rank_name(2, 1, 4) == "engine 2 rank 1"
    assert log_name("engine 2 rank 1") == "engine-2-rank-1"
    logs = [log_file(name) for name in ("rank 3", "engine 1", "engine 1 rank 0")]
    assert logs == ["actor-rank-3.log", "engine-1.log", "engine-1-rank-0.log"]
    assert [log_file(f"scorer {i}") for i in (0, 2)] == ["reward.log", "reward-2.log"]  # their processes'


def test_an_engines_report_is_that_of_its_ranks_in_order_or_all_their_errors():
    one, two = {"worker": 0}, {"worker": 1}
    assert _of_engine([[one], [two]]) == [one, two]
    error = _of_engine([[one], RuntimeError("engine 0 rank 1: no memory")])
    assert str(error) == "engine 0 rank 1: no memory"
    both = _of_engine([RuntimeError("a gave up waiting"), RuntimeError("b broke")])
    assert "a gave up" in str(both) and "b broke" in str(both)


@pytest.fixture
def group(monkeypatch):
    """A maker of a group of two engines with so many ranks each, and what their actors were asked, in order."""

    def make(ranks: int) -> tuple[RolloutGroup, list]:
        asked: list[tuple] = []

        class Actor:
            def __init__(self, number: int):
                self.number = number

            def __getattr__(self, method):
                def remote(*arguments):
                    asked.append((self.number, method, *arguments))
                    return {f"rank{self.number}": method} if method == "fingerprints" else None

                return SimpleNamespace(remote=remote)

        monkeypatch.setattr(rollout_group, "gather", lambda refs, *_: refs)
        made = RolloutGroup.__new__(RolloutGroup)
        made.config, made.engine_ranks = SimpleNamespace(cluster=SimpleNamespace(step_timeout_s=1.0)), ranks
        made.names = [rank_name(*divmod(number, ranks), ranks) for number in range(2 * ranks)]
        made.workers = [Actor(number) for number in range(2 * ranks)]
        return made, asked

    return make


def test_every_rank_says_that_it_is_there_before_any_is_asked(group):
    made, asked = group(2)
    made.call("pause")
    assert asked == [(number, method) for method in ("check_there", "pause") for number in range(4)]
    made, asked = group(1)
    made.call("pause")
    assert asked == [(0, "pause"), (1, "pause")], "an engine of one rank waits for nobody"


def test_an_engine_is_asked_through_all_of_its_ranks(group):
    made, asked = group(2)
    assert list(made.refs("receive_weights", 7, True, engines=[1])) == ["engine 1 rank 0", "engine 1 rank 1"]
    assert asked == [(2, "receive_weights", 7, True), (3, "receive_weights", 7, True)]
    assert made.fingerprints() == [
        {"rank0": "fingerprints", "rank1": "fingerprints"},
        {"rank2": "fingerprints", "rank3": "fingerprints"},
    ]


def test_ranks_of_an_engine_meet_at_its_first_one(group):
    made, asked = group(2)
    assert list(made._start()) == made.names
    assert [number for number, method, *_ in asked if method == "meeting_point"] == [0, 2]
    assert [number for number, method, *_ in asked if method == "start"] == [0, 1, 2, 3]
