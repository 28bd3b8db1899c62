"""Engines that are lost in the middle: what they were at goes on, the prompt that kills them is found and set aside."""

import json
import random

import pytest
from generations import Files, origin_in
from test_generation import AHEAD, BATCH, in_memory  # noqa: F401
from test_ready_first import MODES, STEPS, Flight, LiveEngines

from mrl.cluster.process_logs import concerning
from mrl.data.batch import Prompt
from mrl.data.order import PromptStream
from mrl.errors import DataError, Interrupted
from mrl.generate.kept_groups import read_kept
from mrl.generate.lost_engines import LostEngines, Unfinished, whole_losses
from mrl.generate.numbered_prompts import NumberedPrompts, PromptCursor
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState
from mrl.record.metrics import PhaseTimer
from mrl.schedule.suspects import Suspects, suspects

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
