"""Engines of several data-parallel ranks: who is named, whose answers belong together,
and who stands still before an update.
"""

import asyncio
import inspect
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import psutil
import pytest

from mrl.cluster import rollout_group
from mrl.cluster.calls import Late
from mrl.cluster.deadlines import Deadlines
from mrl.cluster.engine_fleet import EngineFleet
from mrl.cluster.process_logs import concerning, log_file
from mrl.cluster.rollout_group import RolloutGroup
from mrl.cluster.weight_sync import _of_engine
from mrl.engine.engine_calls import EngineCalls
from mrl.engine.engine_state import CONTROL_VERBS
from mrl.engine.engine_worker import EngineWorker
from mrl.engine.process_watch import ProcessWatch, end_processes, end_with_parent, processes_here, stopped_below
from mrl.engine.requests import EngineReading, log_name, rank_name
from mrl.engine.vllm_engine import VllmEngine
from mrl.errors import Interrupted, LostProcess

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
    while not psutil.Process(process.worker).cmdline():  # between fork and exec there is none
        time.sleep(0.01)
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
from mrl.engine.process_watch import end_with_parent

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


# one that spawned the coordinator of data-parallel ranks, which watches nobody itself
OF_RANKS = """
import time
from mrl.engine.forking import ForkedProcess

child = ForkedProcess(target=time.sleep, args=(60,), daemon=True)
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("program", [ACTOR, OF_RANKS], ids=["core", "coordinator"])
def test_what_an_actor_spawned_ends_with_it(program):
    actor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
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


def test_tools_and_agents_that_end_are_no_loss_of_the_engine(core):
    """Their keeper is below the engine's process before vLLM is, and ends with a tool that hangs, or an agent."""
    below = "'mrl.reward.keeper'; import subprocess; subprocess.run(['sleep', '50'])"
    keeper = subprocess.Popen([sys.executable, "-c", below], start_new_session=True)
    # until it executes `sleep`, the child has the command line of the keeper, which waits and cannot be stopped
    while [child.cmdline()[:1] for child in psutil.Process(keeper.pid).children()] != [["sleep"]]:
        time.sleep(0.01)
    watch = ProcessWatch(lambda: False)
    os.killpg(keeper.pid, signal.SIGSTOP)  # as a program of a model's may do to itself
    while psutil.Process(keeper.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert stopped_below() == []
    os.killpg(keeper.pid, signal.SIGKILL)
    keeper.wait()
    time.sleep(0.2)
    assert not watch.has_seen and watch.lost is None
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


@pytest.mark.parametrize("stopped", [False, True])
def test_what_is_left_of_an_engine_is_ended_also_where_it_is_stopped_and_nobody_else_is(core, stopped):
    processes = processes_here()
    assert {os.getpid(), core.worker} <= {pid for pid, _ in processes}
    own = [(pid, begun) for pid, begun in processes if pid != os.getpid()]
    (begun,) = [begun for pid, begun in own if pid == core.worker]
    if stopped:
        os.kill(core.worker, signal.SIGSTOP)
    end_processes([(core.worker, begun - 60)])
    assert psutil.pid_exists(core.worker), "one that began at another time is another one"
    end_processes([(core.worker, begun)])
    assert not psutil.pid_exists(core.worker) or psutil.Process(core.worker).status() == psutil.STATUS_ZOMBIE
    end_processes([(core.worker, begun)])


def test_of_ranks_that_are_late_together_the_stopped_one_and_the_silent_one_are_named(group, monkeypatch):
    made, _ = group(2)
    stopped = "VLLM::Worker_DP1 (process 7) is stopped"
    said = {"engine 0 rank 0": [], "engine 0 rank 1": [stopped], "engine 1 rank 0": []}

    def late(refs, timeout_s, phase):
        names = ("engine 0 rank 0", "engine 0 rank 1", "engine 1 rank 1")
        raise concerning(Late(f"{phase}: no answer from {', '.join(names)} within 60 s"), *names)

    said["engine 1 rank 0"] = ["it was in time"]
    monkeypatch.setattr(rollout_group, "gather", late)
    monkeypatch.setattr(rollout_group, "answered", lambda refs: {name: said[name] for name in refs if name in said})
    named = re.escape(f"within 60 s; engine 0 rank 1: {stopped}; engine 1 rank 1: it does not answer")
    with pytest.raises(Late, match=f"{named}$"):
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
                    if method == "devices":
                        return f"where {made.names[self.number]} is"
                    return {f"rank{self.number}": arguments[0]} if arguments == ("fingerprints",) else None

                return SimpleNamespace(remote=remote)

        monkeypatch.setattr(rollout_group, "gather", lambda refs, *_: refs)
        made = RolloutGroup.__new__(RolloutGroup)
        made.cluster, made.engine_ranks = SimpleNamespace(step_timeout_s=1.0), ranks
        made._deadlines = Deadlines(3600.0, is_set=False)
        made.peers_wait_s = 0.0
        made.names = [rank_name(*divmod(number, ranks), ranks) for number in range(2 * ranks)]
        made.workers = [Actor(number) for number in range(2 * ranks)]
        made.fleet = EngineFleet(made, 60.0)
        return made, asked

    return make


def test_every_rank_says_that_it_is_there_before_any_is_asked(group):
    made, asked = group(2)
    made.call("pause")
    assert asked == [(number, *method) for method in (("check_there",), ("do", "pause")) for number in range(4)]
    made, asked = group(1)
    made.call("pause")
    assert asked == [(0, "do", "pause"), (1, "do", "pause")], "an engine of one rank waits for nobody"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_verb_goes_on_without_an_engine_that_is_lost_under_it_and_asks_nobody_twice(group, monkeypatch, ranks):
    made, asked = group(ranks)
    made.end, made.start_again = (lambda engine: None), (lambda engine: {})
    made.fleet.restart(1, 1)
    lost = concerning(LostProcess("pause: engine 1 died"), made.names[-1])

    def dying(refs, *_):
        if made.names[-1] in refs and "do" in asked[-1]:
            raise lost
        return refs

    monkeypatch.setattr(rollout_group, "gather", dying)
    assert len(made.call("pause")) == ranks, "of engine 0, whole"
    assert [each for each in asked if each[1] == "do"] == [(number, "do", "pause") for number in range(2 * ranks)]
    assert made.fleet.serving().keys() == set(made.names[:ranks])
    asked.clear()
    made.call("resume")
    assert {number for number, *_ in asked} == set(range(ranks)), "nobody asks one that is starting"


def test_an_engine_of_several_ranks_falls_whole_and_rises_whole_where_a_new_port_is_drawn(group, monkeypatch):
    """One of its ranks is lost: both are ended, with all below them, and both are started, on a port that the first
    finds free then.
    """
    made, asked = group(2)
    before = list(made.workers)
    killed, below = [], []
    monkeypatch.setattr(rollout_group.ray, "kill", killed.append)
    monkeypatch.setattr(made, "_end_below", lambda name, processes: below.append((name, processes)))
    monkeypatch.setattr(made, "_worker", lambda number: type(before[0])(number + 10))
    made._below = {number: [(100 + number, 0.0)] for number in range(4)}
    made.fleet.restart(1, 1)
    assert made.fleet.loses(concerning(LostProcess("it died"), "engine 1 rank 1"), made.fleet.epochs())
    assert killed == before[2:]
    assert below == [("engine 1 rank 0", [(102, 0.0)]), ("engine 1 rank 1", [(103, 0.0)])]
    assert [each.number for each in made.workers] == [0, 1, 12, 13]
    assert [each[:2] for each in asked] == [(12, "meeting_point"), (12, "start"), (13, "start")]


def test_a_verb_has_all_the_time_once_and_an_engine_that_is_waited_for_in_vain_gives_nobody_more(group, monkeypatch):
    made, _ = group(1)
    made.end, made.start_again = (lambda engine: None), (lambda engine: {})
    made.fleet.restart(1, 1)
    given, dying = [], []

    def answering(refs, timeout_s, phase):
        given.append((phase, timeout_s))
        if dying:
            raise concerning(LostProcess("sleep: no answer"), dying.pop())
        return refs

    monkeypatch.setattr(rollout_group, "gather", answering)
    dying.append("engine 1")
    for verb in ("sleep", "sleep", "sleep", "commit"):
        made.call(verb)
    assert given == [("sleep", 3600.0), ("sleep", 3600.0), ("sleep", 3600.0), ("sleep", 60.0), ("commit", 3600.0)]


def test_without_restarts_a_lost_engine_ends_the_verb_as_it_did(group, monkeypatch):
    made, _ = group(1)

    def dying(refs, *_):
        raise concerning(LostProcess("pause: engine 1 died"), "engine 1")

    monkeypatch.setattr(rollout_group, "gather", dying)
    with pytest.raises(LostProcess, match="engine 1 died"):
        made.call("pause")
    made.fleet.restart(3, 1)

    def rank_dies(refs, *_):
        raise concerning(LostProcess("update: rank 0 died"), "rank 0")

    monkeypatch.setattr(rollout_group, "gather", rank_dies)
    with pytest.raises(LostProcess, match="rank 0 died"):
        made.call("pause")


def test_a_loss_that_is_told_after_the_engine_was_started_again_hurts_nobody(group):
    made, _ = group(1)
    ended = []
    made.end, made.start_again = ended.append, (lambda engine: {})
    made.fleet.restart(3, 1)
    asked = made.fleet.epochs()
    died = concerning(LostProcess("engine 1 died"), "engine 1")
    assert made.fleet.loses(died, asked) and made.fleet.loses(died, asked) and ended == [1]
    assert made.fleet.epochs() == {"engine 0": 0, "engine 1": 1}


@pytest.mark.parametrize(
    "asking",
    [
        lambda made: made.call("resume"),
        lambda made: made.answers("memory", "measuring"),
        lambda made: made.check_there("sleep"),
        lambda made: made.give_up(3, sleeps=False),
        lambda made: made.end_requests({"engine 0": [1], "engine 1": [2]}),
    ],
    ids=["call", "answers", "check_there", "give_up", "end_requests"],
)
def test_an_engine_that_another_thread_starts_again_under_a_call_does_not_fall_for_the_one_that_was_asked(
    group, monkeypatch, asking
):
    """The loss comes between the calls and the wait for them: what the engine before did not answer is its own."""
    made, _ = group(1)
    ended = []
    made.end, made.start_again = ended.append, (lambda engine: {})
    made.fleet.restart(3, 1)
    died = concerning(LostProcess("engine 1 died"), "engine 1")
    old = made.workers[1]

    class Dying:
        def __getattr__(self, method):
            def remote(*arguments):
                made.fleet.loses(died, {"engine 1": 0})  # as generation's thread does
                return getattr(old, method).remote(*arguments)

            return SimpleNamespace(remote=remote)

    made.workers[1] = Dying()

    def without_engine_1(refs, *_):
        if "engine 1" in refs:
            raise died
        return refs

    monkeypatch.setattr(rollout_group, "gather", without_engine_1)
    asking(made)
    assert ended == [1] and made.fleet.epochs() == {"engine 0": 0, "engine 1": 1}


@pytest.mark.parametrize("peers_wait_s", [0.0, 300.0])
def test_an_engine_may_finish_its_wait_for_ranks_that_are_gone_before_it_gives_up(group, monkeypatch, peers_wait_s):
    made, _ = group(1)
    given = []
    monkeypatch.setattr(rollout_group, "gather", lambda refs, timeout_s, what: given.append(timeout_s) or refs)
    made.peers_wait_s = peers_wait_s
    made.give_up(3, sleeps=False)
    assert given == [rollout_group.GIVE_UP_S + peers_wait_s]


def test_an_engine_is_asked_through_all_of_its_ranks(group):
    made, asked = group(2)
    assert list(made.refs("receive_weights", 7, True, engines=[1])) == ["engine 1 rank 0", "engine 1 rank 1"]
    assert asked == [(2, "do", "receive_weights", 7, True), (3, "do", "receive_weights", 7, True)]
    assert made.fingerprints() == [
        {"rank0": "fingerprints", "rank1": "fingerprints"},
        {"rank2": "fingerprints", "rank3": "fingerprints"},
    ]


def test_a_worker_hands_on_the_verbs_of_its_engine_and_nothing_else():
    worker = EngineWorker.__new__(EngineWorker)
    worker.engine = SimpleNamespace(sleep=AsyncMock(return_value="asleep"), start=AsyncMock(), generate=AsyncMock())
    assert asyncio.run(worker.do("sleep")) == "asleep"
    for other in ("start", "generate", "_die"):
        with pytest.raises(ValueError, match=f"no verb {other}; allowed: end_requests, pause"):
            asyncio.run(worker.do(other))
    assert all(inspect.iscoroutinefunction(getattr(VllmEngine, verb)) for verb in CONTROL_VERBS)


def test_conversations_end_before_the_requests_of_their_engine():
    """Else one whose request was ended would ask for another; given up is all that it has."""
    told = []
    worker = EngineWorker.__new__(EngineWorker)
    worker.engine = SimpleNamespace(
        end_requests=AsyncMock(side_effect=lambda handles: told.append(("engine", handles))),
        give_up=AsyncMock(side_effect=lambda: told.append(("engine", None))),
        memory=AsyncMock(),
    )
    worker.conversations = SimpleNamespace(
        end=AsyncMock(side_effect=lambda handles=None: told.append(("talks", handles)))
    )
    for asked in (("end_requests", [4, 5]), ("give_up",), ("memory",)):
        asyncio.run(worker.do(*asked))
    assert told == [("talks", [4, 5]), ("engine", [4, 5]), ("talks", None), ("engine", None)]


def test_a_reading_says_whether_all_responses_wait_for_tools():
    worker = EngineWorker.__new__(EngineWorker)
    worker.engine = SimpleNamespace(reading=EngineReading(7, 0.5))
    assert not asyncio.run(worker.reading()).all_act
    for all_act in (True, False):
        worker.conversations = SimpleNamespace(all_act=all_act)
        assert asyncio.run(worker.reading()) == EngineReading(7, 0.5, all_act=all_act)


def test_ranks_of_an_engine_meet_at_its_first_one(group):
    made, asked = group(2)
    made._make_workers, made._starting = (lambda: None), {}
    made.start()
    assert list(made._starting) == made.names
    assert [number for number, method, *_ in asked if method == "meeting_point"] == [0, 2]
    starts = [(number, *given[1:]) for number, method, *given in asked if method == "start"]
    first, second = (tuple(f"where engine {engine} rank {rank} is" for rank in range(2)) for engine in range(2))
    assert starts == [(0, *first), (1, *first), (2, *second), (3, *second)], "it answers nothing while it starts"


def test_engines_with_turns_are_told_where_the_users_command_was_given(monkeypatch, tmp_path):
    made = []
    kind = SimpleNamespace(remote=lambda *told: made.append(told))
    monkeypatch.setattr(rollout_group.ray, "remote", lambda cls: SimpleNamespace(options=lambda **given: kind))
    monkeypatch.chdir(tmp_path)
    group = RolloutGroup.__new__(RolloutGroup)
    group._settings = [SimpleNamespace(name="engine 0", turns=turns) for turns in (None, "some")]
    group.seats = SimpleNamespace(seats=[SimpleNamespace(environment={}, options={}, devices=None)] * 2)
    group.cluster, group.names, group._logs = SimpleNamespace(device="cpu"), ["engine 0", "engine 1"], tmp_path
    group.rollout = SimpleNamespace(tensor_model_parallel_size=1, cpu_kvcache_gib=1, tuned_experts=None)
    group._worker(0)
    group._worker(1)
    assert len(made[0]) == 3 and made[1][3:] == (dict(os.environ), str(tmp_path))
    monkeypatch.setenv("VLLM_PORT", "1")
    monkeypatch.setattr("mrl.engine.vllm_engine.VllmEngine", lambda settings: None)
    given = {"log_to": None, "address_environment": {}, "local_folder": "the model's", "replace": None}
    for name, value in given.items():
        monkeypatch.setattr(f"mrl.engine.engine_worker.{name}", lambda *_, value=value, **__: value)
    monkeypatch.setattr(rollout_group.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    worker = EngineWorker(SimpleNamespace(name="engine 0", arguments={"model": "m"}), *made[1][1:])
    assert (worker._environment, worker._folder) == made[1][3:]
