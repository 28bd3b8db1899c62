"""Ranks that are lost are started again inside a run: when, how often, from where, and with what of the start before.

What starts processes is replaced here; that the bits are those of an undisturbed run is asked of real ones.
"""

import signal
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from replicas import scorers
from test_scoring import CHARS, questions, samples

from mrl.cluster.engine_fleet import EngineFleet
from mrl.cluster.process_logs import concerning
from mrl.config.deployment import Deployment
from mrl.config.load import load_config
from mrl.driver import assemble, assemble_processes, loop
from mrl.driver.assemble import RESTART_WINDOW, RestartBudget
from mrl.driver.placement import Separate
from mrl.driver.saving import Saver
from mrl.driver.stop_signals import StopFlag
from mrl.errors import DamagedCheckpoint, EnvironmentFault, Interrupted, LostWeights, NumericAbort
from mrl.record.attempts import attempt, read_attempts
from mrl.reward.items import RewardSpec
from mrl.reward.pool import RewardPool
from mrl.schedule.fleet import RETIRED, Fleet

TINY = "parallel_configs/tiny-moe/cpu.yaml"


def lost(*names: str) -> Interrupted:
    return concerning(Interrupted(f"{' and '.join(names)} died"), *names)


def budget(limit: int, *spent_at: int):
    noted = []
    return RestartBudget(limit, spent_at, lambda step, why: noted.append((step, why))), noted


def test_a_loss_of_ranks_is_spent_and_noted():
    made, noted = budget(3)
    made.spend(lost("rank 1"), 7)
    made.spend(lost("rank 0", "rank 3"), 9)
    assert noted == [(7, "rank 1 died"), (9, "rank 0 and rank 3 died")] and made.spent == 2


@pytest.mark.parametrize("error", [lost("engine 0"), lost("rank 1", "engine 0"), Interrupted("stopped by SIGTERM")])
def test_what_is_no_loss_of_ranks_alone_ends_the_run_as_it_is(error):
    made, noted = budget(3)
    with pytest.raises(Interrupted) as raised:
        made.spend(error, 7)
    assert raised.value is error and not noted


def test_engines_that_need_weights_which_nobody_holds_any_more_are_a_matter_of_ranks():
    error = concerning(LostWeights("no engine is left"), "engine 0")
    with pytest.raises(LostWeights):
        budget(1)[0].spend(error, 7)
    noted = []
    made = RestartBudget(0, (), lambda step, why: noted.append(step), for_engines=1)
    with pytest.raises(Interrupted, match=r"^rank 1 died$"):
        made.spend(lost("rank 1"), 7)
    made.spend(error, 7)
    assert noted == [7]
    with pytest.raises(Interrupted, match="no engine is left; ranks were started again 1 times"):
        made.spend(error, 8)


def test_without_a_limit_a_loss_ends_the_run_as_it_is():
    made, noted = budget(0)
    error = lost("rank 1")
    with pytest.raises(Interrupted) as raised:
        made.spend(error, 7)
    assert raised.value is error and not noted


def test_past_the_limit_of_the_last_hundred_steps_the_run_ends_with_limit_number_and_cause():
    made, noted = budget(2, 10, 50)
    with pytest.raises(Interrupted, match=r"rank 1 died; ranks were started again 2 times in 100 .*restart_limit"):
        made.spend(lost("rank 1"), 60)
    assert not noted
    made.spend(lost("rank 1"), 10 + RESTART_WINDOW)  # the first is forgotten
    with pytest.raises(Interrupted, match="2 times"):
        made.spend(lost("rank 1"), 10 + RESTART_WINDOW)


def test_a_new_start_of_the_run_gives_no_restart_back(tmp_path):
    for step in (4, 6):
        with attempt(tmp_path, 2, {}) as notes:
            notes.generated_again(5)
            RestartBudget(3, (), notes.restarted).spend(lost("rank 1"), step)
            notes.generated_again(7)
    first, second = read_attempts(tmp_path)
    assert (first.restarted_at, second.restarted_at) == ((4,), (6,))
    assert first.generated_again == 12, "of its restart too"


