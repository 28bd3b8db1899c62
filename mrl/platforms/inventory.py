"""Finds the devices of this host, from drivers and /dev. Loads no torch. Every command has a deadline."""

import ctypes
import hashlib
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from mrl.platforms.versions import MIN_NPU_DRIVER_FOR_IPC

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
# programs that prove that torch computes on the device; each prints one line
TORCH_PROBES = {
    "cpu": "import torch; torch.ones(2).sum(); print('torch', torch.__version__, 'computes;', "
    "torch.get_num_threads(), 'threads')",
    "cuda": "import torch; n = torch.cuda.device_count(); assert n, 'torch sees no device'; torch.ones(2, "
    "device='cuda').sum().item(); "
    "print('torch', torch.__version__, 'computes on', n, torch.cuda.get_device_name(0))",
    "npu": "import torch, torch_npu; n = torch.npu.device_count(); assert n, 'torch_npu sees no device'; "
    "torch.ones(2).npu().sum().item(); print('torch_npu', torch_npu.__version__, 'computes on', n, 'devices')",
}
BUILT_FOR_A_CHIP = "npu"  # the device whose vLLM is built for one type of chip: mrl/platforms/ascend_build.py
# programs that prove that the layers of an accelerator's ranks are available; slow
LAYER_PROBES = {
    "cuda": "import transformer_engine.pytorch, transformer_engine as te; print('Transformer Engine', "
    "te.__version__, 'imports')",
}
# CUDA of torch and Transformer Engine in the cuda row, and the oldest driver of that family
# (docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility)
CUDA_MAJOR = 13
MIN_CUDA_DRIVER = "580"
_COMPAT = "cuda/compat"  # folder of NVIDIA's package that runs a newer CUDA on older drivers of data-center devices
_ASCEND = Path("/usr/local/Ascend")
_TIMEOUT_S = 5.0
_OF_NETWORK = ("NCCL_", "TORCH_NCCL_", "HCCL_", "GLOO_", "TP_SOCKET_")
_HOST_IDENTITY = "NCCL_HOSTID"  # NCCL compares it where it is set, not what the host is (src/misc/utils.cc)
_OWN_TO_A_NODE = ("_IFNAME", _HOST_IDENTITY, "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_TOPO_FILE")  # may differ


@dataclass(frozen=True)
class HostDevices:
    """Devices of one kind on this host."""

    kind: str
    count: int  # on cpu: number of cores that this process may use
    driver: str | None = None
    toolkit: str | None = None  # CANN
    error: str | None = None  # why the driver did not answer


@dataclass(frozen=True)
class Rdma:
    """RDMA adapters of this host (InfiniBand, RoCE), for which NCCL looks."""

    adapters: tuple[str, ...] = ()  # as the kernel knows them, also inside a container
    devices: bool = False  # /dev/infiniband exists: a container has it only if it was passed in
    library: bool = False  # libibverbs can be loaded; without it NCCL silently uses sockets


def find_rdma(system: Path = Path("/sys/class/infiniband"), devices: Path = Path("/dev/infiniband")) -> Rdma:
    """Asks the kernel and the loader."""
    adapters = ()
    if system.is_dir():
        adapters = tuple(sorted(adapter.name for adapter in system.iterdir()))
    return Rdma(adapters, any(devices.glob("uverbs*")), _loads("libibverbs.so.1"))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def detect_kind() -> str:
    """Returns npu, cuda or cpu, from what the host shows."""
    if glob("/dev/davinci[0-9]*"):
        return "npu"
    if Path("/proc/driver/nvidia/version").exists():
        return "cuda"
    return "cpu"


def shows_devices(kind: str) -> bool:
    """Whether this host has a driver of that kind, or device files of it. Asks no program, so it takes no time."""
    if kind == "cuda":
        return detect_kind() == "cuda" or bool(glob("/dev/nvidia[0-9]*")) or Path("/dev/dxg").exists()
    return kind == "cpu" or detect_kind() == kind


