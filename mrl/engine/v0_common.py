"""The part that vLLM 0.23 and 0.32 have in common. Only v0_23 and v0_32, which hold the differences, import it.

Private in vLLM, and why it is touched:

* `model_loader.reload.layerwise`, `.meta`, `.utils`: vLLM's own reload takes whole models of full tensors. Here single
  modules are brought into load layout, written box by box, processed, and put back into their kernels' memory.
* `layer.cpu_linear`: on CPU only this closure holds a linear's weight, packed. It is read by multiplying with it.
* `_already_called_process_weights_after_loading`, `_do_torchao_reload`: marks of the reload on layers and model.
"""

import traceback
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import BaseModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from mrl.data.samples import ImageStore
from mrl.engine.awaited_weights import fill
from mrl.engine.constants import Constants, sha256_of
from mrl.engine.drafter import ModelThatDrafts, drafting_model
from mrl.engine.engine_state import TEXT_FOLDER
from mrl.engine.handshake import EngineDegrees
from mrl.engine.load_layout import leaf_of, weight_bytes
from mrl.engine.read_back import through_identity, unpacked, what_reading_shows
from mrl.engine.receive import InitInfo, UpdateInfo, UpdatePath
from mrl.engine.sleeping import SleepingExtension
from mrl.engine.tower import (
    SHOWN,
    check_tower,
    load_tower,
    synced_part,
    text_of,
    tower_digests,
    tower_of,
)
from mrl.errors import EnvironmentFault, described
from mrl.model.hf_config import QUANTIZATION
from mrl.model.hf_files import weight_files
from mrl.model.layout import RolloutLayout
from mrl.model.registry import for_loader
from mrl.model.vllm_parameters import TargetParameter

PACKED_EXPERTS = ("w13_weight", "w2_weight")  # that CPU packs; biases stay as they are
_CONSTANTS = "e_score_correction_bias"
# latent attention: the halves of kv_b_proj that decoding multiplies with, made again at the end of each reload
_ABSORBED = ("W_UK_T", "W_UV")


class CommonAdapter:
    """The common part of mrl.engine.load_layout.Adapter. A generation adds `moe_backends` and `expert_isa`."""

    def plan_name(self, name: str) -> str:
        """Returns the name itself: plans use the names of vLLM 0.32."""
        return name

    def attention_backends(self, model: nn.Module) -> set[str]:
        """Returns the attention kernels. vLLM chooses them by device and version, and each attention layer knows its
        own.
        """
        backends = (getattr(layer, "attn_backend", None) for layer in model.modules())
        # a vision tower's attention has the name of one of its own here, and no class
        return {backend.get_name() for backend in backends if isinstance(backend, type)}

    def fp8_backends(self, model: nn.Module) -> set[str]:
        """Returns the classes of the kernels that vLLM chose for FP8 linear layers; empty on CPU."""
        kernels = (getattr(getattr(layer, "quant_method", None), "fp8_linear", None) for layer in model.modules())
        return {type(kernel).__name__ for kernel in kernels if kernel is not None}

    def expert_isa(self, layer: nn.Module) -> str | None:
        """Returns the instruction set for which the CPU packs this layer's experts; None for other layers and
        kernels.
        """
        raise NotImplementedError

    def prepare_experts(self, layer: nn.Module) -> None:
        """Does nothing: the layer's quantisation method has done everything."""

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
        return parameters.get(leaf, getattr(layer, leaf))  # the reload never sets a bias aside

    def open_loaders(self, layer: nn.Module) -> None:
        for tensor in get_layer_tensors(layer).values():
            if hasattr(tensor, "weight_loader"):
                tensor.weight_loader = _get_original_loader(tensor)

    def materialise(self, layer: nn.Module) -> None:
        materialize_layer(layer, get_layerwise_info(layer))

    def packing_parts(self, layer: nn.Module, leaf: str) -> Iterator[Tensor] | None:
        """Returns None: vLLM's own processing converts whole modules."""

    def process(self, layer: nn.Module, packed: Collection[str] = ()) -> None:
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
        """Returns the bytes of linear layers that kernels hold packed, out of Python's sight."""
        packed = (
            layer for layer in model.modules() if hasattr(layer, "cpu_linear") and not _multiplies_in_torch(layer)
        )
        return sum(get_layerwise_info(layer).restore_metadata[0]["weight"].nbytes for layer in packed)

    def bytes_asleep(self, parts: Collection[str]) -> int:
        """Returns the bytes of `parts` in the device's memory pool that a sleep gave back."""
        raise NotImplementedError

    def is_derived(self, leaf: str) -> bool:
        return leaf in _ABSORBED

    def reads_by_identity(self, layer: nn.Module, target: TargetParameter) -> bool:
        """Returns whether only the CPU's packed copy holds the target."""
        return target.name.endswith(".weight") and hasattr(layer, "cpu_linear") and layer.weight.numel() == 0

    def final_parts(self, model: nn.Module, layer: nn.Module, target: TargetParameter) -> Iterator[Tensor]:
        """Yields the parts of a parameter as kernels hold them.

        Raises RuntimeError where the kernel pads experts. It does so too for an output layer whose packed copy differs
        from its parameter. A copy for decoding that differs from the projection raises it as well.
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
        if isa is None or leaf_of(target) not in PACKED_EXPERTS:
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
    """Returns whether the CPU keeps this linear unpacked: torch's own, or latent attention's projection."""
    return layer.cpu_linear is nn.functional.linear or getattr(layer, "_cpu_skip_gemm_dispatch", False)


def _check_absorbed(model: nn.Module, projection: nn.Module, target: TargetParameter) -> None:
    """Raises RuntimeError unless the copies for decoding equal what `projection` holds.

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
    """Turns a layer's reference to the constants of its router from a parameter into a plain attribute.

    As a second parameter nothing would load it. A reload would then copy uninitialised memory over the router's
    constants.
    """
    if hasattr(layer, "w13_weight") and _CONSTANTS in layer._parameters:
        layer.__dict__[_CONSTANTS] = layer._parameters.pop(_CONSTANTS)
        get_layerwise_info(layer).restore_metadata[0].pop(_CONSTANTS, None)


