"""What a checkpoint has of groups on their way is what there was at its step, however late it is written."""

import json
import threading
import time
import zipfile
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import test_generation
from generations import Files, origin_in
from replicas import stored
from seldom import seldom
from test_generation import AHEAD, BATCH, N, World, assert_columns, in_memory  # noqa: F401
from test_ready_first import STEPS, Flight, LiveEngines

from mrl.checkpoint.group_files import GroupRecord, group_file, read_group, write_group
from mrl.checkpoint.manifest import file_facts
from mrl.cluster.process_logs import concerning
from mrl.cluster.request_streams import EngineProgress
from mrl.data.order import DataCursor
from mrl.data.samples import LEFT_OUT, STOP_REASONS, Sample, packed
from mrl.errors import DamagedCheckpoint, DataError, EnvironmentFault, Interrupted, LostLock
from mrl.generate.group_writer import GroupParts
from mrl.generate.kept_groups import read_kept
from mrl.generate.lost_engines import LostEngines
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState
from mrl.record.metrics import PhaseTimer
from mrl.reward.items import NOT_FINITE, OK, RAISED, RewardResult
from mrl.schedule.groups import State

STARTS = {
    "in order, partial": lambda seed, *more, **own: World(seed, AHEAD["two, partial"], *more, **own),
    "one step off": lambda seed, *more, **own: World(seed, AHEAD["one step off"], *more, **own),
    "filtered": lambda seed, *more, **own: World(seed, AHEAD["filtered"], *more, **own),
    "ready first": lambda seed, *more, **own: Flight(seed, "requeue", *more, **own),
    "patient": lambda seed, *more, **own: Flight(seed, "patient", *more, **own),
    "drained": lambda seed, *more, **own: Flight(seed, "drained", *more, **own),
}
FROM_JSON = staticmethod(lambda said: json.loads(json.dumps(said)))


def step_until(world, holds):
    """Until a snapshot's ledger is such; generation has some time to run ahead."""
    world.step()
    while not holds(world.state.ahead.ledger):
        assert world.state.step < 4, "it never is"
        time.sleep(0.1)
        world.step()


def read_back(folder, said, tmp_path, origin=None):
    return read_kept(
        folder, FROM_JSON(said), Spool(tmp_path / f"spool-of-{folder.name}", Files()), origin or origin_in(said)
    )


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("seed", seldom(range(3), 0))
def test_a_checkpoint_that_is_written_steps_later_has_what_its_step_had(name, seed, tmp_path):
    """Groups are finished, trained on and begun anew before the ranks' files are written."""
    world = STARTS[name](seed)
    step_until(world, lambda ledger: any(group.tokens for group in ledger.groups))
    at = world.state.step
    then = world.state.ahead
    then.hold()
    tokens = {
        (number, index): part.read() for number, parts in then.groups.items() for index, part in parts.responses.items()
    }
    unfinished = [g.number for g in then.ledger.groups if g.tokens and g.state is not State.FINISHED]
    for _ in range(2):
        world.step()
    folder = tmp_path / f"step-{at}"
    folder.mkdir()
    said = then.write(folder)
    world.generation.close()
    kept = read_back(folder, said, tmp_path)
    assert {(n, i) for n, parts in kept.groups.items() for i in parts.responses} == tokens.keys() and tokens
    for number, parts in kept.groups.items():
        assert parts.results == then.groups[number].results
        for index, part in parts.responses.items():
            same_ids = {"group_id": np.array([number]), "sample_id": np.array([index])}
            assert_columns(part.read(), replace(tokens[number, index], **same_ids))
    assert unfinished or name != "in order, partial"
    state = TrainState(at, world.state.cursor, kept)
    again = STARTS[name](seed + 10, state, spool=kept.spool)
    again.step()
    again.generation.close()


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool", Files())


def attempt(number: int, times: int, token: int, score: float) -> GroupParts:
    """A group of two responses of three tokens each."""
    rows = [stored([Sample(7, number, k, k, (1,), (token,) * 3, (0.0,) * 3, "length", times)]) for k in range(2)]
    results = {k: RewardResult(number * 2 + k, score, {}, OK) for k in range(2)}
    return GroupParts(number, times, dict(enumerate(rows)), results)


