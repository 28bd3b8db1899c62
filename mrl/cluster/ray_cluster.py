"""The Ray cluster that a run works on: joined when there is one, else started for the run. Ray listens on all addresses, with a token."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from mrl.cluster.prerequisites import ray_address, unreachable
from mrl.cluster.resources import check_size, own_cpus
from mrl.config.schema import RunConfig
from mrl.errors import EnvironmentFault


@contextmanager
def ray_cluster(config: RunConfig, actor: bool = True) -> Iterator[None]:
    """Connects for the time of the block. Raises EnvironmentFault when the cluster is unreachable or too small; without `actor` only the
    engines have to fit.
    """
    address = ray_address(config)
    folder = None if address else tempfile.mkdtemp(prefix="mrl-ray-", dir="/tmp")  # short: Ray puts sockets below it
    try:
        _connect(address, folder)
        check_size(config, ray.cluster_resources(), actor=actor)
        yield
    finally:
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _connect(address: str | None, folder: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "warning", "namespace": f"mrl-{os.getpid()}"}
    try:
        if address is None:
            ray.init(address="local", num_cpus=own_cpus(), include_dashboard=False, _temp_dir=folder, _node_ip_address="127.0.0.1", **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        if address is None:
            raise EnvironmentFault(f"Ray did not start on this machine: {type(error).__name__}: {error}") from error
        raise unreachable(address, str(error)) from error
