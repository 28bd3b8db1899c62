"""Installed versions against the rows that belong together."""

from collections.abc import Iterator

from mrl.plan.doctor.machine import Finding, Machine, failure, ok, warning
from mrl.platforms.versions import MIN_PYTHON, TORCH_NPU, VLLM_ASCEND, VersionRow, bare, row_of, torchvision_of

_UNUSED = ("torchvision", "torchaudio", "torchcodec")


def version_checks(machine: Machine) -> Iterator[Finding]:
    """Python, the packages of the device's row, what must go with torch, and Ascend's toolkit."""
    row = row_of(machine.device)
    yield _python(machine)
    yield from (_package(machine, row, name, wanted) for name, wanted in row.packages.items())
    yield _loose(machine, row)
    yield _companions(machine)
    if row.toolkit is not None:
        yield _toolkit(machine, row)
        yield _ascend_pairing(machine)
    yield from (_source_only(machine, name, branch) for name, branch in row.source_only.items())


def _python(machine: Machine) -> Finding:
    running = ".".join(map(str, machine.python))
    if machine.python < MIN_PYTHON:
        return failure("python", running, f"use Python {'.'.join(map(str, MIN_PYTHON))} or newer")
    return ok("python", running)


def _package(machine: Machine, row: VersionRow, name: str, wanted: str) -> Finding:
    installed = machine.versions.get(name)
    command = f'pip install -e ".[{row.name}]", or pip install {name}=={wanted}'
    if installed is None:
        return failure(f"version:{name}", "not installed", command)
    if bare(installed) != wanted:
        return failure(f"version:{name}", f"{installed}; the {row.name} row ({row.tested}) has {wanted}", command)
    return ok(f"version:{name}", installed)


def _loose(machine: Machine, row: VersionRow) -> Finding:
    off = {name: machine.versions.get(name) for name, wanted in row.loose.items() if bare(machine.versions.get(name, "")) != wanted}
    if not off:
        return ok("version:others", f"{len(row.loose)} packages as in the {row.name} row")
    listed = ", ".join(f"{name} {version or 'missing'}" for name, version in off.items())
    command = "pip install " + " ".join(f"{name}=={row.loose[name]}" for name in off)
    return (failure if None in off.values() else warning)("version:others", f"{listed}; off the {row.name} row", command)


def _companions(machine: Machine) -> Finding:
    """torchvision and its like: nothing here needs them; one of another build makes `import mbridge` fail, through transformers."""
    torch = machine.versions.get("torch")
    installed = {name: machine.versions[name] for name in _UNUSED if name in machine.versions}
    wrong = [name for name, version in installed.items() if torch and not _same_build(name, version, torch)]
    if not wrong:
        return ok("torch companions", ", ".join(f"{n} {v}" for n, v in installed.items()) or "none installed, none needed")
    listed = ", ".join(f"{name} {installed[name]}" for name in wrong)
    cure = f"pip uninstall -y {' '.join(wrong)}; `import mbridge` fails with them (operator torchvision::nms does not exist)"
    return failure("torch companions", f"{listed} beside torch {torch}: another build", cure)


def _same_build(name: str, version: str, torch: str) -> bool:
    line = torchvision_of(torch) if name == "torchvision" else ".".join(torch.split(".")[:2])
    right_line = name == "torchcodec" or version.startswith(f"{line}.")  # torchcodec counts for itself
    return right_line and ("+cpu" in version) == ("+cpu" in torch)


def _toolkit(machine: Machine, row: VersionRow) -> Finding:
    installed = machine.devices.toolkit
    if installed is None:
        return failure("CANN", "not found", f"install CANN {row.toolkit} with nnal and source both set_env.sh")
    if installed != row.toolkit:
        return failure("CANN", f"{installed}; the {row.name} row has {row.toolkit}", f"install CANN {row.toolkit}")
    return ok("CANN", installed)


def _source_only(machine: Machine, name: str, source: str) -> Finding:
    installed = machine.versions.get(name)
    if installed is None:
        return failure(f"version:{name}", "not installed", f"pip install {source} (it is on no package index)")
    return ok(f"version:{name}", f"{installed}; its own number does not say the branch, which must be that of {source}")


def _ascend_pairing(machine: Machine) -> Finding:
    """vllm-ascend was released for exactly one set; the wrong neighbour is the commonest reason why it does not start."""
    name, version = "vllm-ascend pairing", machine.versions.get("vllm-ascend")
    if version is None:
        return failure(name, "vllm-ascend is not installed", "pip install vllm-ascend==0.23.0")
    if bare(version) not in VLLM_ASCEND:
        return warning(name, f"vllm-ascend {version} is in no published row", f"use one of {', '.join(VLLM_ASCEND)}")
    vllm, cann, torch, torch_npu = VLLM_ASCEND[bare(version)]
    wanted = {"vllm": vllm, "torch": torch, "torch-npu": torch_npu}
    off = [f"{n} {machine.versions.get(n, 'missing')} instead of {w}" for n, w in wanted.items() if bare(machine.versions.get(n, "")) != w]
    if machine.devices.toolkit not in (None, cann):
        off.append(f"CANN {machine.devices.toolkit} instead of {cann}")
    if off:
        cure = f"pip install {' '.join(f'{n}=={w}' for n, w in wanted.items())}"
        return failure(name, f"vllm-ascend {version} with {', '.join(off)}", cure)
    if bare(torch_npu) not in TORCH_NPU.get(cann, (torch_npu,)):
        return warning(name, f"torch-npu {torch_npu} is not listed for CANN {cann}", f"listed: {', '.join(TORCH_NPU[cann])}")
    return ok(name, f"vllm-ascend {version} with its own row")