def test_a_group_that_is_made_anew_before_its_checkpoint_is_written_keeps_tokens_and_rewards_together(spool, tmp_path):
    """Of equal lengths, so that nothing but the record tells the attempts apart."""
    old, new = attempt(4, 0, 11, 0.25), attempt(4, 1, 22, 0.75)
    spool.put(old)
    pinned = spool.pinned([4])
    spool.forget([4])
    spool.put(new)
    (folder := tmp_path / "step-2").mkdir()
    facts = spool.write(folder, pinned, {4: old})
    assert facts.keys() == {group_file(4, 0)}
    record = read_group(folder / group_file(4, 0))
    assert record.attempt == 0 and set(record.samples.token_ids[1:4]) == {11}
    assert {result.score for result in record.results.values()} == {0.25}
    spool.release(pinned.values())
    assert [file.name for file in spool.folder.iterdir()] == [group_file(4, 1)]


def test_a_pinned_file_outlives_its_group_and_goes_with_the_last_who_holds_it(spool, tmp_path):
    files = lambda: sorted(file.name for file in spool.folder.iterdir())  # noqa: E731
    spool.put(attempt(4, 0, 1, 0.0))
    first, second = spool.pinned([4, 5]), spool.pinned([4])
    spool.forget([4])
    spool.release(first.values())
    assert files() == [group_file(4, 0)]
    spool.release(second.values())
    assert files() == [] and spool.pinned([4]) == {}


def test_steps_that_are_not_saved_leave_nothing_in_the_spool_but_what_the_start_is_gone_back_to_for():
    world = World(3, AHEAD["one step off"])
    world.steps(5)
    world.generation.close()
    world.spool.forget(list(world.state.ahead.groups))
    world.state.ahead.release()
    left = {file.name for file in world.spool.folder.iterdir()} - {"by-0.jsonl"}
    assert left and all(int(name.split("-")[1].split(".")[0]) < 2 * BATCH for name in left) and len(left) <= BATCH
    world.spool.saved(5)
    assert list(world.spool.folder.iterdir()) == []


def saved(tmp_path, name="patient"):
    """With a finished group that its step did not take."""
    world = STARTS[name](1)
    world.step()
    deadline = time.monotonic() + 20.0
    while world.generation._buffer._finished <= BATCH:
        assert time.monotonic() < deadline, "nothing is ever finished ahead"
        time.sleep(0.01)
    world.step()
    (folder := tmp_path / "step-2").mkdir()
    said = FROM_JSON(world.state.ahead.write(folder))
    world.generation.close()
    return folder, said


def rewritten(folder, said, file, record):
    (folder / file).unlink()
    write_group(folder / file, record)
    said["files"][file] = file_facts(folder / file)


@pytest.mark.parametrize("change", ["attempt", "number", "shorter", "gone", "unjudged"])
def test_a_record_that_is_not_what_the_ledger_counts_is_a_damaged_checkpoint(change, tmp_path):
    """So that a resume falls back to an older one. The digest of each file is right."""
    folder, said = saved(tmp_path)
    finished = next(group for group in said["ledger"]["groups"] if group["state"] == "finished")
    file = group_file(finished["number"], finished["attempts"])
    record = read_group(folder / file)
    match change:
        case "attempt":
            rewritten(folder, said, file, replace(record, attempt=record.attempt + 1))
        case "number":
            rewritten(folder, said, file, replace(record, number=record.number + 1))
        case "shorter":
            rewritten(folder, said, file, replace(record, samples=record.samples.rows(slice(0, 1))))
        case "gone":
            del said["files"][file]
        case "unjudged":
            rewritten(folder, said, file, replace(record, results={}))
    with pytest.raises(DamagedCheckpoint, match=rf"\[{finished['number']}\] is not what its ledger counts"):
        read_back(folder, said, tmp_path)


@pytest.mark.parametrize("damage", ["a byte", "cut short", "gone"])
def test_a_file_of_groups_that_is_damaged_after_it_was_written_is_a_damaged_checkpoint(damage, tmp_path):
    """Between two starts, of the run or of its ranks alone: none of its tokens is taken. One that is gone may come
    back, as a disk does.
    """
    folder, said = saved(tmp_path)
    file = folder / next(iter(said["files"]))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    match damage:
        case "a byte":
            file.write_bytes(content)
        case "cut short":
            file.write_bytes(content[:-9])
        case "gone":
            file.unlink()
    with pytest.raises(EnvironmentFault if damage == "gone" else DamagedCheckpoint, match=file.name):
        read_back(folder, said, tmp_path)


