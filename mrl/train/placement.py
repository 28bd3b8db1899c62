"""Hand-overs between engines and trainer: nothing to do where each has devices of its own, turns where they share them.

The loop calls the same methods of `Separate` and of `Colocated`. A colocated step, as one device sees it, with 10 GiB
of parameters, 20 of gradients, 60 of optimizer, and an engine of 8 of weights and 40 of cache; 2 stay of a sleeping
engine:

    hand-over             what happens, on every device before any goes on                     on the device after it
    -----------------------------------------------------------------------------------------------------------------
                          engines generate                                                     engine 8 + 40
    to_log_probs          engines sleep: requests given up, weights dropped, memory back       2
                          parameters on                                                        2, actor 10
                          (old and reference log-probs; the optimizer begins to come beside)   2, actor 10 + 60
    to_update             gradients and optimizer on                                           2, actor 10 + 20 + 60
                          (update; a copy of what is saved goes to the host)
    to_engines            gradients and optimizer off                                          2, actor 10
                          engines wake their weights                                           engine 8, actor 10
                          weights are moved and compared (cluster/weight_sync.py)              the same, + staging
                          parameters off                                                       engine 8
                          engines wake their cache                                             engine 8 + 40
                          commit: prefix cache dropped, version set, requests admitted         engine 8 + 40

The optimizer comes on while log-probs are computed where the plan has room for both, else at `to_update`. A critic
computes between the two, beside the actor's parameters; what of it may leave comes on for a pass and goes with its end.

An engine that is lost starts again while ranks are off, and is waited for before they come on. It takes part in the
next `to_engines`; where nobody else generates, ranks come at once with the weights that they hold.

A hand-over is asked of all ranks or all engines at once and over when the last has answered: a fast rank must not wake
an engine beside a slow rank's optimizer. Before something comes on, what is free is held against the plan (gates.py of
cluster): a shortage ends the step, resumable, with the holder named, instead of an allocation that fails half-way.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mrl.cluster.actor_group import ActorGroup
from mrl.cluster.rollout_group import RolloutGroup
from mrl.cluster.weight_sync import WeightSync
from mrl.config.schema_actor import GRADIENTS, OPTIMIZER, PARAMETERS
from mrl.record.metrics import PhaseTimer

T = TypeVar("T")
Gate = Callable[[str], None]  # takes the plan's name of the next phase; raises Interrupted when it does not fit


class Placement(Protocol):
    """What the loop and the saver ask, wherever the processes stand."""

    def begin(self, step: int) -> None:
        """Brings the weights that training starts from, those of `step`, to every engine, before the first step."""

    def to_generation(self) -> None:
        """The engines are about to generate, for training or for validation."""

    def mend(self) -> None:
        """Brings lost engines back as far as they have started; ranks are idle and hold the weights that engines serve.

        Asked again and again.
        """

    def to_log_probs(self) -> None:
        """Gives the devices to the actor after generation; it works until `to_engines`.

        Left out where no pass comes before the update.
        """

    def to_update(self) -> None:
        """The actor is about to update its weights."""

    def to_engines(self, step: int) -> dict[str, float]:
        """Metrics of bringing the weights after `step` to every engine."""

    def give_up_engines(self) -> None:
        """One of them is lost and the run ends: what is left of them keeps the ranks from nothing."""

    def seconds(self) -> dict[str, float]:
        """`switch/*` since the last call: what hand-overs took."""

    def take_checkpoint(self) -> int:
        """Every rank copies its part to host memory; bytes that all of them will write."""

    def write_checkpoint(self, work: Path) -> list[dict[str, Any]]:
        """Every rank writes its copy into `work`."""


class Separate:
    """Engines and ranks have devices of their own."""

    def __init__(self, actor: ActorGroup, sync: WeightSync, are_fresh: bool = True) -> None:
        """`are_fresh`: engines hold the weights of step 0, which they have loaded themselves; false where they wait for
        a sync, or training starts from an adapter.
        """
        self._actor = actor
        self._sync = sync
        self._are_fresh = are_fresh
        self.take_checkpoint = actor.take_checkpoint
        self.write_checkpoint = actor.write_checkpoint

    def begin(self, step: int) -> None:
        """Engines that are fresh hold the weights of step 0."""
        if step > 0 or not self._are_fresh:
            self._sync.bring_to(step)

    def to_generation(self) -> None:
        """What actor.*_offload names leaves the devices while nobody needs it."""
        self._actor.offload()

    def mend(self) -> None:
        """Brings engines back beside those that generate."""
        self._sync.mend()

    def to_log_probs(self) -> None:
        """Does nothing: the ranks' devices are theirs."""

    def to_update(self) -> None:
        """Does nothing: the ranks' devices are theirs."""

    def to_engines(self, step: int) -> dict[str, float]:
        """Metrics of the sync; engines that have started again take part."""
        return self._sync.bring_to(step)

    def give_up_engines(self) -> None:
        """They are not in the way."""

    def seconds(self) -> dict[str, float]:
        """Nothing, as nothing is handed over."""
        return {}


