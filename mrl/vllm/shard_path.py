"""The fast path inside a vLLM worker: takes its shards by the plan, proves what arrived and what the engine then holds.

Imported in every engine process: no ray, megatron or config; what it needs of vLLM comes in as an `Adapter`.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from mrl.model.vllm_parameters import TargetParameter, target_parameters
from mrl.reshard.connect import connect_receiver
from mrl.reshard.setup import SyncSetup
from mrl.vllm.handshake import HandshakeError, check_backend, check_loader, check_parameters
from mrl.vllm.load_layout import LayerwiseWriter, Reload, held_digests, layers_of

# vLLM's MoE kernels that keep experts as a dialect describes them; others swap halves or shuffle rows
_KEEPING = ("CPU", "TRITON", "BATCHED_TRITON")
_TRANSPOSING = ("OOT",)  # out of vLLM's tree, as Ascend's


@dataclass(frozen=True)
class Degrees:
    """What an engine was started with, as vLLM says."""

    tensor: int
    pipeline: int
    data: int
    spreads_experts: bool  # expert parallelism is on
    linear_placement: bool  # experts lie in order, and none is repeated
    quantization: str | None
    dtype: str
    position: int  # of this worker in its engine: data-parallel rank, then tensor rank


class Adapter(Protocol):
    """One generation of vLLM, as far as the fast path needs it."""

    reload: Reload

    def moe_backends(self, model: nn.Module) -> set[str]:
        """Names of the MoE kernels in use; empty for a dense model."""
        ...

    def final_parts(self, model: nn.Module, layer: nn.Module, target: TargetParameter) -> Iterator[Tensor]:
        """What the kernel computes with, read back into the target's layout, in parts along the first dimension.

        A part is valid until the next is asked for. Only experts come in more than one.
        """
        ...

    def reads_by_identity(self, layer: nn.Module, target: TargetParameter) -> bool:
        """Whether `final_parts` reads through an identity matrix, which does not show every value (see `what_reading_shows`)."""
        ...


class ShardPath:
    """One worker's side of every fast sync."""

    def __init__(
        self, model: nn.Module, model_config: Any, adapter: Adapter, setup: SyncSetup, engine: int, plan_hash: str, degrees: Degrees
    ):
        """Checks that this engine is what the plan was made for, then meets the ranks.

        Raises EnvironmentFault, HandshakeError and TransferError.
        """
        self.worker = setup.worker(engine, degrees.position)
        self._engine, self._setup = engine, setup
        self._model, self._config, self._adapter = model, model_config, adapter
        self._writer: LayerwiseWriter | None = None
        self._report: dict[str, Any] = {}
        setup.check_hash(plan_hash, f"engine {engine} worker {self.worker}")
        with self.named():
            check_degrees(setup, degrees)
            self._targets = target_parameters(setup.model, setup.rollout_layout, self.worker, setup.dialect, setup.dtype)
            check_engine(model, setup, self._targets, adapter)
            layers = layers_of(model, adapter.reload)  # asked now: in vLLM 0.23 the worker enters the reload before an update gets here
            self._packed = frozenset(t.name for t in self._targets if adapter.reads_by_identity(layers[t.module], t))
            self._receiver = connect_receiver(setup, self.worker)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors raised inside say which engine and worker they come from."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            error.args = (f"engine {self._engine} worker {self.worker}: {error}",)
            raise

    def start(self) -> None:
        """Enters an update; what an earlier one left unfinished is dropped."""
        self.abandon()
        self._writer = LayerwiseWriter(
            self._model, self._config, self._targets, self._adapter.reload, written_in_place(self._targets), self._packed
        )
        self._writer.begin()

    def receive(self, update: int) -> None:
        """Takes everything that the plan sends here."""
        with self.named():
            report = self._receiver.receive(self._writer, update)
        names = ("bytes_moved", "bytes_local", "staging_bytes")
        self._report = {name: getattr(report, name) for name in names} | {"seconds": dict(report.seconds)}

    def has_everything(self) -> bool:
        """An update comes in one call."""
        return True

    def finish(self, read_back: bool) -> None:
        """Leaves the update; reads back what the engine holds when asked to. Raises RuntimeError when modules are incomplete."""
        writer, began = self._writer, time.perf_counter()
        with self.named():
            writer.finish()
            finalised = time.perf_counter()
            self._writer = None
            held = self.held() if read_back else None
        seconds = {"finalise": finalised - began, "read_back": time.perf_counter() - finalised}
        self._report |= {"worker": self.worker, "received": writer.received, "shown": writer.shown, "held": held}
        self._report["seconds"] |= seconds | writer.seconds

    def report(self) -> dict[str, Any]:
        """Of the last update; see mrl.reshard.sync_report for who compares what."""
        return self._report

    def held(self) -> dict[str, int]:
        """Digest of every parameter as the engine holds it now. Raises RuntimeError where vocabulary padding is not zero."""
        layers = layers_of(self._model, self._adapter.reload)
        return held_digests(self._targets, lambda t: self._adapter.final_parts(self._model, layers[t.module], t))

    def abandon(self) -> None:
        """Drops an update that failed; the engine then holds a mixture and has to be synced again."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        self._report = {}

    def close(self) -> None:
        """Gives the transport's memory and connections back."""
        self._receiver.end.close()


def check_degrees(setup: SyncSetup, degrees: Degrees) -> None:
    """Raises HandshakeError when the engine was started otherwise than the plan assumes."""
    layout = setup.rollout_layout
    pairs = [
        ("tensor_parallel_size", degrees.tensor, layout.tensor),
        ("data_parallel_size", degrees.data, layout.data),
        ("pipeline_parallel_size", degrees.pipeline, 1),
        ("enable_expert_parallel", degrees.spreads_experts, layout.expert > 1),
        ("dtype", degrees.dtype, setup.dtype),
        ("quantization", degrees.quantization, None),
        ("experts placed in order, none repeated", degrees.linear_placement, True),
    ]
    faults = [f"{name} is {found} in vLLM, {wanted} in the plan" for name, found, wanted in pairs if found != wanted]
    if faults:
        raise HandshakeError("; ".join(faults))


def check_engine(model: nn.Module, setup: SyncSetup, targets: Sequence[TargetParameter], adapter: Adapter) -> None:
    """Compares vLLM's parameters and its loader with the plan's targets. Raises HandshakeError naming what differs."""
    in_place = written_in_place(targets)
    for backend in sorted(adapter.moe_backends(model)):
        check_backend(backend, _TRANSPOSING if in_place else _KEEPING)
    check_parameters(model, targets, adapter.reload, in_place)
    check_loader(model, setup.model, [t for t in targets if t.name not in in_place], adapter.reload)
    layers = layers_of(model, adapter.reload)
    held_digests(targets, lambda t: adapter.final_parts(model, layers[t.module], t))  # that everything can be read back


def written_in_place(targets: Sequence[TargetParameter]) -> frozenset[str]:
    """Names of experts that are stored transposed. Their kernel reads them as they are, so they are written where they lie."""
    return frozenset(t.name for t in targets if any(piece.axes != tuple(sorted(piece.axes)) for piece in t.pieces))