def unjudged(record, reason):
    """The record, one of its responses as an engine's fault leaves it, or an environment's."""
    finite = record.samples.finite.copy()
    stops = record.samples.stop_reason.copy()
    if reason == NOT_FINITE:
        finite[0] = False
    else:
        stops[0] = STOP_REASONS.index(LEFT_OUT)
    index = int(record.samples.sample_id[0])
    results = {**record.results, index: replace(record.results[index], reason=reason)}
    return replace(record, samples=replace(record.samples, finite=finite, stop_reason=stops), results=results)


@pytest.mark.parametrize("reason", [NOT_FINITE, LEFT_OUT])
@pytest.mark.parametrize("name", ["patient", "one step off"])
def test_a_group_that_has_a_response_which_nobody_judges_begins_anew(name, reason, tmp_path):
    """Its step would be given up again, and every resume from there."""
    folder, said = saved(tmp_path, name)
    finished = next(group for group in said["ledger"]["groups"] if group["state"] == "finished")
    number = finished["number"]
    file = group_file(number, finished["attempts"])
    rewritten(folder, said, file, unjudged(read_group(folder / file), reason))
    said["filtered"] = [[99, [vars(RewardResult(1, 0.0, {}, reason))]], [7, [vars(RewardResult(2, 1.0, {}, OK))]]]
    kept = read_back(folder, said, tmp_path)
    group = next(group for group in kept.ledger.groups if group.number == number)
    assert number not in kept.groups and not group.tokens and group.attempts == finished["attempts"] + 1
    assert [number for number, _ in kept.filtered] == [7]
    again = STARTS[name](9, TrainState(2, DataCursor(**said["cursor"]), kept), spool=kept.spool)
    for _ in range(3):
        again.step()
    again.generation.close()


class HeldRewards(test_generation.Rewards):
    """Rewards that come when the test lets them."""

    is_held = False

    def collect(self, at_once):
        return [] if self.is_held else super().collect(at_once)


@pytest.mark.parametrize(
    "name", seldom(["patient", "one step off", "in order, partial"], "patient", "in order, partial")
)
def test_weights_do_not_wait_for_rewards_that_decide_nothing(name, monkeypatch, tmp_path):
    """Rewards of what is ahead are held from the moment that the step has its batch until after the sync."""
    monkeypatch.setattr(test_generation, "Rewards", HeldRewards)
    world = STARTS[name](2)
    world.step()
    pending = 0
    for _ in range(3):
        rollouts = world.generation.next_batch(PhaseTimer())
        world.rewards.is_held = True
        deadline = time.monotonic() + 0.5  # in some steps none is awaited any more
        while not world.generation._groups.awaits_rewards and time.monotonic() < deadline:
            time.sleep(0.001)
        timer = PhaseTimer()
        settled = threading.Thread(target=world.generation.drain, args=(timer, False), daemon=True)
        settled.start()
        settled.join(5.0)
        assert not settled.is_alive(), "weights wait for rewards"
        world.engines.version += 1
        world.engines.paused = False
        world.state = world.generation.resume(world.state.advanced(rollouts.cursor))
        pending += world.generation._groups.awaits_rewards
        world.rewards.is_held = False
    assert pending, "rewards were awaited while weights changed"
    world.state.ahead.hold()
    (folder := tmp_path / "step").mkdir()
    said = world.state.ahead.write(folder)
    world.generation.close()
    kept = read_back(folder, said, tmp_path)
    again = STARTS[name](9, TrainState(world.state.step, world.state.cursor, kept), spool=kept.spool)
    again.step()
    again.generation.close()


def test_where_rewards_decide_which_groups_are_trained_on_weights_wait_for_them(monkeypatch):
    monkeypatch.setattr(test_generation, "Rewards", HeldRewards)
    world = World(2, AHEAD["filtered"])
    waited = 0
    for _ in range(5):
        rollouts = world.generation.next_batch(PhaseTimer())
        world.rewards.is_held = True
        settled = threading.Thread(target=world.generation.drain, args=(PhaseTimer(), False), daemon=True)
        settled.start()
        settled.join(0.3)
        waited += settled.is_alive()
        assert settled.is_alive() or not world.generation._groups.awaits_rewards
        world.rewards.is_held = False
        settled.join(5.0)
        assert not settled.is_alive() and not world.generation._groups.awaits_rewards
        world.engines.version += 1
        world.state = world.generation.resume(world.state.advanced(rollouts.cursor))
    world.generation.close()
    assert waited


