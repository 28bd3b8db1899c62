"""What is the same in vLLM 0.23 and 0.32, private parts included: the layerwise reload, the slow path, what a worker answers.

Imported only through the adapter of the installed generation, vllm_032 or vllm_023, which hold what differs.
"""

import hashlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from mrl.errors import described
from mrl.model.vllm_parameters import TargetParameter
from mrl.reshard.setup import SyncSetup
from mrl.vllm.load_layout import weight_bytes, what_reading_shows
from mrl.vllm.read_back import through_identity, unpacked
from mrl.vllm.receive import Bucket, ReloadLedger
from mrl.vllm.shard_path import Adapter, Degrees, ShardPath


class SlowPath:
    """Full HF tensors through the model's own `load_weights`, inside vLLM's layerwise reload.

    It is what the fast path is judged by, so it leans on vLLM's own loader for every layout question.
    """

    def __init__(self, model: nn.Module, model_config: Any, reload: "LayerwiseReload", expected: dict[str, list[int]]):
        """`expected`: HF name and shape of every tensor that each update has to bring."""
        self._model, self._config, self._reload, self._expected = model, model_config, reload, expected

    def start(self) -> None:
        """Enters the reload; what an earlier update left unfinished is dropped."""
        self.abandon()
        self._ledger = ReloadLedger({name for name, _ in self._model.named_parameters()}, self._expected)
        self._reload.enter(self._model)

    def receive(self, bucket: Bucket) -> None:
        """Loads one bucket. Raises ValueError for damaged bytes and whatever vLLM's loader raises for a tensor it cannot place."""
        path = bucket.checked()
        with torch.no_grad():
            self._ledger.add(set(self._model.load_weights(self._tensors(str(path)))))

    def _tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                tensor = file.get_tensor(name)
                self._ledger.receive(name, tuple(tensor.shape))
                yield name, tensor

    def has_everything(self) -> bool:
        """Whether every tensor that has to come did."""
        return self._ledger.expected.keys() <= self._ledger.received.keys()

    def finish(self, read_back: bool) -> None:
        """Leaves the reload; raises RuntimeError when a tensor did not come or a parameter was not written."""
        self._ledger.check_complete()
        self._reload.finish(self._model, self._config)
        for layer in self._model.modules():
            self._reload.prepare_experts(layer)

    def abandon(self) -> None:
        """Gives every module its kernels' tensors back."""
        self._reload.abandon(self._model)

    def report(self) -> dict[str, Any]:
        """There are no digests on this path."""
        return {}

    def close(self) -> None:
        """Holds nothing between updates."""


class LayerwiseReload:
    """vLLM's layerwise reload, one module at a time; see mrl.vllm.load_layout.Reload."""

    def plan_name(self, name: str) -> str:
        """Plans speak of parameters as vLLM 0.32 does."""
        return name

    def prepare_experts(self, layer: nn.Module) -> None:
        """What turning a fused-MoE layer's weights into kernel layout needs after its quantisation method; nothing here."""

    def enter(self, model: nn.Module) -> None:
        initialize_layerwise_reload(model)

    def leave_out(self, layer: nn.Module) -> None:
        info = get_layerwise_info(layer)
        _place_kernel_tensors(layer, info)
        info.reset()

    def load_tensor(self, layer: nn.Module, leaf: str) -> Tensor:
        parameters, _ = get_layerwise_info(layer).restore_metadata
        return parameters.get(leaf, getattr(layer, leaf))  # a bias is never set aside

    def open_loaders(self, layer: nn.Module) -> None:
        for tensor in get_layer_tensors(layer).values():
            if hasattr(tensor, "weight_loader"):
                tensor.weight_loader = _get_original_loader(tensor)

    def materialise(self, layer: nn.Module) -> None:
        materialize_layer(layer, get_layerwise_info(layer))

    def process(self, layer: nn.Module) -> None:
        info, method = get_layerwise_info(layer), getattr(layer, "quant_method", None)
        self.open_loaders(layer)
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)
            if hasattr(layer, "update_param_tp_status"):
                layer.update_param_tp_status()
        self.prepare_experts(layer)
        for name, kernels in info.kernel_tensors[0].items():
            kernels.data.copy_(getattr(layer, name))
        _place_kernel_tensors(layer, info)
        info.reset()

    def finish(self, model: nn.Module, model_config: Any) -> None:
        finalize_layerwise_reload(model, model_config)
        refresh_tied_head(model)

    def abandon(self, model: nn.Module) -> None:
        model._do_torchao_reload = getattr(model, "_original_do_torchao_reload", False)
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                self.leave_out(layer)


def make_path(model: nn.Module, model_config: Any, adapter: Adapter, info: Any, degrees: Degrees) -> "SlowPath | ShardPath":
    """The path that an InitInfo asks for. Raises HandshakeError, ValueError or TransferError when the fast one cannot be had."""
    if info.path == "slow":
        return SlowPath(model, model_config, adapter.reload, info.expected or {})
    setup = SyncSetup.from_json(info.setup)
    return ShardPath(model, model_config, adapter, setup, info.engine, info.plan_hash, degrees)


