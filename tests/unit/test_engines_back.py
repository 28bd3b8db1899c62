"""Engines and ranks that are lost in the middle of a run and come back: in order the bits are those of the undisturbed
run, ready first nothing is lost or trained on twice. The prompt that kills engines is found and set aside.
"""

import json
import random
import threading
from collections import Counter
from itertools import count
from types import SimpleNamespace

import pytest
from generations import Files, origin_in
from late_writes import KINDS, Case
from seldom import seldom
from test_generation import AHEAD, BATCH, Engines, N, World, assert_same, in_memory  # noqa: F401
from test_ready_first import MODES, STEPS, Flight, LiveEngines, check_each_once

from mrl.cluster import request_streams as engine_progress
from mrl.cluster.engine_fleet import EngineFleet
from mrl.cluster.process_logs import concerning
from mrl.cluster.request_streams import EngineProgress, FleetChange
from mrl.data.batch import Prompt
from mrl.data.order import PromptStream
from mrl.engine.requests import EngineReading
from mrl.errors import DataError, Interrupted, LostProcess, LostWeights
from mrl.generate.kept_groups import read_kept
from mrl.generate.lost_engines import LostEngines, Unfinished, whole_losses
from mrl.generate.numbered_prompts import NumberedPrompts, PromptCursor
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState
from mrl.record.metrics import PhaseTimer
from mrl.schedule.fleet import STARTING
from mrl.schedule.suspects import Suspects, suspects

IN_ORDER = {"sync": [], "one step off": AHEAD["one step off"], "two, partial": AHEAD["two, partial"]}


class Streams:
    """Requests of one generation: it knows the engines that serve as it begins, and those that `follow` tells of."""

    def __init__(self, engines):
        self._engines = engines
        engines.view = engines.fleet.serving()

    @property
    def names(self):
        return list(self._engines.view)

    def __getattr__(self, name):
        return getattr(self._engines, name)


class Restarting:
    """Engines that die now and then, with what they have, and start again; the fleet is the product's."""

    chance = 0.03  # of a death in a take

    def __init__(self, seed):
        super().__init__(seed)
        processes = SimpleNamespace(
            names=list(self.names), workers=[None] * len(self.names), engine_ranks=1, end=self.end,
            start_again=lambda engine: {}, note_devices=lambda engine: None,
        )  # fmt: skip
        self.fleet = EngineFleet(processes, 60.0)
        self.fleet.restart(1000, 1)
        self.deaths, self.dies = random.Random(seed), None

    def streams(self):
        return Streams(self)

    def end(self, engine):
        self.drop(self.names[engine])

    def drop(self, name):
        self.under_way = [part for part in self.under_way if part.engine != name]

    def take(self, timeout_s):
        pauses = getattr(self, "paused", False)  # which tests look at
        serving = [] if pauses else sorted(self.fleet.serving())
        if serving and (self.dies in serving or self.deaths.random() < self.chance):
            name = self.dies or self.deaths.choice(serving)
            self.dies = None
            self.lose(name)
            return []
        return super().take(timeout_s)

    def give_up(self):
        for name in self.names:
            self.drop(name)

    def lose(self, name):
        assert self.fleet.loses(concerning(LostProcess(f"{name} died"), name), self.fleet.epochs())

    def follow(self):
        before, self.view = self.view, self.fleet.serving()
        epochs = {name: one.epoch for name, one in self.view.items()}
        gone = [name for name, one in before.items() if epochs.get(name) != one.epoch]
        for name in gone:
            self.drop(name)
        return FleetChange(gone, [name for name in epochs if name not in before or name in gone])

    def send(self, engine, requests, sampling, kept=()):
        assert self.view[engine].epoch == self.fleet.epochs()[engine] or engine not in self.fleet.serving()
        super().send(engine, requests, sampling, kept)

    def started(self):
        for engine in self.fleet.states.those(STARTING):
            if self.deaths.random() < 0.3:
                self.fleet.states.started(engine, self.fleet.epochs()[engine])

    def mend(self):
        """Ranks hold the weights that engines serve."""
        self.started()
        self.bring(self.fleet.stale(), self.fleet.version)

    def bring(self, engines, version):
        self.fleet.proven(engines, version)
        self.fleet.committed(engines, version)

    def sync(self, version):
        """Of all that are there."""
        self.started()
        self.bring(self.fleet.reached(), version)


