"""Steps that train on what is finished, while weights change under requests that engines hold.

Nothing is lost, nothing is trained on twice, no token is too old, each has the log-prob of the weights that made it.
"""

import json
import random
import threading
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from generations import Files, origin_in
from replicas import InMemory
from segment_checks import token_versions
from seldom import seldom
from test_generation import BATCH, LONGEST, Engines, N, World, in_memory  # noqa: F401

from mrl.cluster.request_streams import FinishedResponses
from mrl.config.schedule_rules import schedule_of
from mrl.data.samples import Sample, Samples, packed
from mrl.engine.kept_tokens import going_on, with_kept
from mrl.engine.requests import Request
from mrl.errors import Interrupted
from mrl.generate.group_metrics import recomputed_tokens
from mrl.generate.kept_groups import read_kept
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState
from mrl.record.metrics import PhaseTimer

STEPS = 6
READY = [
    "trainer.schedule=bounded", "trainer.max_staleness=1", "trainer.partial_rollouts=true", "trainer.order=ready_first",
]  # fmt: skip
MODES = {
    "requeue": READY,
    "drop": [*READY, "trainer.on_stale=drop"],
    "patient": [READY[0], "trainer.max_staleness=4", *READY[2:]],  # nothing is ever too old
    "drained": [READY[0], READY[1], READY[3]],
    "filtered": [
        *READY, "algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=0",
        "algorithm.filter_groups.on_exhausted=error",
    ],
}  # fmt: skip


@dataclass
class Live:
    """A request inside an engine."""

    request: Request
    kept: InMemory | None
    slow: bool
    engine: str
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class LiveEngines(Engines):
    """Engines that make tokens one by one, some responses hardly any; a log-prob tells the version of its token."""

    gives_back_always = False

    def __init__(self, seed):
        super().__init__(seed)
        self.live: dict[int, Live] = {}
        self.paused, self._step = False, threading.Lock()
        self.ended: set[int] = set()

    @property
    def waiting_for(self):
        return list(self.names) if self.live or self.under_way else []

    def send(self, engine, requests, sampling, kept):
        for request in requests:
            row = kept[request.sample_id] if kept and request.sample_id in kept else None
            before = None if row is None else replace(row.read(), sample_id=np.array([request.sample_id]))
            assert request.handle == request.sample_id not in self.live
            self.live[request.handle] = Live(going_on(request, before), before, self._rng.random() < 0.3, engine)
            self.sent += 1

    def make_tokens(self):
        for one in list(self.live.values()):
            if self._rng.random() < (0.02 if one.slow else 0.6):
                rng = random.Random(f"{one.request.seed}/{len(one.tokens)}/{self.version}")
                one.tokens.append(rng.randrange(9))
                one.versions.append(self.version)
                if one.tokens[-1] == 0 or len(one.tokens) == one.request.max_tokens:
                    self.answer_live(one)

    def answer_live(self, one):
        del self.live[one.request.handle]
        starts = [i for i, v in enumerate(one.versions) if i == 0 or one.versions[i - 1] != v]
        spans = [(i, one.versions[i]) for i in starts] or [(0, self.version)]
        asked, reason = one.request, "stop" if one.tokens[-1:] == [0] else "length"
        sample = Sample(
            asked.prompt_id, asked.group_id, asked.sample_id, asked.seed, asked.prompt_ids, one.tokens,
            [-1.0 - v for v in one.versions], reason, spans[0][1], later_versions=tuple(spans[1:]),
        )  # fmt: skip
        whole = with_kept({asked.sample_id: one.kept} if one.kept else {}, packed([sample]))
        self.under_way.append(FinishedResponses(InMemory.whole(whole), self.names[0]))

    def take(self, timeout_s):
        with self._step:
            if not self.paused:
                self.make_tokens()
        time.sleep(0.0001)
        with self._step:
            self._rng.shuffle(self.under_way)
            count = self._rng.randrange(len(self.under_way) + 1)
            taken, self.under_way = self.under_way[:count], self.under_way[count:]
        return taken

    def pause_for_update(self, give_back):
        with self._step:
            self.paused = True
            if not (give_back or self.gives_back_always):
                return False
            for one in list(self.live.values()):
                self.answer_live(one)
        return True

    def end_requests(self, handles):
        for each in handles.values():
            for handle in each:
                self.ended.add(handle)
                with self._step:
                    if handle in self.live:
                        self.answer_live(self.live[handle])


class GivingBack(LiveEngines):
    """vLLM 0.23's."""

    gives_back_always = True


class Flight(World):
    """A run of the schedule, one prompt a number."""

    def __init__(
        self, seed=0, mode="requeue", state=None, engines=LiveEngines, spool=None, lost=None, left=None, score=None
    ):
        super().__init__(seed, MODES[mode], state, score, spool, engines, prompts=1000, lost=lost, left=left)
        self.trained: list[tuple[int, int]] = []  # step, prompt

    def step(self, saves=False):
        rollouts = self.generation.next_batch(PhaseTimer())
        samples, step = rollouts.samples.read(), self.state.step
        check_tokens(samples, step, schedule_of(self.config).max_staleness)
        self.generation.drain(PhaseTimer(), saves)
        at_rest = (len(self.engines.live), self.engines.sent)
        time.sleep(0.005)  # a sync, and validation
        assert at_rest == (len(self.engines.live), self.engines.sent)
        self.engines.version, self.engines.paused = self.engines.version + 1, False
        self.state = self.generation.resume(self.state.advanced(rollouts.cursor))
        self.trained += [(step, prompt) for prompt in samples.prompt_id[::N].tolist()]
        return rollouts

    def run(self, steps, saves=False):
        try:
            return [self.step(saves) for _ in range(steps)]
        finally:
            self.generation.close()