def degrees_of(parallel: Any, quantization: str | None, dtype: torch.dtype) -> Degrees:
    """What this engine was started with. `parallel`: vLLM's ParallelConfig."""
    return Degrees(
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        data=parallel.data_parallel_size,
        spreads_experts=parallel.enable_expert_parallel and parallel.tensor_parallel_size * parallel.data_parallel_size > 1,
        linear_placement=parallel.expert_placement_strategy == "linear" and not parallel.enable_eplb,
        quantization=quantization,
        dtype=str(dtype).removeprefix("torch."),
        position=parallel.data_parallel_index * parallel.world_size + parallel.rank,
    )


def refresh_tied_head(model: nn.Module) -> None:
    """Packs a tied output layer anew. It has no weights of its own to load, so a reload leaves CPU's packed copy of the old ones."""
    head = getattr(model, "lm_head", None)
    shared = (
        any(layer is not head and layer._parameters.get("weight") is head.weight for layer in model.modules())
        if head is not None
        else False
    )
    if shared and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def final_parts(model: nn.Module, layer: nn.Module, target: TargetParameter, isa: str | None) -> Iterator[Tensor]:
    """What the kernel computes with, in the target's layout. `isa`: for which instructions CPU packed experts; None: they are not packed.

    Raises RuntimeError where the kernel pads experts, whose padding no plan describes, and where an output layer's packed copy is not
    what its parameter says.
    """
    parameter, dtype = getattr(layer, target.name.rpartition(".")[2]), getattr(torch, target.dtype)
    if computes_packed(layer, target):
        yield through_identity(layer, target.local_shape, dtype)
        return
    head = getattr(model, "lm_head", None)
    is_output = head is not None and hasattr(head, "cpu_linear") and parameter is head._parameters.get("weight")
    if is_output and not torch.equal(through_identity(head, target.local_shape, dtype), what_reading_shows(parameter.data)):
        raise RuntimeError(f"{target.name}: the output layer multiplies with other weights than its parameter holds")
    if isa is None:
        yield parameter.data
        return
    from vllm._custom_ops import cpu_prepack_moe_weight

    if tuple(parameter.shape) != target.local_shape:
        raise RuntimeError(
            f"{target.name}: the kernel pads {list(target.local_shape)} to {list(parameter.shape)}; "
            "choose a rollout layout that leaves each worker a multiple of 32 of moe_intermediate_size"
        )
    yield from unpacked(parameter.data, cpu_prepack_moe_weight, isa)


def computes_packed(layer: nn.Module, target: TargetParameter) -> bool:
    """Whether the target lives on only as CPU's packed copy."""
    return target.name.endswith(".weight") and hasattr(layer, "cpu_linear") and layer.weight.numel() == 0


class WorkerExtension:
    """Methods that vLLM mixes into its worker (`worker_extension_cls`), called through `collective_rpc`."""

    reload: ClassVar[LayerwiseReload]  # of this generation

    def answer(self, method: str, arguments: Sequence[Any] = ()) -> dict[str, Any]:
        """Calls one of this worker's methods: {"value": what it returned}, or {"error": what it raised}.

        Nothing may be raised to vLLM here: its executor stops reading at the first worker that failed, and what the others answered is
        then taken for their answer to the next call (MultiprocExecutor.collective_rpc of 0.23 and 0.32).
        """
        try:
            return {"value": getattr(self, method)(*arguments)}
        except Exception as error:
            traceback.print_exc()
            return {"error": described(error)}

    def sync_path(self) -> "SlowPath | ShardPath":
        """The path in use."""
        return self.weight_transfer_engine.path

    def weight_fingerprints(self) -> dict[str, str]:
        """SHA-256 of everything this worker computes with: parameters, buffers and the linears that CPU packs out of sight.

        vLLM's own `compute_weight_checksums` reads parameters only, and on CPU a packed linear's parameter is empty.
        """
        model = self.model_runner.get_model()
        held = {name: _sha256(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        packed = {f"{name}.<packed>": _sha256(weight) for name, weight in packed_linears(model)}
        return {f"rank{self.rank}.{name}": digest for name, digest in (held | packed).items()}

    def weight_update_report(self) -> dict[str, Any]:
        """What the last fast update brought and what the engine then held; digests by parameter, bytes and seconds."""
        return self.sync_path().report()

    def weight_digests(self) -> dict[str, int]:
        """Digest of every parameter as the engine holds it now (fast path only)."""
        return self.sync_path().held()

    def weight_bytes(self) -> int:
        """Bytes that an update has to bring to this worker, from vLLM's own parameters."""
        return weight_bytes(self.model_runner.get_model(), self.reload, self.model_config.dtype)


def packed_linears(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(module name, weight [out, in]) of linears whose weight their kernel holds in a form of its own."""
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear"):
            parameters, _ = get_layerwise_info(layer).restore_metadata
            yield name, through_identity(layer, tuple(parameters["weight"].shape), parameters["weight"].dtype)


def _sha256(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    return hashlib.sha256(f"{tuple(data.shape)} {data.dtype} ".encode() + data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
