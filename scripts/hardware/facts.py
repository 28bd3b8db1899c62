"""What the machine is: devices, driver, versions, limits; what `mrl doctor` finds of it."""

import sys
from collections.abc import Iterable

from checks import Figures, Machine, Skip, Wrong, check

SLOWEST_SHARE = 0.5  # of the published peak; less is another load on the device, a power limit, or a wrong build


@check(fast=True)
def devices(machine: Machine) -> Figures:
    """Names, number and memory of the devices; all have to be of one kind."""
    import torch

    if machine.small:
        names, memory = [machine.platform.device_name()], []
    else:
        module = getattr(torch, machine.device)
        names = [module.get_device_name(i) for i in range(module.device_count())]
        memory = [module.get_device_properties(i).total_memory / 2**30 for i in range(len(names))]
    if len(set(names)) > 1:
        raise Wrong(f"devices of several kinds: {', '.join(sorted(set(names)))}; the slowest sets the pace and a "
                    "plan knows one kind. Show the job those of one kind (CUDA_VISIBLE_DEVICES)")  # fmt: skip
    facts = {"names": sorted(set(names)), "count": len(names), "memory_gib": memory}
    return facts | {"python": sys.version.split()[0], "torch": torch.__version__, "layers": _layers()}


def _layers() -> str:
    try:
        import transformer_engine
    except ImportError as error:
        return f"torch ({error})"
    return f"transformer_engine {getattr(transformer_engine, '__version__', '')}"


@check(fast=True)
def doctor(machine: Machine) -> Figures:
    """Every finding of `mrl doctor` that is not well, each with its cure; what the host lacks fails."""
    from mrl.tools.doctor.host_checks import host_checks
    from mrl.tools.doctor.host_facts import read_host
    from mrl.tools.doctor.version_checks import engine_checks, version_checks

    here = read_host(machine.device, ports=())
    wrong = _not_well(host_checks(here))
    if wrong["failure"]:
        raise Wrong("; ".join(wrong["failure"]))
    packages = _not_well(
        [*version_checks(here), *engine_checks(here)]
    )  # what cannot be downloaded here is told, and no failure
    return {"warnings": wrong["warning"] + packages["warning"], "packages": packages["failure"]}


def _not_well(findings: Iterable) -> dict[str, list[str]]:
    """By status: what was found, and the cure."""
    said: dict[str, list[str]] = {"warning": [], "failure": []}
    for found in findings:
        if found.status in said:
            said[found.status].append(f"{found.name}: {found.found} -> {found.cure}")
    return said


@check(fast=True)
def peak(machine: Machine) -> Figures:
    """A large matrix product beside the published peak."""
    from mrl.plan.devices import published_flops
    from mrl.platforms.speed import product_rate

    rate, name = product_rate(machine.platform, machine.dtype, threads=None), machine.platform.device_name()
    published = published_flops(name)
    if published and rate < SLOWEST_SHARE * published:
        raise Wrong(
            f"{name}: {rate / 1e12:.0f} of {published / 1e12:.0f} TFLOP/s in a large product; is somebody else on the "
            "device, is it throttled (nvidia-smi -q -d CLOCK,POWER,PERFORMANCE), is torch's build the right one?"
        )
    return {"name": name, "tflops": rate / 1e12, "published_tflops": published and published / 1e12}


@check(fast=True)
def peer_access(machine: Machine) -> Figures:
    """Whether every pair of devices reaches the other's memory, which device transports take inside a node."""
    machine.needs_accelerator("other device")
    import torch

    module = getattr(torch, machine.device)
    count = module.device_count()
    if count < 2:
        raise Skip("one device")
    reach = getattr(module, "can_device_access_peer", None)
    if reach is None:
        raise Skip(f"torch.{machine.device} cannot say")
    apart = [(i, j) for i in range(count) for j in range(count) if i != j and not reach(i, j)]
    if apart:
        raise Wrong(f"devices {apart[:8]} do not reach each other's memory: set reshard.transport: shm, or look at "
                    "`nvidia-smi topo -p2p r` (ACS in the firmware, a virtual machine without it)")  # fmt: skip
    return {"pairs": count * (count - 1)}
