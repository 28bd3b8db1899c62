"""The table of everything that is replaced in torch and Megatron-core 0.16.1 inside Megatron worker processes.

Megatron assumes an accelerator. On CPU the CPU answers in its place. Streams and events do nothing, because work is
already in order there. Rows with `devices` other than cpu repair defects of Megatron without Transformer Engine.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from mrl.platforms import gloo_device, host_memory_collectives
from mrl.platforms.layers import layers
from mrl.platforms.packs import rotated_by_angles, rotated_from_table
from mrl.platforms.patching import MISSING, Patch
from mrl.platforms.replicated_linear import ReplicatedLinear

_CPU = torch.device("cpu")


class _Event:
    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass


class _Stream:
    """A stream of a device that runs everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        return _Event()


_STREAM = _Stream()


def _is_cuda(device: Any) -> bool:
    return device is not None and str(device).startswith("cuda")


def _on_cpu(factory: Any) -> Any:
    """Wraps a tensor factory. Requests for CUDA tensors or pinned memory get a plain CPU tensor."""

    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return factory(*args, device=_CPU if _is_cuda(device) else device, **kwargs)

    return make


def _known_constructors(original: Any) -> Any:
    constructors = original.__wrapped__()  # of the factories before they are wrapped
    return lambda: constructors


def _cuda_type_name(original: Any) -> Any:
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_


def _plain(sizes: Any) -> Any:
    if hasattr(sizes, "tolist"):
        return sizes.tolist()
    return sizes


def _all_to_all_single(original: Any) -> Any:
    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        return original(output, input, _plain(output_split_sizes), _plain(input_split_sizes), **kwargs)

    return all_to_all_single


def _all_gather(original: Any) -> Any:
    def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
        if all(t.shape == tensor.shape for t in tensor_list):
            return original(tensor_list, tensor, group=group, **kwargs)
        rows = max(t.shape[0] for t in tensor_list)
        padded = [tensor.new_empty(rows, *tensor.shape[1:]) for _ in tensor_list]
        original(padded, F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, rows - tensor.shape[0]]), group=group)
        for target, source in zip(tensor_list, padded, strict=True):
            target.copy_(source[: target.shape[0]])
        return None

    return all_gather


def _recompute_without_fp8(original: Any) -> Any:
    return lambda self, fp8=None: original(self, fp8 or None)


