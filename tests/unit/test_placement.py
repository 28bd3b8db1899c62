"""Turns on shared devices: in which order engines and ranks come and go,
with stand-ins that note what they are asked.
"""

from types import SimpleNamespace

import pytest

from mrl.cluster import engine_fleet
from mrl.cluster.engine_fleet import EngineFleet
from mrl.cluster.gates import MemoryGate, MemoryHolder, PhaseMemory, shortage
from mrl.cluster.process_logs import concerning
from mrl.driver.placement import Colocated, Separate
from mrl.errors import Interrupted, LostProcess
from mrl.platforms.process_memory import ProcessMemory
from mrl.record.spec import metric_spec
from mrl.schedule.fleet import READY, STARTING
from mrl.units import GIB


@pytest.fixture(autouse=True)
def answers_are_there(monkeypatch):
    monkeypatch.setattr(engine_fleet, "ray", SimpleNamespace(wait=lambda refs, num_returns, timeout: (refs, [])))


class Devices:
    """Ranks, engines, sync and gate in one.

    It keeps what is on the devices and says when two are there that do not fit.
    """

    def __init__(self, full_before: str = ""):
        self.calls: list[str] = []
        self.actor = {"parameters", "gradients", "optimizer"}  # a model that was just loaded
        self.engines: set[str] = set()  # asleep
        self.full_before = full_before
        processes = SimpleNamespace(
            names=["engine 0", "engine 1"], workers=[None, None], engine_ranks=1, end=lambda engine: None,
            start_again=self.start_again, note_devices=lambda engine: None,
        )  # fmt: skip
        self.fleet = EngineFleet(processes, 60.0)
        self.fleet.restart(100, 1)

    def start_again(self, engine: int) -> dict:
        assert not self.actor, "vLLM would take what comes onto the device for its own"
        self.note(f"start engine {engine}")
        return {}  # it has started when it is looked at

    def lose(self, engine: int) -> None:
        assert self.fleet.loses(concerning(LostProcess("died"), f"engine {engine}"), self.fleet.epochs())

    def poll(self) -> None: ...

    def transfer_again(self) -> None:
        assert self.fleet.none_ready and self.actor == {"parameters"} and self.engines == {"weights"}
        self.fleet.proven(self.fleet.stale(), self.fleet.version)
        self.note("transfer again")

    def commit_again(self) -> None:
        self.fleet.committed(self.fleet.stale(), self.fleet.version)
        self.note("commit again")

    def note(self, call: str) -> None:
        self.calls.append(call)
        assert not ({"gradients", "optimizer"} & self.actor and self.engines), (
            f"{call}: {self.actor} beside {self.engines}"
        )
        assert not (self.actor and "cache" in self.engines), f"{call}: {self.actor} beside {self.engines}"

    def gate(self, phase: str) -> None:
        self.note(f"gate {phase}")
        if phase == self.full_before:
            raise Interrupted(f"no room for {phase}")

    def bring(self, *kinds: str) -> None:
        self.actor = set(kinds)
        self.note(f"on: {' '.join(kinds)}")

    def prefetch(self, *kinds: str) -> None:
        assert self.actor == {"parameters"}, "while log-probs are computed"
        self.actor |= set(kinds)
        self.note(f"coming: {' '.join(kinds)}")

    def offload(self) -> None:
        self.actor = set()
        self.note("actor off")

    def call(self, verb: str) -> None:
        getattr(self, verb)()

    def sleep(self) -> None:
        assert self.engines == {"weights", "cache"} and not self.actor, (
            "the actor allocates nothing while an engine goes to sleep"
        )
        self.engines = set()
        self.note("sleep")

    def wake_weights(self) -> None:
        assert not self.engines
        self.engines = {"weights"}
        self.note("wake weights")

    def wake_cache(self) -> None:
        assert self.engines == {"weights"}
        self.engines = {"weights", "cache"}
        self.note("wake cache")

    def transfer(self, version: int) -> dict[str, float]:
        assert self.actor == {"parameters"} and self.engines == {"weights"}
        self.fleet.proven(self.fleet.reached(), version)
        self.note(f"transfer {version}")
        return {"reshard/weight_version": float(version)}

    def commit(self, version: int) -> dict[str, float]:
        assert self.engines == {"weights", "cache"} and not self.actor
        self.fleet.committed(self.fleet.reached(), version)
        self.note(f"commit {version}")
        return {}

    def bring_to(self, version: int) -> dict[str, float]:
        self.note(f"sync {version}")
        return {}

    def take_checkpoint(self) -> int:
        assert not self.engines
        self.actor |= {"parameters", "optimizer"}
        self.note("take checkpoint")
        return 5

    def write_checkpoint(self, work) -> list[dict]:
        return []


def colocated(devices: Devices) -> Colocated:
    return Colocated(devices, devices, devices, devices.gate)


TO_ENGINES = [
    "on: parameters", "gate train_to_sync", "wake weights", "transfer {}", "actor off", "gate sync_to_rollout",
    "wake cache", "commit {}",
]  # fmt: skip
TO_UPDATE = ["sleep", "gate rollout_to_log_prob", "on: parameters", "gate train", "on: parameters gradients optimizer"]


