"""Drawn runs whose writes to disk are late by a drawn time, cut, or never made, and which are killed and go on.

Real are generation, spool, ledger and the files of groups; the clock of the writers is a count of what the run does.
"""

import json
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from generations import Files, origin_in
from replicas import InMemory
from test_generation import AHEAD, BATCH, N, World, assert_same
from test_ready_first import MODES, Flight

from mrl.checkpoint.group_files import write_group
from mrl.errors import EnvironmentFault
from mrl.generate import generation, judged_groups, kept_groups, rollouts
from mrl.generate.group_writer import record_of
from mrl.generate.kept_groups import KeptGroups, read_kept, read_left
from mrl.generate.sampled_by import UNKNOWN
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState

IN_ORDER = {"sync": [], **AHEAD}
READY_FIRST = {name: MODES[name] for name in ("requeue", "drop", "patient", "drained")}
KINDS = (*IN_ORDER, *READY_FIRST)
STEPS = 5


def in_memory_stores() -> None:
    """Responses are kept without Ray, and nobody waits long: for processes that are no tests."""
    for module in (judged_groups, kept_groups, rollouts):
        module.ResponseStore = InMemory
    generation.WAIT_S = generation.REWARD_WAIT_S = 0.0003
    generation.POLL_S = 0.002


@dataclass
class Pending:
    """A file that is begun."""

    path: Path
    record: object
    due: int  # tick
    facts: dict | None = None
    is_cut: bool = False


class LateFiles(Files):
    """Writes each file some ticks later, or when it is waited for; some are cut, as by a full disk."""

    def __init__(self, rng: random.Random, cut: float):
        self._rng, self._cut = rng, cut
        self._lock = threading.Lock()
        self._begun: list[Pending] = []
        self._now = 0
        self.cuts = 0

    def begin(self, path, parts):
        with self._lock:
            self._tick()
            if self._rng.random() < 0.1:
                return None  # too much waits already
            pending = Pending(path, record_of(parts), self._now + self._rng.choice((0, 1, 5, 50)))
            self._begun.append(pending)
            return pending

    def facts(self, begun):
        with self._lock:
            self._tick()
            return {name: self._waited(pending) for name, pending in begun.items()}

    def written(self, pending):
        with self._lock:
            if pending.is_cut:
                raise EnvironmentFault(f"{pending.path}: No space left on device")
            return pending.facts

    def _waited(self, pending: Pending) -> dict:
        if pending.facts is None and not pending.is_cut:
            self._begun.remove(pending)
            self._write(pending)
        if pending.is_cut:
            raise EnvironmentFault(f"{pending.path}: No space left on device")
        return pending.facts

    def _tick(self) -> None:
        self._now += 1
        due = [pending for pending in self._begun if pending.due <= self._now]
        self._begun = [pending for pending in self._begun if pending.due > self._now]
        for pending in due:
            self._write(pending)

    def _write(self, pending: Pending) -> None:
        if not pending.path.parent.exists():  # its run is over
            pending.is_cut = True
        elif self._rng.random() < self._cut:
            pending.path.write_bytes(b"half of a fi")
            pending.is_cut = True
            self.cuts += 1
        else:
            pending.facts = write_group(pending.path, pending.record)

    def outlive(self) -> None:
        """The run was killed; what was begun is written all the same, or is not."""
        with self._lock:
            begun, self._begun = self._begun, []
            for pending in begun:
                if self._rng.random() < 0.5:
                    self._write(pending)


@dataclass
class Save:
    """A checkpoint that is not written yet."""

    state: TrainState
    kept: KeptGroups
    due: int  # step


