"""A CPU worker of vLLM that gives its memory back while its engine sleeps, like the workers of accelerators.

vLLM's own CPU worker ignores `sleep`. Here storages are emptied under their tensors, so that every view stays valid.
Linears that oneDNN packed live in closures, which are dropped and made again. Memory comes back full of NaN, in every
form that kernels read. These are parameters, experts (packed in place), packed linears, and the output layer, which has
both. The KV cache comes back as zeros. What sleeps is the worker extension's `computing_model` (sleeping.py).

Private in vLLM, and why it is touched:

* `layer.cpu_linear`, `dispatch_cpu_unquantized_gemm`: the closure that holds a packed linear, and what makes it.
* `get_layerwise_info(layer).restore_metadata`: shape and dtype of a linear whose parameter packing left empty.
* `_match_cos_sin_cache_dtype` of rotary embeddings: rounds their table to the dtype of queries, for good.
* `model_runner.kv_caches`: the KV cache, layer by layer.
* `shm_broadcast.SpinCondition.wait`: how a core waits for its workers, and a worker for its next call.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, UntypedStorage, nn
from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.v1.worker.cpu_worker import CPUWorker

from mrl.engine import cpu_batch_invariance
from mrl.engine.engine_state import CACHE, WEIGHTS
from mrl.engine.sleeping import NAN, clear, poison
from mrl.engine.tower import synced_part
from mrl.platforms import gloo_device
from mrl.platforms.process_memory import give_back_heap, note_baseline

NAP_S = 2e-4  # between two polls; two naps are a hundredth of a step of the tiny model's engine


def allow_tiles() -> None:
    """Asks Linux for this process's AMX tiles, where the processor has some.

    vLLM's attention in bfloat16 uses them whether or not anybody asked, and dies by SIGILL if nobody did. oneDNN asks
    with its first product that uses them, which a prompt of one token need not have. Private in torch 2.11 and 2.13:
    `torch.cpu._init_amx`. Raises RuntimeError where Linux refuses.
    """
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        raise RuntimeError(
            "Linux does not let this process use AMX tiles (arch_prctl ARCH_REQ_XCOMP_PERM), and vLLM would; "
            "allow it in the container, or set rollout.dtype: float32"
        )


class CpuWorker(CPUWorker):
    """vLLM's CPU worker, with sleep."""

    memory_asleep: dict[str, list["_EmptiedStorage"]]  # by part
    unpacked_layers: list[nn.Module]

    def __init__(self, *arguments: Any, **named: Any):
        nap_while_waiting()  # for a spawned process; forked.py does it for forked ones
        allow_tiles()
        gloo_device.share()
        super().__init__(*arguments, **named)
        if self.parallel_config.data_parallel_size > 1 or self.parallel_config.enable_expert_parallel:
            from mrl.engine.cpu_parallel import install

            install()

    def init_device(self) -> None:
        """Prepares the device and makes the model runner as vLLM does, whose drafter has the model's positions."""
        if self.vllm_config.speculative_config is not None:
            from mrl.engine.cpu_drafts import share_positions

            share_positions(self.vllm_config)
        super().init_device()

    def load_model(self, *arguments: Any, **named: Any) -> None:
        """Loads the model as vLLM does. Memory that the process takes from here on counts as the engine's."""
        self.memory_asleep = {}
        self.unpacked_layers = []
        get_model_architecture(self.model_config)  # imports the model's module
        cpu_batch_invariance.install()
        if self.model_config.use_mla:
            from mrl.engine.cpu_latent import install

            install()
        if self.model_config.is_hybrid:
            from mrl.engine.cpu_delta import install

            install()
        if self.vllm_config.speculative_config is not None:
            from mrl.engine.cpu_drafts import install

            install()
        if self.model_config.quantization is not None:
            from mrl.engine.cpu_fp8 import install

            install()
        note_baseline()
        super().load_model(*arguments, **named)
        round_angles(self.model_runner.get_model(), self.model_config.dtype)

    def sleep(self, level: int = 1) -> None:
        """Gives weights and KV cache back.

        Raises RuntimeError for another level than 2, since the host is the device here.
        """
        if level != 2:
            raise RuntimeError(
                f"a CPU worker sleeps at level 2, not {level}: a copy of its weights on the host would free nothing"
            )
        if WEIGHTS not in self.memory_asleep:
            # a frozen vision tower stays: no sync would bring it back
            synced = synced_part(self.computing_model(), self.model_config)
            self.unpacked_layers = drop_packed(synced)
            loosen(synced.parameters())
            self.memory_asleep[WEIGHTS] = empty(synced.parameters())
        if CACHE not in self.memory_asleep:
            self.memory_asleep[CACHE] = empty(self.model_runner.kv_caches)
        give_back_heap()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes the memory of these parts again, or of all parts that sleep."""
        give_back_heap()  # where the cache wakes: heap that the update before has freed
        for part in tags or list(self.memory_asleep):
            for emptied in self.memory_asleep.pop(part, ()):
                emptied.take()
            if part == WEIGHTS:
                poison(synced_part(self.computing_model(), self.model_config).parameters())
                pack_nan(self.unpacked_layers)
                self.unpacked_layers = []
            else:
                clear(self.model_runner.kv_caches)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Executes a step as vLLM does.

        A resume makes vLLM run a step. Raises RuntimeError where memory is asleep, instead of reading it.
        """
        if scheduler_output.total_num_scheduled_tokens:
            self._refuse_asleep("a step")
        return super().execute_model(scheduler_output)

    def execute_dummy_batch(self) -> None:
        """Executes a dummy step as vLLM does. Raises RuntimeError while memory is asleep."""
        self._refuse_asleep("a dummy step")
        super().execute_dummy_batch()

    def start_weight_update(self, *arguments: Any, **named: Any) -> None:
        """Starts an update as vLLM does. Raises RuntimeError while weights are asleep, where writing them would
        crash.
        """
        if WEIGHTS in self.memory_asleep:
            raise RuntimeError("a weight update was asked of a worker whose weights are asleep")
        super().start_weight_update(*arguments, **named)

    def _refuse_asleep(self, what: str) -> None:
        if self.memory_asleep:
            raise RuntimeError(f"{what} was asked of a worker whose {' and '.join(self.memory_asleep)} are asleep")