class RestartingEngines(Restarting, Engines):
    """Engines that answer in whole."""


class RestartingLive(Restarting, LiveEngines):
    """Engines that make tokens one by one."""

    def drop(self, name):
        with self._step:
            self.live = {number: one for number, one in self.live.items() if one.engine != name}


def run(world, steps, losses=lambda step: None, found=None):
    """As World.steps, with syncs of those engines that are there. `found`: gets what each step took."""
    found = [] if found is None else found
    try:
        for step in range(steps):
            losses(step)
            rollouts = world.generation.next_batch(PhaseTimer())
            world.generation.before_update()
            world.generation.drain(PhaseTimer(), saves=False)
            world.engines.version += 1
            world.engines.sync(world.engines.version)
            world.state = world.generation.resume(world.state.advanced(rollouts.cursor))
            found.append(rollouts)
    finally:
        world.generation.close()
    return found


class RestartingOne(RestartingEngines):
    """The only engine of a run."""

    names = ("engine 0",)


def run_back_and_on(seed, mode, engines, steps, folder):
    """As `run`, from the step before where nobody holds the weights any more that responses are to be finished by."""
    found, fleets, state, spool = [], [], None, None
    while len(found) < steps:
        world = World(seed + 10 * len(fleets), IN_ORDER[mode], state, spool=spool, engines=engines)
        fleets.append(world.engines.fleet.metrics)
        try:
            run(world, steps - len(found), found=found)
        except LostWeights as error:
            assert "no engine is left" in str(error) and mode != "sync"
            if state := world.state if world.state.step else None:
                at = folder / str(len(fleets))
                at.mkdir(parents=True)
                said = json.loads(json.dumps(state.ahead.write(at)))
                spool = Spool(at / "spool", Files())
                state = TrainState(state.step, state.cursor, read_kept(at, said, spool, origin_in(said)))
    counted = sum((Counter(metrics()) for metrics in fleets), Counter())
    return found, counted | Counter({"went back": len(fleets) - 1})


@pytest.mark.parametrize("engines", seldom([RestartingEngines, RestartingOne], RestartingEngines))
@pytest.mark.parametrize("mode", IN_ORDER)
def test_in_order_the_bits_are_those_of_the_undisturbed_run(mode, engines, tmp_path):
    expected = World(0, IN_ORDER[mode]).steps(5)
    seen = Counter()
    wanted = ["lost", "restarted", "requests_again", "same"]
    if mode != "sync" and engines is RestartingOne:
        wanted.append("went back")
    for seed in range(60):  # what is lost when is a matter of threads, too
        if seed >= 4 and all(seen[name] for name in wanted):
            break
        found, counted = run_back_and_on(seed, mode, engines, 5, tmp_path / str(seed))
        seen += Counter({name: counted[f"fleet/{name}"] for name in ("lost", "restarted", "requests_again")})
        seen["went back"] += counted["went back"]
        if not counted["fleet/quarantined"]:
            assert_same(found, expected)
            seen["same"] += 1
    assert all(seen[name] for name in wanted), seen


def test_where_a_loss_cannot_be_noted_the_run_goes_on_all_the_same(tmp_path, capsys):
    """The file is on a full disk. What the process remembers of the loss, a later start will not know."""

    def disturb(step):
        if step == 1:
            (tmp_path / "lost").symlink_to("/dev/full")
            world.engines.dies = world.engines.names[0]

    world = World(0, engines=RestartingEngines, lost=LostEngines(tmp_path / "lost"))
    world.engines.chance = 0.0
    found = run(world, 3, disturb)
    assert_same(found, World(0).steps(3))
    assert world.engines.fleet.metrics()["fleet/lost"] == 1
    assert "what they were at is not noted: " in (said := capsys.readouterr().out) and "No space left" in said


class LostRank(Exception):
    """Training ends here, and goes on from the newest checkpoint."""