def calls_of(*parts: tuple[list[str], int]) -> list[str]:
    return [call.format(version) for calls, version in parts for call in calls]


def test_a_step_on_shared_devices_never_has_both_there_with_all_they_have():
    devices = Devices()
    placement = colocated(devices)
    placement.begin(0)
    for step in (1, 2):
        placement.to_generation()
        placement.to_log_probs()
        placement.to_update()
        assert placement.to_engines(step) == {"reshard/weight_version": float(step)}
    assert devices.calls == calls_of((TO_ENGINES, 0), (TO_UPDATE, 0), (TO_ENGINES, 1), (TO_UPDATE, 0), (TO_ENGINES, 2))


def test_the_optimizer_comes_while_log_probs_are_computed_where_it_is_told_to():
    devices = Devices()
    placement = Colocated(devices, devices, devices, devices.gate, prefetched=["optimizer"])
    placement.begin(0)
    placement.to_log_probs()
    placement.to_update()
    placement.to_engines(1)
    coming = [*TO_UPDATE[:3], "coming: optimizer", *TO_UPDATE[3:]]
    assert devices.calls == calls_of((TO_ENGINES, 0), (coming, 0), (TO_ENGINES, 1))


def test_each_hand_over_is_timed_under_a_declared_name_and_the_start_belongs_to_no_step():
    placement = colocated(Devices())
    placement.begin(3)
    assert placement.seconds() == {}
    placement.to_log_probs()
    placement.to_update()
    placement.to_engines(4)
    seconds = placement.seconds()
    assert set(seconds) == {
        f"switch/{name}_s" for name in ("sleep", "gate", "onload", "offload", "wake_weights", "wake_kv")
    }
    assert all(metric_spec(name).unit == "s" for name in seconds) and all(value >= 0 for value in seconds.values())
    assert placement.seconds() == {}


@pytest.mark.parametrize("phase", ["rollout_to_log_prob", "train", "train_to_sync", "sync_to_rollout"])
def test_a_shortage_ends_the_step_before_anything_comes_on(phase):
    devices = Devices()
    placement = colocated(devices)
    placement.begin(0)
    devices.full_before = phase
    with pytest.raises(Interrupted, match=f"no room for {phase}"):
        for hand_over in (placement.to_log_probs, placement.to_update, lambda: placement.to_engines(1)):
            hand_over()
    assert devices.calls[-1] == f"gate {phase}"


def test_a_save_at_a_runs_end_puts_the_engines_to_sleep_and_one_within_a_step_finds_them_asleep():
    devices = Devices()
    placement = colocated(devices)
    placement.begin(0)
    assert placement.take_checkpoint() == 5 and devices.calls[-2:] == ["sleep", "take checkpoint"]
    assert placement.take_checkpoint() == 5 and devices.calls[-2:] == ["take checkpoint"] * 2


def a_step(placement: Colocated, step: int) -> None:
    placement.to_log_probs()
    placement.to_update()
    placement.to_engines(step)


def test_an_engine_that_is_lost_beside_another_starts_while_ranks_are_off_and_takes_part_in_the_next_hand_over():
    devices = Devices()
    placement = colocated(devices)
    placement.begin(0)
    devices.lose(1)
    assert devices.calls[-1] == "start engine 1"
    placement.mend()
    assert devices.calls[-1] == "start engine 1", "beside one that generates there is no room for ranks"
    assert devices.fleet.stale() == {1} and devices.fleet.states.those(READY) == ["engine 0"]
    a_step(placement, 1)
    assert devices.calls[-len(TO_UPDATE + TO_ENGINES) :] == calls_of((TO_UPDATE, 0), (TO_ENGINES, 1))
    assert devices.fleet.states.those(READY) == ["engine 0", "engine 1"]


def test_where_nobody_generates_ranks_come_with_the_weights_that_they_hold():
    devices = Devices()
    placement = colocated(devices)
    placement.begin(0)
    a_step(placement, 1)
    devices.lose(0)
    devices.lose(1)
    placement.mend()
    again = [call.format("again") for call in ["sleep", *TO_ENGINES]]
    assert devices.calls[-len(again) :] == again
    assert devices.fleet.states.those(READY) == ["engine 0", "engine 1"] and devices.fleet.version == 1
    before = list(devices.calls)
    placement.mend()
    assert devices.calls == before
    a_step(placement, 2)


@pytest.mark.parametrize("verb", ["sleep", "wake_weights", "wake_cache"])
def test_an_engine_that_is_lost_while_ranks_are_there_is_started_when_they_are_gone(verb):
    devices = Devices()
    placement = colocated(devices)
    placement.begin(0)
    asked = getattr(devices, verb)

    def lost_then():
        asked()
        devices.lose(0)

    setattr(devices, verb, lost_then)
    a_step(placement, 1)
    setattr(devices, verb, asked)
    assert "start engine 0" not in devices.calls
    placement.mend()
    assert devices.calls[-1] == "start engine 0" and devices.fleet.states.those(READY) == ["engine 1"]
    a_step(placement, 2)
    assert devices.fleet.states.those(READY) == ["engine 0", "engine 1"]