def test_training_goes_on_with_the_run_that_was_started_again(monkeypatch):
    second = SimpleNamespace(state=SimpleNamespace(step=5))
    error = lost("rank 1")
    first = SimpleNamespace(state=SimpleNamespace(step=3), start_again=lambda *given: asked.append(given) or second)
    asked, trained = [], []

    def train(run):
        trained.append(run)
        if run is first:
            raise error

    monkeypatch.setattr(loop, "train", train)
    assert loop.train_on(first) is second
    assert asked == [(error, 3)] and trained == [first, second]


@pytest.mark.parametrize("error", [NumericAbort("inf"), EnvironmentFault("no room"), RuntimeError("a defect")])
def test_nothing_else_that_ends_training_starts_ranks_again(monkeypatch, error):
    def train(run):
        raise error

    monkeypatch.setattr(loop, "train", train)
    with pytest.raises(type(error)):
        loop.train_on(SimpleNamespace(start_again=None))


class Places:
    """Stands in for what starts processes: notes who is started from where, and what is closed."""

    def __init__(self, monkeypatch, tmp_path, path="fast", limit=3, placement="separate", schedule="sync"):
        self.events, self.points, self.failures = [], [Path("step-2"), Path("step-2"), Path("step-1")], []
        self.stop = StopFlag()
        for name in ("with_spool", "at_newest_checkpoint", "start_processes", "restart_ranks", "_ready_run"):
            monkeypatch.setattr(assemble, name, getattr(self, name))
        config = SimpleNamespace(
            trainer=SimpleNamespace(restart_limit=limit, schedule=schedule, order="in_order"),
            rollout=SimpleNamespace(restart_limit=1),
            reshard=SimpleNamespace(path=path),
            cluster=SimpleNamespace(placement=placement),
        )
        order = SimpleNamespace(ranks=SimpleNamespace(config=config), reshard=config.reshard)
        self.noted = []
        notes = SimpleNamespace(restarted=lambda step, why: self.noted.append(step), ready=lambda: None)
        files = SimpleNamespace(run_dir=SimpleNamespace(path=tmp_path), notes=notes, point="the start")
        self.damaged = {}
        self.stack = ExitStack()
        data = SimpleNamespace(reward=None)
        self.starts = assemble._Starts(self.stack, order, data, files, self.damaged, None, self.stop)

    def with_spool(self, own, files):
        own.callback(self.events.append, "spool closed")
        return files

    def at_newest_checkpoint(self, files):
        return SimpleNamespace(point=self.points.pop(0))

    def _fail(self, kind):
        if self.failures and self.failures[0][0] == kind:
            raise self.failures.pop(0)[1]

    def _processes(self):
        own = SimpleNamespace(
            names=["engine 0", "engine 1"], workers=[None, None], engine_ranks=1,
            end=lambda engine: self.events.append(f"engine {engine} ended"), start_again=lambda engine: {},
            note_devices=lambda engine: None,
        )  # fmt: skip
        fleet = EngineFleet(own, 60.0)
        fleet.restart(1, 1)
        return SimpleNamespace(
            actor=SimpleNamespace(stop=lambda: self.events.append("ranks killed")),
            engines=SimpleNamespace(fleet=fleet),
        )

    def start_processes(self, kept, own, order, files, before=None):
        self.events.append(f"engines and ranks from {files.point}")
        kept.callback(self.events.append, "engines ended")
        own.callback(self.events.append, "ranks ended")
        self._fail("engines")
        started = self._processes()
        if before is not None:
            started.engines.fleet.continue_from(before.fleet)
        return started

    def restart_ranks(self, own, order, files, before):
        self._fail("engines")
        self.events.append(f"ranks from {files.point}")
        own.callback(self.events.append, "ranks ended")
        self._fail("ranks")
        return self._processes()

    def _ready_run(self, own, config, data, files, processes, views, stop, peak):
        own.callback(self.events.append, "generation closed")
        own.callback(self._fail, "closing")
        saver = Saver(SimpleNamespace(max_failed_saves=2), None, Path("checkpoints"), None, 0)
        return SimpleNamespace(
            peak="measured" if peak is None else f"{peak} before",
            saver=saver,
            sample_writer=SimpleNamespace(failed=0),
            spikes=None,
        )


