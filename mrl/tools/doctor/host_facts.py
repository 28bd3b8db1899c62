"""Facts about this host and this installation, read without heavy imports, and the form of findings."""

import importlib.metadata
import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mrl.acting.python_tool import fault as sandbox_fault
from mrl.acting.sandboxes.trial import faults as backend_faults
from mrl.platforms.device_state import DeviceState, read_device_state
from mrl.platforms.hosting import BUCKET_FOLDER
from mrl.platforms.inventory import HostDevices, Rdma, find_devices, find_rdma
from mrl.platforms.versions import VLLM_GENERATIONS, installed_versions
from mrl.units import GIB

_SHM = "/dev/shm"
OK = "ok"
WARNING = "warning"
FAILURE = "failure"
_LEFT_BEHIND = ("psm_*", "vllm_dist_*", f"{BUCKET_FOLDER}*")


@dataclass(frozen=True)
class HostFacts:
    """The facts that checks use. Sizes are in GiB."""

    device: str
    python: tuple[int, int]
    versions: dict[str, str]  # installed packages of PACKAGES
    devices: HostDevices
    environment: dict[str, str]
    busy_ports: tuple[int, ...]  # among the requested ones
    shm_gib: float  # size of /dev/shm
    shm_free_gib: float
    shm_left: tuple[str, ...]  # segments of mrl that may have no owner any more
    open_files: int  # soft limit
    locked_memory: float  # soft limit in GiB, inf for none
    disk_gib: dict[str, float]  # free, by folder
    token_mode: int | None  # permissions of Ray's token file; None if it is absent
    plugins: tuple[str, ...]  # installed vllm.general_plugins
    adapters: tuple[str, ...]  # generations of vLLM, such as "0.32", to which mrl can send weights
    rdma: Rdma = field(default_factory=Rdma)
    processes: float = float("inf")  # soft limit of processes and threads of this user; inf for none
    state: DeviceState = field(default_factory=DeviceState)  # of GPUs
    nnodes: int = 1  # nodes of the run that this host is meant for
    sandbox_fault: str | None = None  # why programs of a model cannot be confined
    # why sandboxes cannot be started, by backend; empty where they can
    backend_faults: dict[str, str] = field(default_factory=dict)


def read_host(device: str, ports: Iterable[int], nnodes: int = 1) -> HostFacts:
    """Reads everything in well under a second, except drivers (at most 5 s)."""
    size, _, free = shutil.disk_usage(_SHM) if Path(_SHM).is_dir() else (0, 0, 0)
    locked, processes = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC))
    return HostFacts(
        device=device,
        python=sys.version_info[:2],
        versions=installed_versions(),
        devices=find_devices(device),
        environment=dict(os.environ),
        busy_ports=tuple(port for port in ports if _busy(port)),
        shm_gib=size / GIB,
        shm_free_gib=free / GIB,
        shm_left=tuple(sorted(p.name for pattern in _LEFT_BEHIND for p in Path(_SHM).glob(pattern))),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=float("inf") if locked == resource.RLIM_INFINITY else locked / GIB,
        disk_gib={folder: shutil.disk_usage(folder).free / GIB for folder in (str(Path.cwd()), "/tmp")},
        token_mode=_token_mode(),
        plugins=tuple(point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")),
        adapters=tuple(generation.name for generation in VLLM_GENERATIONS),
        rdma=find_rdma(),
        processes=float("inf") if processes == resource.RLIM_INFINITY else processes,
        state=read_device_state(device),
        nnodes=nnodes,
        sandbox_fault=sandbox_fault(),
        backend_faults=backend_faults(),
    )


def _busy(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError:
            return True
    return False


def _token_mode() -> int | None:
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if path.is_file():
        return path.stat().st_mode & 0o777
    return None


@dataclass(frozen=True)
class Finding:
    """The result of one check. `cure` tells what to do; it is empty when all is well."""

    name: str
    status: str
    found: str
    cure: str = ""

    def to_json(self) -> dict[str, str]:
        """Returns plain data: name, status, found, cure."""
        return asdict(self)


def ok(name: str, found: str) -> Finding:
    """Makes a finding that needs no action."""
    return Finding(name, OK, found)


def warning(name: str, found: str, cure: str) -> Finding:
    """Makes a finding with which a run may start, but may fail."""
    return Finding(name, WARNING, found, cure)


def failure(name: str, found: str, cure: str) -> Finding:
    """Makes a finding with which a run cannot work.

    `mrl doctor` then ends with the exit code of a faulty environment.
    """
    return Finding(name, FAILURE, found, cure)
