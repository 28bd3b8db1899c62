"""The first step that is repeated is not generated again: what of it counts, what does not, and what that changes."""

import json
import re
import time
import zipfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from generations import Files, origin_in
from orders import files_order
from replicas import InMemory
from small_model import write_model
from test_data import load, row, write_jsonl
from test_engines_back import IN_ORDER, GoesBack, Restarting, RestartingEngines, RestartingLive
from test_generation import AHEAD, BATCH, SIZES, Engines, N, Rewards, World, assert_same, in_memory  # noqa: F401
from test_ready_first import MODES, STEPS, Flight, check_each_once
from test_spool import Writer, group
from test_turns_ahead import TALKS, Talking, talks  # noqa: F401

from mrl.checkpoint.group_files import group_file, read_group, write_group
from mrl.checkpoint.manifest import file_facts
from mrl.checkpoint.step_folders import Newest
from mrl.config.load import load_config
from mrl.config.override_fields import VLLM_SPEED
from mrl.config.override_rules import decided_by, upstream_class
from mrl.config.schedule_rules import schedule_of
from mrl.data.samples import LEFT_OUT, STOP_REASONS
from mrl.driver.assemble_files import Beginning, with_spool
from mrl.driver.assemble_files import Files as StartFiles
from mrl.driver.resume import generated_again, groups_again, resumed_state
from mrl.errors import Interrupted
from mrl.generate.generation_rules import GenerationRules
from mrl.generate.kept_groups import read_kept, read_left
from mrl.generate.sampled_by import UNKNOWN, SampledBy, Sources, sources_of
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState
from mrl.record.attempts import attempt, generated_after, read_attempts
from mrl.record.metrics import PhaseTimer
from mrl.record.run_dir import RunDir
from mrl.reward.items import RAISED

TINY = "parallel_configs/tiny-moe/cpu.yaml"
REPLAYED = "trainer/replayed_responses"
EVERY = BATCH * N  # responses of a step
ROOM = 1 << 30


def by(version: int, weights: str = "", **more) -> SampledBy:
    return replace(UNKNOWN.by(version, weights), **more)


def replayed(rollouts) -> list[int]:
    return [int(each.metrics[REPLAYED]) for each in rollouts]


class Replays(GoesBack):
    """As a run does: its spool is one folder, and a start goes back to what is left there of the newest checkpoint."""

    def __init__(self, *given):
        super().__init__(*given)
        self.lines = []  # (step, responses replayed) of each step, repeated ones too
        self.repeats = []  # first steps of starts that went back

    def restored(self):
        state = None
        step, weights = 0, ""
        if self.checkpoint is not None:
            saved, at, said = self.checkpoint
            step, weights = saved.step, saved.weights
        self.spool = Spool(self.folder / "spool", Files(), origin=by(step, weights))
        if self.checkpoint is not None:
            state = TrainState(saved.step, saved.cursor, read_kept(at, said, self.spool, origin_in(said)), weights)
        left = read_left(self.spool, ROOM, 0)
        self.repeats.append(step)
        return World(
            self.seed + 100 * self.starts, self.overrides, state, spool=self.spool, engines=lambda seed: self.engines,
            prompts=1000, left=left,
        )  # fmt: skip

    def step(self, world):
        version = world.state.step
        before = len(self.found)
        try:
            super().step(world)
        finally:
            if len(self.found) > before:
                self.lines.append((version, int(self.found[-1].metrics[REPLAYED])))
            if self.checkpoint is not None:
                self.spool.saved(self.checkpoint[0].step)

    def go_back(self):
        super().go_back()
        self.spool.close()


@pytest.mark.parametrize("engines", [RestartingEngines, Engines], ids=["engines are lost too", "engines stay"])
@pytest.mark.parametrize("mode", IN_ORDER)
def test_in_order_replayed_responses_change_no_bit(mode, engines, tmp_path):
    expected = World(0, IN_ORDER[mode], prompts=1000).steps(6)
    seen = Counter()
    for seed in range(2):
        going = Replays(seed, IN_ORDER[mode], Kept if engines is Engines else engines, tmp_path / str(seed))
        going.run(6)
        seen["losses"] += len(going.repeats) - 1
        seen["replayed"] += sum(count for _, count in going.lines)
        if not going.engines.fleet.metrics().get("fleet/quarantined"):
            assert_same(going.found, expected)
            seen["same"] += 1
        for version, count in going.lines:
            assert not count or version in going.repeats, "of a later step nothing is replayed"
            assert count <= EVERY
    assert all(seen[what] for what in ("losses", "replayed", "same")), seen


class Kept(Restarting, Engines):
    """Engines that are never lost."""

    chance = 0.0


