"""Whatever a rank reports first, a run that lost a process ends as resumable and names who died.

Ray's answers are played.
"""

import errno
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from mrl.cluster import actor_group, calls, late_ranks
from mrl.cluster.actor_group import ActorGroup
from mrl.cluster.deadlines import Deadlines
from mrl.cluster.process_logs import concerning
from mrl.config.load import load_config
from mrl.errors import DataError, EnvironmentFault, Interrupted, LostProcess
from mrl.platforms.collective_trail import Entry, RankGroup, Trail
from mrl.rank import rank_worker
from mrl.rank.rank_step import FETCHING, LOG_PROBS, PHASES, WEIGHING, ReplicaRows, Scored

GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
DEAD = ray.exceptions.ActorDiedError()


def raised(cause: Exception) -> ray.exceptions.RayTaskError:
    """As Ray hands out what a method raised."""
    return ray.exceptions.RayTaskError("update", "Traceback ...", cause)


class Answers:
    """In place of Ray: each reference is an answer with the wait in which it is ready; waits cost no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.waits, self.now = 0, 0.0
        monkeypatch.setattr(calls.ray, "wait", self.wait)
        monkeypatch.setattr(calls.ray, "get", self.get)
        monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: self.now))

    def wait(self, refs, timeout):
        self.waits, self.now = self.waits + 1, self.now + timeout
        ready = [ref for ref in refs if ref[0] <= self.waits][:1]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref):
        if isinstance(ref[1], Exception):
            raise ref[1]
        return ref[1]


@pytest.fixture
def gather(monkeypatch):
    Answers(monkeypatch)

    def run(*answers):
        return calls.gather({f"rank {i}": answer for i, answer in enumerate(answers)}, 60.0, "update")

    return run


NEVER = (10**9, None)


def test_answers_come_in_the_order_of_the_ranks(gather):
    assert gather((3, "a"), (1, "b")) == {"rank 0": "a", "rank 1": "b"}


def test_a_dead_rank_is_named_although_its_peer_complained_first(gather):
    with pytest.raises(Interrupted, match="update: rank 1 died"):
        gather((1, raised(GLOO)), (4, DEAD))


def test_a_defect_of_a_peer_does_not_hide_a_dead_rank(gather):
    with pytest.raises(Interrupted, match="rank 2 died"):
        gather((1, raised(ValueError("half a message"))), (2, raised(GLOO)), (3, DEAD))


def test_a_broken_connection_without_a_known_culprit_is_a_lost_worker(gather):
    with pytest.raises(Interrupted, match="the ranks lost each other, as rank 0 saw"):
        gather((1, raised(GLOO)), NEVER)


def test_the_defect_that_broke_the_connection_is_what_is_told(gather):
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        gather((1, raised(GLOO)), (2, raised(KeyError("a bug"))))
    assert isinstance(caught.value.cause, KeyError)


def test_a_rank_that_fails_for_a_known_reason_explains_its_peers(gather):
    with pytest.raises(DataError, match="an empty prompt"):
        gather((1, raised(GLOO)), (2, raised(DataError("an empty prompt"))))


def test_a_defect_keeps_its_traceback(gather):
    with pytest.raises(ray.exceptions.RayTaskError):
        gather((1, raised(ValueError("a bug"))), NEVER)


@pytest.mark.parametrize(
    "cause",
    [OSError(errno.ENOSPC, "No space left on device"), Exception("I/O error: No space left on device (os error 28)")],
)
def test_a_full_disk_is_the_environments_fault(gather, cause):
    with pytest.raises(EnvironmentFault, match="update: rank 0 found no space left"):
        gather((1, raised(cause)), NEVER)


@pytest.mark.parametrize("kind", [ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError])
def test_a_full_store_on_a_full_disk_is_a_stop_that_can_be_resumed(gather, kind):
    with pytest.raises(Interrupted, match=r"update: rank 0 found the object store of its node full, and its disk too"):
        gather((1, raised(kind("full"))), NEVER)


def test_a_task_whose_argument_was_lost_with_its_maker_is_a_lost_worker(gather):
    with pytest.raises(Interrupted, match="died"):
        gather((1, raised(raised(DEAD))))


@pytest.mark.parametrize("kind", [ray.exceptions.ObjectLostError, ray.exceptions.OwnerDiedError])
def test_who_cannot_read_what_was_lost_with_another_node_has_not_died(gather, kind):
    """Else a healthy engine falls for the kept tokens of one that was lost with its node, and falls again."""
    lost = kind("ab" * 14, None, "")
    with pytest.raises(Interrupted, match=r"update: rank 0 cannot read what it was given.* lost with the node") as told:
        gather((1, raised(lost)))
    assert not isinstance(told.value, LostProcess)
    with pytest.raises(LostProcess, match="rank 0 died"):
        gather((1, lost))  # its own answer is lost with its node


def test_a_missed_deadline_names_who_is_late(gather):
    with pytest.raises(Interrupted, match="no answer from rank 1 within 60 s"):
        gather((1, "a"), NEVER)


@pytest.fixture
def write(monkeypatch):
    """ActorGroup.write_checkpoint over played answers, with 60 s for them: (the call, what stands for Ray)."""
    played = Answers(monkeypatch)

    def run(*answers):
        group = object.__new__(ActorGroup)
        group.config = SimpleNamespace(cluster=SimpleNamespace(step_timeout_s=60.0))
        group.refs = lambda method, folder: {f"rank {i}": answer for i, answer in enumerate(answers)}
        return group.write_checkpoint("folder")

    return run, played


def test_a_write_that_failed_is_told_when_no_rank_writes_any_more(write):
    run, played = write
    with pytest.raises(EnvironmentFault, match="full"):
        run((1, raised(EnvironmentFault("full"))), (40, "slower"), (9, raised(EnvironmentFault("full as well"))))
    assert played.waits == 40


def test_a_rank_that_died_in_a_write_is_told_before_a_full_disk(write):
    with pytest.raises(Interrupted, match="rank 1 died"):
        write[0]((1, raised(EnvironmentFault("full"))), (2, DEAD))


def test_parts_of_a_checkpoint_come_in_the_order_of_the_ranks(write):
    assert write[0]((7, "a"), (1, "b")) == ["a", "b"]


def test_a_disk_that_is_too_slow_is_a_fault_of_the_disk_and_no_interruption(write):
    with pytest.raises(EnvironmentFault, match=r"no answer from rank 1 within 60 s.*raise cluster\.step_timeout_s"):
        write[0]((1, "a"), NEVER)


SEVERAL_LINES = RuntimeError(
    "worker 0 did not take round 2 of 7:\n  model.norm.weight\nException raised from wait at pair.cc:1\nframe #0: ..."
)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        (
            "rank 3",
            raised(SEVERAL_LINES),
            "rank 3: worker 0 did not take round 2 of 7: model.norm.weight (logs/actor-rank-3.log)",
        ),
        ("engine 1", raised(KeyError("w13")), "engine 1: KeyError: 'w13' (logs/engine-1.log)"),
        ("engine 1", raised(MemoryError()), "engine 1: MemoryError (logs/engine-1.log)"),
        (
            "rank 0",
            ray.exceptions.RayTaskError(
                "send", "Traceback (most recent call last):\n  File x\n    y()\nE: rank 0\nmodel.norm", None
            ),
            "rank 0: E: rank 0 model.norm (logs/actor-rank-0.log)",
        ),
    ],
)
def test_a_call_that_may_be_tried_again_answers_with_all_of_its_cause_and_the_log(monkeypatch, name, error, said):
    Answers(monkeypatch)
    answer = calls.settle({name: (1, error)}, 60.0, "weight sync")[name]
    assert str(answer) == said


def test_a_broken_connection_keeps_what_the_transport_said_before_it(monkeypatch):
    Answers(monkeypatch)
    lost = RuntimeError("rank 0: worker 1 did not take round 4\n[gloo/transport/tcp] Connection closed by peer\nframes")
    answer = calls.settle({"rank 0": (1, raised(lost))}, 60.0, "weight sync")["rank 0"]
    assert "worker 1 did not take round 4" in str(answer)


def test_a_rank_that_dies_in_a_sync_ends_it_as_resumable_although_others_complained_first(monkeypatch):
    Answers(monkeypatch)
    refs = {"rank 0": (1, raised(GLOO)), "engine 0": (2, raised(RuntimeError("nothing came"))), "rank 1": (4, DEAD)}
    with pytest.raises(Interrupted, match="weight sync: rank 1 died"):
        calls.settle(refs, 60.0, "weight sync")


GROUP = RankGroup("tensor", (0, 1, 2))


def come_to(count: int) -> Trail:
    return Trail({GROUP: count}, tuple(Entry(GROUP, number, "all_reduce") for number in range(1, count + 1)))


@pytest.fixture
def late(monkeypatch):
    """ActorGroup.call in which ranks 0 and 1 of three are late, by where each then says that it is, and is later: the
    error. Nobody is where None stands.
    """

    def run(there, later=None):
        played = Answers(monkeypatch)
        group = object.__new__(ActorGroup)
        group.poll = lambda: None
        group._deadlines = Deadlines(60.0, is_set=True)
        totals = [own and own.total for own in later or there]
        looks = {"write_stacks": there, "collectives": totals}
        answers = {name: [NEVER if own is None else (0, own) for own in looks[name]] for name in looks}
        answers["update"] = [NEVER, (10**9, "another"), (1, "a")]
        group.refs = lambda method: {f"rank {i}": answer for i, answer in enumerate(answers[method])}

        def wait(refs, timeout, num_returns=1):
            if num_returns > 1:
                return [ref for ref in refs if ref is not NEVER], []
            return Answers.wait(played, refs, timeout)

        monkeypatch.setattr(calls.ray, "wait", wait)
        monkeypatch.setattr(late_ranks, "time", SimpleNamespace(sleep=lambda seconds: None))
        with pytest.raises(calls.Late) as raised_late:
            group.call("update")
        return raised_late.value

    return run


@pytest.fixture
def stopped(monkeypatch):
    """A group of three ranks of which the second is stopped, after each has answered once within two seconds."""
    asked = []

    def played(refs, timeout_s, phase, poll):
        asked.append((phase, timeout_s, list(refs)))
        if len(asked) == 1:
            return dict.fromkeys(refs, 7)
        raise concerning(calls.Late(f"{phase}: no answer"), *refs)

    group = object.__new__(ActorGroup)
    group._deadlines = Deadlines(3600.0, is_set=False)
    method = SimpleNamespace(remote=lambda *arguments: None)
    group.workers = [SimpleNamespace(memory=method, write_stacks=method)] * 3
    monkeypatch.setattr(actor_group, "gather", played)
    monkeypatch.setattr(late_ranks, "answered", lambda refs: {name: come_to(1) for name in refs if name != "rank 1"})
    return group, asked


def test_a_rank_that_stops_between_steps_is_noticed_by_a_call_that_is_usually_quick_and_it_alone_is_named(stopped):
    group, asked = stopped
    assert group.answers("memory", "measuring") == {"rank 0": 7, "rank 1": 7, "rank 2": 7}
    with pytest.raises(calls.Late, match="rank 1 did not even write its stacks") as told:
        group.answers("memory", "measuring", ranks=[0, 1])
    assert told.value.processes == ("rank 1",)
    assert asked == [
        ("measuring", 3600.0, ["rank 0", "rank 1", "rank 2"]),
        ("measuring", 60.0, ["rank 0", "rank 1"]),
    ]


def test_of_ranks_that_are_late_together_the_one_that_does_not_run_is_the_culprit(late):
    error = late([come_to(2), None, come_to(2)])
    assert "no answer from rank 0, rank 1 within 60 s" in str(error)
    assert "rank 1 did not even write its stacks" in str(error) and "logs/*.stacks" in str(error)
    assert "rank 0, rank 2 came to all_reduce 2 of tensor (ranks 0, 1, 2)" in str(error)
    assert error.processes == ("rank 1",)


def test_where_all_run_all_that_are_late_are_named_and_where_they_are_is_written(late):
    error = late([come_to(2)] * 3)
    assert "rank 0, rank 1, rank 2 came to all_reduce 2" in str(error)
    assert "the stacks of ranks are in logs/*.stacks" in str(error)
    assert error.processes == ("rank 0", "rank 1")


def test_the_one_that_has_not_come_to_a_collective_is_named_although_it_has_answered(late):
    error = late([come_to(2), come_to(2), come_to(1)])
    said = (
        "rank 2 has not come to all_reduce 2 of tensor (ranks 0, 1, 2), to which rank 0 has; the stacks of ranks are in"
    )
    assert said in str(error)
    assert error.processes == ("rank 2",)


def test_ranks_that_go_on_are_slow_and_nobody_is_accused(late):
    error = late([come_to(2), come_to(2), come_to(1)], [come_to(3), come_to(3), come_to(3)])
    assert "they go on, by 4 collectives in about 1 s, so they are slow and do not hang" in str(error)
    assert error.processes == ("rank 0", "rank 1")


def test_where_nobody_answers_no_culprit_is_guessed(late):
    assert late([None] * 3).processes == ("rank 0", "rank 1")


def test_a_phase_has_all_the_time_once_and_then_ten_times_its_longest():
    deadlines = Deadlines(3600.0, is_set=False)
    assert deadlines.of("update") == 3600.0
    deadlines.ended("update", 2.0)
    assert deadlines.of("update") == 60.0, "at least a minute"
    deadlines.ended("update", 30.0)
    deadlines.ended("update", 20.0)
    assert deadlines.of("update") == 300.0
    assert deadlines.of("offload") == 3600.0, "of another nothing is known"
    deadlines.ended("update", 1000.0)
    assert deadlines.of("update") == 3600.0, "never more than at first"
    patient = Deadlines(3600.0, is_set=False, least_s=360.0)
    patient.ended("sync", 1.0)
    assert patient.of("sync") == 360.0


def test_a_deadline_that_is_set_stays():
    deadlines = Deadlines(10.0, is_set=True)
    deadlines.ended("update", 9.0)
    deadlines.ended("offload", 0.1)
    assert deadlines.of("update") == deadlines.of("offload") == 10.0


def test_a_configuration_says_whether_its_deadline_is_set():
    preset = "parallel_configs/qwen3-30b-a3b/h100-4x8.yaml"
    for overrides, is_set in (((), False), (("cluster.step_timeout_s=3600",), True)):
        cluster = load_config(preset, overrides=list(overrides)).config.cluster
        assert ("step_timeout_s" in cluster.model_fields_set) is is_set
        deadlines = Deadlines.of_steps(cluster)
        deadlines.ended("update", 1.0)
        assert deadlines.of("update") == (3600.0 if is_set else 60.0)


def test_ranks_in_different_collectives_have_lost_each_other_and_are_started_again(gather):
    told = RuntimeError("ranks gave [4, 8] bytes of torch.float32 where ... : they are not in the same collective, or")
    with pytest.raises(Interrupted, match="the ranks lost each other, as rank 0 saw"):
        gather((1, raised(told)), (2, raised(told)))


# ---------------------------------------------------------------- the phases of a step


class Scoring(ActorGroup):
    """Two ranks of which only the first has answered; where the second is, at each look."""

    def __init__(self, monkeypatch, looks, deadlines, poll=lambda: None):
        self._deadlines, self.poll, self.waited, self.asked, self._scores = deadlines, poll, [], [], 0
        looks = iter(looks)
        done = [Scored({FETCHING: 1.0, LOG_PROBS: 90.0}), Scored({FETCHING: 2.0, LOG_PROBS: 80.0, WEIGHING: 0.5})]

        def gather(refs, timeout_s, phase, poll):
            poll()
            self.waited.append(timeout_s)
            self.at = next(looks)
            if self.at is None:
                return dict(zip(refs, done, strict=True))
            raise concerning(calls.Late(phase), "rank 1")

        monkeypatch.setattr(actor_group, "gather", gather)
        monkeypatch.setattr(actor_group, "answered", lambda refs: {"rank 1": self.at} if self.at else {})
        monkeypatch.setattr(actor_group, "with_cause", lambda error, refs: error)

    def refs_each(self, method, arguments):
        return {f"rank {number}": [method, f"kept {number}"] for number in range(2)}

    def refs(self, method, *arguments, ranks=None):
        self.asked.append((method, *arguments))


def test_each_phase_of_a_step_has_its_own_deadline_from_where_it_begins(monkeypatch):
    deadlines = Deadlines(600.0, is_set=False)
    for phase in PHASES:
        deadlines.ended(phase, 1.0)
    deadlines.ended(LOG_PROBS, 20.0)
    group = Scoring(monkeypatch, [(LOG_PROBS, 59.0), (LOG_PROBS, 119.0), (LOG_PROBS, 179.0), None], deadlines)
    answers, kept = group.score([(), ()])
    assert group.waited == [60.0, 60.0, 60.0, 21.0], "no longer than until the next deadline can pass"
    assert [answer.seconds[FETCHING] for answer in answers] == [1.0, 2.0] and kept == ["kept 0", "kept 1"]
    assert (deadlines.of(LOG_PROBS), deadlines.of(FETCHING)) == (600.0, 60.0), "ten times the slowest rank's"


def test_a_rank_that_stays_in_a_phase_is_named_with_the_phase(monkeypatch):
    deadlines = Deadlines(100.0, is_set=True)
    group = Scoring(monkeypatch, [(FETCHING, 40.0), (LOG_PROBS, 30.0), (LOG_PROBS, 100.5)], deadlines)
    with pytest.raises(calls.Late, match="log_probs: no answer from rank 1 within 100 s"):
        group.score([(), ()])
    assert group.waited == [100.0, 60.0, 70.0]


def test_a_signal_while_ranks_score_has_them_stop_too(monkeypatch):
    def stopped():
        raise Interrupted("stopped by SIGTERM")

    group = Scoring(monkeypatch, [], Deadlines(100.0, is_set=True), stopped)
    with pytest.raises(Interrupted, match="SIGTERM"):
        group.score([(), ()])
    assert group.asked == [("stop_scoring", 1)]


def test_a_rank_that_is_asked_to_stop_before_it_begins_does_not_score(monkeypatch):
    worker = object.__new__(rank_worker.ActorWorker)
    worker.stopped = 0
    worker.actor = worker.profile = None
    asked = []

    class Step:
        def __init__(self, actor, rows, stops):
            self.stops = stops

        def score(self, own, samples, handed):
            asked.append(self.stops())

    monkeypatch.setattr(rank_worker, "RankStep", Step)
    monkeypatch.setattr(rank_worker.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    own = ReplicaRows(np.zeros(0, np.int64), np.zeros(0, bool), None)
    for number, stopped in ((1, None), (2, 2), (3, None)):
        if stopped:
            worker.stop_scoring(stopped)
        worker.score(number, None, own, None)
    assert asked == [False, True, False]