def round_angles(model: nn.Module, dtype: torch.dtype) -> None:
    """Rounds tables of angles to the engine's dtype, as vLLM does where they are first used.

    gpt-oss makes them in float32. Devices use them before a sync, when vLLM measures its memory, and CPUs do not: the
    rounding would count as a change of what no sync brings (constants.py).
    """
    for layer in model.modules():
        rounded = getattr(layer, "_match_cos_sin_cache_dtype", None)
        if rounded is not None and isinstance(getattr(layer, "cos_sin_cache", None), Tensor):
            rounded(torch.empty(0, dtype=dtype))


class NappingCondition(shm_broadcast.SpinCondition):
    """Polls in naps for a second after the last call, where vLLM's own class keeps a core busy.

    Others need that core: a worker computes while its core waits, a front end while both wait. Actor ranks need it when
    a generation is over. After that second it blocks like vLLM's own class. Waking from that takes milliseconds on two
    cores.
    """

    def wait(self, timeout_ms: int | None = None) -> None:
        """Waits in naps while the last message is recent, then as vLLM does."""
        if time.monotonic() <= self.last_read + self.busy_loop_s:
            time.sleep(NAP_S)
        else:
            super().wait(timeout_ms)


def nap_while_waiting() -> None:
    """Makes the queues that this process creates from now on, between core and workers, wait in naps."""
    shm_broadcast.SpinCondition = NappingCondition


@dataclass(frozen=True)
class _EmptiedStorage:
    """A storage that was emptied, and its size before."""

    storage: UntypedStorage
    nbytes: int

    def take(self) -> None:
        self.storage.resize_(self.nbytes)


def loosen(parameters: Iterable[nn.Parameter]) -> None:
    """Moves parameters into storages that can be emptied. Digests call Tensor.numpy(), which makes a storage fixed for
    ever.
    """
    for parameter in parameters:
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def empty(tensors: Iterable[Tensor]) -> list[_EmptiedStorage]:
    """Empties the storages below the tensors, which keep shape and strides. Raises RuntimeError for a fixed storage."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage._cdata] = storage
    emptied = [_EmptiedStorage(storage, storage.nbytes()) for storage in storages.values()]
    for item in emptied:
        item.storage.resize_(0)
    return emptied


def drop_packed(model: nn.Module) -> list[nn.Module]:
    """Drops packed linears and returns the layers that had one.

    Each closure holds the handle of its kernel, whose end frees the memory.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "cpu_linear") and not layer.weight.is_meta]
    for layer in layers:
        layer.cpu_linear = _refuse
    return layers


def pack_nan(layers: Iterable[nn.Module]) -> None:
    """Gives each layer a packed linear of NaN again. Its parameter stays the same object, empty or not."""
    for layer in layers:
        parameter = layer.weight
        is_left_empty = parameter.numel() == 0
        if is_left_empty:
            packed = get_layerwise_info(layer).restore_metadata[0]["weight"]
            layer.weight = nn.Parameter(torch.full(packed.shape, NAN, dtype=packed.dtype), requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=is_left_empty)
        layer.weight = parameter


def _refuse(*_: Any) -> NoReturn:
    raise RuntimeError("a linear layer was asked to compute while its weights are asleep")