def test_ready_first_nothing_is_trained_on_twice_and_each_token_is_of_its_version(tmp_path):
    seen = Counter()
    for seed in range(2):
        going = Replays(seed, MODES["requeue"], RestartingLive, tmp_path / str(seed))
        going.engines.chance = 0.0
        state = going.run(STEPS)
        seen["losses"] += len(going.repeats) - 1
        seen["replayed"] += sum(count for _, count in going.lines)
        check_each_once(going, state)
    assert seen["losses"] and seen["replayed"], seen


class Killed:
    """A synchronous run, or one like it, whose third step was trained on when it was killed behind checkpoint 2."""

    def __init__(self, folder, overrides=(), engines=Engines, rewards="", writer=Files):
        self.folder = folder
        self.overrides = overrides
        self.engines = engines
        self.writer = writer
        spool = Spool(folder / "spool", writer())
        first = self.world(1, None, spool)
        self.trained = []
        for step in range(3):
            self.trained.append(self.step(first, saves=step == 1))
            if step == 1:
                (folder / "step-2").mkdir()
                self.saved = first.state
                self.said = json.loads(json.dumps(self.saved.ahead.write(folder / "step-2")))
                spool.saved(2)
        self.step(first, saves=False)  # some of the fourth, too
        first.generation.close()
        spool.close()
        self.origin = by(2, self.saved.weights)
        assert self.files(), "responses are left"

    def world(self, seed, state, spool, **more):
        return World(seed, self.overrides, state, spool=spool, engines=self.engines, **more)

    @staticmethod
    def step(world, saves, batch_taken=lambda: None):
        rollouts = world.generation.next_batch(PhaseTimer())
        batch_taken()
        world.generation.drain(PhaseTimer(), saves)
        world.engines.version += 1
        world.state = world.generation.resume(world.state.advanced(rollouts.cursor))
        return rollouts

    def files(self):
        return sorted(self.folder.glob("spool/*/group-*.npz"))

    def again(self, origin=None, **more):
        """Steps 3 to 5 of the next start, and how many requests its engines got in step 3."""
        spool = Spool(self.folder / "spool", self.writer(), origin=origin or self.origin)
        state = TrainState(
            2,
            self.saved.cursor,
            read_kept(self.folder / "step-2", self.said, spool, origin_in(self.said)),
            self.origin.weights,
        )
        world = self.world(2, state, spool, left=read_left(spool, ROOM, 0), **more)
        found = [self.step(world, saves=False, batch_taken=lambda: setattr(self, "sent", world.engines.sent))]
        found += world.steps(2)
        spool.close()
        return found

    def expected(self):
        return World(0, self.overrides, engines=self.engines).steps(5)


def test_of_a_synchronous_step_nothing_is_generated_again_and_the_count_says_so(tmp_path):
    killed = Killed(tmp_path)
    found = killed.again()
    assert_same([*killed.trained[:2], *found], killed.expected())
    assert replayed(found) == [EVERY, 0, 0]
    assert len(killed.files()) == BATCH, "a start after this one may use them, too"
    assert replayed(killed.again()) == [EVERY, 0, 0]


def test_what_engines_are_asked_for_and_what_is_replayed_is_the_step(tmp_path):
    killed = Killed(tmp_path)
    killed.files()[0].unlink()
    found = killed.again()
    assert replayed(found)[0] == EVERY - N and killed.sent == N
    assert_same([*killed.trained[:2], *found], killed.expected())


@pytest.mark.parametrize("overrides", [AHEAD["one step off"], AHEAD["two, partial"], AHEAD["filtered"][2:], TALKS],
    ids=["one step off", "two, partial", "filtered", "conversations"])  # fmt: skip
def test_of_every_kind_the_first_repeated_step_is_replayed_to_the_same_bits(tmp_path, overrides):
    engines = Talking if overrides is TALKS else Engines
    killed = Killed(tmp_path, overrides, engines)
    found = killed.again()
    assert_same([*killed.trained[:2], *found], killed.expected())
    assert replayed(found)[0] > 0 and replayed(found)[1:] == [0, 0]


@pytest.mark.parametrize("what", ["weights", "data", "model", "sampling"])
def test_what_other_causes_made_is_said_and_generated_again(tmp_path, capsys, what):
    killed = Killed(tmp_path)
    found = killed.again(replace(killed.origin, **{what: "other"}))
    assert replayed(found) == [0, 0, 0]
    said = capsys.readouterr().out
    assert f"{BATCH} groups of step 3 are there from an earlier start" in said and f"by other {what}" in said
    assert_same([*killed.trained[:2], *found], killed.expected())


def test_of_another_version_nothing_is_used_and_nothing_said(tmp_path, capsys):
    Killed(tmp_path)
    spool = Spool(tmp_path / "spool", Files(), origin=by(3, "x"))
    assert not spool.left and "generated again" not in capsys.readouterr().out
    assert list((tmp_path / "spool").iterdir()) == [spool.folder]


