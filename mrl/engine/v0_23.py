"""Adapter for vLLM 0.23, the generation of vllm-ascend: names, experts, and updates that the worker drives.

In 0.23 the worker itself enters and leaves the reload around calls of the engine's `receive_weights`. It reports
neither to the engine. So the first call begins an update, and the call that makes it whole finishes it. The worker's
own steps after that find nothing to do.

Private in vLLM, and why it is touched (beside what v0_common.py lists):

* `quant_method.cpu_fused_moe` and its `isa`: how CPU packed a layer's experts, to read them back. Its quantisation
  method packs them at every reload, so nothing is left to prepare.
* `torch.accelerator.synchronize`: the worker calls it after every update. It raises where there is no accelerator.
* `worker._weight_update_active`, `_is_checkpoint_format`: refuse the next update after one that failed.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.model_executor.model_loader import register_model_loader

from mrl.engine import ascend_wake, receive
from mrl.engine.engine_state import AWAITED
from mrl.engine.receive import InitInfo, open_path
from mrl.engine.v0_common import (
    AwaitedWeights,
    CommonAdapter,
    CommonTransferEngine,
    CommonWorkerExtension,
    degrees_of,
)
from mrl.model.vllm_parameters import TargetParameter


class Adapter(CommonAdapter):
    """vLLM 0.23's layerwise reload, and its experts."""

    def plan_name(self, name: str) -> str:
        """Returns the plan's name of a parameter. In 0.23 the fused experts are parameters of `mlp.experts` itself."""
        return re.sub(r"(\.mlp\.experts)(?=\.w\d|$)", r"\1.routed_experts", name)

    def moe_backends(self, model: nn.Module) -> set[str]:
        methods = (getattr(layer, "quant_method", None) for layer in model.modules() if hasattr(layer, "w13_weight"))
        # Ascend's method is another class, without a backend
        return {getattr(getattr(method, "unquantized_backend", None), "name", "OOT") for method in methods}

    def expert_isa(self, layer: nn.Module) -> str | None:
        return getattr(_cpu_experts(layer), "isa", None)

    def bytes_asleep(self, parts: Collection[str]) -> int:
        """Counts by the part for which memory was taken. 0.23 does not say which memory of its pool is asleep."""
        return sum(data.handle[1] for data in ascend_wake.pool().pointer_to_data.values() if data.tag in parts)

    def final_parts(self, model: nn.Module, layer: nn.Module, target: TargetParameter) -> Iterator[Tensor]:
        """Reads as in 0.32. Raises RuntimeError as there, and for experts in a layout of this processor's own."""
        experts = _cpu_experts(layer)
        if experts is not None and self.expert_isa(layer) in (None, "none"):
            raise RuntimeError(
                f"{target.name}: this processor's expert kernel ({type(experts).__name__}) has a layout "
                "that cannot be read back"
            )
        return super().final_parts(model, layer, target)


def _cpu_experts(layer: nn.Module) -> Any:
    """Returns the CPU kernel of a fused-MoE layer; None for other layers and devices."""
    if hasattr(layer, "w13_weight"):
        return getattr(getattr(layer, "quant_method", None), "cpu_fused_moe", None)
    return None


ADAPTER = Adapter()
register_model_loader(AWAITED)(AwaitedWeights)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo, receive.UpdateInfo):
    """The data of one update for vLLM. The worker of 0.23 first reads vLLM's own `update_kind` from it."""


class TransferEngine(CommonTransferEngine):
    """The calls that a worker of vLLM 0.23 makes."""

    update_info_cls = UpdateInfo
    is_under_way = False

    def __init__(self, config: Any, parallel_config: Any, model: nn.Module):
        super().__init__(config, parallel_config, model)
        if not torch.accelerator.is_available():
            torch.accelerator.synchronize = lambda *device: None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Chooses the path; may be called again. Raises as `open_path` does."""
        self.shutdown()
        dtype = ADAPTER.load_tensor(self.model.model.embed_tokens, "weight").dtype
        quantization = None
        if self.model.quant_config is not None:
            quantization = self.model.quant_config.get_name()
        degrees = degrees_of(self.parallel_config, quantization, dtype)
        # an engine of 0.23 gets no ModelConfig, but leaving the reload needs only its dtype
        self.path = open_path(self.model, SimpleNamespace(dtype=dtype), ADAPTER, init_info, degrees)

    def receive_weights(self, update_info: UpdateInfo, load_weights: Callable) -> None:
        """Takes the whole update (fast) or one bucket (slow), and leaves the reload when the update is whole."""
        if not self.is_under_way:
            self.path.start()
            self.is_under_way = True
        self.path.receive(update_info)
        if self.path.has_everything():
            self.path.finish()
            self.is_under_way = False

    def abandon(self) -> None:
        """Drops an update that failed at any point, so that another can start."""
        self.is_under_way = False
        super().abandon()
        ADAPTER.abandon(self.model)  # the worker enters the reload on its own

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raises RuntimeError: ranks send through mrl.reshard.execute, and nobody calls this."""
        raise RuntimeError("trainer ranks send by mrl.reshard.execute, not through vLLM")


class WorkerExtension(CommonWorkerExtension):
    """The calls to a worker of vLLM 0.23."""

    adapter = ADAPTER

    def give_memory(self) -> None:
        """Gives memory back as in 0.32. Raises RuntimeError where this generation could not take it again."""
        if ascend_wake.is_ascend(self):
            ascend_wake.check_worker(self)
        elif self.device.type != "cpu":
            raise RuntimeError(
                "with vLLM 0.23 engines sleep on Ascend and CPU; use 0.32 here, or cluster.placement: separate"
            )
        for name, layer in self.model_runner.get_model().named_modules():
            if _cpu_experts(layer) is not None and ADAPTER.expert_isa(layer) in (None, "none"):
                raise RuntimeError(
                    f"{name}: this processor's expert kernel keeps weights where they cannot be put to sleep"
                )
        super().give_memory()

    def restore_part(self, part: str) -> None:
        """Wakes a part. Ascend's own wake does more than that (mrl.engine.ascend_wake)."""
        if ascend_wake.is_ascend(self):
            ascend_wake.wake(self, part)
        else:
            super().restore_part(part)

    def weight_update_report(self) -> dict[str, Any]:
        """Reports as in 0.32. Raises RuntimeError when an update never became whole, which 0.23 finishes all the
        same.
        """
        if self.weight_transfer_engine.is_under_way:
            raise RuntimeError("the update was finished before everything had come")
        return super().weight_update_report()

    def abandon_update(self) -> None:
        """Drops an update that failed at any point, so that the next one may start.

        Until then the engine holds a mixture.
        """
        self.weight_transfer_engine.abandon()
        self._weight_update_active = False
        self._is_checkpoint_format = True
