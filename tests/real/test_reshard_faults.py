"""What goes wrong in a real sync is named, leaves no engine serving a mixture, and is mended or ends the run as
resumable.

Faults that need no engine are in tests/unit/test_weight_sync.py; what a worker's handshake and read-back find, in
test_engine_slices.py.
"""

import os
import re
import signal
import threading
import time

import psutil
import pytest
import ray
from test_sync import (
    Case,
    SyncFromAnyVersion,
    World,
    answers,
    config_for,
    equal,
    held_by,
    start_engines,
    start_ranks,
    two_models,
)

from mrl.cluster.ray_cluster import ray_cluster
from mrl.cluster.weight_sync import WeightSync
from mrl.config.deployment import Deployment
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError, EnvironmentFault, Interrupted

# two workers: what one answers must not be taken for the other's
CASE = Case("moe", "float32", dict(tensor_model_parallel_size=2), {})
LAYOUT = dict(world_size=2, tensor_model_parallel_size=2)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """One engine of two workers and other weights, two ranks."""
    folder = tmp_path_factory.mktemp("faults")
    start, other = two_models(folder, CASE)
    config = config_for(start, CASE, LAYOUT)
    with ray_cluster(Deployment.of(config)):
        engines = start_engines(config_for(other, CASE, {}), folder / "engines")
        try:
            actor = start_ranks(config, folder / "actor")
            engines.wait_started()
            yield World(CASE, start, engines, actor, None, None)
            actor.stop()
        finally:
            engines.stop()


def sync_of(world: World, **changes) -> WeightSync:
    config = config_for(world.start, CASE, LAYOUT).model_dump()
    for key, value in changes.items():
        section, _, name = key.partition("__")
        config[section][name] = value
    changed = RunConfig.model_validate(config)
    return SyncFromAnyVersion(changed.model, Deployment.of(changed), changed.reshard, world.actor, world.engines)


@pytest.mark.real
def test_faults_one_after_the_other(world, capfd):
    """In one test, because what each leaves behind is where the next begins."""
    an_engine_of_another_dtype_or_layout_is_refused_and_the_parameter_is_named(world)
    a_flipped_bit_is_named_and_the_engine_synced_again(world, capfd)
    a_message_that_never_comes_is_named_and_the_engine_synced_again(world, capfd)
    a_fault_that_stays_leaves_an_engine_that_refuses_to_generate(world)
    a_worker_that_dies_in_the_middle_ends_the_run_as_resumable(world)


def an_engine_of_another_dtype_or_layout_is_refused_and_the_parameter_is_named(world):
    before = held_by(world.engines)
    with pytest.raises(EnvironmentFault, match=r"engine 0 .*dtype is float32 in vLLM, bfloat16 in the plan"):
        sync_of(world, rollout__dtype="bfloat16").bring_to(1)
    with pytest.raises(ConfigError, match="2 ranks and 2 workers, the layouts have 2 and 1"):
        sync_of(world, rollout__tensor_model_parallel_size=1).bring_to(1)
    assert held_by(world.engines) == before
    answers(world.engines)  # it serves what it served


def a_flipped_bit_is_named_and_the_engine_synced_again(world, capfd):
    sync = sync_of(world)
    sync.bring_to(1)
    clean, said = held_by(world.engines), answers(world.engines)
    move_every_weight(world, sync, 2, clean)
    ray.get(world.actor.workers[1].spoil_syncs.remote(1))
    metrics = sync.bring_to(3)
    assert (metrics["reshard/resynced"], metrics["reshard/verified"]) == (1, 1)
    assert metrics["reshard/bytes_moved"] == metrics["reshard/bytes_required"]
    reported = capfd.readouterr().err
    assert "engine 0 worker 0: " in reported and "differs on the way, sent by rank" in reported
    assert held_by(world.engines) == clean
    assert answers(world.engines) == said


def a_message_that_never_comes_is_named_and_the_engine_synced_again(world, capfd):
    """Both workers fail, one of them because the other did; transports are opened anew."""
    sync = sync_of(world, reshard__timeout_s=8.0)
    sync.bring_to(10)
    clean, said = held_by(world.engines), answers(world.engines)
    move_every_weight(world, sync, 11, clean)
    ray.get(world.actor.workers[1].lose_message.remote())
    assert sync.bring_to(12)["reshard/resynced"] == 1
    reported = capfd.readouterr().err
    assert re.search(
        r"engine 0 worker 0: rank 1, round 0 of update \d+ for worker 0: nothing came|rank 1 got no room", reported
    ), reported
    assert "(logs/engine-0.log)" in reported
    assert held_by(world.engines) == clean
    assert answers(world.engines) == said


def move_every_weight(world, sync, version, clean):
    """The engine holds other weights throughout; the ranks have those of `clean` again: twice a number, halved,
    is the number.
    """
    world.actor.call("scale_weights", 2.0)
    sync.bring_to(version)
    assert all(equal(now, then) == [] for now, then in zip(held_by(world.engines), clean, strict=True))
    world.actor.call("scale_weights", 0.5)


def a_fault_that_stays_leaves_an_engine_that_refuses_to_generate(world):
    sync = sync_of(world)
    sync.bring_to(4)
    clean = held_by(world.engines)
    move_every_weight(world, sync, 5, clean)
    ray.get(world.actor.workers[1].spoil_syncs.remote(2))
    with pytest.raises(
        Interrupted, match=r"weight sync to version 6: engine 0 could not be brought .* twice: engine 0 worker 0: "
    ) as told:
        sync.bring_to(6)
    assert "model." in str(told.value) and "sent by rank" in str(told.value)
    assert held_by(world.engines) != clean
    with pytest.raises(ray.exceptions.RayTaskError, match="engine 0 is FENCED and refuses generate"):
        answers(world.engines)
    sync.bring_to(7)  # the fault has passed
    assert held_by(world.engines) == clean
    answers(world.engines)


def a_worker_that_dies_in_the_middle_ends_the_run_as_resumable(world):
    sync = sync_of(world)
    sync.bring_to(8)
    ray.get([worker.stall.remote(8.0) for worker in world.actor.workers])
    processes = psutil.Process().children(recursive=True)
    core = next(p for p in processes if "EngineCore" in " ".join(p.cmdline()) or "EngineCore" in p.name())
    killer = threading.Timer(2.0, os.kill, (core.pid, signal.SIGKILL))
    killer.start()
    began = time.monotonic()
    with pytest.raises(Interrupted, match="engine 0: vLLM's process below it died"):
        sync.bring_to(9)
    assert time.monotonic() - began < 60
    killer.join()