@dataclass
class Case:
    """One drawn run, with the books of what it trained on."""

    number: int
    folder: Path
    kind: str = ""
    trained: list = field(default_factory=list)
    seen: Counter = field(default_factory=Counter)

    def run(self) -> "Case":
        """To its last step, through kills; raises AssertionError where something is lost, twice or not the same."""
        rng = random.Random(self.number)
        self.kind = rng.choice(KINDS)
        self._rng, self._cut = rng, rng.choice((0.0, 0.0, 0.1, 0.4))
        whole: list[tuple[TrainState, dict]] = []
        kills = rng.choice((1, 1, 2))
        state = None
        spool = Spool(self.folder / "spool", LateFiles(rng, self._cut))
        self._left = {}
        while state is None or state.step < STEPS:
            until = rng.randint((state.step if state else 0) + 1, STEPS) if kills else STEPS
            state, spool = self._life(state, spool, until, whole, is_killed=kills > 0)
            kills -= 1
        self.check()
        return self

    def _life(self, state, spool, until, whole, is_killed):
        """One process, up to the step at which it is killed or done; where the next one goes on."""
        world = self._world(state, spool)
        begun: list[Save] = []
        while world.state.step < until:
            saves = self._rng.random() < 0.8
            self.trained.append(world.step(saves and self._rng.random() < 0.8))
            self.seen["replayed"] += self.trained[-1].metrics["trainer/replayed_responses"]
            if saves:
                world.state.ahead.hold()
                begun.append(Save(world.state, world.state.ahead, world.state.step + self._rng.choice((0, 0, 1, 3))))
            begun = [save for save in begun if not self._is_over(save, world.state.step, whole, spool)]
        world.generation.close()
        if not is_killed:
            return world.state, spool
        self.seen["kills"] += 1
        for save in begun:  # some had begun
            if self._rng.random() < 0.5:
                self._write(save, self._new_folder())
        spool._writer.outlive()
        self.seen["cuts"] += spool._writer.cuts
        back_to = whole[-1][0] if whole else TrainState()
        origin = UNKNOWN.by(back_to.step, back_to.weights)
        again = Spool(self.folder / "spool", LateFiles(self._rng, self._cut), origin=origin)
        self._left = read_left(again, 1 << 30, 0)
        del self.trained[back_to.step :]
        if not whole:
            return TrainState(), again
        self.seen["resumes"] += 1
        saved, folder, said = whole[-1]
        kept = read_kept(folder, json.loads(json.dumps(said)), again, origin_in(said))
        return TrainState(saved.step, saved.cursor, kept, saved.weights), again

    def _world(self, state, spool) -> World:
        seed = self._rng.randrange(1 << 30)
        state = state if state is None or state.step else None
        if self.kind in READY_FIRST:
            return Flight(seed, self.kind, state, spool=spool, left=self._left)
        return World(seed, IN_ORDER[self.kind], state, spool=spool, left=self._left)

    def _is_over(self, save: Save, step: int, whole, spool) -> bool:
        """Whether the save was written, or failed; it is due."""
        if save.due > step:
            return False
        self.seen["late saves"] += save.due > save.state.step
        folder = self._new_folder()
        said = self._write(save, folder)
        save.kept.release()
        if said is None:
            self.seen["failed saves"] += 1
        else:
            spool.saved(save.state.step)
            whole.append((save.state, folder, said))
            whole.sort(key=lambda each: each[0].step)
        return True

    def _new_folder(self) -> Path:
        folder = self.folder / f"checkpoint-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        return folder

    def _write(self, save: Save, folder: Path):
        try:
            return save.kept.write(folder)
        except EnvironmentFault:
            return None

    def check(self) -> None:
        """Each step has its batch, nothing is trained on twice or too old, in order all is what it is undisturbed."""
        if self.kind in IN_ORDER:
            assert_same(self.trained, undisturbed(self.kind))
            return
        assert len(self.trained) == STEPS  # of a batch each, no token too old: Flight looks at every step
        prompts = [prompt for step in self.trained for prompt in step.samples.read().prompt_id[::N].tolist()]
        assert len(set(prompts)) == len(prompts) == STEPS * BATCH


_undisturbed: dict[str, list] = {}


def undisturbed(kind: str) -> list:
    """All steps of a run in order that nothing disturbs."""
    if kind not in _undisturbed:
        _undisturbed[kind] = World(0, IN_ORDER[kind]).steps(STEPS)
    return _undisturbed[kind]