def test_ranks_wait_for_an_engine_that_is_starting_and_a_signal_ends_the_wait_but_not_the_last_save(monkeypatch):
    devices = Devices()
    placement = colocated(devices)
    placement.begin(0)
    started = []
    monkeypatch.setattr(devices.fleet, "_look_at", lambda engine, late_at, answers: started.append(engine))
    devices.lose(1)

    def signalled():
        if len(started) > 3:
            raise Interrupted("SIGTERM")

    devices.poll = signalled
    with pytest.raises(Interrupted, match="SIGTERM"):
        placement.to_log_probs()
    assert "sleep" not in devices.calls and devices.fleet.states.those(STARTING) == ["engine 1"]
    assert placement.take_checkpoint() == 5 and devices.calls[-2:] == ["sleep", "take checkpoint"]
    assert not devices.fleet.states.those(STARTING), "nobody needs it any more"


def test_with_devices_of_their_own_nothing_is_handed_over():
    devices = Devices()
    placement = Separate(devices, devices)
    placement.begin(0)
    assert devices.calls == []  # engines have loaded step 0 themselves
    placement.begin(4)
    placement.to_generation()
    placement.to_log_probs()
    placement.to_update()
    placement.to_engines(5)
    assert devices.calls == ["sync 4", "actor off", "sync 5"] and placement.seconds() == {}


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
def test_a_run_that_goes_on_brings_its_weights_to_engines_that_have_loaded_those_of_step_0(step):
    devices = Devices()
    Separate(devices, devices).begin(step)
    assert devices.calls == [f"sync {step}"]


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_ranks_and_engines_are_asked_by_their_groups_which_know_how_long_and_who_is_the_cause():
    asked = []

    def group(name: str, of: dict) -> SimpleNamespace:
        def answers(method, phase):
            asked.append((name, method, phase))
            return of[method]

        return SimpleNamespace(answers=answers, process_devices={"engine 0": [("node", 0)]})

    here = [("node", 0)]
    actor = group("ranks", {"devices": {"rank 0": here}, "memory": {"rank 0": holder("rank 0", 10, free=12).memory}})
    engines = group("engines", {"memory": {"engine 0": [holder("engine 0", 0, free=12).memory]}})
    gate = MemoryGate(plan_with(12, 12, 2, 78), actor, engines)
    gate("train_to_sync")
    gate("train_to_sync")
    measures = [(name, "memory", "measuring memory before train_to_sync") for name in ("ranks", "engines")]
    assert asked == [("ranks", "devices", "asking for the devices of ranks"), *measures, *measures]


def holder(name: str, live: float, free: float | None = None) -> MemoryHolder:
    kind = "actor" if name.startswith("rank") else "engine"
    return MemoryHolder(name, kind, ProcessMemory(int(live * GIB), None if free is None else int(free * GIB), 0, 0))


def plan_with(actor: int, engine: int, asleep: int, available: int) -> dict:
    """A plan whose train_to_sync gives the actor and the engine so many GiB,
    `asleep` of the engine's for what it keeps in sleep.
    """
    terms = {"parameters": actor * GIB, "engine_weights": (engine - asleep) * GIB, "engine_asleep": asleep * GIB}
    phase = {"terms": terms, "device_bytes": available * GIB, "change": ""}
    host = {"bytes_of_a_rank": 0, "bytes_of_a_worker": 0}
    return {"memory": {"phases": {"train_to_sync": phase}, "host": host}, "layout": {"placement": "colocated"}}


# 12 GiB for the actor, of which 10 are there; 10 for the engine's weights, and 2 that a sleeping engine keeps: 12 are
# to come
NEED = PhaseMemory.of(plan_with(12, 12, 2, 78), "train_to_sync")


def test_room_is_what_a_device_says_is_free_against_what_is_to_come():
    assert shortage(NEED, [holder("rank 0", 10, free=12), holder("engine 0", 0, free=12)]) is None
    said = shortage(NEED, [holder("rank 0", 10, free=11.5), holder("engine 0", 0, free=11.5)])
    assert said == (
        "2.00 GiB of the actor and 10.00 GiB of the engine are still planned for this device, 11.50 GiB are free; "
        "in use: rank 0 10.00 GiB, engine 0 0.00 GiB"
    )


def test_where_no_device_says_what_is_free_it_is_what_the_plan_may_fill_less_what_is_held():
    assert shortage(NEED, [holder("rank 0", 10), holder("engine 0", 0)]) is None
    # an optimizer of 58 GiB stayed: 78 - 68 are left for the engine's 10
    assert shortage(NEED, [holder("rank 0", 68), holder("engine 0", 0)]) is None
    said = shortage(NEED, [holder("engine 0", 0), holder("rank 0", 68.5)])
    assert (
        said == "10.00 GiB of the engine are still planned for this device, 9.50 GiB are free; in use: rank 0 "
        "68.50 GiB, engine 0 0.00 GiB"
    )


def test_a_device_without_an_engine_needs_room_for_its_rank_alone():
    assert NEED.to_come([holder("rank 3", 10)]) == {"actor": 2 * GIB}