def test_engines_stay_and_all_that_knew_the_ranks_is_closed_before_others_start(monkeypatch, tmp_path):
    places = Places(monkeypatch, tmp_path)
    run = places.starts.first()
    places.stop.defer_signals()  # the update that was under way
    again = run.start_again(lost("rank 1"), 3)
    assert places.events == [
        "engines and ranks from the start", "ranks killed", "generation closed", "ranks ended", "spool closed",
        "ranks from step-2",
    ]  # fmt: skip
    assert not places.stop.on_hold and places.noted == [3]
    assert (again.restarts, again.peak) == (1, "measured before")
    places.stack.close()
    assert places.events[-4:] == ["generation closed", "ranks ended", "spool closed", "engines ended"]


def test_what_was_lost_with_the_ranks_is_said_and_ends_no_run(monkeypatch, tmp_path, capsys):
    places = Places(monkeypatch, tmp_path)
    run = places.starts.first()
    places.failures = [("closing", Interrupted("the writer of samples died"))]
    run.start_again(lost("rank 1"), 3)
    assert places.events[-1] == "ranks from step-2" and places.noted == [3]
    assert "the writer of samples died" in capsys.readouterr().out


def test_failures_of_the_disk_are_counted_on_over_a_restart(monkeypatch, tmp_path):
    places = Places(monkeypatch, tmp_path)
    run = places.starts.first()
    run.sample_writer.failed = 3
    run.saver._count_failure(2, "no room")
    again = run.start_again(lost("rank 1"), 3)
    assert (again.saver.failed_saves, again.sample_writer.failed) == (1, 3)
    with pytest.raises(EnvironmentFault, match="2 saves in a row failed"):
        again.saver._count_failure(4, "no room")


def test_what_a_lost_validation_asked_is_not_answered_to_the_next_one():
    """Scorers stay, and held-out prompts have the same ids in every validation."""
    with RewardPool(RewardSpec("exact_match"), 1) as pool:
        processes = SimpleNamespace(
            engines=None, scorers=scorers(pool, CHARS), placement=SimpleNamespace(mend=lambda: None)
        )
        given = SimpleNamespace(reward=None), SimpleNamespace(poll=lambda: None), processes, None
        with ExitStack() as lost_run:
            before = assemble._responder(lost_run, *given).rewards
            before.submit(samples(["a"], 5), questions(["a"], 5), "engine 0")
        after = assemble._responder(ExitStack(), *given).rewards
        after.submit(samples(["b"], 5), questions(["a"], 5), "engine 0")
        assert [(each.sample_id, each.score) for each in after.drain()] == [(5, 0.0)]


def test_restarts_of_ranks_that_an_earlier_start_of_the_run_wrote_down_are_spent(monkeypatch, tmp_path):
    for step in (4, 6):
        with attempt(tmp_path, 2, {}) as notes:
            notes.restarted(step, "rank 1 died")
    places = Places(monkeypatch, tmp_path, limit=3)
    run = places.starts.first().start_again(lost("rank 1"), 7)
    assert run.restarts == 3
    with pytest.raises(Interrupted, match="3 times"):
        run.start_again(lost("rank 1"), 8)


def test_without_restarts_a_loss_ends_the_run(monkeypatch, tmp_path):
    places = Places(monkeypatch, tmp_path, limit=0)
    error = lost("rank 1")
    with pytest.raises(Interrupted) as raised:
        places.starts.first().start_again(error, 3)
    assert raised.value is error and places.noted == []


def states_of(places) -> Fleet:
    return places.starts._processes.engines.fleet.states


