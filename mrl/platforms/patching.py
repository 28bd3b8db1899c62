"""Describes, applies and reverts replaced symbols. cpu_patches lists them."""

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mrl.errors import EnvironmentFault

MISSING = object()  # the original of a name that Megatron never defined


@dataclass(frozen=True)
class Patch:
    """One replaced symbol. `make` gets the original and returns its replacement."""

    target: str  # dotted path, e.g. "torch.cuda.Stream"
    make: Callable[[Any], Any]
    reason: str
    devices: tuple[str, ...] = ("cpu",)
    torch_layers_only: bool = False  # a defect of Megatron without Transformer Engine


_originals: dict[str, Any] = {}


def apply(rows: Iterable[Patch]) -> None:
    """Applies every row that is not applied yet. Raises EnvironmentFault in a process that has imported vllm."""
    refuse_beside_vllm()
    for row in rows:
        if row.target not in _originals:
            owner, name = _owner(row.target)
            original = _originals[row.target] = owner.__dict__.get(name, getattr(owner, name, MISSING))
            setattr(owner, name, row.make(original))


def refuse_beside_vllm() -> None:
    """Raises EnvironmentFault in a process that has imported vllm."""
    if "vllm" in sys.modules:
        raise EnvironmentFault(
            "torch cannot be adapted to Megatron in a process that has imported vllm: it would change what vllm runs "
            "on. Run actor ranks and rollout engines in processes of their own"
        )


def _owner(target: str) -> tuple[Any, str]:
    """Returns the module or class that holds the symbol, and the symbol's name in it."""
    path, name = target.rsplit(".", 1)
    try:
        return importlib.import_module(path), name
    except ModuleNotFoundError:
        outer, inner = path.rsplit(".", 1)
        return getattr(importlib.import_module(outer), inner), name
