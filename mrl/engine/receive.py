"""The receiving side of a weight update: the code that runs inside every vLLM process.

vLLM imports this module in each of its processes through the plugin entry point `mrl.engine.receive:register`. Its
workers then drive one of two paths, call by call:

               FastPath (reshard.path: fast)               SlowPath (reshard.path: slow)
    meet       waits for the ranks, once                   nothing
    start      enters vLLM's layerwise reload              the same
    receive    all of this worker's shards, by the plan    one bucket of full tensors, through vLLM's own loader
    finish     leaves the reload, reads weights back       leaves the reload; every parameter was written
    report     digests, bytes and seconds                  nothing

This module and its imports load neither ray nor megatron nor config, and vllm only inside functions. Code that needs
vLLM's private parts comes in as an `Adapter`, one per generation (v0_23.py, v0_32.py).
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mrl.engine.constants import Constants
from mrl.engine.forking import install
from mrl.engine.handshake import EngineDegrees, check_degrees, check_engine
from mrl.engine.load_layout import Adapter, LayerwiseWriter, layers_of
from mrl.engine.process_watch import end_with_parent
from mrl.engine.read_back import held_digests
from mrl.errors import EnvironmentFault
from mrl.model.registry import for_loader
from mrl.model.vllm_parameters import target_parameters
from mrl.platforms.process_memory import give_back_heap, note_baseline
from mrl.platforms.versions import VLLM_GENERATIONS, VLLM_PACKAGES, VllmGeneration, vllm_generation
from mrl.reshard.connect import connect_receiver
from mrl.reshard.execute import Receiver
from mrl.reshard.setup import SyncSetup

BACKEND = "mrl"
# text models in one file with image models, and models that draft for them, by module
_BESIDE_IMAGES = {
    "text_models": ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    "text_drafters": ("Qwen3_5MTP", "Qwen3_5MoeMTP"),
}
# mrl's own names, by module
_OWN_MODELS = {
    "inner_texts": ("Qwen2InsideVL", "Qwen3InsideVL", "Qwen3MoeInsideVL"),
    "seeing_models": (
        "SeeingQwen2_5_VL",
        "SeeingQwen3VL",
        "SeeingQwen3VLMoe",
        "SeeingQwen3_5",
        "SeeingQwen3_5Moe",
    ),
}


def register() -> None:
    """vLLM plugin entry point: makes the weight-transfer backend `mrl` known.

    vLLM calls it in every process, maybe twice. Memory that the process takes from here on counts as the engine's, and
    the process ends with its engine.
    """
    note_baseline()
    end_with_parent()
    install()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, adapter_module(), "TransferEngine")
    register_models()


def register_models() -> None:
    """Makes known to vLLM the classes of models that read images, and of the text models inside of them.

    Text models in one file with their image models are imported without torchvision, which only the latter need.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    registered = _OWN_MODELS
    if importlib.util.find_spec("torchvision") is None:
        registered = registered | _BESIDE_IMAGES
    for module, architectures in registered.items():
        for architecture in architectures:
            ModelRegistry.register_model(architecture, f"mrl.engine.{module}:{architecture}")


def adapter_module() -> str:
    """Returns the module of the adapter for the installed vLLM. Raises EnvironmentFault as `installed_generation`
    does.
    """
    return f"mrl.engine.v{installed_generation().name.replace('.', '_')}"


def installed_generation() -> VllmGeneration:
    """Returns the generation of the installed vLLM. Raises EnvironmentFault that lists the supported ones."""
    for package in VLLM_PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if generation := vllm_generation(version):
            return generation
        supported = ", ".join(generation.name for generation in VLLM_GENERATIONS)
        raise EnvironmentFault(
            f"vLLM {version} is of no supported generation ({supported}); `mrl doctor` says what to install"
        )
    raise EnvironmentFault("vLLM is not installed")


@dataclass
class InitInfo:
    """Arguments of vLLM's `init_weight_transfer_engine`: the path, and what it needs once."""

    path: str = "slow"  # "slow": full tensors through vLLM's own loader; "fast": shard to shard by the plan
    expected: dict[str, list[int]] | None = None  # slow: HF name and shape of every tensor of an update
    setup: dict[str, Any] | None = None  # fast: JSON of mrl.reshard.setup.SyncSetup
    engine: int = 0
    plan_hash: str = ""
    # fast: false in an engine that slept and got no weights since, so there is nothing to read back
    holds_weights: bool = True


