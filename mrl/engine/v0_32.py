"""Adapter for vLLM 0.32, in which a weight-transfer engine drives its whole update.

Private in vLLM, and why it is touched (beside what v0_common.py lists):

* `quant_method.moe_kernel.fused_experts` and its `isa`, `_use_zentorch`: how CPU packed a layer's experts. vLLM
  prepares experts only at the first load. After a reload the kernel would read load layout as if it were packed.
* `torch.ops._C.prepack_moe_weight`: the operator of vLLM's own packing, which needs no memory beside the kernel's.
* `routed_experts_capturer`: where routers report their choices, which vLLM does not return on CPU (route_capture.py).
* `worker._weight_update_active`: refuses the next update after one that failed.
"""

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from mrl.engine.engine_state import AWAITED
from mrl.engine.load_layout import ModuleBuffers, check_same_shapes
from mrl.engine.read_back import PART_BYTES
from mrl.engine.receive import InitInfo, UpdateInfo, open_path
from mrl.engine.route_capture import RouteCapture
from mrl.engine.tower import text_of
from mrl.engine.v0_common import (
    PACKED_EXPERTS,
    AwaitedWeights,
    CommonAdapter,
    CommonTransferEngine,
    CommonWorkerExtension,
    degrees_of,
)


class Adapter(CommonAdapter):
    """vLLM 0.32's layerwise reload, and its experts.

    Experts that CPU packs are nearly all of a model. They take a shorter way than vLLM's, to the same bits. Their load
    layout is memory that one layer takes over from another. vLLM's own operator packs it straight into the kernel's
    memory. vLLM's way takes fresh memory for both and copies afterwards.
    """

    def __init__(self) -> None:
        self._buffers = ModuleBuffers()

    def expert_isa(self, layer: nn.Module) -> str | None:
        experts = _experts(layer)
        if hasattr(experts, "isa") and not experts._use_zentorch:
            return experts.isa
        return None

    def materialise(self, layer: nn.Module) -> None:
        super().materialise(layer)
        if self.expert_isa(layer):
            self._buffers.lend(layer, PACKED_EXPERTS)

    def packing_parts(self, layer: nn.Module, leaf: str) -> Iterator[Tensor] | None:
        isa = self.expert_isa(layer)
        if not isa or leaf not in PACKED_EXPERTS:
            return None
        kernels = get_layerwise_info(layer).kernel_tensors[0]
        check_same_shapes({leaf: getattr(layer, leaf) for leaf in kernels}, kernels)
        return _packed_one_by_one(getattr(layer, leaf).data, kernels[leaf].data, isa)

    def process(self, layer: nn.Module, packed: Collection[str] = ()) -> None:
        if not self.expert_isa(layer):
            super().process(layer)
            return
        for leaf in PACKED_EXPERTS:
            if leaf not in packed:
                deque(self.packing_parts(layer, leaf), maxlen=0)
        for leaf, kernel in get_layerwise_info(layer).kernel_tensors[0].items():
            if leaf not in PACKED_EXPERTS:
                kernel.data.copy_(getattr(layer, leaf))
        self.leave_out(layer)

    def leave_out(self, layer: nn.Module) -> None:
        super().leave_out(layer)
        self._buffers.take_back(layer)

    def finish(self, model: nn.Module, model_config: Any) -> None:
        super().finish(model, model_config)
        self._buffers.clear()

    def abandon(self, model: nn.Module) -> None:
        super().abandon(model)
        self._buffers.clear()

    def prepare_experts(self, layer: nn.Module) -> None:
        """Puts reloaded experts into kernel layout.

        vLLM 0.32 calls the experts' own `process_weights_after_loading` only at the first load. After a reload the CPU
        kernel would read load-layout weights as if they were packed: wrong log-probs, no error.
        """
        experts = _experts(layer)
        if experts is not None:
            experts.process_weights_after_loading(layer)

    def moe_backends(self, model: nn.Module) -> set[str]:
        methods = (getattr(layer, "quant_method", None) for layer in model.modules() if hasattr(layer, "w13_weight"))
        return {_backend(method).name for method in methods}

    def bytes_asleep(self, parts: Collection[str]) -> int:
        """Counts the memory that the pool itself marks as asleep. Waking any part also wakes memory without a part."""
        from vllm.device_allocator import get_mem_allocator_instance

        return sum(data.handle[1] for data in get_mem_allocator_instance().pointer_to_data.values() if data.is_asleep)


