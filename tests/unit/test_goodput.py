"""The wall time of a run is what its steps took and what was lost, by cause; the parts sum to the whole."""

import random
from datetime import UTC, datetime

import pytest

from mrl.record.goodput import AGAIN, BESIDE, DOWN, KILLED, RESTARTING, STARTING, Goodput, goodput

BEGIN = 1_700_000_000.0


class Told:
    """A run that is lived through: what it writes, and what a watcher with a clock counts."""

    def __init__(self):
        self.now, self.events, self.rows, self.step = BEGIN, [], {}, 0
        self.lost = dict.fromkeys((STARTING, RESTARTING, AGAIN, BESIDE, DOWN, KILLED), 0.0)

    def event(self, kind, **more):
        self.events.append({"event": kind, "time": datetime.fromtimestamp(self.now, UTC).isoformat()} | more)

    def spend(self, seconds, cause):
        self.now += seconds
        self.lost[cause] += seconds

    def start(self, seconds, at=0):
        self.event("began", step=at)
        self._go_back(at, seconds, STARTING, is_new=not self.events[:-1])

    def restart(self, seconds, at):
        self.event("restarted", step=self.step, why="rank 1 died")
        self._go_back(at, seconds, RESTARTING)

    def _go_back(self, at, seconds, cause, is_new=False):
        dropped = sum(took for step, took in self.rows.items() if step > at)
        self.spend(seconds, cause)
        if not is_new:
            self.event("rewound", step=at, seconds=dropped)
        self.lost[AGAIN] += dropped
        self.rows = {step: took for step, took in self.rows.items() if step <= at}
        self.step = at
        self.event("ready")

    def steps(self, *seconds):
        for took in seconds:
            self.step += 1
            self.rows[self.step] = took
            self.now += took

    def end(self):
        self.event("ended", exit_code=5, message="")

    def found(self, now=None) -> Goodput:
        rows = [{"training/global_step": 0}]
        rows += [{"training/global_step": step, "timing_s/step": took} for step, took in self.rows.items()]
        return goodput(self.events, rows, self.now if now is None else now)

    def check(self):
        found = self.found()
        assert found.wall == pytest.approx(self.now - BEGIN, abs=1e-3)
        assert found.useful == pytest.approx(sum(self.rows.values()), abs=1e-3)
        for cause, seconds in self.lost.items():
            assert found.lost.get(cause, 0.0) == pytest.approx(seconds, abs=1e-3), cause
        assert found.useful + sum(found.lost.values()) == pytest.approx(found.wall, rel=1e-6)


def test_a_run_without_faults_loses_its_start_and_what_stands_beside_steps():
    run = Told()
    run.start(20.0)
    run.steps(3.0, 4.0)
    run.spend(1.5, BESIDE)
    run.end()
    run.check()
    assert run.found().share == pytest.approx(7 / 28.5)


def test_every_cause_of_a_run_that_was_lost_restarted_killed_and_resumed():
    run = Told()
    run.start(20.0)
    run.steps(3.0, 4.0, 5.0)
    run.spend(2.0, BESIDE)  # into step 4
    run.restart(8.0, at=2)
    run.steps(5.5)
    run.spend(0.5, BESIDE)
    run.end()
    run.spend(100.0, DOWN)
    run.start(19.0, at=3)
    run.steps(6.0, 7.0)
    run.spend(30.0, KILLED)  # nobody wrote when
    run.start(21.0, at=4)
    run.steps(7.5)
    run.check()
    assert set(run.found().lost) == set(run.lost)


def test_a_start_that_is_killed_before_its_loop_and_one_that_goes_on():
    run = Told()
    run.start(20.0)
    run.steps(3.0)
    run.event("began", step=1)
    run.now += 5.0
    run.lost[STARTING] += 5.0
    run.start(20.0, at=1)
    run.steps(3.0)
    run.check()
    assert run.found(run.now + 4.0).lost[BESIDE] == pytest.approx(4.0)


@pytest.mark.parametrize(
    "event",
    [
        {"event": "rewound", "time": "2026-01-01", "seconds": 1.0},
        {"event": "rewound", "time": "2026-01-01", "seconds": "nan", "step": 1},
        {"event": "began", "time": "2026-01-01", "step": "x"},
        {"event": "ended", "time": "0001-01-01"},
    ],
)
def test_an_event_or_a_row_that_says_nothing_of_use_is_passed_over(event):
    run = Told()
    run.start(20.0)
    run.steps(3.0, 4.0)
    run.end()
    expected = run.found()
    run.events.insert(2, event)
    assert run.found() == expected
    for took in ("x", None, "inf"):
        run.rows[3] = took
        assert run.found() == expected


def test_nothing_is_said_of_a_run_that_older_versions_wrote_or_that_never_began():
    run = Told()
    assert run.found() is None
    run.event("began", step=0)
    run.steps(3.0)
    run.end()
    assert run.found() is None


@pytest.mark.parametrize("seed", range(50))
def test_parts_sum_to_the_whole_whatever_happens(seed):
    rng = random.Random(seed)
    run = Told()
    run.start(rng.uniform(5, 20))
    for _ in range(20):
        run.steps(*(rng.uniform(0.1, 3) for _ in range(rng.randrange(4))))
        saved = run.step - rng.randrange(3) if run.step > 3 else 0
        fault = rng.choice(["rank", "end", "kill"])
        if fault == "rank":
            run.spend(rng.uniform(0, 2), BESIDE)
            run.restart(rng.uniform(1, 9), at=max(saved, 0))
        elif fault == "end":
            run.spend(rng.uniform(0, 2), BESIDE)
            run.end()
            run.spend(rng.uniform(0, 60), DOWN)
            run.start(rng.uniform(5, 20), at=max(saved, 0))
        else:
            run.spend(rng.uniform(0, 60), KILLED)
            run.start(rng.uniform(5, 20), at=max(saved, 0))
    found = run.found()
    assert found.wall == pytest.approx(run.now - BEGIN, abs=1e-3)
    assert found.useful == pytest.approx(sum(run.rows.values()), abs=1e-3)
    assert found.useful + sum(found.lost.values()) == pytest.approx(found.wall, rel=1e-6)


def test_in_words():
    said = str(Goodput(100.0, 70.0, {STARTING: 20.0, AGAIN: 10.0}))
    assert said == (
        "goodput 0.70: 70 s of steps in 100 s since the first start; lost seconds: starting the run 20, "
        "steps that were trained again 10"
    )