def check_tokens(samples: Samples, step: int, staleness: int) -> None:
    """Each token of the version that its log-prob tells, none older than may be, none after the end."""
    assert len(samples) == BATCH * N
    versions = token_versions(samples)
    np.testing.assert_array_equal(versions, -samples.rollout_log_probs - 1)
    assert step - staleness <= versions.min() and versions.max() <= step
    assert samples.response_lengths.max() <= LONGEST
    for tokens in samples.responses():
        assert (tokens[:-1] != 0).all() and (tokens[-1] == 0 or len(tokens) == LONGEST)


def check_each_once(going, state: TrainState) -> None:
    """No group is trained twice, no token is older than one step, and all that was issued is counted."""
    samples = [rollouts.samples.read() for rollouts in going.found]
    for step, one in enumerate(samples):
        check_tokens(one, step, staleness=1)
    prompts = [prompt for one in samples for prompt in one.prompt_id[::N].tolist()]
    assert len(set(prompts)) == len(prompts) == STEPS * BATCH
    ledger = state.ahead.ledger
    dropped = sum(tally.groups for tally in ledger.counts.dropped.values())
    assert ledger.counts.kept.groups + dropped + len(ledger.groups) == ledger.next_number


@pytest.mark.parametrize(
    ("mode", "engines"),
    seldom([*((mode, LiveEngines) for mode in MODES if mode != "patient"), ("requeue", GivingBack)], 0, -2, -1),
)
def test_nothing_is_lost_or_trained_on_twice_and_no_token_is_too_old(mode, engines):
    versions, stale = 0.0, 0
    for seed in range(2):
        world = Flight(seed, mode, engines=engines)
        rollouts = world.run(STEPS)
        prompts = [prompt for _, prompt in world.trained]
        assert len(set(prompts)) == len(prompts) == STEPS * BATCH
        ledger = world.state.ahead.ledger
        dropped = sum(tally.groups for tally in ledger.counts.dropped.values())
        assert ledger.counts.kept.groups + dropped + len(ledger.groups) == ledger.next_number
        assert not (mode == "requeue" and dropped)
        stale += ledger.counts.requeued.groups + dropped
        versions = max(versions, *(each.metrics["async/versions_per_sample"] for each in rollouts))
        if mode == "drop" and dropped:
            assert rollouts[-1].metrics["async/dropped_groups"] <= dropped
    assert mode != "drained" or versions == 1
    assert mode not in ("requeue", "drop") or (versions > 1 and stale), "both really happen"


@pytest.mark.parametrize(("mode", "saves"), [("requeue", True), ("requeue", False), ("drop", True)])
def test_a_resumed_run_trains_on_each_group_once_and_keeps_the_tokens_of_a_saved_step(mode, saves, tmp_path):
    kept = 0
    for kill in (1, 3):
        first = Flight(kill, mode)
        first.run(kill, saves)
        folder, spool = tmp_path / str(kill), Spool(tmp_path / "spool", Files())
        folder.mkdir()
        said = json.loads(json.dumps(first.state.ahead.write(folder)))
        state = TrainState(first.state.step, first.state.cursor, read_kept(folder, said, spool, origin_in(said)))
        unfinished = [group for group in state.ahead.ledger.groups if not group.is_whole]
        kept += sum(group.tokens for group in unfinished)
        second = Flight(kill + 10, mode, state, spool=spool)
        second.run(STEPS - kill)
        prompts = [prompt for _, prompt in [*first.trained, *second.trained]]
        assert len(set(prompts)) == len(prompts) == STEPS * BATCH
    assert kept or not saves


def test_the_tokens_of_a_step_that_is_saved_are_all_there():
    """Of each response that an engine held when it paused; others may wait for an engine, as fast as the thread is."""
    world = Flight(5, "patient")
    held = []
    pause = world.engines.pause_for_update

    def note(give_back):
        pause(False)
        sent = world.generation._dispatcher.under_way
        tokens = {}
        for handle, one in world.engines.live.items():
            before = int(one.kept.response_lengths[0]) if one.kept else 0
            tokens[sent[handle].number, sent[handle].index] = before + len(one.tokens)
        held.append(tokens)
        return pause(give_back)

    world.engines.pause_for_update = note
    try:
        for _ in range(3):
            world.step(saves=True)
            groups = world.state.ahead.ledger.groups
            lengths = {
                (group.number, index): length
                for group in groups
                for index, length in enumerate(group.lengths)
                if not group.ended[index]
            }
            assert held[-1].items() <= lengths.items()
    finally:
        world.generation.close()
    assert sum(sum(tokens.values()) for tokens in held) > 0


def test_requests_of_groups_that_became_stale_are_ended():
    worlds = [Flight(seed, "requeue") for seed in range(4)]
    for world in worlds:
        world.run(STEPS)
    assert any(world.engines.ended for world in worlds)


def test_what_ends_an_engine_in_a_pause_ends_the_loop():
    world = Flight(0)

    def dies(give_back):
        raise Interrupted("pause_for_update: engine 1 died")

    world.engines.pause_for_update = dies
    with pytest.raises(Interrupted, match="engine 1 died"):
        world.run(2)


def test_recomputed_tokens_are_prompts_and_what_was_there_at_each_border():
    samples = packed([
        Sample(0, 0, 0, 0, (1, 2, 3), range(9), [0.0] * 9, "length", 4, later_versions=((2, 5), (7, 6))),
        Sample(0, 0, 1, 0, (1, 2, 3), range(9), [0.0] * 9, "length", 4),
    ])  # fmt: skip
    assert recomputed_tokens(samples) == (3 + 2) + (3 + 7)
    assert [b - a for a, b in pairwise([0, 2, 7, 9])] == [2, 5, 2]
