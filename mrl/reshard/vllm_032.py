"""Adapter for vLLM 0.32: its weight-transfer engine class, its layerwise reload and how its weights are read back.

Everything here that starts with an underscore in vLLM is private there; another vLLM generation gets a file of its own.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from mrl.reshard.load_layout import weight_bytes
from mrl.reshard.read_back import through_identity, unpacked
from mrl.reshard.receive import Bucket, ReloadLedger
from mrl.reshard.setup import SyncSetup
from mrl.reshard.shard_path import Degrees, ShardPath
from mrl.reshard.target import TargetParameter


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
    """Slow: one bucket of full HF tensors, see mrl.reshard.receive.Bucket. Fast: `update` numbers the sync, which comes in one call."""

    path: str
    sha256: str = ""
    update: int = 0
    read_back: bool = True  # digest what the engine finally holds


class Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight-transfer engine `mrl`: the fast path or the slow one, as it was last initialised."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    path: "SlowPath | ShardPath | None" = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Chooses the path; may be called again. Raises HandshakeError, ValueError or TransferError when the fast one cannot be had."""
        self.shutdown()
        if init_info.path == "slow":
            self.path = SlowPath(self.model, self.model_config, init_info.expected or {})
        else:
            setup = SyncSetup.from_json(init_info.setup)
            degrees = degrees_of(self.vllm_config)
            self.path = ShardPath(self.model, self.model_config, Adapter(), setup, init_info.engine, init_info.plan_hash, degrees)

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
        if isinstance(self.path, SlowPath):
            self.path.receive(Bucket(update_info.path, update_info.sha256))
        else:
            self.read_back = update_info.read_back
            self.path.receive(update_info.update)

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


class SlowPath:
    """Full HF tensors through the model's own `load_weights`, inside vLLM's layerwise reload.

    It is what the fast path is judged by, so it leans on vLLM's own loader for every layout question.
    """

    def __init__(self, model: nn.Module, model_config: Any, expected: dict[str, list[int]]):
        """`expected`: HF name and shape of every tensor that each update has to bring."""
        self._model, self._config, self._expected = model, model_config, expected

    def start(self) -> None:
        """Enters the reload; what an earlier update left unfinished is dropped."""
        self.abandon()
        self._ledger = ReloadLedger({name for name, _ in self._model.named_parameters()}, self._expected)
        initialize_layerwise_reload(self._model)

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

    def finish(self, read_back: bool) -> None:
        """Leaves the reload; raises RuntimeError when a tensor did not come or a parameter was not written."""
        self._ledger.check_complete()
        finalize_layerwise_reload(self._model, self._config)
        prepare_experts(self._model)

    def abandon(self) -> None:
        """Gives every module its kernels' tensors back."""
        LayerwiseReload().abandon(self._model)

    def report(self) -> dict[str, Any]:
        """There are no digests on this path."""
        return {}

    def close(self) -> None:
        """Holds nothing between updates."""


class LayerwiseReload:
    """vLLM 0.32's layerwise reload, one module at a time; see mrl.reshard.load_layout.Reload."""

    def enter(self, model: nn.Module) -> None:
        initialize_layerwise_reload(model)

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
        prepare_experts(layer)
        for name, kernels in info.kernel_tensors[0].items():
            kernels.data.copy_(getattr(layer, name))
        _place_kernel_tensors(layer, info)
        info.reset()

    def finish(self, model: nn.Module, model_config: Any) -> None:
        finalize_layerwise_reload(model, model_config)

    def abandon(self, model: nn.Module) -> None:
        model._do_torchao_reload = getattr(model, "_original_do_torchao_reload", False)
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
                info.reset()


class Adapter:
    """What the fast path asks of vLLM 0.32; see mrl.reshard.shard_path.Adapter."""

    reload = LayerwiseReload()

    def moe_backends(self, model: nn.Module) -> set[str]:
        methods = (getattr(layer, "quant_method", None) for layer in model.modules() if hasattr(layer, "w13_weight"))
        return {method.unquantized_backend.name for method in methods}

    def final_tensor(self, model: nn.Module, layer: nn.Module, target: TargetParameter) -> Tensor:
        leaf = target.name.rpartition(".")[2]
        parameter, dtype = getattr(layer, leaf).data, getattr(torch, target.dtype)
        if leaf == "weight" and computes_packed(model, layer):
            return through_identity(layer, target.local_shape, dtype)
        experts = experts_of(layer)
        if experts is None or not hasattr(experts, "isa") or experts._use_zentorch:
            return parameter
        from vllm._custom_ops import cpu_prepack_moe_weight

        if tuple(parameter.shape) != target.local_shape:
            raise RuntimeError(
                f"{target.name}: the kernel pads {list(target.local_shape)} to {list(parameter.shape)}; "
                "choose a rollout layout that leaves each worker a multiple of 32 of moe_intermediate_size"
            )
        return unpacked(parameter, cpu_prepack_moe_weight, experts.isa)


def degrees_of(vllm_config: Any) -> Degrees:
    """What this engine was started with."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    return Degrees(
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        data=parallel.data_parallel_size,
        spreads_experts=parallel.enable_expert_parallel and parallel.tensor_parallel_size * parallel.data_parallel_size > 1,
        linear_placement=parallel.expert_placement_strategy == "linear" and not parallel.enable_eplb,
        quantization=model.quantization,
        dtype=str(model.dtype).removeprefix("torch."),
        position=parallel.data_parallel_index * parallel.world_size + parallel.rank,
    )


def computes_packed(model: nn.Module, layer: nn.Module) -> bool:
    """Whether the layer's products come from a packed copy. CPU packs word embeddings too, but looks rows up in the parameter."""
    is_output = layer is getattr(model, "lm_head", None)
    return hasattr(layer, "cpu_linear") and (is_output or layer.weight.numel() == 0)


def experts_of(layer: nn.Module) -> Any:
    """The kernel of a fused-MoE layer; None for other layers."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    return kernel.fused_experts if kernel is not None and hasattr(layer, "w13_weight") else None


def prepare_experts(model: nn.Module) -> None:
    """Puts reloaded experts into kernel layout.

    vLLM 0.32 calls the experts' own `process_weights_after_loading` at the first load only, so after a reload the CPU
    kernel reads load-layout weights as if they were prepacked: wrong log-probs, no error.
    """
    for layer in model.modules():
        experts = experts_of(layer)
        if experts is not None:
            experts.process_weights_after_loading(layer)


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

    def weight_update_report(self) -> dict[str, Any]:
        """What the last fast update brought and what the engine then held; digests by parameter, bytes and seconds."""
        return self.weight_transfer_engine.path.report()

    def weight_digests(self) -> dict[str, int]:
        """Digest of every parameter as the engine holds it now (fast path only)."""
        return self.weight_transfer_engine.path.held()

    def weight_bytes(self) -> int:
        """Bytes that an update has to bring to this worker, from vLLM's own parameters."""
        return weight_bytes(self.model_runner.get_model(), Adapter.reload, self.model_config.dtype)

    def abandon_update(self) -> None:
        """After a failed update, wherever it failed: the next one may start. What the engine holds is a mixture until then."""
        self.weight_transfer_engine.abandon()
        self._weight_update_active = False


def packed_linears(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(module name, weight [out, in]) of linears whose weight their kernel holds in a form of its own."""
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear"):
            parameters, _ = get_layerwise_info(layer).restore_metadata
            yield name, through_identity(layer, tuple(parameters["weight"].shape), parameters["weight"].dtype)


def _sha256(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    return hashlib.sha256(f"{tuple(data.shape)} {data.dtype} ".encode() + data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