def _refresh_tied_head(model: nn.Module) -> None:
    """Packs a tied output layer again.

    It has no weights of its own to load. So after a reload the CPU's packed copy would be the old one.
    """
    head = getattr(model, "lm_head", None)
    if head is None or not hasattr(head, "cpu_linear"):
        return
    if any(layer is not head and layer._parameters.get("weight") is head.weight for layer in model.modules()):
        head.quant_method.process_weights_after_loading(head)


class AwaitedWeights(BaseModelLoader):
    """vLLM's loader of a model whose weights a sync will bring. Buffers stay as they were made.

    No file is read, except for what no sync brings: those of a vision tower, and, of an engine that evaluates, those of
    a text model in a folder of its own (TEXT_FOLDER). Both are compared with the files, element by element.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        """Does nothing: there is no file to read."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fills all parameters, and the padding of a vocabulary with zeros. vLLM then processes them as after any
        load.

        A quantisation that was overridden by none is taken out of the configuration, since loaders of some classes
        (gpt-oss) read it wherever there is the key.
        """
        config = vars(model_config.hf_config)
        if QUANTIZATION in config and config[QUANTIZATION] is None:
            del config[QUANTIZATION]
        fill(model.parameters())
        load_tower(model, Path(model_config.model))
        if (folder := self.load_config.model_loader_extra_config.get(TEXT_FOLDER)) is not None:
            _load_text(text_of(model), Path(folder))
        for layer in model.modules():
            rows = getattr(layer, "shard_indices", None)
            if rows is not None and not rows.num_added_elements:
                layer.weight.data[rows.num_org_elements :] = 0
        if folder is not None:
            _check_text(text_of(model), Path(folder))


def _load_text(text: nn.Module, folder: Path) -> None:
    """Loads a text model by its own loader."""
    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            text.load_weights(for_loader(type(text).__name__, name, tensors.get_tensor(name)) for name in names)


def _check_text(text: nn.Module, folder: Path) -> None:
    """Raises EnvironmentFault unless every parameter, not processed yet, is what the files in `folder` have of it."""
    # here: it reads checkpoints, which engines that train do not
    from mrl.engine.loader_check import parallel_of_worker, unlike_files

    degrees = degrees_of(parallel_of_worker(), None, torch.float32)
    workers = degrees.tensor * degrees.data
    layout = RolloutLayout(1, degrees.tensor, degrees.data, workers if degrees.spreads_experts else 1)
    if wrong := unlike_files(text, folder, layout, degrees.position):
        raise EnvironmentFault(
            f"{folder}: vLLM's text model does not hold what the files have of {', '.join(wrong[:SHOWN])}"
            f"{' and more' * (len(wrong) > SHOWN)}"
        )


class CommonTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight-transfer engine `mrl`, with the path of its last initialisation."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    path: UpdatePath | None = None
    drafted: ModelThatDrafts | None = None  # where layers of the model draft

    @property
    def synced(self) -> nn.Module:
        """What the plan of a sync describes: the text model, with the drafting model where there is one, or with a
        vision tower that is trained.
        """
        if self.drafted is not None:
            return self.drafted
        return synced_part(self.model, self.model_config)

    def abandon(self) -> None:
        """Drops an update that failed at any point, so that another can start."""
        if self.path is not None:
            self.path.abandon()

    def shutdown(self) -> None:
        """Closes the transport."""
        if self.path is not None:
            self.path.close()
            self.path = None


def degrees_of(parallel: Any, quantization: str | None, dtype: torch.dtype) -> EngineDegrees:
    """Returns the settings with which this engine was started. `parallel`: vLLM's ParallelConfig."""
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
    """Returns the position of a worker in its engine, by data-parallel rank, then by tensor rank.

    `parallel`: vLLM's ParallelConfig.
    """
    return parallel.data_parallel_index * parallel.world_size + parallel.rank