class GoesBack:
    """A run whose ranks are lost now and then, beside engines that stay, and are lost now and then, too."""

    saves_every = 2

    def __init__(self, seed, overrides, engines, folder):
        self.rng = random.Random(seed)
        self.seed = seed
        self.overrides = overrides
        self.folder = folder
        self.engines = engines(seed)
        self.starts = 0
        self.checkpoint = None  # the state there, its folder, and what the manifest says of groups
        self.found = []  # what each step took
        self.lost_at = Counter()

    def run(self, steps):
        """The state after the last step."""
        while len(self.found) < steps:
            self.starts += 1
            world = self.restored()
            self.engines.sync(world.state.step)
            try:
                while len(self.found) < steps:
                    self.step(world)
            except (LostRank, LostWeights):
                self.go_back()
            finally:
                world.generation.close()
        return world.state

    def restored(self):
        spool = Spool(self.folder / f"spool-{self.starts}", Files())
        state = None
        if self.checkpoint is not None:
            before, at, said = self.checkpoint
            state = TrainState(before.step, before.cursor, read_kept(at, said, spool, origin_in(said)))
        seed = self.seed + 100 * self.starts
        return World(seed, self.overrides, state, spool=spool, engines=lambda seed: self.engines, prompts=1000)

    def step(self, world):
        rollouts = world.generation.next_batch(PhaseTimer())
        self.may_lose_rank("as responses are there")
        world.generation.before_update()
        saves = (world.state.step + 1) % self.saves_every == 0
        world.generation.drain(PhaseTimer(), saves)
        self.may_lose_rank("before the sync")
        self.engines.version += 1
        self.engines.sync(self.engines.version)
        self.engines.paused = False
        world.state = world.generation.resume(world.state.advanced(rollouts.cursor))
        self.found.append(rollouts)
        if saves:
            at = self.folder / f"step-{world.state.step}-{self.starts}"
            at.mkdir(parents=True)
            self.checkpoint = (world.state, at, json.loads(json.dumps(world.state.ahead.write(at))))
            self.may_lose_rank("behind a save", 0.4)

    def may_lose_rank(self, where, chance=0.15):
        if self.rng.random() < chance:
            self.lost_at[where] += 1
            raise LostRank(where)

    def go_back(self):
        """Engines give up what they are at, and serve no version."""
        step = 0 if self.checkpoint is None else self.checkpoint[0].step
        del self.found[step:]
        self.engines.give_up()
        self.engines.paused = False
        self.engines.fleet.rewind(step)


@pytest.mark.parametrize("engines", seldom([RestartingEngines, RestartingOne], RestartingOne))
@pytest.mark.parametrize("mode", IN_ORDER)
def test_in_order_lost_ranks_change_no_bit_either(mode, engines, tmp_path):
    expected = World(0, IN_ORDER[mode], prompts=1000).steps(6)
    lost_at = Counter()
    same = 0
    for seed in range(3):
        going = GoesBack(seed, IN_ORDER[mode], engines, tmp_path / str(seed))
        going.run(6)
        lost_at += going.lost_at
        if not going.engines.fleet.metrics()["fleet/quarantined"]:
            assert_same(going.found, expected)
            same += 1
    assert lost_at and same, lost_at


def test_ready_first_lost_ranks_give_nothing_up_that_the_checkpoint_has_and_train_on_nothing_twice(tmp_path):
    lost_at = Counter()
    for seed in range(3):
        going = GoesBack(seed, MODES["requeue"], RestartingLive, tmp_path / str(seed))
        going.engines.chance = 0.004
        state = going.run(STEPS)
        lost_at += going.lost_at
        check_each_once(going, state)
    assert lost_at


def test_ready_first_goes_on_behind_the_tokens_that_came_back_and_trains_on_each_once():
    lost = 0
    for seed in range(3):
        world = Flight(seed, "requeue", engines=RestartingLive)
        world.engines.chance = 0.004
        step = world.generation.drain

        def drain(timer, saves, world=world, drain=step):
            drain(timer, saves)
            world.engines.sync(world.engines.version + 1)

        world.generation.drain = drain
        world.run(STEPS)
        prompts = [prompt for _, prompt in world.trained]
        assert len(set(prompts)) == len(prompts) == STEPS * BATCH
        ledger = world.state.ahead.ledger
        dropped = sum(tally.groups for tally in ledger.counts.dropped.values())
        assert ledger.counts.kept.groups + dropped + len(ledger.groups) == ledger.next_number
        lost += world.engines.fleet.metrics()["fleet/lost"]
    assert lost > 0