@dataclass
class UpdateInfo:
    """Arguments of vLLM's `update_weights`. Slow: one bucket of an update. Fast: the whole update in one call."""

    bucket: str = ""  # slow: safetensors file on the engine's host
    sha256: str = ""  # slow: hash of the bucket's bytes as the trainer sent them
    update: int = 0  # fast: number of the sync
    read_back: bool = True  # fast: digest what the engine finally holds


class UpdatePath(Protocol):
    """One way for new weights into this worker."""

    def start(self) -> None:
        """Enters an update, and drops the rest of an unfinished one."""

    def receive(self, info: UpdateInfo) -> None:
        """Takes all of an update, or a part of it."""

    def has_everything(self) -> bool:
        """Returns whether the update is whole."""

    def finish(self) -> None:
        """Leaves the update. Raises RuntimeError when a tensor did not come or was not written."""

    def report(self) -> dict[str, Any]:
        """Returns the report of the last update. mrl.reshard.sync_report says who compares it with what."""

    def abandon(self) -> None:
        """Drops an update that failed. The engine then holds a mixture and has to be updated again."""

    def close(self) -> None:
        """Frees what is held between updates."""


def open_path(
    model: nn.Module, model_config: Any, adapter: Adapter, info: InitInfo, degrees: EngineDegrees
) -> UpdatePath:
    """Returns the path that `info` names; the fast one still has to meet its ranks.

    Raises EnvironmentFault, HandshakeError or ValueError when the fast path is impossible.
    """
    if info.path == "slow":
        return SlowPath(model, model_config, adapter, info.expected or {})
    return FastPath(model, model_config, adapter, info, degrees)