def damaged_byte(killed):
    data = bytearray(killed.files()[0].read_bytes())
    data[len(data) // 2] ^= 1
    killed.files()[0].write_bytes(data)


def other_group(killed):
    first, second, *_ = killed.files()
    first.write_bytes(second.read_bytes())


def half_a_line(killed):
    (lines,) = killed.folder.glob("spool/*/by-2.jsonl")
    lines.write_text(lines.read_text()[:-9])


def no_lines(killed):
    (lines,) = killed.folder.glob("spool/*/by-2.jsonl")
    lines.write_text('{"version": 2}\n{}\n')


@pytest.mark.parametrize(
    ("harm", "lost", "said"),
    [
        (damaged_byte, 1, "1 groups in .* are generated again: their files are not what was written"),
        (other_group, 1, "1 groups in .* are generated again: their files are not what was written"),
        (half_a_line, 1, ""),
        (no_lines, BATCH, "by-2.jsonl is damaged, and its groups are generated again"),
    ],
)
def test_what_is_damaged_is_said_and_generated_again(tmp_path, capsys, harm, lost, said):
    killed = Killed(tmp_path)
    harm(killed)
    found = killed.again()
    assert replayed(found)[0] == EVERY - lost * N
    assert re.search(said, capsys.readouterr().out)
    assert_same([*killed.trained[:2], *found], killed.expected())


@pytest.mark.parametrize(
    ("column", "said"),
    [("seed", "was asked for otherwise"), ("span_versions", "has tokens of weights after step 2")],
)
def test_a_group_of_other_seeds_or_later_weights_is_refused_by_that_cause(tmp_path, capsys, column, said):
    """The lines' digests hold: somebody else wrote the group, or a version that kept too much."""
    killed = Killed(tmp_path)
    number = with_other_column(killed, column)
    found = killed.again()
    assert replayed(found)[0] == EVERY - N
    assert f"group {number} of an earlier start {said}" in capsys.readouterr().out
    assert_same([*killed.trained[:2], *found], killed.expected())


def with_other_column(killed, column):
    path = killed.files()[0]
    record = read_group(path)
    other = replace(record.samples, **{column: getattr(record.samples, column) + 1})
    rewritten(killed, path, replace(record, samples=other))
    return record.number


def of_a_prompt_that_no_step_asks_for(killed):
    path = killed.files()[0]
    record = read_group(path)
    other = path.with_name(group_file(99, 0))
    path.rename(other)
    (lines,) = killed.folder.glob("spool/*/by-2.jsonl")
    lines.write_text(lines.read_text().replace(path.name, other.name))
    rewritten(killed, other, replace(record, number=99))


@pytest.mark.parametrize(
    ("harm", "used"),
    [
        (lambda killed: None, BATCH),
        (lambda killed: with_other_column(killed, "seed"), BATCH - 1),
        (of_a_prompt_that_no_step_asks_for, BATCH - 1),
        (damaged_byte, BATCH - 1),
    ],
    ids=["all are used", "one is refused", "one is not asked for", "one is damaged"],
)
def test_what_is_generated_again_is_all_that_was_lost_but_what_is_replayed(tmp_path, harm, used):
    killed = Killed(tmp_path)
    harm(killed)
    run = RunDir.open(tmp_path / "run", "")
    lines = [{"training/global_step": step, "train/trained_groups": float(BATCH)} for step in range(5)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    point = SimpleNamespace(manifest=SimpleNamespace(step=2))
    with attempt(run.path, 2, {}) as notes:
        schedule = schedule_of(load_config(TINY, None, SIZES).config)
        found = Spool(tmp_path / "spool", Files(), origin=killed.origin)
        left = len(read_left(found, ROOM, 0)) * N
        found.close()
        notes.generated_again(generated_again(schedule, run, point, left))
        steps = killed.again(groups_again=groups_again(schedule, notes))
    assert replayed(steps)[0] == used * N
    assert read_attempts(run.path)[-1].generated_again == generated_after(run.path, 2, N) - used * N


def test_where_generation_runs_ahead_no_group_counts_as_lost_with_a_start(tmp_path):
    with attempt(tmp_path, 2, {}) as notes:
        groups_again(schedule_of(load_config(TINY, None, [*SIZES, *AHEAD["one step off"]]).config), notes)(3)
    assert read_attempts(tmp_path)[-1].generated_again == 0


def test_groups_with_log_probs_that_are_no_numbers_begin_anew(tmp_path, capsys):
    spool = Spool(tmp_path / "spool", Files())
    spool.serve(by(2), most=9)
    one = group(4)
    nan = {k: replace_log_probs(row) for k, row in one.responses.items()}
    spool.put(replace(one, responses=nan))
    spool.put(group(5))
    spool.note()
    again = Spool(tmp_path / "spool", Files(), origin=by(2))
    assert read_left(again, ROOM, 0).keys() == {5} == again.left.keys()
    assert "log-probs that are not finite" in capsys.readouterr().out


def left_by(tmp_path, *numbers):
    """The spool of a start that goes back to weights 2 and finds these groups of them."""
    first = Spool(tmp_path / "spool", Files())
    first.serve(by(2), most=2)
    for number in numbers:
        first.put(group(number))
    first.note()
    again = Spool(tmp_path / "spool", Writer(), origin=by(2))
    again.serve(by(2), most=2)
    assert again.left.keys() == set(numbers)
    return again


def test_a_group_that_an_earlier_start_left_is_written_by_nobody_again(tmp_path):
    again = left_by(tmp_path, 4)
    there = again.left[4]
    again.put(group(4))
    assert again._writer.under_way == 0 and not again.left
    assert again.pinned([4]) == {4: there} and there.path.exists()


def test_a_group_that_is_given_up_leaves_its_place_and_its_line_says_nothing(tmp_path, capsys):
    """Two groups are kept at most."""
    again = left_by(tmp_path, 4, 5)
    again.give_up([4])
    again.put(group(6))
    again._writer.facts({"6": again._files[6].under_way})
    again.note()
    capsys.readouterr()
    assert Spool(tmp_path / "spool", Files(), origin=by(2)).left.keys() == {5, 6}
    assert capsys.readouterr().out == "", "nobody is told of a file that was removed"


def with_version(row, version):
    samples = row.read()
    return InMemory.whole(replace(samples, span_versions=samples.span_versions * 0 + version))


def test_what_later_weights_had_a_part_in_is_not_kept_for_those_that_are_served(tmp_path):
    spool = Spool(tmp_path / "spool", Files())
    spool.serve(by(2), most=9)
    for number, version in ((4, 2), (5, 3)):
        one = group(number)
        last = with_version(one.responses[2], version)
        spool.put(replace(one, responses={**one.responses, 2: last}))
    spool.note()
    assert set(spool.pinned([4, 5])) == {4, 5}, "a checkpoint still gets both"
    assert Spool(tmp_path / "spool", Files(), origin=by(2)).left.keys() == {4}


def rewritten(killed, path, record):
    """The file has another record, and its line is right."""
    facts = write_group(path, record)
    (lines,) = killed.folder.glob("spool/*/by-2.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    changed = [row | facts if row.get("file") == path.name else row for row in rows]
    lines.write_text("".join(json.dumps(row) + "\n" for row in changed))


class GoingOn(Flight):
    """Engines go on once they have new weights; a validation comes before generation resumes."""

    def step(self, saves=False):
        rollouts = self.generation.next_batch(PhaseTimer())
        self.generation.drain(PhaseTimer(), saves)
        self.engines.version += 1
        self.engines.paused = False
        time.sleep(0.05)
        self.state = self.generation.resume(self.state.advanced(rollouts.cursor))
        return rollouts


def test_ready_first_what_engines_finish_between_sync_and_resume_is_not_of_the_weights_before(tmp_path):
    later = 0
    for seed in range(2):
        spool = Spool(tmp_path / str(seed) / "spool", Files())
        put = spool.put
        seen = []
        spool.put = lambda parts, put=put, seen=seen, spool=spool: (seen.append((parts, spool._served)), put(parts))
        world = GoingOn(seed, "requeue", spool=spool)
        world.run(4)
        later += sum(served is not None and parts.newest > served.number for parts, served in seen)
        spool.close()
        for lines in spool.folder.glob("by-*.jsonl"):
            version = int(lines.stem[3:])
            for line in lines.read_text().splitlines()[1:]:
                assert read_group(spool.folder / json.loads(line)["file"]).samples.span_versions.max() <= version
    assert later, "it really happens"


def test_groups_whose_environment_failed_begin_anew(tmp_path, capsys):
    """One fault of an environment does not end every start again."""
    spool = Spool(tmp_path / "spool", Files())
    spool.serve(by(2), most=9)
    one = group(4)
    spool.put(replace(one, responses={**one.responses, 1: left_out(one.responses[1])}))
    spool.put(group(5))
    spool.note()
    again = Spool(tmp_path / "spool", Files(), origin=by(2))
    assert read_left(again, ROOM, 0).keys() == {5} == again.left.keys()
    assert "their environment failed" in capsys.readouterr().out


def left_out(row):
    samples = row.read()
    return InMemory.whole(replace(samples, stop_reason=samples.stop_reason * 0 + STOP_REASONS.index(LEFT_OUT)))


def without_record(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other.npy", b"")


def of_further_columns(path):
    columns = dict(np.load(path))
    np.savez(path.with_suffix(""), **columns, later=columns["record"])


def of_other_rewards(path):
    columns = dict(np.load(path))
    text = json.dumps({"number": 4, "attempt": 0, "results": [[0, {"mark": 1.0}]]})
    np.savez(path.with_suffix(""), **columns | {"record": np.frombuffer(text.encode(), np.uint8)})


def no_archive(path):
    path.write_bytes(b"PK of another kind")


@pytest.mark.parametrize("rewrite", [without_record, of_further_columns, of_other_rewards, no_archive])
def test_files_of_another_version_are_said_and_generated_again(tmp_path, capsys, rewrite):
    spool = Spool(tmp_path / "spool", Files())
    spool.serve(by(2), most=9)
    spool.put(group(5))
    spool.put(group(4))
    path = spool.folder / group_file(4, 0)
    rewrite(path)
    spool._files[4].facts = file_facts(path)
    spool.note()
    again = Spool(tmp_path / "spool", Files(), origin=by(2))
    assert read_left(again, ROOM, 0).keys() == {5} == again.left.keys()
    assert "their files are of another version" in capsys.readouterr().out


def replace_log_probs(row):
    samples = row.read()
    log_probs = samples.rollout_log_probs * float("nan")
    return InMemory.whole(replace(samples, rollout_log_probs=log_probs, finite=samples.finite & False))


def test_rewards_are_those_that_were_given_but_are_asked_for_again_where_other_code_would_give_them(
    tmp_path, monkeypatch
):
    killed = Killed(tmp_path)
    asked = noted_questions(monkeypatch)
    killed.again()
    assert not asked
    found = killed.again(replace(killed.origin, rewards="other"))
    assert replayed(found)[0] == len(asked) == EVERY
    assert_same([*killed.trained[:2], *found], killed.expected())


@pytest.mark.parametrize("name", ["one step off", "two, partial"])
def test_rewards_that_came_after_the_checkpoint_are_not_asked_for_again(tmp_path, monkeypatch, name):
    """Of groups, and of responses, that had ended by then: a judge who is asked twice may answer twice."""
    late = holding_rewards(monkeypatch)
    spool = Spool(tmp_path / "spool", Files())
    first = World(1, AHEAD[name], spool=spool)
    Killed.step(first, saves=True)
    (tmp_path / "step-1").mkdir()
    saved = first.state
    said = json.loads(json.dumps(saved.ahead.write(tmp_path / "step-1")))
    spool.saved(1)
    late.are_held = False
    trained = first.generation.next_batch(PhaseTimer())
    first.generation.close()
    spool.close()

    spool = Spool(tmp_path / "spool", Files(), origin=by(1, saved.weights))
    state = TrainState(1, saved.cursor, read_kept(tmp_path / "step-1", said, spool, origin_in(said)), saved.weights)
    left = read_left(spool, ROOM, 0)
    assert any(group.number in left and any(group.ended) for group in saved.ahead.ledger.groups)
    asked = []
    submit = Rewards.submit

    def noted(self, samples, questions, engine, held_s):
        asked.extend(question.sample_id // N for question in questions)
        submit(self, samples, questions, engine, held_s)

    monkeypatch.setattr(Rewards, "submit", noted)
    again = World(2, AHEAD[name], state, score=lambda item: -1.0, spool=spool, left=left)
    found = again.generation.next_batch(PhaseTimer())
    again.generation.close()
    assert not left.keys() & set(asked)
    for place, number in enumerate(range(BATCH, 2 * BATCH)):
        if number in left:  # the step's others were not kept: no more than a step's are
            own = slice(place * N, (place + 1) * N)
            assert found.rewards[own].tolist() == trained.rewards[own].tolist()


def holding_rewards(monkeypatch) -> SimpleNamespace:
    """Holds rewards back but those of the first step, until `are_held` of what is returned is false."""
    late = SimpleNamespace(are_held=True)
    collect = Rewards.collect

    def of_the_first_step(self, at_once):
        if not late.are_held:
            return collect(self, at_once)
        there = [result for result in self._waiting if result.sample_id < EVERY]
        self.withdraw([result.sample_id for result in there])
        return there

    monkeypatch.setattr(Rewards, "collect", of_the_first_step)
    return late


def noted_questions(monkeypatch) -> list:
    """Gets the responses of step 3 that are asked about from now on."""
    asked = []
    submit = Rewards.submit

    def noted(self, samples, questions, engine, held_s):
        asked.extend(question for question in questions if 2 * EVERY <= question.sample_id < 3 * EVERY)
        submit(self, samples, questions, engine, held_s)

    monkeypatch.setattr(Rewards, "submit", noted)
    return asked


def test_rewards_that_failed_are_asked_for_again(tmp_path, monkeypatch):
    killed = Killed(tmp_path)
    path = killed.files()[0]
    record = read_group(path)
    failed = {index: replace(result, reason=RAISED) for index, result in record.results.items()}
    rewritten(killed, path, replace(record, results=failed))
    asked = noted_questions(monkeypatch)
    found = killed.again()
    assert replayed(found)[0] == EVERY and len(asked) == N
    assert_same([*killed.trained[:2], *found], killed.expected())


def test_the_object_store_gets_no_more_than_it_has_room_for(tmp_path, capsys):
    killed = Killed(tmp_path)
    spool = Spool(tmp_path / "spool", Files(), origin=killed.origin)
    sizes = [parts.bytes(0) for parts in read_left(spool, ROOM, 0).values()]
    assert len(read_left(spool, sum(sizes[:2]), 0)) == 2
    assert "1 groups in" in (said := capsys.readouterr().out) and "no room" in said


# ------------------------------------------------------------------------------------ what is on the disk when


def versions(spool: Spool) -> list[str]:
    return sorted(path.name for path in spool.folder.glob("by-*.jsonl"))


def test_what_is_kept_goes_once_a_newer_checkpoint_is_whole_and_is_never_more_than_of_two(tmp_path):
    spool = Spool(tmp_path / "spool", Files())
    for version in range(6):
        spool.serve(by(version), most=9)
        spool.put(group(version))
        spool.forget([version])
        spool.note()
        assert versions(spool) == ["by-0.jsonl", f"by-{version}.jsonl"][version == 0 :], "no save came to its end"
        assert len(list(spool.folder.glob("group-*"))) == min(version + 1, 2)
    spool.saved(5)
    assert versions(spool) == ["by-5.jsonl"]
    assert [path.name for path in spool.folder.glob("group-*")] == [group_file(5, 0)]
    spool.serve(None, 0)
    assert not spool.keeps
    spool.put(group(9))
    spool.forget([9])
    assert [path.name for path in spool.folder.glob("group-*")] == [group_file(5, 0)]
    spool.saved(7)
    assert list(spool.folder.iterdir()) == []
    spool.close()
    assert not (tmp_path / "spool").exists()


def test_no_more_groups_are_kept_than_a_step_has(tmp_path):
    spool = Spool(tmp_path / "spool", Files())
    spool.serve(by(0), most=2)
    for number in range(4):
        assert spool.keeps == (number < 2)
        spool.put(group(number))
    spool.forget(range(4))
    assert len(list(spool.folder.glob("group-*"))) == 2


def test_a_process_that_ends_leaves_what_a_start_after_it_may_use_and_nothing_else(tmp_path):
    spool = Spool(tmp_path / "spool", Files())
    spool.serve(by(3), most=1)
    for number in (4, 5):
        spool.put(group(number))
    spool.note()
    spool.close()
    (folder,) = (tmp_path / "spool").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["by-3.jsonl", group_file(4, 0)]
    again = Spool(tmp_path / "spool", Files(), origin=by(3))
    facts = again.left[4].facts
    assert list((tmp_path / "spool").iterdir()) == [again.folder] and file_facts(again.left[4].path) == facts
    again.serve(by(3), most=1)
    again.put(group(4))
    again.serve(None, 0)
    assert not again.left and file_facts(again.folder / group_file(4, 0)) == facts, "it is kept as it is"


def test_a_start_that_fails_before_it_generates_loses_nothing(tmp_path):
    killed = Killed(tmp_path)
    for _ in range(2):
        spool = Spool(tmp_path / "spool", Files(), origin=killed.origin)
        assert read_left(spool, ROOM, 0).keys() == {6, 7, 8}
        spool.close()
    assert replayed(killed.again()) == [EVERY, 0, 0]


def test_what_would_be_judged_otherwise_is_not_taken_for_judged_by_a_start_that_fails(tmp_path):
    killed = Killed(tmp_path)
    other = replace(killed.origin, rewards="other")
    spool = Spool(tmp_path / "spool", Files(), origin=other)
    assert not any(parts.results for parts in read_left(spool, ROOM, 0).values())
    spool.close()
    assert not Spool(tmp_path / "spool", Files(), origin=other).left


def test_a_full_disk_ends_no_run_and_leaves_nothing_half_done(tmp_path, monkeypatch, capsys):
    spool = Spool(tmp_path / "spool", Writer())
    spool._writer.is_full = True
    spool._writer.written = lambda begun: spool._writer.facts({"": begun})[""]
    spool.serve(by(0), most=9)
    for number in (4, 5):
        spool.put(group(number))
    spool.note()
    assert capsys.readouterr().out.count("no space left") == 1
    spool.serve(by(1), most=9)
    spool._writer.is_full = False
    spool.put(group(6))
    monkeypatch.setattr("mrl.generate.spool_lines.SpoolLines.add", refuse)
    spool.note()
    assert versions(spool) == ["by-0.jsonl"] and not spool.keeps
    monkeypatch.setattr("mrl.generate.spool_lines.SpoolLines.begin", refuse)
    spool.serve(by(2), most=9)
    assert not spool.keeps
    spool.put(group(7))
    spool.close()
    assert not (tmp_path / "spool").exists()


def refuse(*given):
    raise OSError(28, "No space left on device")


def test_responses_that_a_writer_lost_are_not_kept(tmp_path, capsys):
    spool = Spool(tmp_path / "spool", Writer())

    def lost(begun):
        raise Interrupted("node 1 is gone")

    spool._writer.written = lost
    spool.serve(by(0), most=9)
    spool.put(group(4))
    spool.note()
    assert "node 1 is gone" in capsys.readouterr().out
    assert (spool.folder / versions(spool)[0]).read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("found", "left"),
    [(Newest(None, None, {}), set()), (None, set()), ("w", {4}), ("another", set())],
    ids=["no checkpoint", "a new run", "its checkpoint", "another"],
)
def test_a_start_looks_for_what_is_left_of_its_checkpoint(tmp_path, found, left):
    spool = Spool(tmp_path / "spool", Files())
    spool.serve(by(2, "w"), most=9)
    spool.put(group(4))
    spool.note()
    spool.close()
    if isinstance(found, str):
        trainer = {"cursor": {"epoch": 0, "index": 2}, "weights": found}
        found = Newest(tmp_path / "step-2", SimpleNamespace(step=2, trainer=trainer), {})
    assert begun(tmp_path, found).left.keys() == left
    assert (tmp_path / "spool").exists() == bool(left)


def begun(folder, point, room=ROOM) -> StartFiles:
    """A start's files, on a node whose object store has so many bytes by the plan."""
    plan = {"memory": {"host": {"object_store_bytes": room}}}
    beginning = Beginning(files_order(load_config(TINY).config), folder, point, lambda: None, plan)
    files = StartFiles(
        RunDir(folder), beginning, resumed_state(point, beginning.order.kl_control), None, None, None, None, None
    )
    with ExitStack() as own:
        return with_spool(own, files)


def test_what_groups_of_a_checkpoint_hold_is_no_room_for_those_that_are_left(tmp_path, capsys):
    killed = Killed(tmp_path, AHEAD["two, partial"])
    trainer = {"cursor": vars(killed.saved.cursor), "weights": killed.saved.weights, "ahead": killed.said}
    point = Newest(tmp_path / "step-2", SimpleNamespace(step=2, trainer=trainer), {})
    whole = begun(tmp_path, point)
    kept = sum(parts.bytes(0) for parts in whole.state.ahead.groups.values())
    own = sum(parts.bytes(0) for parts in whole.left.values())
    assert kept and own
    assert begun(tmp_path, point, kept + own).left.keys() == whole.left.keys()
    assert "no room" not in capsys.readouterr().out
    assert len(begun(tmp_path, point, kept + own - 1).left) == len(whole.left) - 1
    assert "1 groups in" in (said := capsys.readouterr().out) and "no room" in said


# ------------------------------------------------------------------------------------ what responses are made by


@pytest.fixture
def sources(tmp_path):
    write_model(tmp_path / "model")

    def of(*overrides, files=(), rows="rows") -> Sources:
        settings = [f"model.path={tmp_path / 'model'}", *overrides]
        return sources_of(load_config(TINY, None, settings).config, "data", rows, files)

    return of


@pytest.mark.parametrize("setting", [
    "rollout.temperature=0.9", "data.max_response_length=3", "trainer.seed=7", "actor.router_replay=R3",
    "rollout.turns={tools: [calculator]}", "rollout.engine_kwargs={vllm: {kv_cache_dtype: fp8}}",
])  # fmt: skip
def test_what_changes_responses_is_another_sampling(sources, setting):
    changed = sources(setting)
    assert changed.sampling != sources().sampling
    assert replace(changed, sampling="") == replace(sources(), sampling="")


def test_another_search_index_is_another_sampling(sources, tmp_path):
    index = tmp_path / "index.db"
    index.write_text("one")
    before = sources(f"rollout.turns={{tools: [search], index: {index}}}")
    index.write_text("another")
    assert sources(f"rollout.turns={{tools: [search], index: {index}}}").sampling != before.sampling


@pytest.mark.parametrize("setting", [
    "rollout.num_engines=2", "rollout.max_num_seqs=3", "trainer.save_freq=7", "cluster.placement=colocated",
    "actor.optim.lr=1.0", "rollout.restart_limit=9", "reward.num_workers=7", "reward.timeout_s=99.0",
    "reward.max_failure_share=0.7",
])  # fmt: skip
def test_what_only_changes_who_makes_them_is_the_same(sources, setting):
    assert sources(setting) == sources()


ENGINE = "rollout.engine_kwargs.vllm"


@pytest.fixture
def sampling_with(tmp_path):
    """The digest of sampling with arguments for vLLM alone."""
    write_model(tmp_path / "model")
    config = load_config(TINY, None, [f"model.path={tmp_path / 'model'}"]).config

    def digest(**arguments) -> str:
        rollout = config.rollout.model_copy(update={"engine_kwargs": {"vllm": arguments}})
        return sources_of(config.model_copy(update={"rollout": rollout}), "data", "rows", ()).sampling

    return digest


def test_every_argument_for_vllm_alone_makes_other_responses_but_those_of_speed(sampling_with):
    given = {name for name in upstream_class("AsyncEngineArgs", None).fields if decided_by(ENGINE, name) is None}
    assert given > VLLM_SPEED, "all of them exist, and no key of mrl's says them"
    usual = sampling_with()
    assert {name for name in given if sampling_with(**{name: 1}) == usual} == VLLM_SPEED
    assert sampling_with(block_size=16, stream_interval=2) == sampling_with(block_size=16) != usual


def test_no_argument_that_chooses_tokens_formats_or_kernels_is_one_of_speed():
    others = set(
        """
        additional_config all2all_backend attention_backend attention_config block_size calculate_kv_scales
        compilation_config diffusion_config disable_cascade_attn disable_custom_all_reduce disable_sliding_window
        enable_batch_sharded_sampling enable_flashinfer_autotune gdn_prefill_backend hf_overrides kernel_config
        kv_cache_dtype kv_sharing_fast_prefill linear_backend logits_processors lora_dtype mamba_cache_dtype
        mamba_ssm_cache_dtype max_logprobs model_class_overrides model_impl moe_backend optimization_level
        override_attention_dtype performance_mode quantization quantization_config return_sampling_mask scheduler_cls
        speculative_config structured_outputs_config use_fp64_gumbel use_replayssm watermark_config
        """.split()  # noqa: SIM905
    )
    assert others <= upstream_class("AsyncEngineArgs", None).fields
    assert not VLLM_SPEED & others


def test_other_rewards_and_files_of_the_users_own_are_others(sources):
    assert replace(sources("reward.failure_score=0.0"), rewards="") == replace(sources(), rewards="")
    assert sources("reward.failure_score=0.0").rewards != sources().rewards
    reward = {"key": "reward.custom_reward_function.path", "path": "x.py", "sha256": "1"}
    tools = reward | {"key": "rollout.turns.path"}
    assert sources(files=[reward]).rewards != sources(files=[reward | {"sha256": "2"}]).rewards
    assert sources(files=[reward]).sampling == sources().sampling
    assert sources(files=[tools]).sampling != sources(files=[tools | {"sha256": "2"}]).sampling


@pytest.mark.parametrize("change", [{"answer": "3"}, {"source": "other"}, {"extra_info": {"index": 1}}])
def test_rows_that_were_corrected_are_judged_anew_and_where_tools_see_them_spoken_anew(sources, tmp_path, change):
    digests = []
    prints = []
    for name, rows in (("a", [row(), row("2+2")]), ("b", [row(), row("2+2", **change)])):
        found = load(write_jsonl(tmp_path / f"{name}.jsonl", rows))
        digests.append(found.rows_digest)
        prints.append(found.fingerprint)
    one, other = digests
    assert one != other and len(set(prints)) == 1, "a resume is not refused for it"
    assert replace(sources(rows=one), rewards="") == replace(sources(rows=other), rewards="")
    assert sources(rows=one).rewards != sources(rows=other).rewards
    turns = "rollout.turns={tools: [calculator]}"
    assert sources(turns, rows=one).sampling != sources(turns, rows=other).sampling


def test_a_part_of_the_rows_has_a_digest_of_its_own(tmp_path):
    found = load(write_jsonl(tmp_path / "a.jsonl", [row(str(i)) for i in range(9)]))
    parts = [found, *(found.sample(8, seed) for seed in (1, 2, None))]
    assert len({part.rows_digest for part in parts}) == len({part.fingerprint for part in parts})
    assert found.sample(9, 1).rows_digest == found.rows_digest


def test_each_update_makes_weights_of_another_name_and_the_start_has_that_of_its_files(sources):
    state = TrainState()
    first = state.advanced(state.cursor)
    second = state.advanced(state.cursor)
    assert first == second and first.weights != second.weights and first.weights and not state.weights
    assert sources().by(0, "").weights == sources().start != sources().by(1, first.weights).weights
    assert isinstance(GenerationRules.__dataclass_fields__["sources"].default, Sources)
