"""Checks that all processes of a run have the driver's software: the same bytes of mrl, and the same packages."""

import hashlib
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mrl
from mrl.errors import EnvironmentFault
from mrl.platforms.versions import PACKAGES, bare

_OWN = "mrl's sources"
_SHOWN = 12  # characters of a digest


@cache
def software() -> dict[str, str]:
    """Returns this process's software by name: Python, installed packages, and a digest of mrl's sources."""
    versions = {"Python": ".".join(map(str, sys.version_info[:2])), _OWN: _digest(Path(mrl.__file__).parent)}
    for name in PACKAGES:
        try:
            versions[name] = bare(version(name))
        except PackageNotFoundError:  # a driver's node may lack packages of ranks, a rank's node those of engines
            continue
    return versions


def _digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return total.hexdigest()[:_SHOWN]


def check_same(others: Mapping[str, tuple[str, Mapping[str, str]]], mine: Mapping[str, str] | None = None) -> None:
    """Compares software. `others`: name of a process -> address of its node, and its `software`.

    `mine` is the driver's, by default this process's. Raises EnvironmentFault that names nodes whose versions differ
    from the driver's.
    """
    mine = software() if mine is None else mine
    differing: dict[str, list[str]] = {}
    for process, (address, theirs) in others.items():
        for name in (name for name in mine if name in theirs and theirs[name] != mine[name]):
            differing.setdefault(f"{name} is {theirs[name]} on {address} and {mine[name]} here", []).append(process)
    if differing:
        listed = "; ".join(f"{what} ({', '.join(processes)})" for what, processes in differing.items())
        raise EnvironmentFault(f"the nodes do not run the same software: {listed}; install one version on every node")
