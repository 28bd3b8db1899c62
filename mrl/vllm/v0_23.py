"""Adapter for vLLM 0.23, the generation that vllm-ascend supports: names, experts, and a lifecycle that the worker drives.

In 0.23 the worker itself enters and leaves the reload, around calls of the engine's `receive_weights`, and tells the engine neither. So an
update is begun by the first call and finished by the one that makes it whole; what the worker then still does finds nothing to do.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from mrl.model.vllm_parameters import TargetParameter
from mrl.vllm import v0_common as shared
from mrl.vllm.receive import Bucket
from mrl.vllm.shard_path import ShardPath


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Which path, and what it needs to know once; see mrl.vllm.v0_32.InitInfo."""

    path: str = "slow"
    expected: dict[str, list[int]] | None = None
    setup: dict[str, Any] | None = None
    engine: int = 0
    plan_hash: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket (slow) or the whole update (fast); see mrl.vllm.v0_32.UpdateInfo."""

    path: str
    sha256: str = ""
    update: int = 0
    read_back: bool = True


class Reload(shared.LayerwiseReload):
    """vLLM 0.23's layerwise reload. Its quantisation method packs experts for the CPU at every reload, so nothing is left to prepare."""

    def plan_name(self, name: str) -> str:
        """In 0.23 the fused experts are parameters of `mlp.experts` itself."""
        return re.sub(r"(\.mlp\.experts)(?=\.w\d|$)", r"\1.routed_experts", name)


class Adapter:
    """What the fast path asks of vLLM 0.23; see mrl.vllm.shard_path.Adapter."""

    reload = Reload()

    def moe_backends(self, model: nn.Module) -> set[str]:
        methods = (getattr(layer, "quant_method", None) for layer in model.modules() if hasattr(layer, "w13_weight"))
        return {
            getattr(getattr(method, "unquantized_backend", None), "name", "OOT") for method in methods
        }  # Ascend's is a class of its own

    def reads_by_identity(self, layer: nn.Module, target: TargetParameter) -> bool:
        return shared.computes_packed(layer, target)

    def final_parts(self, model: nn.Module, layer: nn.Module, target: TargetParameter) -> Iterator[Tensor]:
        experts = getattr(getattr(layer, "quant_method", None), "cpu_fused_moe", None) if hasattr(layer, "w13_weight") else None
        isa = getattr(experts, "isa", None)
        if experts is not None and isa in (None, "none"):
            raise RuntimeError(
                f"{target.name}: this processor's expert kernel ({type(experts).__name__}) has a layout that cannot be read back"
            )
        return shared.final_parts(model, layer, target, isa)


class Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight-transfer engine `mrl`: the fast path or the slow one, as it was last initialised."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    path: "shared.SlowPath | ShardPath | None" = None
    is_under_way = False

    def __init__(self, config: Any, parallel_config: Any, model: nn.Module):
        super().__init__(config, parallel_config, model)
        if not torch.accelerator.is_available():
            torch.accelerator.synchronize = lambda *device: None  # the worker calls it after every update; without a device it raises

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Chooses the path; may be called again. Raises HandshakeError, ValueError or TransferError when the fast one cannot be had."""
        self.shutdown()
        dtype = Adapter.reload.load_tensor(self.model.model.embed_tokens, "weight").dtype
        quantization = self.model.quant_config.get_name() if self.model.quant_config is not None else None
        degrees = shared.degrees_of(self.parallel_config, quantization, dtype)
        # of vLLM's ModelConfig, which an engine of 0.23 does not get, leaving the reload takes the dtype alone
        self.path = shared.make_path(self.model, SimpleNamespace(dtype=dtype), Adapter(), init_info, degrees)

    def receive_weights(self, update_info: UpdateInfo, load_weights: Callable) -> None:
        """Takes the whole update (fast) or one bucket (slow); leaves the reload when nothing is missing any more."""
        if not self.is_under_way:
            self.path.start()
            self.is_under_way = True
        if isinstance(self.path, ShardPath):
            self.path.receive(update_info.update)
        else:
            self.path.receive(Bucket(update_info.path, update_info.sha256))
        if self.path.has_everything():
            self.path.finish(update_info.read_back)
            self.is_under_way = False

    def abandon(self) -> None:
        """Drops an update that failed, from any point, so that another can start."""
        self.is_under_way = False
        if self.path is not None:
            self.path.abandon()
        Adapter.reload.abandon(self.model)  # the worker enters the reload on its own

    def shutdown(self) -> None:
        """Closes the transport."""
        if self.path is not None:
            self.path.close()
            self.path = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Ranks send through mrl.reshard.execute; nobody calls this."""
        raise RuntimeError("trainer ranks send by mrl.reshard.execute, not through vLLM")


class WorkerExtension(shared.WorkerExtension):
    """What can be asked of a worker of this generation."""

    reload = Adapter.reload

    def weight_update_report(self) -> dict[str, Any]:
        """As in 0.32. Raises RuntimeError when the update never became whole: 0.23 finishes one without asking."""
        if self.weight_transfer_engine.is_under_way:
            raise RuntimeError("the update was finished before everything had come")
        return super().weight_update_report()

    def abandon_update(self) -> None:
        """After a failed update, wherever it failed: the next one may start. What the engine holds is a mixture until then."""
        self.weight_transfer_engine.abandon()
        self._weight_update_active, self._is_checkpoint_format = False, True
