"""Ray gives its own start 30 s whatever the machine has to do: one that ran out of time is tried again, and no more."""

import os
import subprocess
from contextlib import ExitStack

import pytest
from ray._private import parameter

from mrl.cluster import ray_cluster
from mrl.errors import EnvironmentFault

SLOW = Exception("The current node timed out during startup. This could happen because some of the raylet failed")


class Rays:
    """Stands in for Ray: a start leaves a process behind, and may fail."""

    def __init__(self, monkeypatch, failures):
        self.failures, self.folders, self.left, self.shutdowns = list(failures), [], [], 0
        self.options = []
        self.parameters = []
        monkeypatch.setattr(ray_cluster.ray, "init", self.init)
        monkeypatch.setattr(ray_cluster.ray, "shutdown", self.shutdown)

    def init(self, _temp_dir, **options):
        assert all(one.poll() is not None for one in self.left), "nothing of the start before is left"
        assert options["address"] == "local" and os.path.isdir(_temp_dir)
        self.folders.append(_temp_dir)
        self.options.append(options)
        self.parameters.append(parameter.RayParams(num_cpus=2))  # as ray.init makes them
        self.left.append(subprocess.Popen(["sleep", "60"]))
        if self.failures:
            raise self.failures.pop(0)

    def shutdown(self):
        self.shutdowns += 1


@pytest.fixture
def starts(monkeypatch):
    made = []

    def of(*failures):
        made.append(Rays(monkeypatch, failures))
        return made[-1]

    yield of
    for one in (one for rays in made for one in rays.left):
        one.kill()
        one.wait()


def test_a_start_that_ran_out_of_time_is_tried_again_in_a_folder_of_its_own(starts, capsys):
    rays = starts(SLOW, TimeoutError("Timed out after 30 seconds while waiting for node to startup."))
    with ExitStack() as stack:
        ray_cluster._start_own(stack)
        assert len(set(rays.folders)) == 3 and rays.shutdowns == 2
        assert rays.left[-1].poll() is None
    assert rays.shutdowns == 5 and not any(map(os.path.exists, rays.folders))
    assert capsys.readouterr().out.count("Ray did not start in time, and is started again (") == 2


@pytest.mark.parametrize(
    ("name", "seconds"), [("gcs_rpc_server_reconnect_timeout_s", 1.0), ("health_check_period_ms", 5 / 1000)]
)  # of a raylet there are five looks
def test_lost_parts_of_ray_are_missed_within_ten_seconds_unless_the_environment_says_otherwise(
    starts, monkeypatch, name, seconds
):
    monkeypatch.delenv(f"RAY_{name}", raising=False)
    assert 0 < settings_of(starts())[name] * seconds < 10
    monkeypatch.setenv(f"RAY_{name}", "60")
    assert name not in settings_of(starts())


def settings_of(rays: Rays) -> dict[str, object]:
    with ExitStack() as stack:
        ray_cluster._start_own(stack)
    return rays.options[0]["_system_config"]


def test_it_is_tried_three_times_and_no_more(starts):
    rays = starts(SLOW, SLOW, SLOW, SLOW)
    with (
        ExitStack() as stack,
        pytest.raises(EnvironmentFault, match="on this machine, 3 times: Exception: The current"),
    ):
        ray_cluster._start_own(stack)
    assert len(rays.folders) == 3


def test_what_is_no_matter_of_time_is_told_at_once(starts):
    rays = starts(PermissionError("no room for sockets"))
    with ExitStack() as stack, pytest.raises(EnvironmentFault, match="on this machine: PermissionError: no room"):
        ray_cluster._start_own(stack)
    assert len(rays.folders) == 1


def test_a_cluster_of_its_own_has_neither_an_autoscaler_nor_a_reader_of_logs(starts):
    """Ray's defaults are back after a start, also after one that failed: a cluster that is joined has its own."""
    made = parameter.RayParams
    rays = starts(SLOW)
    with ExitStack() as stack:
        ray_cluster._start_own(stack)
        assert [(each.num_cpus, each.no_monitor, each.include_log_monitor) for each in rays.parameters] == [
            (2, True, False)
        ] * 2
        assert parameter.RayParams is made