def _packed_one_by_one(loaded: Tensor, kernel: Tensor, isa: str) -> Iterator[Tensor]:
    """Yields some experts at a time, and then packs them into the kernel's memory by vLLM's own operator."""
    at_once = max(1, PART_BYTES // loaded[0].nbytes)
    for part, target in zip(loaded.split(at_once), kernel.split(at_once), strict=True):
        yield part
        torch.ops._C.prepack_moe_weight(part, target, isa)


def _backend(method: Any) -> Any:
    """Returns the kernels that vLLM chose for experts: FP8 ones, or those for experts that are not quantised."""
    return getattr(method, "fp8_backend", None) or method.unquantized_backend


def _experts(layer: nn.Module) -> Any:
    """Returns the kernel of a fused-MoE layer; None for other layers, and for FP8 experts, which are read as loaded."""
    if hasattr(layer, "w13_weight_scale_inv"):
        return None
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    if kernel is not None and hasattr(layer, "w13_weight"):
        return kernel.fused_experts
    return None


ADAPTER = Adapter()


@register_model_loader(AWAITED)
class AwaitedWeightsTied(AwaitedWeights):
    """The loader of awaited weights, of models whose output layer is tied where config.json says so."""

    def create_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Makes the model as config.json describes it.

        Where the folder stores a copy of the embedding as output layer, vLLM 0.32 first unties the two, and ties them
        again if the loaded ones are equal. No file is loaded here, and `check_checkpoint` has found them equal.
        """
        if model_config.word_embeddings_untied_by_checkpoint:
            model_config.word_embeddings_untied_by_checkpoint = False
            for config in (model_config.hf_config, model_config.hf_text_config):
                config.tie_word_embeddings = True
        return super().create_model(vllm_config, model_config, prefix)


class TransferEngine(CommonTransferEngine):
    """The calls that a worker of vLLM 0.32 makes."""

    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Chooses the path; may be called again. Raises as `open_path` does."""
        self.shutdown()
        degrees = degrees_of(self.parallel_config, self.model_config.quantization, self.model_config.dtype)
        without_drafts = init_info.path == "slow" and self.drafted is not None
        model = text_of(self.model) if without_drafts else self.synced
        self.path = open_path(model, self.model_config, ADAPTER, init_info, degrees)

    def start_weight_update(self) -> None:
        """Enters vLLM's reload. From here on the model is in load layout and cannot generate."""
        self.path.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives weights as the base class does, but without a device sync where there is no accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Takes one bucket (slow) or the whole update (fast)."""
        self.path.receive(update_info)

    def finish_weight_update(self) -> None:
        """Leaves the reload. Raises RuntimeError when a tensor did not come or was not written."""
        self.path.finish()

    def abandon(self) -> None:
        """Drops an update that failed at any point, so that another can start."""
        self.reset_weight_update_target()
        super().abandon()


class WorkerExtension(CommonWorkerExtension):
    """The calls to a worker of vLLM 0.32."""

    adapter = ADAPTER

    def abandon_update(self) -> None:
        """Drops an update that failed at any point, so that the next one may start.

        Until then the engine holds a mixture.
        """
        self.weight_transfer_engine.abandon()
        self._weight_update_active = False

    def capture_routes(self) -> None:
        """Keeps the routes of requests that want them, from here on."""
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        self.route_capture = RouteCapture(self.model_runner, bind_routed_experts_capturer)

    def take_routes(self, name: str, computed: int) -> tuple[list[int], bytes]:
        """Returns shape and int16 bytes of the result of RouteCapture.take."""
        routes = self.route_capture.take(name, computed)
        return list(routes.shape), routes.tobytes()

    def forget_routes(self) -> None:
        """Drops the routes of requests that were given up."""
        self.route_capture.forget()
