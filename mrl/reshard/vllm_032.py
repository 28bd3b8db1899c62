"""Adapter for vLLM 0.32: its weight-transfer engine class, its layerwise reload and how its weights are read back.

Everything here that starts with an underscore in vLLM is private there; another vLLM generation gets a file of its own.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from mrl.reshard.receive import Bucket, ReloadLedger


@dataclass
class InitInfo(WeightTransferInitInfo):
    """HF name and shape of every tensor that each update has to bring."""

    expected: dict[str, list[int]]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket of full HF tensors; see mrl.reshard.receive.Bucket."""

    path: str
    sha256: str


class FullTensorEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The slow path: full HF tensors through the model's own `load_weights`, inside vLLM's layerwise reload.

    It is what a faster path is judged by, so it leans on vLLM's own loader for every layout question.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect: buckets come as files."""
        self.expected = init_info.expected

    def start_weight_update(self) -> None:
        """Enters vLLM's reload lifecycle; from here the model is in load layout and cannot generate."""
        self.ledger = ReloadLedger({name for name, _ in self.model.named_parameters()}, self.expected)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, whose closing device synchronisation has no meaning, and fails, where there is no accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads one bucket. Raises ValueError for damaged bytes and whatever vLLM's loader raises for a tensor it cannot place."""
        path = Bucket(update_info.path, update_info.sha256).checked()
        with torch.no_grad():
            self.ledger.add(set(self.model.load_weights(self._tensors(str(path)))))

    def _tensors(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                tensor = file.get_tensor(name)
                self.ledger.receive(name, tuple(tensor.shape))
                yield name, tensor

    def finish_weight_update(self) -> None:
        """Leaves the reload lifecycle; raises RuntimeError when a tensor did not come or a parameter was not written."""
        self.ledger.check_complete()
        finalize_layerwise_reload(self.model, self.model_config)
        prepare_experts(self.model)

    def shutdown(self) -> None:
        """Holds nothing between updates."""


def prepare_experts(model: torch.nn.Module) -> None:
    """Puts reloaded experts into kernel layout.

    vLLM 0.32 calls the experts' own `process_weights_after_loading` at the first load only, so after a reload the CPU
    kernel reads load-layout weights as if they were prepacked: wrong log-probs, no error.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(layer, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(layer)


class WorkerExtension:
    """Methods that vLLM mixes into its worker (`worker_extension_cls`), called through `collective_rpc`."""

    def weight_fingerprints(self) -> dict[str, str]:
        """SHA-256 of everything this worker computes with: parameters, buffers and the linears that CPU packs out of sight.

        vLLM's own `compute_weight_checksums` reads parameters only, and on CPU a packed linear's parameter is empty.
        """
        model = self.model_runner.get_model()
        held = {name: _sha256(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        packed = {f"{name}.<packed>": _sha256(weight) for name, weight in packed_linears(model)}
        return {f"rank{self.rank}.{name}": digest for name, digest in (held | packed).items()}


def packed_linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(module name, weight [out, in]) of linears whose weight only their kernel holds.

    An identity matrix through the layer returns the weight bit for bit: every product is x*1 or x*0.
    """
    for name, layer in model.named_modules():
        kernel = getattr(layer, "cpu_linear", None)
        if kernel is None:
            continue
        width = getattr(layer, "input_size_per_partition", None) or getattr(layer, "embedding_dim", None) or layer.input_size
        eye = torch.eye(width, dtype=getattr(layer, "params_dtype", None) or layer.weight.dtype)
        yield name, kernel(eye, layer.weight, None).t()


def _sha256(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    return hashlib.sha256(f"{tuple(data.shape)} {data.dtype} ".encode() + data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