def test_engines_that_do_not_answer_are_started_again_too_and_each_is_charged_for_it(monkeypatch, tmp_path):
    places = Places(monkeypatch, tmp_path)
    run = places.starts.first()
    places.failures = [("engines", lost("engine 0"))]
    again = run.start_again(lost("rank 1"), 3)
    assert places.events[-3:] == ["spool closed", "engines ended", "engines and ranks from step-2"]
    places.failures = [("engines", error := lost("engine 0"))]
    with pytest.raises(Interrupted) as raised:
        again.start_again(lost("rank 1"), 4)
    assert raised.value is error, "it was started again once, and has no restart more"
    assert places.events.count("engines and ranks from step-2") == 1


def test_ranks_that_are_lost_as_everything_is_started_anew_cost_no_engine_a_restart(monkeypatch, tmp_path):
    places = Places(monkeypatch, tmp_path)
    run = places.starts.first()
    places.failures = [("engines", lost("engine 0")), ("engines", lost("rank 0"))]
    assert run.start_again(lost("rank 1"), 3).restarts == 2
    assert places.events.count("engines and ranks from step-2") == 1, "and once from the checkpoint before"
    assert places.events[-1] == "engines and ranks from step-1"
    assert states_of(places).epoch("engine 1") == 0
    states_of(places).exit("engine 1", 0)
    assert states_of(places).start("engine 1") == 1, "it is charged for nothing"


def test_an_engine_in_the_place_of_one_that_was_started_again_has_no_restart_more(monkeypatch, tmp_path):
    places = Places(monkeypatch, tmp_path, path="slow")
    run = places.starts.first()
    states_of(places).exit("engine 0", 0)
    assert states_of(places).start("engine 0") == 1
    run.start_again(lost("rank 1"), 3)
    states_of(places).exit("engine 0", 0)
    assert states_of(places).start("engine 0") is None


def test_an_engine_that_was_given_up_stays_so_where_all_are_started_anew(monkeypatch, tmp_path):
    places = Places(monkeypatch, tmp_path, path="slow")
    run = places.starts.first()
    for epoch in (0, 1):
        states_of(places).exit("engine 0", epoch)
        states_of(places).start("engine 0")
    run.start_again(lost("rank 1"), 3)
    assert places.events[-1] == "engines and ranks from step-2"
    assert states_of(places).those(RETIRED) == ["engine 0"] and states_of(places).serving() == {"engine 1": 0}


def test_where_weights_go_by_the_slow_path_engines_are_started_again(monkeypatch, tmp_path):
    places = Places(monkeypatch, tmp_path, path="slow")
    places.starts.first().start_again(lost("rank 1"), 3)
    assert places.events[-2:] == ["engines ended", "engines and ranks from step-2"]


def test_ranks_that_are_lost_as_they_load_cost_another_restart(monkeypatch, tmp_path):
    places = Places(monkeypatch, tmp_path, limit=2)
    run = places.starts.first()
    places.failures = [("ranks", lost("rank 0"))]
    assert run.start_again(lost("rank 1"), 3).restarts == 2
    with pytest.raises(Interrupted, match="2 times"):
        run.start_again(lost("rank 1"), 4)


def test_a_checkpoint_that_they_find_damaged_is_passed_over_once(monkeypatch, tmp_path):
    places = Places(monkeypatch, tmp_path)
    run = places.starts.first()
    damage = DamagedCheckpoint("other bytes", "step-2")
    places.points = [Path("step-2"), Path("step-1")]
    places.failures = [("ranks", damage)]
    run.start_again(lost("rank 1"), 3)
    assert places.events[-1] == "ranks from step-1" and list(places.damaged) == [Path("step-2")]
    places.points = [Path("step-2")]
    places.failures = [("ranks", damage)]
    with pytest.raises(DamagedCheckpoint):
        run.start_again(lost("rank 1"), 4)