class StandsStill(RestartingLive):
    """One answers that it gives back all that it has, and then stands still. Who watches them is the product's."""

    chance = 0.0
    progress = None

    def __init__(self, seed):
        super().__init__(seed)
        self.stands = ""
        self.progress = EngineProgress(str, 0.4)

    @property
    def waiting_for(self):
        holding = {one.engine for one in list(self.live.values())}
        return sorted(holding | ({self.names[0]} if self.under_way else set()))

    def pause_for_update(self, give_back):
        with self._step:
            self.paused = True
            live = list(self.live.values())
            self.stands = live[-1].engine
            for one in live:
                if one.engine != self.stands:
                    self.answer_live(one)
        return True

    def take(self, timeout_s):
        try:
            self.progress.check(self.waiting_for)
        except LostProcess as error:
            assert self.fleet.loses(error, self.fleet.epochs())
            return []
        return super().take(timeout_s)


def test_an_engine_that_stands_still_while_it_gives_back_is_noticed(monkeypatch):
    """No signal would end the wait: an update is only over when engines have its weights."""
    world = Flight(0, "patient", engines=StandsStill)
    tokens = count()
    answers = SimpleNamespace(
        wait=lambda refs, timeout: ([engine for engine in refs if engine != world.engines.stands], []),
        get=lambda engine: EngineReading(next(tokens), 0.0, 0.0, 0),
    )
    monkeypatch.setattr(engine_progress, "ray", answers)
    try:
        world.generation.next_batch(PhaseTimer())
        drained = threading.Thread(target=world.generation.drain, args=(PhaseTimer(), True), daemon=True)
        drained.start()
        drained.join(5.0)
        assert not drained.is_alive()
        assert world.engines.stands not in world.engines.fleet.serving()
        assert not world.engines.live
    finally:
        world.generation.close()


def test_the_only_engine_is_waited_for_and_what_it_was_at_is_noted(tmp_path):
    class One(RestartingEngines):
        names = ("engine 0",)
        chance = 0.0

    world = World(0, [], engines=One)
    lost = world.generation._rules.lost

    def losses(step):
        if step in (1, 2):
            world.engines.dies = "engine 0"

    run(world, 4, losses)
    found, _ = whole_losses(lost._path)
    assert [loss.step for loss in found] == [1, 2] and all(loss.groups for loss in found)
    assert world.engines.fleet.metrics() | {"fleet/seconds_lost": 0} == {
        "fleet/lost": 2, "fleet/restarted": 2, "fleet/late_answers": 0, "fleet/quarantined": 0,
        "fleet/engines_ready": 1, "fleet/requests_again": sum(len(loss.groups) for loss in found) * N,
        "fleet/seconds_lost": 0,
    }  # fmt: skip


def test_past_the_limit_the_run_ends_with_the_reason_and_the_number():
    class Two(RestartingEngines):
        chance = 0.0

        def started(self):
            """At once: it has to be lost twice in the run's few steps."""
            for engine in self.fleet.states.those(STARTING):
                self.fleet.states.started(engine, self.fleet.epochs()[engine])

    world = World(0, [], engines=Two)
    world.engines.fleet.restart(1, 2)

    def losses(step):
        world.engines.dies = "engine 1"

    with pytest.raises(Interrupted, match=r"1 of 2 engines are left, fewer than rollout.min_engines 2: .*more than 1"):
        run(world, 5, losses)


