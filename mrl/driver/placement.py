"""Hands devices over between engines and trainer. It does nothing if both have their own devices. Otherwise they take
turns.

The loop calls the same methods of `Separate` and of `Colocated`. Example: a colocated step on one device. The actor has
10 GiB of parameters, 20 of gradients and 60 of optimizer. An engine has 8 of weights and 40 of cache, and 2 remain
while it sleeps:

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

The optimizer arrives while log-probs are computed if the plan has room for both, else at `to_update`. A critic computes
between the two, beside the actor's parameters. Its offloaded states are on the device only during a pass.

A lost engine restarts while ranks are off the device, and ranks wait for it. It takes part in the next `to_engines`. If
no other engine generates, ranks bring it the weights that they hold at once.

A hand-over is requested from all ranks or all engines at once, and ends when the last has answered. So a fast rank
cannot wake an engine beside a slow rank's optimizer. Before an arrival, free memory is compared with the plan (gates.py
of cluster). A shortage ends the step in a resumable way and names the holder. Otherwise an allocation would fail
half-way.
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
Gate = Callable[[str], None]  # takes the plan's name of the next phase; raises Interrupted if it does not fit


class Placement(Protocol):
    """The methods that the loop and the saver call, for any placement."""

    def begin(self, step: int) -> None:
        """Brings the initial weights, those of `step`, to every engine, before the first step."""

    def to_generation(self) -> None:
        """Prepares the engines for generation, for training or for validation."""

    def mend(self) -> None:
        """Brings lost engines back if they have started. Ranks are idle and hold the weights that engines serve.

        It is called again and again.
        """

    def to_log_probs(self) -> None:
        """Gives the devices to the actor after generation, until `to_engines`.

        It is not called if no pass comes before the update.
        """

    def to_update(self) -> None:
        """Prepares the actor for the update of its weights."""

    def to_engines(self, step: int) -> dict[str, float]:
        """Brings the weights after `step` to every engine. Returns metrics of that."""

    def take_back(self, step: int) -> None:
        """Gives the devices back to the engines after `to_log_probs`, with the weights of `step` as before."""

    def give_up_engines(self) -> None:
        """Gives engines up because one is lost and the run ends. The others must not block the ranks."""

    def seconds(self) -> dict[str, float]:
        """Returns the durations of hand-overs since the last call, as `switch/*`."""

    def take_checkpoint(self) -> int:
        """Makes every rank copy its part to host memory. Returns the bytes that all of them will write."""

    def write_checkpoint(self, work: Path) -> list[dict[str, Any]]:
        """Makes every rank write its copy into `work`."""


class Separate:
    """Engines and ranks have devices of their own."""

    def __init__(self, actor: ActorGroup, sync: WeightSync, are_fresh: bool = True) -> None:
        """`are_fresh`: engines have loaded the weights of step 0 themselves.

        It is false if they wait for a sync, or training starts from an adapter.
        """
        self._actor = actor
        self._sync = sync
        self._are_fresh = are_fresh
        self.take_checkpoint = actor.take_checkpoint
        self.write_checkpoint = actor.write_checkpoint

    def begin(self, step: int) -> None:
        """Does nothing if fresh engines hold the weights of step 0. Otherwise syncs them."""
        if step > 0 or not self._are_fresh:
            self._sync.bring_to(step)

    def to_generation(self) -> None:
        """Moves everything that actor.*_offload names off the devices until it is needed."""
        self._actor.offload()

    def mend(self) -> None:
        """Brings engines back beside those that generate."""
        self._sync.mend()

    def to_log_probs(self) -> None:
        """Does nothing: the ranks' devices are theirs."""

    def to_update(self) -> None:
        """Does nothing: the ranks' devices are theirs."""

    def to_engines(self, step: int) -> dict[str, float]:
        """Syncs engines, including restarted ones. Returns metrics of the sync."""
        return self._sync.bring_to(step)

    def take_back(self, step: int) -> None:
        """Does nothing: engines have kept their devices and weights."""

    def give_up_engines(self) -> None:
        """Does nothing: engines do not block ranks."""

    def seconds(self) -> dict[str, float]:
        """Returns nothing, because there are no hand-overs."""
        return {}


class Colocated:
    """Engines and ranks take turns on the same devices.

    At first the engines sleep, and the actor is loaded.
    """

    def __init__(
        self, actor: ActorGroup, engines: RolloutGroup, sync: WeightSync, gate: Gate, prefetched: Sequence[str] = ()
    ) -> None:
        """`prefetched`: the actor's states that arrive while log-probs are computed."""
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
        """Brings the weights of any step, even step 0, because engines that slept have no weights."""
        self.to_engines(step)
        self.seconds()  # drops times that belong to no step

    def to_generation(self) -> None:
        """Does nothing: the engines are awake since `to_engines`, and the actor is off the device."""

    def mend(self) -> None:
        """Brings engines back if none generates, and all that may come back have started.

        Ranks have no room beside an engine that generates. So a restarted engine waits for the next `to_engines`.
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
        """Puts engines to sleep, then brings parameters.

        The actor allocates nothing while an engine goes to sleep. vLLM would take the lost device memory for a leak of
        its own.
        """
        self._sleep()
        self._let_in("rollout_to_log_prob")
        with self._timer("onload"):
            self._actor.bring(PARAMETERS)
            if self._prefetched:
                self._actor.prefetch(*self._prefetched)

    def to_update(self) -> None:
        """Brings gradients and optimizer.

        Without a `to_log_probs` before, because there is nothing to score, engines sleep first.
        """
        self._sleep()
        self._let_in("train")
        with self._timer("onload"):
            self._actor.bring(PARAMETERS, GRADIENTS, OPTIMIZER)

    def to_engines(self, step: int) -> dict[str, float]:
        """Moves actor states except parameters off, wakes engine weights, moves parameters off, and wakes caches."""
        metrics = self._hand_over(lambda: self._sync.transfer(step))
        metrics |= self._sync.commit(step)
        self._engines_serve()
        return metrics

    def _hand_over(self, transfer: Callable[[], T]) -> T:
        """Calls `transfer`, which moves the weights, and returns its result.

        The devices are the engines' afterwards.
        """
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

    def take_back(self, step: int) -> None:
        """Brings the weights again, which engines dropped when they slept."""
        self.begin(step)

    def give_up_engines(self) -> None:
        """Ends the engines, because living ones cannot be put to sleep together with a lost one."""
        self._engines.stop()
        self._engines_sleep = True

    def seconds(self) -> dict[str, float]:
        """Returns `switch/NAME_s` for every kind of hand-over."""
        timer = self._timer
        self._timer = PhaseTimer()
        return {f"switch/{name}_s": value for name, value in timer.seconds.items()}

    def take_checkpoint(self) -> int:
        """Has the ranks copy their states for a checkpoint, while the engines sleep.

        During a step the engines sleep already. At a run's end they are put to sleep, because there is no room beside
        them.
        """
        if not self._engines_sleep:
            self._engines.fleet.end_starts()  # they are no longer needed
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
