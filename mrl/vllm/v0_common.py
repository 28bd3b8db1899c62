"""What is the same in vLLM 0.23 and 0.32; v0_23 and v0_32, which hold what differs, import it, and nobody else.

Private in vLLM, and why it is touched:

* `model_loader.reload.layerwise`, `.meta`, `.utils`: vLLM's own reload takes whole models of full tensors; here single
  modules are brought into load layout, written box by box, processed and put back into their kernels' memory.
* `layer.cpu_linear`: on CPU a linear's weight lives on in this closure only, packed; it is read by multiplying with it.
* `_already_called_process_weights_after_loading`, `_do_torchao_reload`: marks that the reload leaves on layers and
  model.
"""

import hashlib
import traceback
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from mrl.errors import described
from mrl.model.vllm_parameters import TargetParameter
from mrl.vllm.awaited_weights import fill
from mrl.vllm.engine_state import AWAITED
from mrl.vllm.handshake import EngineDegrees
from mrl.vllm.load_layout import leaf_of, weight_bytes
from mrl.vllm.read_back import through_identity, unpacked, what_reading_shows
from mrl.vllm.receive import InitInfo, UpdateInfo, UpdatePath
from mrl.vllm.sleeping import SleepingExtension

_CONSTANTS = "e_score_correction_bias"
# of latent attention: halves of kv_b_proj as decoding multiplies with them, made anew at the end of each reload
_ABSORBED = ("W_UK_T", "W_UV")


class CommonAdapter:
    """What mrl asks of vLLM; see mrl.vllm.load_layout.Adapter. A generation adds `moe_backends` and `expert_isa`."""

    def plan_name(self, name: str) -> str:
        """Plans speak of parameters as vLLM 0.32 does."""
        return name

    def attention_backends(self, model: nn.Module) -> set[str]:
        """vLLM chooses by device and version; each attention layer knows its own."""
        backends = (getattr(layer, "attn_backend", None) for layer in model.modules())
        return {backend.get_name() for backend in backends if backend is not None}

    def word_backends(self, model: nn.Module) -> set[str]:
        """Classes of the kernels that multiply with words of linear layers, as vLLM chose them; on CPU none."""
        kernels = (getattr(getattr(layer, "quant_method", None), "fp8_linear", None) for layer in model.modules())
        return {type(kernel).__name__ for kernel in kernels if kernel is not None}

    def expert_isa(self, layer: nn.Module) -> str | None:
        """The instructions for which the CPU packs this layer's experts; None for other layers and kernels."""
        raise NotImplementedError

    def prepare_experts(self, layer: nn.Module) -> None:
        """Does nothing: nothing is left to do after the layer's quantisation method."""

    def enter(self, model: nn.Module) -> None:
        for layer in model.modules():
            _leave_constants_to_the_router(layer)
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
        info = get_layerwise_info(layer)
        method = getattr(layer, "quant_method", None)
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
        _refresh_tied_head(model)

    def abandon(self, model: nn.Module) -> None:
        model._do_torchao_reload = getattr(model, "_original_do_torchao_reload", False)
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                self.leave_out(layer)

    def packed_bytes(self, model: nn.Module) -> int:
        """Bytes of linear layers that kernels hold packed, out of Python's sight."""
        packed = (
            layer for layer in model.modules() if hasattr(layer, "cpu_linear") and not _multiplies_in_torch(layer)
        )
        return sum(get_layerwise_info(layer).restore_metadata[0]["weight"].nbytes for layer in packed)

    def bytes_asleep(self, parts: Collection[str]) -> int:
        """Bytes of the pool of device memory whose `parts` an engine's sleep gave away."""
        raise NotImplementedError

    def is_derived(self, leaf: str) -> bool:
        return leaf in _ABSORBED

    def reads_by_identity(self, layer: nn.Module, target: TargetParameter) -> bool:
        """The target lives on only as CPU's packed copy."""
        return target.name.endswith(".weight") and hasattr(layer, "cpu_linear") and layer.weight.numel() == 0

    def final_parts(self, model: nn.Module, layer: nn.Module, target: TargetParameter) -> Iterator[Tensor]:
        """Yields the parts of a parameter as kernels hold them.

        Raises RuntimeError where the kernel pads experts. Raises it too where an output layer's packed copy is not its
        parameter, or a copy for decoding is not the projection.
        """
        if target.module.endswith(".kv_b_proj"):
            _check_absorbed(model, layer, target)
        parameter = getattr(layer, leaf_of(target))
        dtype = getattr(torch, target.dtype)
        if self.reads_by_identity(layer, target):
            yield through_identity(layer, target.local_shape, dtype)
            return
        head = getattr(model, "lm_head", None)
        is_output = head is not None and hasattr(head, "cpu_linear") and parameter is head._parameters.get("weight")
        if is_output and not torch.equal(
            through_identity(head, target.local_shape, dtype), what_reading_shows(parameter.data)
        ):
            raise RuntimeError(
                f"{target.name}: the output layer multiplies with other weights than its parameter holds"
            )
        isa = self.expert_isa(layer)
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


