"""Adapter for vLLM 0.32: its weight-transfer engine class, and how its experts get into and out of kernel layout.

Everything here and in v0_common.py that starts with an underscore in vLLM is private there; another generation gets a file of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from mrl.model.vllm_parameters import TargetParameter
from mrl.vllm import v0_common as shared
from mrl.vllm.receive import Bucket
from mrl.vllm.route_capture import RouteCapture
from mrl.vllm.shard_path import ShardPath
from mrl.vllm.staging import Staging, check_same_shapes


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Which path, and what it needs to know once."""

    path: str = "slow"  # "slow": full tensors through vLLM's own loader; "fast": shard to shard by the plan
    expected: dict[str, list[int]] | None = None  # slow: HF name and shape of every tensor that each update has to bring
    setup: dict[str, Any] | None = None  # fast: of mrl.reshard.setup.SyncSetup
    engine: int = 0
    plan_hash: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Slow: one bucket of full HF tensors, see mrl.vllm.receive.Bucket. Fast: `update` numbers the sync, which comes in one call."""

    path: str
    sha256: str = ""
    update: int = 0
    read_back: bool = True  # digest what the engine finally holds


_EXPERTS = ("w13_weight", "w2_weight")


class Reload(shared.LayerwiseReload):
    """vLLM 0.32's layerwise reload.

    Experts that CPU packs, which are nearly all of a model, take a shorter way than vLLM's, to the same bits: their load layout is memory
    that one layer takes over from another, and vLLM's own operator packs it straight into the kernel's memory. vLLM's way takes fresh
    memory for either and copies afterwards.
    """

    def __init__(self) -> None:
        self._staging = Staging()

    def materialise(self, layer: nn.Module) -> None:
        super().materialise(layer)
        if _packing(layer):
            self._staging.lend(layer, _EXPERTS)

    def process(self, layer: nn.Module) -> None:
        isa = _packing(layer)
        if not isa:
            super().process(layer)
            return
        kernels = get_layerwise_info(layer).kernel_tensors[0]
        check_same_shapes({leaf: getattr(layer, leaf) for leaf in _EXPERTS}, kernels)
        for leaf in _EXPERTS:
            torch.ops._C.prepack_moe_weight(getattr(layer, leaf).data, kernels[leaf].data, isa)
        self.leave_out(layer)

    def leave_out(self, layer: nn.Module) -> None:
        super().leave_out(layer)
        self._staging.take_back(layer)

    def finish(self, model: nn.Module, model_config: Any) -> None:
        super().finish(model, model_config)
        self._staging.clear()

    def abandon(self, model: nn.Module) -> None:
        super().abandon(model)
        self._staging.clear()

    def prepare_experts(self, layer: nn.Module) -> None:
        """Puts reloaded experts into kernel layout.

        vLLM 0.32 calls the experts' own `process_weights_after_loading` at the first load only, so after a reload the CPU
        kernel reads load-layout weights as if they were prepacked: wrong log-probs, no error.
        """
        experts = _experts(layer)
        if experts is not None:
            experts.process_weights_after_loading(layer)


class Adapter:
    """What the fast path asks of vLLM 0.32; see mrl.vllm.shard_path.Adapter."""

    reload = Reload()

    def moe_backends(self, model: nn.Module) -> set[str]:
        methods = (getattr(layer, "quant_method", None) for layer in model.modules() if hasattr(layer, "w13_weight"))
        return {method.unquantized_backend.name for method in methods}

    def reads_by_identity(self, layer: nn.Module, target: TargetParameter) -> bool:
        return shared.computes_packed(layer, target)

    def final_parts(self, model: nn.Module, layer: nn.Module, target: TargetParameter) -> Iterator[Tensor]:
        return shared.final_parts(model, layer, target, _packing(layer))


def _experts(layer: nn.Module) -> Any:
    """The kernel of a fused-MoE layer; None for other layers."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    return kernel.fused_experts if kernel is not None and hasattr(layer, "w13_weight") else None


def _packing(layer: nn.Module) -> str | None:
    """For which instructions CPU packs this layer's experts; None for other layers and kernels."""
    experts = _experts(layer)
    return experts.isa if hasattr(experts, "isa") and not experts._use_zentorch else None


class Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight-transfer engine `mrl`: the fast path or the slow one, as it was last initialised."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    path: "shared.SlowPath | ShardPath | None" = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Chooses the path; may be called again. Raises HandshakeError, ValueError or TransferError when the fast one cannot be had."""
        self.shutdown()
        degrees = shared.degrees_of(self.parallel_config, self.model_config.quantization, self.model_config.dtype)
        self.path = shared.make_path(self.model, self.model_config, Adapter(), init_info, degrees)

    def start_weight_update(self) -> None:
        """Enters vLLM's reload lifecycle; from here the model is in load layout and cannot generate."""
        self.read_back = True
        self.path.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, whose closing device synchronisation has no meaning, and fails, where there is no accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Takes one bucket (slow) or the whole update (fast)."""
        if isinstance(self.path, ShardPath):
            self.read_back = update_info.read_back
            self.path.receive(update_info.update)
        else:
            self.path.receive(Bucket(update_info.path, update_info.sha256))

    def finish_weight_update(self) -> None:
        """Leaves the reload lifecycle; raises RuntimeError when something did not come or was not written."""
        self.path.finish(self.read_back)

    def abandon(self) -> None:
        """Drops an update that failed, from any point, so that another can start."""
        self.reset_weight_update_target()
        if self.path is not None:
            self.path.abandon()

    def shutdown(self) -> None:
        """Closes the transport."""
        if self.path is not None:
            self.path.close()
            self.path = None


class WorkerExtension(shared.WorkerExtension):
    """What can be asked of a worker of this generation."""

    reload = Adapter.reload

    def abandon_update(self) -> None:
        """After a failed update, wherever it failed: the next one may start. What the engine holds is a mixture until then."""
        self.weight_transfer_engine.abandon()
        self._weight_update_active = False

    def capture_routes(self) -> None:
        """From here on keeps the routes of requests that ask for them."""
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        self.route_capture = RouteCapture(self.model_runner, bind_routed_experts_capturer)

    def take_routes(self, name: str, computed: int) -> tuple[list[int], bytes]:
        """Shape and int16 bytes of what RouteCapture.take returns."""
        routes = self.route_capture.take(name, computed)
        return list(routes.shape), routes.tobytes()

    def forget_routes(self) -> None:
        """Drops the routes of requests that were given up."""
        self.route_capture.forget()
