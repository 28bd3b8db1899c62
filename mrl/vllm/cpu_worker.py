"""A CPU worker of vLLM that gives its memory away while its engine sleeps, as the accelerators' workers do.

vLLM's own ignores `sleep`. Storages are emptied under the tensors that lie on them, so that every view stays valid;
linears that oneDNN packed live in closures, which are dropped and made anew. What comes back holds NaN in every form
that kernels read: parameters, experts (packed in place), packed linears and the output layer, which has both. The KV
cache comes back as zeros.

Private in vLLM, and why it is touched:

* `layer.cpu_linear`, `dispatch_cpu_unquantized_gemm`: the closure that holds a packed linear, and what makes it.
* `get_layerwise_info(layer).restore_metadata`: shape and dtype of a linear whose parameter packing left empty.
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

from mrl.platforms import gloo_device
from mrl.platforms.process_memory import give_back_heap, note_baseline
from mrl.vllm import cpu_sigmoid
from mrl.vllm.engine_state import CACHE, WEIGHTS
from mrl.vllm.sleeping import NAN, clear, poison

NAP_S = 2e-4  # between two looks; two of them are a hundredth of a step of the tiny model's engine


class CpuWorker(CPUWorker):
    """vLLM's CPU worker, which sleeps."""

    memory_asleep: dict[str, list["_EmptiedStorage"]]  # by part
    unpacked_layers: list[nn.Module]

    def __init__(self, *arguments: Any, **named: Any):
        nap_while_waiting()  # one that was spawned; forked.py does it for the others
        gloo_device.share()
        super().__init__(*arguments, **named)
        if self.parallel_config.data_parallel_size > 1 or self.parallel_config.enable_expert_parallel:
            from mrl.vllm.cpu_parallel import install

            install()

    def load_model(self, *arguments: Any, **named: Any) -> None:
        """Loads the model as vLLM does; what the process takes from here on is the engine's."""
        self.memory_asleep = {}
        self.unpacked_layers = []
        get_model_architecture(self.model_config)  # imports the model's module
        cpu_sigmoid.install()
        if self.model_config.use_mla:
            from mrl.vllm.cpu_latent import install

            install()
        if self.model_config.is_hybrid:
            from mrl.vllm.cpu_delta import install

            install()
        if self.model_config.quantization is not None:
            from mrl.vllm.cpu_fp8 import install

            install()
        note_baseline()
        super().load_model(*arguments, **named)

    def sleep(self, level: int = 1) -> None:
        """Gives weights and KV cache back.

        Raises RuntimeError for another level than 2: the host is the device here.
        """
        if level != 2:
            raise RuntimeError(
                f"a CPU worker sleeps at level 2, not {level}: a copy of its weights on the host would free nothing"
            )
        if WEIGHTS not in self.memory_asleep:
            self.unpacked_layers = drop_packed(self.model_runner.get_model())
            loosen(self.model_runner.get_model().parameters())
            self.memory_asleep[WEIGHTS] = empty(self.model_runner.get_model().parameters())
        if CACHE not in self.memory_asleep:
            self.memory_asleep[CACHE] = empty(self.model_runner.kv_caches)
        give_back_heap()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes the memory of these parts, or of all that sleep."""
        give_back_heap()  # of the update before, where it is the cache that wakes
        for part in tags or list(self.memory_asleep):
            for emptied in self.memory_asleep.pop(part, ()):
                emptied.take()
            if part == WEIGHTS:
                poison(self.model_runner.get_model().parameters())
                pack_nan(self.unpacked_layers)
                self.unpacked_layers = []
            else:
                clear(self.model_runner.kv_caches)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Executes a step as vLLM does.

        Raises RuntimeError instead of reading memory that was given away: a resume makes vLLM try.
        """
        if scheduler_output.total_num_scheduled_tokens:
            self._refuse_asleep("a step")
        return super().execute_model(scheduler_output)

    def execute_dummy_batch(self) -> None:
        """Executes a dummy step as vLLM does; refused while memory is asleep."""
        self._refuse_asleep("a dummy step")
        super().execute_dummy_batch()

    def start_weight_update(self, *arguments: Any, **named: Any) -> None:
        """Starts an update as vLLM does; refused while weights are asleep, when writing them would crash."""
        if WEIGHTS in self.memory_asleep:
            raise RuntimeError("a weight update was asked of a worker whose weights are asleep")
        super().start_weight_update(*arguments, **named)

    def _refuse_asleep(self, what: str) -> None:
        if self.memory_asleep:
            raise RuntimeError(f"{what} was asked of a worker whose {' and '.join(self.memory_asleep)} are asleep")


class NappingCondition(shm_broadcast.SpinCondition):
    """Where vLLM's own polls on a core, for a second from the last call on, this looks and naps in turn.

    The core is another's: a worker computes while its core waits, a front end while both do, actor ranks when a
    generation is over. After that second it blocks, as vLLM's own; what ends that takes milliseconds on two cores.
    """

    def wait(self, timeout_ms: int | None = None) -> None:
        """Waits in naps while the last message is recent, then as vLLM does."""
        if time.monotonic() <= self.last_read + self.busy_loop_s:
            time.sleep(NAP_S)
        else:
            super().wait(timeout_ms)


def nap_while_waiting() -> None:
    """The queues between core and workers that this process makes from now on wait so."""
    shm_broadcast.SpinCondition = NappingCondition


@dataclass(frozen=True)
class _EmptiedStorage:
    """Memory that was given away, and how much it was."""

    storage: UntypedStorage
    nbytes: int

    def take(self) -> None:
        self.storage.resize_(self.nbytes)


def loosen(parameters: Iterable[nn.Parameter]) -> None:
    """Puts parameters into storages that can be emptied; Tensor.numpy(), which digests use,
    makes one fixed for ever.
    """
    for parameter in parameters:
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def empty(tensors: Iterable[Tensor]) -> list[_EmptiedStorage]:
    """Gives the memory below the tensors away; they keep shape and strides. Raises RuntimeError for a fixed storage."""
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
    """Gives packed linears away; the layers that had one.

    The closure holds the kernel's handle, whose end frees them.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "cpu_linear") and not layer.weight.is_meta]
    for layer in layers:
        layer.cpu_linear = _refuse
    return layers


def pack_nan(layers: Iterable[nn.Module]) -> None:
    """Gives each layer a packed linear again, of NaN. Its parameter stays the same object, empty or not."""
    for layer in layers:
        kept = layer.weight
        is_left_empty = kept.numel() == 0
        if is_left_empty:
            packed = get_layerwise_info(layer).restore_metadata[0]["weight"]
            layer.weight = nn.Parameter(torch.full(packed.shape, NAN, dtype=packed.dtype), requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=is_left_empty)
        layer.weight = kept


def _refuse(*_: Any) -> NoReturn:
    raise RuntimeError("a linear layer was asked to compute while its weights are asleep")