def find_devices(kind: str) -> HostDevices:
    """Returns the devices of that kind. Never raises: errors are in `error`."""
    if kind == "cpu":
        return HostDevices("cpu", len(os.sched_getaffinity(0)), driver=_cpu_features())
    if kind == "cuda":
        return _nvidia()
    driver = _stated(_ASCEND / "driver" / "version.info", r"^Version=(\S+)")
    return HostDevices("npu", len(glob("/dev/davinci[0-9]*")), driver, _cann(), _failure(["npu-smi", "info"]))


def visible_faults(kind: str, count: int, environment: Mapping[str, str]) -> list[str]:
    """Returns faults of the variable that lists a process's visible devices; empty when all is well."""
    name = VISIBLE.get(kind)
    value = None
    if name:
        value = environment.get(name)
    if value is None:
        return []
    listed = [part.strip() for part in value.split(",") if part.strip()]
    if not listed:
        return [f"{name} is empty, which hides every device; unset it"]
    wrong = [part for part in listed if part.isdigit() and int(part) >= count]
    if wrong and count:
        return [f"{name}={value} names {', '.join(wrong)}, and this host has devices 0 to {count - 1}"]
    return []


def device_number(name: str) -> int:
    """Returns a number for a device as its scheduler names it, the same in every process of the host.

    It is the index. UUIDs and ids of MIG partitions are names, and get a number above any index.
    """
    if name.isdigit():
        return int(name)
    return 1 << 40 | int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


@dataclass(frozen=True)
class DriverFault:
    """A fault of a driver. `breaks`: nothing computes with it."""

    found: str
    cure: str
    breaks: bool = False


def driver_fault(devices: HostDevices, environment: Mapping[str, str]) -> DriverFault | None:
    """Returns the fault of the driver; None when nothing is known against it."""
    if devices.kind == "cuda" and devices.driver and _numbers(devices.driver) < _numbers(MIN_CUDA_DRIVER):
        return _old_for_cuda(devices.driver, _COMPAT in environment.get("LD_LIBRARY_PATH", ""))
    if devices.kind != "npu":
        return None
    if devices.driver is None:
        return DriverFault("version unknown", "mount /usr/local/Ascend/driver/version.info into the container")
    if _numbers(devices.driver) < _numbers(MIN_NPU_DRIVER_FOR_IPC):
        least = MIN_NPU_DRIVER_FOR_IPC
        cure = f"update HDK to {least} or newer; older ones cannot share device memory between actor and engine"
        return DriverFault(devices.driver, cure)
    return None


def _old_for_cuda(driver: str, has_newer_libraries: bool) -> DriverFault:
    found = f"{driver}; CUDA {CUDA_MAJOR}, for which torch is built, needs {MIN_CUDA_DRIVER} or newer"
    found += f", or on data-center devices {_COMPAT}, which is on LD_LIBRARY_PATH" * has_newer_libraries
    cure = f"update the host's driver to {MIN_CUDA_DRIVER} or newer (a container has the host's)"
    return DriverFault(found, cure, breaks=not has_newer_libraries)


def network_fault(kind: str, rdma: Rdma, nnodes: int) -> tuple[str, str] | None:
    """Returns why NCCL would silently use sockets between nodes, and the cure.

    HCCL has its own adapters in the devices.
    """
    if kind != "cuda":
        return None
    if not rdma.adapters:
        cure = "fine if another network's plugin for NCCL is installed; else load the adapters' driver on the host"
        if nnodes > 1:
            return ("none for RDMA: between nodes NCCL goes over sockets", cure)
        return None
    listed = ", ".join(rdma.adapters)
    if not rdma.devices:
        return f"{listed}, but no /dev/infiniband", "give a container --device /dev/infiniband --ulimit memlock=-1"
    if not rdma.library:
        return (
            f"{listed}, but libibverbs.so.1 cannot be loaded",
            "apt-get install libibverbs1 ibverbs-providers rdma-core",
        )
    return None