def test_in_order_the_last_engine_is_waited_for_before_an_update_and_nobody_can_be_brought_back_after_it():
    class One(RestartingEngines):
        names = ("engine 0",)
        chance = 0.0

        def take(self, timeout_s):
            """The first step's responses, and none of those that the second needs."""
            first = [part for part in self.under_way if part.samples.rows.group_id[0] < BATCH]
            self.under_way = [part for part in self.under_way if part not in first]
            return first

    world = World(0, AHEAD["one step off"], engines=One)
    try:
        world.generation.next_batch(PhaseTimer())
        world.engines.lose("engine 0")
        world.generation.before_update()
        assert world.engines.fleet.serving()["engine 0"].epoch == 1, "brought to the weights that ranks still hold"
        world.engines.lose("engine 0")
        with pytest.raises(LostWeights, match=r"no engine is left, and responses are to be made by .* of step 0"):
            world.generation.drain(PhaseTimer(), saves=False)
    finally:
        world.generation.close()


# ---------------------------------------------------------------- lost engines are written down


KILLER = 4
STREAM = PromptStream([Prompt(p, (1, p + 1), "test", "x") for p in range(1000)], BATCH, seed=0)
FATAL = NumberedPrompts(STREAM, PromptCursor(0, TrainState().cursor))[4][0].prompt_id  # of the second step
MODES["one step off"] = AHEAD["one step off"]


def test_the_example():
    losses = [{2, 3, 4, 5}, {3, 4, 5, 9}, {4, 11, 12}]
    found = [suspects(losses[:count]) for count in range(4)]
    assert [(set(each.aside), set(each.alone)) for each in found] == [
        (set(), set()),
        (set(), set()),
        (set(), {3, 4, 5}),
        ({4}, {3, 5}),
    ]


@pytest.mark.parametrize("seed", range(10))
def test_a_killer_is_found_among_random_neighbours_and_nobody_else_is(seed):
    rng, losses = random.Random(seed), []
    while not (found := suspects(losses)).aside:
        neighbours = rng.sample(range(1000, 1000 + rng.choice([8, 60])), 8)
        losses.append({KILLER, *(n for n in neighbours if n not in found.alone or KILLER not in found.alone)})
        assert len(losses) < 6
    assert found.aside == {KILLER}


def test_losses_that_have_other_causes_set_nobody_aside():
    """At other places of the data, or again at the same one."""
    elsewhere = [range(start, start + 64) for start in (0, 500, 900)]
    assert suspects(elsewhere) == Suspects()
    assert suspects([*elsewhere, elsewhere[-1]]) == Suspects(frozenset(), frozenset(elsewhere[-1]))


def test_a_prompt_with_several_responses_under_a_loss_was_under_one_loss():
    assert suspects([[4, 4, 5], [4, 5, 9]]) == Suspects(frozenset(), frozenset({4, 5}))


def test_the_file_outlives_the_process_and_a_torn_line(tmp_path):
    lost = LostEngines(tmp_path / "lost")
    assert lost.suspects() == Suspects()
    told = [lost.note(step, ["engine 1"], "it died", [Unfinished(9, KILLER, 30)]) for step in (3, 3)]
    assert told[0] == "1 unfinished groups go on when the run is resumed (prompts 4)"
    with (tmp_path / "lost").open("a") as file:
        file.write('{"step": 4, "gro')
    assert LostEngines(tmp_path / "lost").suspects() == Suspects(frozenset({KILLER}), frozenset())


GROUP = {"number": 1, "prompt_id": KILLER, "tokens": 3}


@pytest.mark.parametrize(
    "line",
    [
        {}, [], {"step": 1, "engines": ["engine 0"], "why": "it died", "groups": 3},
        *({"step": 1, "engines": ["engine 0"], "why": "it died", "groups": [{**GROUP, **other}, GROUP]}
            for other in ({"prompt_id": []}, {"prompt_id": None}, {"tokens": {}}, {"number": "x"})),
    ],
)  # fmt: skip
def test_a_line_that_is_no_loss_is_refused_by_the_files_name(tmp_path, line):
    path = tmp_path / "lost"
    path.write_text(f"{json.dumps(line)}\n" * 2)
    with pytest.raises(DataError, match=rf"^{path} is damaged"):
        LostEngines(path).suspects()
    assert whole_losses(path) == ([], 2), "a report goes on without them"