class FastPath:
    """One worker's side of every fast sync. It takes its shards by the plan, and digests what arrives and what is then
    held.
    """

    def __init__(self, model: nn.Module, model_config: Any, adapter: Adapter, info: InitInfo, degrees: EngineDegrees):
        """Checks that the plan was made for this engine. This may take long, and nobody waits for it.

        Raises EnvironmentFault for another plan, HandshakeError, ValueError.
        """
        self._setup = setup = SyncSetup.from_json(info.setup)
        self._engine = info.engine
        self._worker = setup.worker(info.engine, degrees.position)
        self._model = model
        self._config = model_config
        self._adapter = adapter
        self._writer: LayerwiseWriter | None = None
        self._receiver: Receiver | None = None
        self._read_back = True
        self._report: dict[str, Any] = {}
        setup.check_hash(info.plan_hash, f"engine {self._engine} worker {self._worker}")
        with self._named_errors():
            check_degrees(setup, degrees)
            self._targets = target_parameters(
                setup.model, setup.rollout_layout, self._worker, setup.dialect, setup.dtype, setup.fp8_block
            )
            check_engine(model, setup, self._targets, adapter, info.holds_weights)
            self._kernels = {
                "attention": sorted(adapter.attention_backends(model)),
                "moe": sorted(adapter.moe_backends(model)),
            }
            layers = layers_of(model, adapter)  # read now, since vLLM 0.23 enters the reload before `start`
            self._by_identity = frozenset(
                t.name for t in self._targets if adapter.reads_by_identity(layers[t.module], t)
            )
        self._constants = Constants.of(model)
        give_back_heap()  # the checks above take a module's memory for a moment

    def meet(self) -> None:
        """Connects with the ranks, which wait for this worker now. Raises TransferError."""
        with self._named_errors():
            self._receiver = connect_receiver(self._setup, self._worker)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Adds the engine and worker to the message of errors that are raised inside."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            error.args = (f"engine {self._engine} worker {self._worker}: {error}",)
            raise

    def start(self) -> None:
        self.abandon()
        self._writer = LayerwiseWriter(self._model, self._config, self._targets, self._adapter, self._by_identity)
        self._writer.begin()

    def receive(self, info: UpdateInfo) -> None:
        """Takes everything that the plan sends here."""
        self._read_back = info.read_back
        with self._named_errors():
            report = self._receiver.receive(self._writer, info.update)
        counts = ("bytes_moved", "bytes_local", "bytes_remote", "staging_bytes", "free_bytes")
        self._report = {name: getattr(report, name) for name in counts}
        self._report |= {"seconds": dict(report.seconds), "kernels": self._kernels}

    def has_everything(self) -> bool:
        """Returns True: an update comes in one call."""
        return True

    def finish(self) -> None:
        """Leaves the update, and reads back what the engine holds if the update asked for it.

        Raises RuntimeError when modules are incomplete.
        """
        writer = self._writer
        began = time.perf_counter()
        with self._named_errors():
            writer.finish()
            finalised = time.perf_counter()
            self._writer = None
            digests = None
            if self._read_back:
                digests = self.held_digests()
                self._constants.check(self._model, {target.name for target in self._targets})
        seconds = {"finalise": finalised - began, "read_back": time.perf_counter() - finalised}
        self._report |= {"worker": self._worker, "received": writer.received, "shown": writer.shown, "held": digests}
        self._report["seconds"] |= seconds | writer.seconds

    def report(self) -> dict[str, Any]:
        return self._report

    def held_digests(self) -> dict[str, int]:
        """Returns the digest of every parameter as the engine holds it now.

        Raises RuntimeError where vocabulary padding is not zero.
        """
        layers = layers_of(self._model, self._adapter)
        return held_digests(self._targets, lambda t: self._adapter.final_parts(self._model, layers[t.module], t))

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        self._report = {}

    def close(self) -> None:
        """Frees the transport's memory and connections."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


class SlowPath:
    """Full HF tensors through the model's own `load_weights`, inside vLLM's layerwise reload.

    The fast path is compared with this one. So it leaves every question of layout to vLLM's own loader.
    """

    def __init__(self, model: nn.Module, model_config: Any, adapter: Adapter, expected: dict[str, list[int]]):
        """`expected`: HF name and shape of every tensor that each update has to bring."""
        self._model = model
        self._config = model_config
        self._adapter = adapter
        self._expected = expected
        self._constants = Constants.of(model)

    def start(self) -> None:
        self.abandon()
        named = [name for name, _ in self._model.named_parameters()]
        loaded = {name for name in named if not self._adapter.is_derived(name.rpartition(".")[2])}
        self._ledger = ReloadLedger(loaded, self._expected)
        self._adapter.enter(self._model)

    def receive(self, info: UpdateInfo) -> None:
        """Loads one bucket.

        Raises ValueError for damaged bytes, and what vLLM's loader raises for a tensor that it cannot place.
        """
        _check_bytes(Path(info.bucket), info.sha256)
        with torch.no_grad():
            self._ledger.add(set(self._model.load_weights(self._tensors(info.bucket))))

    def _tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                tensor = file.get_tensor(name)
                self._ledger.receive(name, tuple(tensor.shape))
                yield for_loader(type(self._model).__name__, name, tensor)

    def has_everything(self) -> bool:
        """Returns whether every expected tensor has come."""
        return self._ledger.expected.keys() <= self._ledger.received.keys()

    def finish(self) -> None:
        """Leaves the reload. Raises RuntimeError when a tensor did not come or a parameter was not written."""
        self._ledger.check_complete()
        self._adapter.finish(self._model, self._config)
        for layer in self._model.modules():
            self._adapter.prepare_experts(layer)
        self._constants.check(self._model, self._ledger.written)

    def report(self) -> dict[str, Any]:
        """Returns nothing: there are no digests on this path."""
        return {}

    def abandon(self) -> None:
        """Gives every module its kernels' tensors back."""
        self._adapter.abandon(self._model)

    def close(self) -> None:
        """Does nothing: nothing is held between updates."""


def _check_bytes(bucket: Path, sha256: str) -> None:
    """Raises ValueError when a bucket's bytes differ from the sender's."""
    with bucket.open("rb") as file:
        arrived = hashlib.file_digest(file, "sha256").hexdigest()
    if arrived != sha256:
        raise ValueError(
            f"weight bucket {bucket.name} arrived damaged: sha256 {arrived[:12]}, the trainer sent {sha256[:12]}"
        )


class ReloadLedger:
    """The tensors that one slow update brought, and the parameters that it wrote.

    An update that lacks a tensor or leaves a parameter unwritten is never committed. Both have to be counted. A fused
    parameter counts as written after any one of its tensors. And the loader may skip a tensor that came.
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
        """Raises RuntimeError naming tensors that are missing, unknown or misshapen, and parameters left unwritten."""
        faults = [
            _fault("lacks", self.expected.keys() - self.received.keys()),
            _fault("has what the model does not:", self.received.keys() - self.expected.keys()),
            _fault(
                "has in another shape",
                [self._shapes(name) for name, shape in self.expected.items() if self._differs(name, shape)],
            ),
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
    if names:
        return f"{what} {len(names)}: {json.dumps(names[:8])}"
    return ""