@pytest.mark.parametrize(("start_s", "waits_s"), [(1800.0, 300.0), (60.0, 60.0)])
def test_a_node_whose_ranks_are_lost_is_waited_for_five_minutes(monkeypatch, tmp_path, start_s, waits_s):
    """Or for as long as a start may take, where that is less."""
    given = []

    def nowhere(cluster, layout, within_s):
        given.append(within_s)
        raise EnvironmentFault("the cluster did not free 2 bundles")

    monkeypatch.setattr(assemble_processes, "actor_seats", nowhere)
    config = load_config(TINY, None, [f"cluster.start_timeout_s={start_s}"]).config
    files = SimpleNamespace(state=SimpleNamespace(step=3))
    before = SimpleNamespace(engines=SimpleNamespace(give_up=lambda step, sleeps: None), rank_seats=None)
    with ExitStack() as own, pytest.raises(EnvironmentFault, match="did not free"):
        assemble_processes.restart_ranks(own, SimpleNamespace(deployment=Deployment.of(config)), files, before)
    assert given == [waits_s]


def test_ranks_that_find_no_place_end_the_run_as_resumable_with_both_causes(monkeypatch, tmp_path):
    places = Places(monkeypatch, tmp_path)
    run = places.starts.first()
    places.failures = [("ranks", EnvironmentFault("the cluster did not free 2 bundles"))]
    with pytest.raises(
        Interrupted, match="rank 1 died; and ranks could not be started again: the cluster did not"
    ) as at:
        run.start_again(lost("rank 1"), 3)
    assert at.value.processes == ("rank 1",)


def test_a_signal_that_came_in_the_update_ends_the_run_instead(monkeypatch, tmp_path):
    places = Places(monkeypatch, tmp_path)
    run = places.starts.first()
    places.stop.defer_signals()
    places.stop.signal = signal.SIGTERM
    with pytest.raises(Interrupted, match="SIGTERM"):
        run.start_again(lost("rank 1"), 3)
    assert "ranks from step-2" not in places.events


@pytest.mark.parametrize("shares", [True, False], ids=["devices of both", "devices of their own"])
def test_no_engine_is_starting_while_ranks_come_onto_its_devices(monkeypatch, shares):
    """vLLM would take what they bring for its own; on devices of their own ranks wait for nobody."""
    asked = []
    fleet = SimpleNamespace(hold_starts=lambda poll: asked.append("nobody starts"))
    engines = SimpleNamespace(
        fleet=fleet, nodes={}, give_up=lambda version, sleeps: asked.append(f"given up, asleep: {sleeps}")
    )

    def ranks(order, seats, run_dir, poll):
        return SimpleNamespace(
            start=lambda checkpoint: asked.append("ranks"), stop=None, read_routes_at=lambda nodes: None
        )

    monkeypatch.setattr(assemble_processes, "ActorGroup", ranks)
    monkeypatch.setattr(assemble_processes, "actor_seats", lambda *given: "own")
    monkeypatch.setattr(assemble_processes, "_placement", lambda *given, **named: None)
    deployment = SimpleNamespace(cluster=SimpleNamespace(start_timeout_s=1.0), layout=None)
    order = SimpleNamespace(deployment=deployment, ranks=None)
    files = SimpleNamespace(
        state=SimpleNamespace(step=2), run_dir=SimpleNamespace(path=None), poll=None,
        beginning=SimpleNamespace(checkpoint=None),
    )  # fmt: skip
    before = assemble_processes.Processes(engines, None, None, None, "shared" if shares else None)
    assemble_processes.restart_ranks(ExitStack(), order, files, before)
    assert asked == [*(["nobody starts"] if shares else []), f"given up, asleep: {shares}", "ranks"]


def test_engines_that_stayed_are_brought_to_the_start_too():
    brought = []
    sync = SimpleNamespace(bring_to=brought.append)
    actor = SimpleNamespace(take_checkpoint=None, write_checkpoint=None)
    Separate(actor, sync).begin(0)
    assert brought == []
    Separate(actor, sync, are_fresh=False).begin(0)
    assert brought == [0]