class LateForSome(test_generation.Rewards):
    """Judges responses of every fifth group once in a long while."""

    def __init__(self, seed, **score):
        super().__init__(seed, **score)
        self.withdrawn = 0
        self._asked = 0

    def withdraw(self, sample_ids):
        self.withdrawn += len(sample_ids)
        super().withdraw(sample_ids)

    def collect(self, at_once):
        self._asked += 1
        late = [result for result in self._waiting if self._asked % 400 and result.sample_id // N % 5 == 0]
        self._waiting = deque(result for result in self._waiting if result not in late)
        given = super().collect(at_once)
        self._waiting.extend(late)
        return given


def test_a_reward_of_an_attempt_that_was_given_up_is_nobodys(monkeypatch):
    """Rewards of some are late for so long that their groups are too old."""
    monkeypatch.setattr(test_generation, "Rewards", LateForSome)
    world = Flight(4, "drop")
    world.run(STEPS)
    assert world.state.ahead.ledger.counts.dropped["stale"].groups and world.rewards.withdrawn


def test_the_watch_over_engines_knows_a_pause():
    clock = [0.0]
    progress = EngineProgress(lambda engine: None, limit_s=40.0, clock=lambda: clock[0])
    progress._every = 1e9  # nobody is asked
    progress.check(["engine 0"])
    progress.pause()
    clock[0] = 1000.0
    progress.check(["engine 0"])
    assert progress.observed(10) is None
    progress.resume()
    clock[0] = 1039.0
    progress.check(["engine 0"])
    clock[0] = 1041.0
    with pytest.raises(Interrupted, match="no token within 40 s from engine 0"):
        progress.check(["engine 0"])


class Lost(LiveEngines):
    """Engines that are lost between the update and the commit of its weights."""

    def pause_for_update(self, give_back):
        if self.version == 2:
            raise Interrupted("pause_for_update: engine 1 died")
        return super().pause_for_update(give_back)


@pytest.mark.parametrize("where", ["settle", "sync"])
@pytest.mark.parametrize("name", ["requeue", "drop"])
def test_what_is_on_its_way_where_engines_never_hold_the_new_weights_is_kept_too(name, where, tmp_path):
    world = Flight(6, name, engines=Lost if where == "settle" else LiveEngines)
    world.step()
    world.step()
    rollouts = world.generation.next_batch(PhaseTimer())
    if where == "settle":
        with pytest.raises(Interrupted, match="engine 1 died"):
            world.generation.drain(PhaseTimer(), False)
    else:
        world.generation.drain(PhaseTimer(), False)
    state = world.generation.given_up(world.state.advanced(rollouts.cursor))
    (folder := tmp_path / "step-3").mkdir()
    kept = read_back(folder, state.ahead.write(folder), tmp_path)
    assert kept.ledger.step == 3 and kept.ledger.groups
    again = Flight(16, name, TrainState(3, state.cursor, kept), spool=kept.spool)
    again.run(3)
    prompts = [prompt for _, prompt in [*world.trained, *again.trained]]
    prompts += rollouts.samples.read().prompt_id[::N].tolist()
    assert len(set(prompts)) == len(prompts)


def test_a_record_has_every_column_and_reward_and_the_same_bytes_for_the_same(tmp_path):
    rows = [Sample(7, 3, k, 9, (1, 2), tuple(range(40 * k + 1)), (-0.5,) * (40 * k + 1), "stop", 1) for k in (0, 2)]
    samples = stored(rows)
    results = {2: RewardResult(8, 0.5, {"acc": 1.0, "why": "text"}, OK, data_source="math")}
    record = GroupRecord(3, 2, samples.read(), results)
    facts = [write_group(tmp_path / name, record) for name in ("one", "two")]
    assert facts[0] == facts[1] == file_facts(tmp_path / "one")
    again = read_group(tmp_path / "one")
    assert (again.number, again.attempt, again.results) == (3, 2, results)
    assert_columns(again.samples, record.samples)
    assert read_group_of_nothing(tmp_path).samples is None


def test_columns_are_joined_where_they_are_small(tmp_path):
    rows = [Sample(7, 3, k, 9, (1, 2), (5,) * tokens, (-0.5,) * tokens, "stop", 1) for k, tokens in enumerate((3, 900))]
    samples, results = packed(rows), {1: RewardResult(8, 0.5, {"acc": 1.0}, OK)}
    write_group(tmp_path / "group.npz", GroupRecord(3, 2, samples, results))
    with zipfile.ZipFile(tmp_path / "group.npz") as archive:
        assert set(archive.namelist()) == {"record.npy", "small.npy", "token_ids.npy", "rollout_log_probs.npy"}
    again = read_group(tmp_path / "group.npz")
    assert (again.number, again.attempt, again.results) == (3, 2, results)
    assert_columns(again.samples, samples)
    assert all(column.flags.writeable and column.flags.aligned for column in again.samples.arrays.values())


def read_group_of_nothing(folder):
    write_group(folder / "empty", GroupRecord(3, 0, None, {}))
    return read_group(folder / "empty")


def test_columns_that_do_not_shrink_are_stored_as_they_are(tmp_path):
    """Routes are nearly random; compressing those of a large step takes longer than the step."""
    rng = np.random.default_rng(0)
    ids = tuple(rng.integers(0, 99, 4000))
    routes = rng.integers(0, 128, (4001, 4, 8)).astype(np.uint8)
    one = Sample(7, 3, 0, 9, (1,), ids, tuple(-rng.random(4000)), "stop", 1, routes=routes)
    write_group(tmp_path / "group", GroupRecord(3, 0, packed([one]), {}))
    with zipfile.ZipFile(tmp_path / "group") as archive:
        how = {info.filename: info.compress_type for info in archive.infolist()}
    assert how["routes.npy"] == zipfile.ZIP_STORED and how["token_ids.npy"] == zipfile.ZIP_DEFLATED


class Overtaken(test_generation.Rewards):
    """Group 0's rewards are taken by the thread, which then stands still until weights have changed."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.border, self.collected, self.over = threading.Event(), threading.Event(), threading.Event()
        self.held = []

    def submit(self, samples, questions, engine, held_s):
        super().submit(samples, questions, engine, held_s)
        if not self.over.is_set():
            self.held += [result for result in self._waiting if result.sample_id < N]
            self._waiting = deque(result for result in self._waiting if result.sample_id >= N)

    def collect(self, at_once):
        if not self.border.is_set() or self.collected.is_set():
            return super().collect(at_once)
        self.collected.set()
        self.over.wait(5)
        return self.held


@pytest.mark.parametrize("on_stale", ["requeue", "drop"])
def test_a_reward_that_comes_as_its_group_becomes_too_old_is_nobodys(on_stale, monkeypatch):
    monkeypatch.setattr(test_generation, "Rewards", Overtaken)
    ready = ["trainer.schedule=bounded", "trainer.max_staleness=1", "trainer.order=ready_first"]
    world = World(0, [*ready, f"trainer.on_stale={on_stale}"])
    world.step()
    rollouts = world.generation.next_batch(PhaseTimer())
    world.generation.drain(PhaseTimer(), saves=False)
    world.rewards.border.set()
    assert world.rewards.collected.wait(5) and world.rewards.held
    world.engines.version += 1
    world.state = world.generation.resume(world.state.advanced(rollouts.cursor))
    world.rewards.over.set()
    world.steps(3)


@pytest.mark.parametrize("name", AHEAD)
def test_rewards_that_failed_are_asked_for_again_by_the_run_that_goes_on(name, tmp_path):
    """A judge that is down ends the run, which is saved; once it is up again the run goes on."""
    world = World(0, AHEAD[name])
    world.step()
    world.rewards.reason = RAISED
    with pytest.raises(DataError, match="the reward failed"):
        world.steps(4)
    state = world.generation.given_up(world.state)
    (folder := tmp_path / "step").mkdir()
    kept = read_back(folder, state.ahead.write(folder), tmp_path)
    again = World(5, AHEAD[name], TrainState(state.step, state.cursor, kept))
    steps = again.steps(6 - state.step)
    assert all(metrics["reward/failed"] == 0 for metrics in (rollouts.metrics for rollouts in steps))


@pytest.mark.parametrize("refused", [OSError(28, "No space left on device"), LostLock("taken over")])
def test_a_loss_that_cannot_be_noted_ends_the_run_all_the_same(refused, tmp_path):
    class Dying(test_generation.Engines):
        def take(self, timeout_s):
            if self.is_dead:
                raise concerning(Interrupted("engine 1 died"), "engine 1")
            return super().take(timeout_s)

    class Full(LostEngines):
        def note(self, *loss):
            raise refused

    world = World(0, AHEAD["one step off"], engines=Dying, lost=Full(tmp_path / "lost"))
    world.step()
    world.engines.is_dead = True
    with pytest.raises(Interrupted, match="engine 1 died; what they were at is not noted"):
        world.steps(2)