class CommonWorkerExtension(SleepingExtension):
    """Methods that vLLM mixes into its worker (`worker_extension_cls`), called through `collective_rpc`."""

    adapter: ClassVar[CommonAdapter]  # of this generation
    tower_loaded: dict[str, object] | None = None  # digests of the vision tower, where there is one

    def answer(self, method: str, arguments: Sequence[Any] = ()) -> dict[str, Any]:
        """Calls one of this worker's methods. Returns {"value": its result}, or {"error": what it raised}.

        Nothing may be raised to vLLM here, because its executor stops reading at the first worker that failed. It would
        then take the other answers for those to the next call (MultiprocExecutor.collective_rpc of 0.23 and 0.32).
        """
        try:
            self.refuse_asleep(method)
            return {"value": getattr(self, method)(*arguments)}
        except Exception as error:
            traceback.print_exc()
            return {"error": described(error)}

    def answer_call(self) -> None:
        """Does nothing. Its answer shows that this worker is there."""

    def rendezvous(self) -> str:
        """Returns where the workers of this engine met, as a URI: a port, or a file, which vLLM leaves behind."""
        return self.distributed_init_method

    def update_path(self) -> UpdatePath:
        """Returns the path in use."""
        return self.weight_transfer_engine.path

    def meet_ranks(self) -> None:
        """Connects with the ranks on the fast path, once both sides have agreed on its plan. Raises TransferError."""
        self.update_path().meet()

    def weight_fingerprints(self) -> dict[str, str]:
        """Returns the SHA-256 of every tensor that this worker computes with: parameters, buffers, and linears packed
        by the CPU.

        vLLM's own `compute_weight_checksums` reads only parameters, and on CPU the parameter of a packed linear is
        empty.
        """
        model = self.computing_model()
        plain = {name: sha256_of(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        packed = {f"{name}.<packed>": sha256_of(weight) for name, weight in packed_linears(model)}
        return {f"rank{position_of(self.parallel_config)}.{name}": digest for name, digest in (plain | packed).items()}

    def weight_update_report(self) -> dict[str, Any]:
        """Returns the report of the last fast update: digests by parameter as received and as held, bytes and
        seconds.
        """
        report = self.update_path().report()
        if report.get("held", True) is None:
            return report
        if self.tower_loaded is not None:
            check_tower(self.tower_loaded, self._tower_digests())
        return report

    def note_drafter(self) -> None:
        """Makes the drafting model a part of what sleeps, and of what fast syncs write and read back."""
        self.drafted = ModelThatDrafts(self.model_runner.get_model(), drafting_model(self.model_runner))
        Constants.of(self.drafted)  # noted before the first sleep
        self.weight_transfer_engine.drafted = self.drafted

    def note_tower(self) -> None:
        """Notes the vision tower as it was loaded. Each update that is read back compares it from here on."""
        self.tower_loaded = self._tower_digests()

    def see_images(self, folder: str, most_pixels: int) -> None:
        """Lets the model read images by name. `folder`, `most_pixels`: as in ImageStore. Raises ConfigError as
        ImageReader does.
        """
        from mrl.engine.image_inputs import WorkerImages

        store = ImageStore(folder, most_pixels)
        self.model_runner.get_model().images = WorkerImages(self.model_config.model, store)

    def _tower_digests(self) -> dict[str, object]:
        tower = tower_of(self.model_runner.get_model())
        return tower_digests(tower, packed_linears(tower))

    def weight_digests(self) -> dict[str, int]:
        """Returns the digest of every parameter as the engine holds it now (fast path only)."""
        return self.update_path().held_digests()

    def weight_bytes(self) -> int:
        """Returns the bytes that an update has to bring to this worker, counted on vLLM's own parameters."""
        return weight_bytes(self.weight_transfer_engine.synced, self.adapter, self.model_config.dtype)


def packed_linears(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (module name, weight [out, in]) of linears whose kernel holds the weight in a form of its own."""
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear"):
            parameters, _ = get_layerwise_info(layer).restore_metadata
            yield name, through_identity(layer, tuple(parameters["weight"].shape), parameters["weight"].dtype)
