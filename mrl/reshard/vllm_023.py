"""Adapter for vLLM 0.23, the generation that vllm-ascend supports: names, experts, and a lifecycle that the worker drives.

In 0.23 an update is started and finished by the worker, not by the weight-transfer engine, and ends in a device synchronisation that CPU
does not have. So no engine is registered with vLLM here: the worker extension drives the same two paths through calls of its own.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config

from mrl.reshard import vllm_shared as shared
from mrl.reshard.receive import Bucket
from mrl.reshard.shard_path import ShardPath
from mrl.reshard.target import TargetParameter


@dataclass(frozen=True)
class InitInfo:
    """Which path, and what it needs to know once; see mrl.reshard.vllm_032.InitInfo."""

    path: str = "slow"
    expected: dict[str, list[int]] | None = None
    setup: dict[str, Any] | None = None
    engine: int = 0
    plan_hash: str = ""


class Reload(shared.LayerwiseReload):
    """vLLM 0.23's layerwise reload. Its quantisation method packs experts for the CPU at every reload, so nothing is left to prepare."""

    def plan_name(self, name: str) -> str:
        """In 0.23 the fused experts are parameters of `mlp.experts` itself."""
        return re.sub(r"(\.mlp\.experts)(?=\.w\d|$)", r"\1.routed_experts", name)


class Adapter:
    """What the fast path asks of vLLM 0.23; see mrl.reshard.shard_path.Adapter."""

    reload = Reload()

    def moe_backends(self, model: nn.Module) -> set[str]:
        methods = (getattr(layer, "quant_method", None) for layer in model.modules() if hasattr(layer, "w13_weight"))
        return {method.unquantized_backend.name for method in methods}

    def final_tensor(self, model: nn.Module, layer: nn.Module, target: TargetParameter) -> Tensor:
        experts = getattr(getattr(layer, "quant_method", None), "cpu_fused_moe", None) if hasattr(layer, "w13_weight") else None
        isa = getattr(experts, "isa", None)
        if experts is not None and isa in (None, "none"):
            raise RuntimeError(
                f"{target.name}: this processor's expert kernel ({type(experts).__name__}) has a layout that cannot be read back"
            )
        return shared.final_tensor(model, layer, target, isa)


class WorkerExtension(shared.WorkerExtension):
    """What can be asked of a worker of this generation; the update's own calls too."""

    reload = Adapter.reload
    _mrl_path: "shared.SlowPath | ShardPath | None" = None

    def sync_path(self) -> "shared.SlowPath | ShardPath":
        """The path in use."""
        return self._mrl_path

    def init_weight_sync(self, info: dict[str, Any]) -> None:
        """Chooses the path; may be called again. Raises HandshakeError, ValueError or TransferError when the fast one cannot be had."""
        if self._mrl_path is not None:
            self._mrl_path.close()
        with set_current_vllm_config(self.vllm_config):
            self._mrl_path = shared.make_path(self.model_runner.get_model(), self.vllm_config, Adapter(), InitInfo(**info))

    def start_weight_sync(self) -> None:
        """Enters vLLM's reload lifecycle; from here the model is in load layout and cannot generate."""
        with torch.device(self.device), set_current_vllm_config(self.vllm_config):
            self._mrl_path.start()

    def take_weight_sync(self, path: str, sha256: str = "", update: int = 0) -> None:
        """Takes one bucket (slow) or the whole update (fast)."""
        with torch.device(self.device), set_current_vllm_config(self.vllm_config):
            self._mrl_path.receive(update if isinstance(self._mrl_path, ShardPath) else Bucket(path, sha256))

    def finish_weight_sync(self, read_back: bool = True) -> None:
        """Leaves the reload lifecycle; raises RuntimeError when something did not come or was not written."""
        with torch.device(self.device), set_current_vllm_config(self.vllm_config):
            self._mrl_path.finish(read_back)

    def abandon_update(self) -> None:
        """After a failed update, wherever it failed: the next one may start. What the engine holds is a mixture until then."""
        self._mrl_path.abandon()