def test_a_torn_line_takes_no_loss_with_it_that_comes_after(tmp_path, capsys):
    """A kill in the middle of a write; then two more losses."""
    path = tmp_path / "lost"
    LostEngines(path).note(1, ["engine 0"], "it died", [Unfinished(1, KILLER, 3)])
    with path.open("a") as file:
        file.write('{"step": 2, "engines": ["engine 0"], "wh')
    for step in (3, 3):
        LostEngines(path).note(step, ["engine 0"], "it died", [Unfinished(9, KILLER, 0)])
    assert LostEngines(path).suspects() == Suspects(frozenset({KILLER}), frozenset())
    assert "1 torn lines" in capsys.readouterr().out
    losses, unread = whole_losses(path)
    assert ([loss.step for loss in losses], unread) == ([1, 3, 3], 1)


class Killed(LiveEngines):
    """An engine dies when it computes a certain prompt, of which no token ever comes."""

    def take(self, timeout_s):
        engines = {one.engine for one in self.live.values() if one.request.prompt_id == FATAL}
        if engines and self._rng.random() < 0.2:
            raise concerning(Interrupted("generation: it died"), *engines)
        return super().take(timeout_s)

    def make_tokens(self):
        fatal = {number: one for number, one in self.live.items() if one.request.prompt_id == FATAL}
        self.live = {number: one for number, one in self.live.items() if number not in fatal}
        super().make_tokens()
        self.live |= fatal


@pytest.mark.parametrize("mode", ["requeue", "one step off"])
def test_a_run_that_is_resumed_again_and_again_trains_on_all_but_the_prompt_that_kills(mode, tmp_path):
    state, spool, trained, losses, starts = TrainState(), Spool(tmp_path / "spool", Files()), [], 0, 0
    while state.step < STEPS:
        starts += 1
        world = Flight(losses, mode, state, engines=Killed, spool=spool, lost=LostEngines(tmp_path / "lost"))
        try:
            world.run(STEPS - state.step, saves=True)
        except Interrupted as error:
            losses += 1
            assert "unfinished groups go on" in str(error) and losses < 6
        trained += world.trained
        folder = tmp_path / str(starts)
        folder.mkdir()
        if world.state.ahead is not None:
            said = json.loads(json.dumps(world.state.ahead.write(folder)))
            state, spool = world.state, Spool(tmp_path / f"spool-{starts}", Files())
            state = TrainState(state.step, state.cursor, read_kept(folder, said, spool, origin_in(said)))
    prompts = [prompt for step, prompt in trained]
    assert losses >= 2 and FATAL not in prompts
    assert len(set(prompts)) == len(prompts) == STEPS * BATCH
    counts = state.ahead.ledger.counts
    assert {cause: tally.groups for cause, tally in counts.dropped.items() if cause != "stale"} == {"quarantined": 1}
    lines = [json.loads(line) for line in (tmp_path / "lost").read_text().splitlines()]
    assert len(lines) == losses and all(FATAL in [group["prompt_id"] for group in line["groups"]] for line in lines)


def test_an_engine_that_dies_in_a_pause_is_noted_once(tmp_path):
    world = Flight(0, "patient", lost=LostEngines(tmp_path / "lost"))

    def dies(give_back):
        world.engines.paused = True
        raise concerning(Interrupted("pause_for_update: engine 1 died"), "engine 1")

    world.engines.pause_for_update = dies
    rollouts = world.generation.next_batch(PhaseTimer())
    with pytest.raises(Interrupted, match="engine 1 died"):
        world.generation.drain(PhaseTimer(), saves=False)
    world.generation.close()
    assert rollouts and len((tmp_path / "lost").read_text().splitlines()) == 1


# ---------------------------------------------------------------- late and cut writes, and kills (a thousand are long)


CASES = 25  # of each part


@pytest.mark.parametrize("part", seldom(range(40), 0))
def test_nothing_is_lost_or_trained_on_twice_however_late_its_files_are(part, tmp_path):
    seen = Counter()
    for number in range(CASES * part, CASES * part + CASES):
        (folder := tmp_path / str(number)).mkdir()
        case = Case(number, folder).run()
        seen.update(case.seen + Counter([case.kind]))
    assert all(seen[kind] for kind in KINDS)
    assert all(seen[what] > 2 for what in ("kills", "resumes", "cuts", "failed saves", "late saves", "replayed")), seen
