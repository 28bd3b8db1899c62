"""Checks the host's devices, memory, limits, disk and ports, and Ray's address and token, without asking Ray."""

from collections.abc import Iterator

from mrl.platforms.device_state import state_checks
from mrl.platforms.hosting import environment_faults
from mrl.platforms.inventory import driver_fault, network_fault, visible_faults
from mrl.tools.doctor.host_facts import Finding, HostFacts, failure, ok, warning

# GiB. Below the first limit a run fails (containers have 0.06 by default: vLLM's queues and one bucket of weights do
# not fit). Below the second it may fail once larger models pass their weights through it.
SHM_LEAST = 1.0
SHM_ENOUGH = 8.0
# GiB free: logs and a tiny checkpoint; a few checkpoints of a small model
DISK_LEAST = 2.0
DISK_ENOUGH = 20.0
# Ray opens a few sockets for each worker and requests 65535
FILES_LEAST = 4096
FILES_ENOUGH = 65535
# Threads count too: a rank or an engine has a hundred (torch, gloo or NCCL, Ray), and so has a raylet with its agents
PROCESSES_LEAST = 2048
PROCESSES_ENOUGH = 16384
LOCKED_ENOUGH = 1.0  # GiB; RDMA pins its buffers


def host_checks(host: HostFacts) -> Iterator[Finding]:
    """Yields findings on devices, ports, memory, limits, disks, environment and driver."""
    yield _devices(host)
    yield _visible(host)
    yield from _device_state(host)
    yield _ports(host)
    yield _shared_memory(host)
    yield _left_behind(host)
    yield _open_files(host)
    yield _processes(host)
    yield _locked_memory(host)
    yield _rdma(host)
    yield from (_disk(folder, free) for folder, free in host.disk_gib.items())
    yield _environment(host)
    yield _driver(host)
    yield _sandbox(host)
    yield from (_backend(name, fault) for name, fault in host.backend_faults.items())


def _devices(host: HostFacts) -> Finding:
    devices = host.devices
    if devices.kind == "cpu":
        cores = f"{devices.count} cores ({devices.driver or 'no vector extensions'})"
        if "avx" not in (devices.driver or "avx"):
            return failure("devices", cores, "vLLM's CPU build needs AVX2 or AVX-512")
        return ok("devices", cores)
    if devices.count == 0 or devices.error:
        cure = "install the driver and its tools; in a container pass the devices in; or choose another --device"
        return failure("devices", f"{devices.count} {devices.kind} devices ({devices.error or 'none shown'})", cure)
    return ok("devices", f"{devices.count} {devices.kind} devices, driver {devices.driver or 'unknown'}")


def _visible(host: HostFacts) -> Finding:
    if faults := visible_faults(host.device, host.devices.count, host.environment):
        return failure("visible devices", "; ".join(faults), "unset the variable; Ray sets it for each process")
    return ok("visible devices", "not restricted, or restricted to existing devices")


def _ports(host: HostFacts) -> Finding:
    if host.busy_ports:
        ports = ", ".join(map(str, host.busy_ports))
        cure = (
            "fine if that is the head; a head still to be started needs others: PORT or "
            "DASHBOARD_PORT of launch/start_head.sh"
        )
        return warning("ports", f"{ports} in use", cure)
    return ok("ports", "free")


def _shared_memory(host: HostFacts) -> Finding:
    free = f"{host.shm_free_gib:.1f} of {host.shm_gib:.1f} GiB free in /dev/shm"
    cure = (
        "give a container --shm-size=16g or --ipc=host, else mount -o remount,size=16G /dev/shm; "
        f"{SHM_ENOUGH:g} GiB are enough to begin with"
    )
    if host.shm_free_gib < SHM_LEAST:
        return failure("shared memory", free, cure)
    if host.shm_free_gib < SHM_ENOUGH:
        return warning("shared memory", free, cure)
    return ok("shared memory", free)


def _left_behind(host: HostFacts) -> Finding:
    if host.shm_left:
        names = ", ".join(host.shm_left[:5])
        cure = "when no run and no engine is alive here, remove them; killed engines leave them"
        return warning("left in shared memory", f"{len(host.shm_left)} segments: {names}", cure)
    return ok("left in shared memory", "nothing")