def network_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that communicators of several nodes read."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_OF_NETWORK)}


def network_setting_faults(
    settings: Mapping[str, Mapping[str, str]], interfaces: Mapping[str, Sequence[str]]
) -> list[str]:
    """Returns what would keep communicators between nodes from working, each with its cure.

    `settings` are the `network_settings` of each node, by address. `interfaces` are the names of its interfaces.
    """
    faults = [
        f"{name}={value} on {node}, which has no such interface (it has {', '.join(interfaces[node])}): correct it"
        for node, own in settings.items()
        for name, value in own.items()
        if name.endswith("_SOCKET_IFNAME") and not _names_one(value, interfaces[node])
    ]
    for name in sorted({name for own in settings.values() for name in own if not name.endswith(_OWN_TO_A_NODE)}):
        values = {node: own.get(name, "unset") for node, own in settings.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{value} on {node}" for node, value in values.items())
            faults.append(f"{name} differs ({listed}): set one value on every node")
    return faults + host_identity_faults((node, own.get(_HOST_IDENTITY, "")) for node, own in settings.items())


def host_identity() -> str:
    """Returns what this process tells NCCL in place of its host's own identity; empty if nothing."""
    return os.environ.get(_HOST_IDENTITY, "")


def host_identity_faults(processes: Iterable[tuple[str, str]]) -> list[str]:
    """Returns where NCCL would mistake hosts, each with its cure. Takes each process's node and `host_identity`."""
    nodes_of: dict[str, list[str]] = {}
    identities_of: dict[str, list[str]] = {}
    for node, identity in dict.fromkeys(processes):
        nodes_of.setdefault(identity, []).append(node)
        identities_of.setdefault(node, []).append(identity)
    one = [
        f"{_HOST_IDENTITY}={identity} on {' and '.join(nodes)}, so NCCL takes them for one host: unset it"
        for identity, nodes in nodes_of.items()
        if identity and len(nodes) > 1
    ]
    several = [
        f"{_HOST_IDENTITY} differs between processes of {node} ({', '.join(word or 'unset' for word in identities)}), "
        "so NCCL takes them for several hosts and goes over the network between their devices: unset it"
        for node, identities in identities_of.items()
        if len(identities) > 1
    ]
    return one + several


def _names_one(value: str, interfaces: Sequence[str]) -> bool:
    """Tells whether a list of interfaces, as NCCL reads it, leaves one: `=` for whole names, `^` for all but these."""
    names = value.lstrip("^=").split(",")
    is_exact = "=" in value[:2]
    found = [own for own in interfaces if any(own == name if is_exact else own.startswith(name) for name in names)]
    if value.startswith("^"):
        return len(found) < len(interfaces)
    return bool(found)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version, so that 25.5.0 is above 25.3 and 24.1.rc3 below."""
    return tuple(int(part) for part in re.findall(r"\d+", version.lower().partition("rc")[0]))


def _nvidia() -> HostDevices:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return HostDevices("cuda", 0, error=f"{command[0]}: {error}")
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return HostDevices("cuda", len(lines), driver=lines[0] if lines else None)


def _failure(command: list[str]) -> str | None:
    try:
        subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{' '.join(command)}: {error}"
    return None


def _cpu_features() -> str | None:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    return (
        ", ".join(name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if re.search(rf"\b{name}\b", flags))
        or None
    )


def _cann() -> str | None:
    for folder in (os.environ.get("ASCEND_TOOLKIT_HOME"), _ASCEND / "ascend-toolkit" / "latest"):
        for file in sorted(Path(folder).glob("*/ascend_toolkit_install.info")) if folder else ():
            if version := _stated(file, r"^version=(\S+)"):
                return version
    return None


def _stated(file: Path, pattern: str) -> str | None:
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    if match:
        return match[1]
    return None