class _TwoSides(TorchFunctionMode):
    """Tells host from device where both share memory: results of `cpu()` are on the host, and so is what is made from
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._host: dict[int, torch.Tensor] = {}  # tensors are kept, so that no other gets their id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = bool(args) and id(args[0]) in self._host
        if func == torch.Tensor.is_cuda.__get__:
            return not known
        answer = args[0] if func is torch.Tensor.pin_memory else func(*args, **(kwargs or {}))
        if isinstance(answer, torch.Tensor) and (known or func is torch.Tensor.cpu):
            self._host[id(answer)] = answer
        return answer


def _with_two_sides(original: Any) -> Any:
    def sorted_by_side(*args: Any, **kwargs: Any) -> Any:
        with _TwoSides():
            return original(*args, **kwargs)

    return sorted_by_side


def _answer(value: Any) -> Any:
    """Returns a function that always gives the same answer."""
    return lambda original: lambda *args, **kwargs: value


def _itself(original: Any) -> Any:
    return lambda self, *args, **kwargs: self


def _get_rng_state(original: Any) -> Any:
    return lambda *args, **kwargs: torch.random.get_rng_state()


def _set_rng_state(original: Any) -> Any:
    return lambda state, *args, **kwargs: torch.random.set_rng_state(state)


_PACK_ROTATION = "megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd"
_WAKES = "gloo wakes four threads for a message, and an update of a tiny model over two ranks waits for 90 of them"

# The order matters once: constructors of torch.device contexts are read before the factories are wrapped.
PATCHES: tuple[Patch, ...] = (
    Patch("torch.cuda.current_device", _answer(_CPU), "Megatron builds its tensors on this device"),
    Patch("torch.cuda.synchronize", _answer(None), "pipeline stages wait for the shapes they receive"),
    Patch("torch.cuda.get_rng_state", _get_rng_state, "the generator tracker saves a new state with it"),
    Patch(
        "torch.cuda.manual_seed",
        lambda _: torch.random.default_generator.manual_seed,
        "the generator tracker seeds with it",
    ),
    Patch(
        "megatron.core.tensor_parallel.random._get_cuda_rng_state",
        _get_rng_state,
        "the generator tracker forks with it",
    ),
    Patch(
        "megatron.core.tensor_parallel.random._set_cuda_rng_state",
        _set_rng_state,
        "the generator tracker forks with it",
    ),
    Patch("torch.cuda.Stream", lambda _: _Stream, "the all-to-all dispatcher makes a side stream"),
    Patch("torch.cuda.current_stream", _answer(_STREAM), "the all-to-all dispatcher waits for it"),
    Patch("torch.Tensor.cuda", _itself, "mbridge moves each model chunk to the device, Megatron tied embeddings"),
    Patch("torch.Tensor.type", _cuda_type_name, "the optimizers recognise parameters by torch.cuda type names"),
    Patch(
        "torch.utils._device._device_constructors",
        _known_constructors,
        "torch.device('meta') contexts look the factories up here; wrapped ones would be missed "
        "and leave tensors unmoved",
    ),
    Patch("torch.tensor", _on_cpu, "gradient scalers and norms ask for device='cuda' by name"),
    Patch("torch.zeros", _on_cpu, "schedules and gradient norms ask for device='cuda' by name"),
    Patch("torch.empty", _on_cpu, "the hybrid optimizer asks for gradients in pinned memory"),
    Patch(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer._get_sub_optimizer_param_groups",
        _with_two_sides,
        "the hybrid optimizer (optimizer_cpu_offload) goes by is_cuda, and pins what it copies",
    ),
    Patch(
        "torch.distributed.distributed_c10d.ProcessGroupGloo",
        gloo_device.sharing,
        "a thread of each group wakes a hundred times a second, and there are a hundred groups",
    ),
    Patch("torch.distributed.all_to_all_single", _all_to_all_single, "gloo refuses split sizes given as tensors"),
    Patch(
        "torch.distributed.all_gather",
        _all_gather,
        "gloo refuses uneven sizes, which expert tensor parallelism gathers",
    ),
    Patch("torch.distributed.ProcessGroup.all_gather_single", host_memory_collectives.all_gather, _WAKES),
    Patch("torch.distributed.ProcessGroup.reduce_scatter_single", host_memory_collectives.reduce_scatter, _WAKES),
    Patch("torch.distributed.ProcessGroup.allreduce", host_memory_collectives.all_reduce, _WAKES),
    Patch("torch.distributed.ProcessGroup.all_to_all_single", host_memory_collectives.all_to_all, _WAKES),
    Patch(
        "megatron.core.transformer.moe.moe_utils.te_general_gemm",
        lambda original: None if original is MISSING else original,
        "the router reads this name although its import failed without Transformer Engine",
        ("cpu", "cuda"),
        torch_layers_only=True,
    ),
    Patch(
        "megatron.core.transformer.multi_latent_attention.TELinear",
        lambda _: ReplicatedLinear,
        "down projections of latent attention are replicated by this class alone, which is None",
        ("cpu", "cuda"),
        torch_layers_only=True,
    ),
    Patch(
        _PACK_ROTATION,
        rotated_from_table,
        "a pack of many short sequences is rotated by a loop over them: a tenth of the update of a tiny model; and its "
        "starts are read from the device twice for queries and twice for keys of every layer",
        ("cpu", "cuda"),
    ),
    Patch(
        _PACK_ROTATION,
        rotated_by_angles,
        "likewise; MindSpeed's kernel is below it",
        ("npu",),
    ),
    Patch(
        "megatron.core.optimizer.optimizer_config.is_te_min_version",
        _answer(False),
        "use_precision_aware_optimizer compares the version of Transformer Engine, which is None without it",
        ("cpu", "cuda"),
        torch_layers_only=True,
    ),
    Patch(
        "megatron.core.tensor_parallel.random.CheckpointWithoutOutput.__init__",
        _recompute_without_fp8,
        "its default fp8=False counts as fp8 and reaches a Transformer Engine name",
        ("cpu", "cuda"),
        torch_layers_only=True,
    ),
)


def rows_for(device: str) -> tuple[Patch, ...]:
    """Returns the rows that `device` needs in this installation."""
    kind = layers()
    return tuple(row for row in PATCHES if device in row.devices and (kind == "torch" or not row.torch_layers_only))