def _open_files(host: HostFacts) -> Finding:
    limit = f"ulimit -n {host.open_files}"
    cure = f"ulimit -n {FILES_ENOUGH} in the shell that starts Ray, or limits.conf"
    if host.open_files < FILES_LEAST:
        return failure("open files", limit, cure)
    if host.open_files < FILES_ENOUGH and host.device != "cpu":
        return warning("open files", limit, cure)
    return ok("open files", limit)


def _processes(host: HostFacts) -> Finding:
    limit = f"ulimit -u {host.processes:g}"
    cure = "ulimit -u unlimited in the shell that starts Ray, or limits.conf"
    if host.processes < PROCESSES_LEAST:
        return failure("processes", limit, cure)
    if host.processes < PROCESSES_ENOUGH:
        return warning("processes", limit, cure)
    return ok("processes", limit)


def _device_state(host: HostFacts) -> Iterator[Finding]:
    for name, fault in state_checks(host.device, host.state):
        yield warning(name, *fault) if fault else ok(name, "nothing against a run")


def _locked_memory(host: HostFacts) -> Finding:
    limit = f"ulimit -l {host.locked_memory:.2g} GiB"
    if host.device != "cpu" and host.locked_memory < LOCKED_ENOUGH:
        return warning(
            "locked memory", limit, "ulimit -l unlimited, or --ulimit memlock=-1 for a container: RDMA pins its buffers"
        )
    return ok("locked memory", limit)


def _rdma(host: HostFacts) -> Finding:
    if fault := network_fault(host.device, host.rdma, host.nnodes):
        return warning("network adapters", *fault)
    return ok("network adapters", ", ".join(host.rdma.adapters) or "none for RDMA, and none needed")


def _disk(folder: str, free: float) -> Finding:
    name = f"disk:{folder}"
    text = f"{free:.1f} GiB free"
    cure = "make room, or give --run-dir (and TEMP of launch/start_head.sh) another file system"
    if free < DISK_LEAST:
        return failure(name, text, cure)
    if free < DISK_ENOUGH:
        return warning(name, text, cure)
    return ok(name, text)


def _environment(host: HostFacts) -> Finding:
    if faults := environment_faults(host.device, host.environment):
        return failure("environment", "; ".join(faults), "each names its own fix")
    return ok("environment", "nothing set that is known to break a run")


def _driver(host: HostFacts) -> Finding:
    if fault := driver_fault(host.devices, host.environment):
        return (failure if fault.breaks else warning)("driver", fault.found, fault.cure)
    return ok("driver", host.devices.driver if host.device != "cpu" else "none needed")


def _sandbox(host: HostFacts) -> Finding:
    if host.sandbox_fault is None:
        return ok("sandbox", "programs of a model can be confined")
    cure = "do without the tool python here, or see rollout.turns.python.unconfined"
    return warning("sandbox", host.sandbox_fault, cure)


def _backend(name: str, fault: str) -> Finding:
    """Finds whether sandboxes of rollout.turns.sandbox can be started. Few runs need them."""
    if fault:
        return ok(f"sandboxes:{name}", f"cannot be started, and few runs need them: {fault}")
    return ok(f"sandboxes:{name}", "can be started")


def cluster_checks(host: HostFacts) -> Iterator[Finding]:
    """Yields findings on Ray's address and token."""
    address = host.environment.get("RAY_ADDRESS")
    if address in (None, "", "local"):
        yield ok("ray address", "RAY_ADDRESS is not set: a run starts its own cluster on this host")
    yield _authentication(host)


def _authentication(host: HostFacts) -> Finding:
    mode = host.environment.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        cure = (
            "unset RAY_AUTH_MODE: Ray listens on every address and runs what it is sent; the token "
            "is what keeps others out"
        )
        return failure("ray token", f"RAY_AUTH_MODE={mode}", cure)
    if host.environment.get("RAY_AUTH_TOKEN"):
        return ok("ray token", "given in RAY_AUTH_TOKEN")
    if host.token_mode is None:
        return ok("ray token", "none yet: the first head on this host makes ~/.ray/auth_token")
    if host.token_mode & 0o077:
        return warning(
            "ray token",
            f"~/.ray/auth_token can be read by others (mode {host.token_mode:o})",
            "chmod 600 ~/.ray/auth_token",
        )
    return ok("ray token", "in ~/.ray/auth_token")