def _multiplies_in_torch(layer: nn.Module) -> bool:
    """Whether CPU keeps this linear as it is; of latent attention the projection that it reads weights from."""
    return layer.cpu_linear is nn.functional.linear or getattr(layer, "_cpu_skip_gemm_dispatch", False)


def _check_absorbed(model: nn.Module, projection: nn.Module, target: TargetParameter) -> None:
    """Raises RuntimeError unless what decoding multiplies with is what `projection` holds.

    Its rows are, head by head, those of keys and those of values.
    """
    attention = next(
        layer for layer in model.modules() if getattr(layer, "kv_b_proj", None) is projection and hasattr(layer, "W_UV")
    )
    by_head = projection.weight.data.unflatten(0, (attention.W_UV.shape[0], -1))
    keys, values = by_head.split((attention.qk_nope_head_dim, attention.v_head_dim), dim=1)
    if not (torch.equal(attention.W_UK_T, keys) and torch.equal(attention.W_UV, values.transpose(1, 2))):
        raise RuntimeError(f"{target.name}: decoding multiplies with other weights than its parameter holds")


def _leave_constants_to_the_router(layer: nn.Module) -> None:
    """Experts keep a plain reference to their router's constants, and no parameter of that name.

    A reload would copy their second parameter, which nothing loads, over the router's: uninitialised memory.
    """
    if hasattr(layer, "w13_weight") and _CONSTANTS in layer._parameters:
        layer.__dict__[_CONSTANTS] = layer._parameters.pop(_CONSTANTS)
        get_layerwise_info(layer).restore_metadata[0].pop(_CONSTANTS, None)


def _refresh_tied_head(model: nn.Module) -> None:
    """Packs a tied output layer anew.

    It has no weights of its own to load, so a reload leaves CPU's packed copy of the old ones.
    """
    head = getattr(model, "lm_head", None)
    if head is None or not hasattr(head, "cpu_linear"):
        return
    if any(layer is not head and layer._parameters.get("weight") is head.weight for layer in model.modules()):
        head.quant_method.process_weights_after_loading(head)


@register_model_loader(AWAITED)
class AwaitedWeights(BaseModelLoader):
    """vLLM's way to a model whose weights a sync will bring: buffers stay as they were made, and nothing is read."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Does nothing: there is nothing to read."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fills all parameters, padding of a vocabulary with zeros; vLLM makes of them what kernels read, as after any
        load.
        """
        fill(model.parameters())
        for layer in model.modules():
            rows = getattr(layer, "shard_indices", None)
            if rows is not None and not rows.num_added_elements:
                layer.weight.data[rows.num_org_elements :] = 0


class CommonTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight-transfer engine `mrl`: the fast path or the slow one, as it was last initialised."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    path: UpdatePath | None = None

    def abandon(self) -> None:
        """Drops an update that failed, from any point, so that another can start."""
        if self.path is not None:
            self.path.abandon()

    def shutdown(self) -> None:
        """Closes the transport."""
        if self.path is not None:
            self.path.close()
            self.path = None


def degrees_of(parallel: Any, quantization: str | None, dtype: torch.dtype) -> EngineDegrees:
    """What this engine was started with. `parallel`: vLLM's ParallelConfig."""
    return EngineDegrees(
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        data=parallel.data_parallel_size,
        spreads_experts=parallel.enable_expert_parallel
        and parallel.tensor_parallel_size * parallel.data_parallel_size > 1,
        linear_placement=parallel.expert_placement_strategy == "linear" and not parallel.enable_eplb,
        quantization=quantization,
        dtype=str(dtype).removeprefix("torch."),
        position=position_of(parallel),
    )


def position_of(parallel: Any) -> int:
    """The position of a worker in its engine: by data-parallel rank, then tensor rank. `parallel`: vLLM's
    ParallelConfig.
    """
    return parallel.data_parallel_index * parallel.world_size + parallel.rank


class CommonWorkerExtension(SleepingExtension):
    """Methods that vLLM mixes into its worker (`worker_extension_cls`), called through `collective_rpc`."""

    adapter: ClassVar[CommonAdapter]  # of this generation

    def answer(self, method: str, arguments: Sequence[Any] = ()) -> dict[str, Any]:
        """Calls one of this worker's methods: {"value": what it returned}, or {"error": what it raised}.

        Nothing may be raised to vLLM here, whose executor stops reading at the first worker that failed. What the
        others answered is then taken for their answer to the next call (MultiprocExecutor.collective_rpc of 0.23 and
        0.32).
        """
        try:
            self.refuse_asleep(method)
            return {"value": getattr(self, method)(*arguments)}
        except Exception as error:
            traceback.print_exc()
            return {"error": described(error)}

    def answer_call(self) -> None:
        """Says that this worker is there."""

    def rendezvous(self) -> str:
        """Where the workers of this engine met, as a URI: a file, of which vLLM leaves each behind, or a port."""
        return self.distributed_init_method

    def update_path(self) -> UpdatePath:
        """The path in use."""
        return self.weight_transfer_engine.path

    def meet_ranks(self) -> None:
        """Meets the ranks on the fast path, once both sides have agreed on its plan. Raises TransferError."""
        self.update_path().meet()

    def weight_fingerprints(self) -> dict[str, str]:
        """SHA-256 of all that this worker computes with: parameters, buffers and linears that CPU packs out of sight.

        vLLM's own `compute_weight_checksums` reads parameters only, and on CPU a packed linear's parameter is empty.
        """
        model = self.model_runner.get_model()
        plain = {name: _sha256(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        packed = {f"{name}.<packed>": _sha256(weight) for name, weight in packed_linears(model)}
        return {f"rank{position_of(self.parallel_config)}.{name}": digest for name, digest in (plain | packed).items()}

    def weight_update_report(self) -> dict[str, Any]:
        """What the last fast update brought and what the engine then held; digests by parameter, bytes and seconds."""
        return self.update_path().report()

    def weight_digests(self) -> dict[str, int]:
        """Digest of every parameter as the engine holds it now (fast path only)."""
        return self.update_path().held_digests()

    def weight_bytes(self) -> int:
        """Bytes that an update has to bring to this worker, from vLLM's own parameters."""
        return weight_bytes(self.model_runner.get_model(), self.adapter, self.model_config.dtype)


def packed_linears(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(module name, weight [out, in]) of linears whose weight their kernel holds in a form of its own."""
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear"):
            parameters, _ = get_layerwise_info(layer).restore_metadata
            yield name, through_identity(layer, tuple(parameters["weight"].shape), parameters["weight"].dtype)


def _sha256(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    return hashlib.sha256(
        f"{tuple(data.shape)} {data.dtype} ".encode() + data.reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()
