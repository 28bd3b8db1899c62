"""A weight sync as events, with what NCCL does: it walks the product's own order of actions over a plan's own messages.

Unlike gloo, NCCL makes a pair's communicator in the first send or receive of the pair. That blocks the host until the
peer's first one (torch's `ProcessGroupNCCL::broadcastUniqueNCCLID`, `ncclCommInitRank`; pytorch 108378). Its kernels
hold the device until the peer's kernel has come. `device_wide`: every wait of a process waits for all that its device
has begun, in the order in which it was begun, as with one hardware queue.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mrl.config.deployment import Deployment, rank_devices
from mrl.config.load import load_config
from mrl.model import planning_model_spec
from mrl.plan.plan_inputs import PlanInputs, device_for
from mrl.plan.run_plan import reshard_plan_of
from mrl.platforms.hosting import get_hosting
from mrl.reshard.actions import AHEAD, SyncAction, receiving, sending
from mrl.reshard.messages import by_round
from mrl.reshard.plan import ReshardPlan
from mrl.reshard.setup import pair_route

FOLDER = Path(__file__).parents[2] / "parallel_configs"
PRESETS = [f"{p.parent.name}/{p.stem}" for p in sorted(FOLDER.glob("*/*.yaml")) if not p.stem.startswith("cpu")]
LARGEST = [preset for preset in PRESETS if preset.startswith(("deepseek-v3/", "hy3/", "kimi-k2"))]
# the first use of a pair blocks, waits are for the whole device: either alone is enough
CAUSES = [(True, True), (True, False), (False, True)]

Pair = tuple[int, int]  # rank, worker
Process = tuple[str, int]


class Note(NamedTuple):
    """A message without its content."""

    round: int
    source: int
    worker: int


def notes_of(plan: ReshardPlan) -> list[Note]:
    """All messages of a plan."""
    found = []
    for worker in range(plan.rollout.world_size):
        flow = plan.schedule.flow(worker)
        keys = np.unique(flow.round.astype(np.int64) * plan.train.world_size + flow.source)
        found += [Note(*divmod(key, plan.train.world_size), worker) for key in keys.tolist()]
    return found


def each_transport_two_rounds_ahead(
    rounds: list[list[Note]], is_remote: Callable[[Note], bool]
) -> Iterator[SyncAction]:
    """The order before: each transport counts its own rounds, and asks for two of them ahead."""
    shares = [[[m for m in ms if is_remote(m) == remote] for ms in rounds] for remote in (False, True)]
    left = [deque(share for share in of_kind if share) for of_kind in shares]
    for of_kind in left:
        for _ in range(min(AHEAD, len(of_kind))):
            yield SyncAction("ask", of_kind.popleft())
    for messages in rounds:
        yield SyncAction("take", messages)
        yield SyncAction("release", messages)
        for of_kind, remote in zip(left, (False, True), strict=True):
            if of_kind and any(is_remote(message) == remote for message in messages):
                yield SyncAction("ask", of_kind.popleft())


@dataclass
class Simulation:
    """One sync. `met`: pairs that have a communicator already."""

    notes: Iterable[Note]
    route: Callable[[int, int], str]
    blocking_first_use: bool = True
    device_wide: bool = True
    met: Collection[Pair] = ()
    receiving: Callable[..., Iterator[SyncAction]] = receiving
    happened: set = field(default_factory=set)
    waiting: dict = field(default_factory=lambda: defaultdict(list))  # event -> processes

    def stuck(self) -> dict[Process, object]:
        """Runs it. Returns the processes that wait for good, each with what it waits for."""
        routes: dict[Pair, str] = {}
        by_rank, by_worker = defaultdict(list), defaultdict(list)
        for note in sorted(self.notes):
            pair = note.source, note.worker
            if pair not in routes:
                routes[pair] = self.route(*pair)
            by_rank[note.source].append(note)
            by_worker[note.worker].append(note)
        self.remote = lambda note: routes[note.source, note.worker] == "p2p"
        self.happened |= {("met", pair) for pair in self.met}
        self.queues: dict[Process, deque[Note]] = defaultdict(deque)  # kernels of a device that are not matched yet
        self.ready: deque = deque()
        runs = {("rank", rank): self._rank(rank, sorted(own, key=_by_worker)) for rank, own in by_rank.items()}
        runs |= {("worker", worker): self._worker(worker, by_round(own)) for worker, own in by_worker.items()}
        self.ready.extend(runs)
        blocked: dict[Process, object] = {}
        while self.ready:
            process = self.ready.popleft()
            event = next((event for event in runs[process] if event not in self.happened), None)
            if event is None:
                blocked.pop(process, None)
            else:
                blocked[process] = event
                self.waiting[event].append(process)
        return {process: event for process, event in blocked.items() if event not in self.happened}

    def _rank(self, rank: int, notes: list[Note]) -> Iterator[object]:
        me = ("rank", rank)
        for step, these in sending(notes, self.remote):
            if step == "wait":
                for note in these:
                    yield ("moved", note) if self.remote(note) else ("released", note)
            elif step == "slot" and not self.remote(these[0]):
                yield ("room", these[0])
            elif step == "post":
                yield from self._idle(me)  # it has been packed, and a header has been copied
                if self.remote(these[0]):
                    yield from self._launch(me, these[0])
                else:
                    self._happen(("posted", these[0]))

    def _worker(self, worker: int, rounds: list[list[Note]]) -> Iterator[object]:
        me = ("worker", worker)
        for step, these in self.receiving(rounds, self.remote):
            for note in these:
                if step == "ask" and self.remote(note):
                    yield from self._launch(me, note)
                elif step == "ask":
                    self._happen(("room", note))
                elif step == "take":
                    yield ("moved", note) if self.remote(note) else ("posted", note)
            if step != "ask":
                yield from self._idle(me)  # headers have been read; what was unpacked has been read
            if step == "release":
                for note in these:
                    self._happen(("released", note))

    def _launch(self, me: Process, note: Note) -> Iterator[object]:
        """Begins a send or a receive."""
        pair = note.source, note.worker
        if self.blocking_first_use and ("met", pair) not in self.happened:
            self._happen(("came", me[0], pair))
            if {("came", "rank", pair), ("came", "worker", pair)} <= self.happened:
                self._happen(("met", pair))
            yield ("met", pair)
        self.queues[me].append(note)
        self._match(note)

    def _match(self, note: Note) -> None:
        """Moves a message that both devices have begun and, with one queue, reached; then what follows it."""
        reached = deque([note])
        while reached:
            note = reached.popleft()
            sides = self.queues["rank", note.source], self.queues["worker", note.worker]
            if all(note in (list(queue)[:1] if self.device_wide else queue) for queue in sides):
                for queue in sides:
                    queue.remove(note)
                self._happen(("moved", note))
                reached.extend(queue[0] for queue in sides if queue)

    def _idle(self, me: Process) -> Iterator[object]:
        if self.device_wide:
            for note in list(self.queues[me]):
                yield ("moved", note)

    def _happen(self, event: object) -> None:
        self.happened.add(event)
        self.ready.extend(self.waiting.pop(event, ()))


def _by_worker(note: Note) -> tuple[int, int]:
    return note.round, note.worker


@lru_cache(maxsize=1)
def planned(preset: str, *overrides: str):
    """The messages of a preset, the route of a pair, and how many workers an engine has."""
    config = load_config(FOLDER / f"{preset}.yaml", overrides=list(overrides)).config
    model, _ = planning_model_spec(config.model.path)
    inputs = PlanInputs.of(config, model, device_for(config))
    plan = reshard_plan_of(config, inputs.model, inputs.train)
    ranks, workers = rank_devices(Deployment.of(config))
    reach = get_hosting(config.cluster.device).memory_reach
    kind = config.reshard.transport

    def route(rank: int, worker: int) -> str:
        return pair_route(kind, ranks[rank], workers[worker], reach)

    return notes_of(plan), route, plan.rollout.workers_per_engine


def check_completes(preset: str, *overrides: str) -> None:
    """Whole, with an engine left out, and to one engine after a fence, of whose pairs some have met.

    Under the strictest semantics; any other takes only waits away.
    """
    notes, route, size = planned(preset, *overrides)
    lost = max(note.worker for note in notes) // size // 2
    pairs = sorted({(note.source, note.worker) for note in notes})
    has_met = np.random.default_rng(len(notes)).random(len(pairs)) < 0.5
    met = [pair for pair, chosen in zip(pairs, has_met, strict=True) if chosen]
    for some, given in (
        (notes, {}),
        ([note for note in notes if note.worker // size != lost], {}),
        ([note for note in notes if note.worker // size == lost], {"met": met}),
    ):
        stuck = Simulation(some, route, **given).stuck()
        assert not stuck, next(iter(stuck.items()))
    greetings = [Note(rank, rank, worker) for rank, worker in pairs if route(rank, worker) == "p2p"]
    stuck = Simulation(greetings, route).stuck()  # while they connect: see transport_p2p
    assert not stuck, next(iter(stuck.items()))


def check_deadlock_before(preset: str, *overrides: str, causes=CAUSES) -> None:
    """The order before deadlocks by each of the causes, and completes without them, as with gloo."""
    notes, route, _ = planned(preset, *overrides)
    for blocking, wide in causes:
        assert Simulation(notes, route, blocking, wide, receiving=each_transport_two_rounds_ahead).stuck()
    assert not Simulation(notes, route, False, False, receiving=each_transport_two_rounds_ahead).stuck()