class Colocated:
    """Engines and ranks take turns on the same devices.

    The engines are handed over asleep, the actor as it was loaded.
    """

    def __init__(
        self, actor: ActorGroup, engines: RolloutGroup, sync: WeightSync, gate: Gate, prefetched: Sequence[str] = ()
    ) -> None:
        """`prefetched`: what of the actor comes on while log-probs are computed."""
        self._actor = actor
        self._engines = engines
        self._sync = sync
        self._gate = gate
        self._prefetched = prefetched
        self._timer = PhaseTimer()
        self._engines_sleep = True
        engines.fleet.hold_starts(engines.poll)
        self.write_checkpoint = actor.write_checkpoint

    def begin(self, step: int) -> None:
        """Engines that slept have no weights, so those of step 0 are brought to them too."""
        self.to_engines(step)
        self.seconds()  # of no step

    def to_generation(self) -> None:
        """The engines are awake since `to_engines`, and the actor is off."""

    def mend(self) -> None:
        """Brings engines back where nobody generates, and all that may come back have started.

        Beside an engine that generates there is no room for ranks: whoever has started waits for the next `to_engines`.
        """
        fleet = self._engines.fleet
        fleet.collect()
        if not (fleet.none_ready and fleet.none_starts and fleet.stale()):
            return
        self._sleep()
        self._hand_over(self._sync.transfer_again)
        self._sync.commit_again()
        self._engines_serve()

    def to_log_probs(self) -> None:
        """Engines sleep, then parameters come on. The actor allocates nothing while an engine goes to sleep: vLLM takes
        memory that vanishes from the device meanwhile for a leak of its own."""
        self._sleep()
        self._let_in("rollout_to_log_prob")
        with self._timer("onload"):
            self._actor.bring(PARAMETERS)
            if self._prefetched:
                self._actor.prefetch(*self._prefetched)

    def to_update(self) -> None:
        """Gradients and optimizer come on; after no `to_log_probs`, where there is nothing to score,
        engines sleep first.
        """
        self._sleep()
        self._let_in("train")
        with self._timer("onload"):
            self._actor.bring(PARAMETERS, GRADIENTS, OPTIMIZER)

    def to_engines(self, step: int) -> dict[str, float]:
        """All of the actor but its parameters goes, weights of engines come; then those go, and caches come."""
        metrics = self._hand_over(lambda: self._sync.transfer(step))
        metrics |= self._sync.commit(step)
        self._engines_serve()
        return metrics

    def _hand_over(self, transfer: Callable[[], T]) -> T:
        """What `transfer` gives, which moves the weights; devices are the engines' afterwards."""
        with self._timer("offload"):
            self._actor.bring(PARAMETERS)
        self._let_in("train_to_sync")
        with self._timer("wake_weights"):
            self._engines.call("wake_weights")
        moved = transfer()
        with self._timer("offload"):
            self._actor.offload()
        self._let_in("sync_to_rollout")
        with self._timer("wake_kv"):
            self._engines.call("wake_cache")
        return moved

    def _engines_serve(self) -> None:
        self._engines_sleep = False
        self._engines.fleet.allow_starts()

    def give_up_engines(self) -> None:
        """Ends them: those that live cannot be put to sleep together with one that does not."""
        self._engines.stop()
        self._engines_sleep = True

    def seconds(self) -> dict[str, float]:
        """`switch/NAME_s` of every kind of hand-over."""
        timer = self._timer
        self._timer = PhaseTimer()
        return {f"switch/{name}_s": value for name, value in timer.seconds.items()}

    def take_checkpoint(self) -> int:
        """Has the ranks copy their states for a checkpoint, while the engines sleep.

        In a step the engines sleep already. At a run's end they are put to sleep, for there is no room beside them.
        """
        if not self._engines_sleep:
            self._engines.fleet.end_starts()  # nobody needs them any more
        self._sleep()
        return self._actor.take_checkpoint()

    def _let_in(self, phase: str) -> None:
        with self._timer("gate"):
            self._gate(phase)

    def _sleep(self) -> None:
        if not self._engines_sleep:
            with self._timer("sleep"):
                self._engines.fleet.hold_starts(self._engines.poll)
                self._engines.call("sleep")
            self._engines_sleep = True
