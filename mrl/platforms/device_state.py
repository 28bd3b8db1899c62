"""Reads the settings of a host's NVIDIA GPUs with nvidia-smi: kinds, partitions, clocks, and peer access.

Written from the driver's documentation (R580); on hardware one H100 alone was read. Every command has a deadline.
"""

import csv
import io
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_TIMEOUT_S = 5.0
_FIELDS = (
    "index", "name", "mig.mode.current", "clocks.max.graphics", "clocks.applications.graphics",
    "clocks_event_reasons.hw_slowdown", "clocks_event_reasons.hw_thermal_slowdown",
    "clocks_event_reasons.hw_power_brake_slowdown",
)  # fmt: skip
_SLOWED = _FIELDS[-3:]
# checks
_OF_EACH = ("device kinds", "partitions", "clocks")
_OF_PAIRS = ("peer access",)
_LOWERED = 0.9  # of the highest clock: a lower limit was set by somebody


@dataclass(frozen=True)
class Gpu:
    """One device as the driver describes it. Unknown numbers are None."""

    index: str
    name: str
    has_partitions: bool  # MIG is on
    highest_mhz: float | None
    set_mhz: float | None
    slowed: tuple[str, ...]  # reasons for which the hardware limits its speed now


@dataclass(frozen=True)
class DeviceState:
    """All GPUs of a host, as far as the driver tells."""

    gpus: tuple[Gpu, ...] = ()
    # pairs without access to each other's memory, with the driver's word; None where it does not tell
    apart: tuple[str, ...] | None = None


def read_device_state(kind: str) -> DeviceState:
    """Asks the driver of that kind of device, where one can be asked.

    Never raises; unanswered questions stay unknown.
    """
    if kind != "cuda":
        return DeviceState()
    query = _output(["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"])
    return DeviceState(parse_gpus(query), parse_peers(_output(["nvidia-smi", "topo", "-p2p", "r"])))


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Reads the rows of the query. Rows of another form are left out."""
    gpus = []
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(row) == len(_FIELDS):
            cells = [cell.strip() for cell in row]
            gpus.append(_gpu(dict(zip(_FIELDS, cells, strict=True))))
    return tuple(gpus)


def _gpu(row: dict[str, str]) -> Gpu:
    slowed = tuple(name.partition(".")[2].removeprefix("hw_") for name in _SLOWED if row[name] == "Active")
    clocks = (_number(row["clocks.max.graphics"]), _number(row["clocks.applications.graphics"]))
    return Gpu(row["index"], row["name"], row["mig.mode.current"] == "Enabled", *clocks, slowed)


def _number(text: str) -> float | None:
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    return None


def parse_peers(text: str) -> tuple[str, ...] | None:
    """Returns pairs of different devices without access, from `nvidia-smi topo -p2p r`; None without its matrix."""
    rows = list(_peer_rows(text))
    pairs = ((own, other, word) for own, words in rows for other, word in enumerate(words) if own < other)
    apart = tuple(f"{own} and {other} ({word})" for own, other, word in pairs if word not in ("X", "OK"))
    if rows:
        return apart
    return None


def _peer_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yields a device's number, and a word for each device of the host."""
    for line in text.splitlines():
        name, *words = line.split() or [""]
        if re.fullmatch(r"GPU\d+", name) and words and all(re.fullmatch("X|OK|[A-Z]{2,3}", word) for word in words):
            yield int(name.removeprefix("GPU")), words


def state_checks(kind: str, state: DeviceState) -> Iterator[tuple[str, tuple[str, str] | None]]:
    """Yields each check for that kind of device, with (finding, cure), or None where nothing is wrong.

    Questions that the driver did not answer share one check that says so.
    """
    if kind != "cuda":
        return
    faults = {name: (found, cure) for name, found, cure in state_faults(state)}
    answered = (_OF_EACH if state.gpus else ()) + (_OF_PAIRS if state.apart is not None else ())
    yield from ((name, faults.get(name)) for name in answered)
    if unanswered := [name for name in (*_OF_EACH, *_OF_PAIRS) if name not in answered]:
        cure = (
            "run `nvidia-smi` and `nvidia-smi topo -p2p r` here and fix what they report; drivers before R580 may "
            "answer in another form"
        )
        yield "GPU state", (f"nvidia-smi did not answer; not checked: {', '.join(unanswered)}", cure)


def state_faults(state: DeviceState) -> Iterator[tuple[str, str, str]]:
    """Yields (check, finding, cure) for everything that makes a run slow or fail."""
    kinds = sorted({gpu.name for gpu in state.gpus})
    if len(kinds) > 1:
        yield "device kinds", ", ".join(kinds), "every step waits for the slowest: give a run devices of one kind"
    if parted := [gpu.index for gpu in state.gpus if gpu.has_partitions]:
        cure = "NCCL does not connect MIG partitions: run nvidia-smi -mig 0 on the host, or use another device"
        yield "partitions", f"MIG is on for {', '.join(parted)}", cure
    if slowed := [f"{gpu.index} ({', '.join(gpu.slowed)})" for gpu in state.gpus if gpu.slowed]:
        yield "clocks", f"slowed by the hardware: {'; '.join(slowed)}", "check the node's cooling and power"
    elif lowered := [
        f"{gpu.index} at {gpu.set_mhz:g} of {gpu.highest_mhz:g} MHz" for gpu in state.gpus if _is_low(gpu)
    ]:
        yield (
            "clocks",
            f"set low: {', '.join(lowered)}",
            "nvidia-smi -rac restores the default clocks, -rgc ends a lock",
        )
    if state.apart:
        cure = "reshard.transport: p2p; check ACS in the BIOS, and whether a virtual machine isolates devices"
        yield "peer access", f"no access to each other's memory: {', '.join(state.apart[:6])}", cure


def _is_low(gpu: Gpu) -> bool:
    return gpu.highest_mhz is not None and gpu.set_mhz is not None and gpu.set_mhz < _LOWERED * gpu.highest_mhz
