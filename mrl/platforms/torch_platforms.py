"""The three platforms in torch: CPU with gloo, NVIDIA GPUs with NCCL, Ascend NPUs with torch_npu and HCCL.

The NPU platform follows documented interfaces and was never run on hardware. mrl.platforms.npu_mindspeed must apply
MindSpeed before Megatron is imported.
"""

import importlib
import logging
import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from typing import Any

import torch

from mrl.errors import EnvironmentFault
from mrl.platforms.addresses import address_towards, gloo_environment
from mrl.platforms.cpu_patches import rows_for
from mrl.platforms.hosting import check_npu_environment
from mrl.platforms.patching import apply
from mrl.platforms.process_memory import cpu_name, give_back_heap, peak_resident_bytes, reset_peak_resident
from mrl.units import GIB


def _deterministic_kernels() -> None:
    torch.use_deterministic_algorithms(True)
    # filling would only hide a read of uninitialised memory, and costs a pass
    torch.utils.deterministic.fill_uninitialized_memory = False


class CpuPlatform:
    """One process for each rank, one compute thread, gloo collectives. cpu_patches answers what Megatron asks
    torch.cuda.
    """

    name = "cpu"
    distributed_backend = "gloo"
    device = torch.device("cpu")

    def set_device(self, local_rank: int) -> None:
        pass

    def apply_patches(self) -> None:
        apply(rows_for("cpu"))
        # Megatron warns when the CPU generator changes inside its tracker's fork; here that generator is the tracked
        # one.
        logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)

    def deterministic(self) -> None:
        torch.set_num_threads(1)  # sums over threads depend on the split of the work
        _deterministic_kernels()

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def synchronize(self) -> None:
        pass

    def beside(self) -> AbstractContextManager[Any]:
        return nullcontext()  # a copy is complete when it returns

    def device_name(self) -> str:
        return cpu_name()

    def reset_peak_memory(self) -> None:
        reset_peak_resident()

    def max_memory_allocated_gb(self) -> float:
        return peak_resident_bytes() / GIB

    def max_memory_reserved_gb(self) -> float:
        return self.max_memory_allocated_gb()

    def network_environment(self, master_addr: str) -> dict[str, str]:
        return gloo_environment(address_towards(master_addr))

    def span(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name)

    def profiled(self) -> list[torch.profiler.ProfilerActivity]:
        return [torch.profiler.ProfilerActivity.CPU]

    def capture(self, begins: bool) -> None:
        raise NotImplementedError("no outer profiler follows a CPU's work")  # refused by a rule

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def release_cache(self) -> None:
        give_back_heap()


class _Accelerator:
    """The common part of torch.cuda and torch.npu: one process for each device."""

    name: str
    distributed_backend: str

    @property
    def _torch(self) -> Any:
        """torch.cuda or torch.npu."""
        return getattr(torch, self.name)

    @property
    def device(self) -> torch.device:
        return torch.device(self.name, self._torch.current_device())

    def set_device(self, local_rank: int) -> None:
        # If a scheduler shows each process only its own device, that device has number 0.
        self._torch.set_device(local_rank % self._torch.device_count())

    def rng_state(self) -> torch.Tensor:
        return self._torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._torch.set_rng_state(state)

    def synchronize(self) -> None:
        self._torch.synchronize()

    def beside(self) -> AbstractContextManager[Any]:
        stream = self._copy_stream
        stream.wait_stream(self._torch.current_stream())
        return self._torch.stream(stream)

    @cached_property
    def _copy_stream(self) -> Any:
        return self._torch.Stream()

    def span(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name)

    def profiled(self) -> list[torch.profiler.ProfilerActivity]:
        return [torch.profiler.ProfilerActivity.CPU]

    def capture(self, begins: bool) -> None:
        raise NotImplementedError(f"no outer profiler follows the work on {self.name}")  # refused by a rule

    def device_name(self) -> str:
        return self._torch.get_device_name()

    def reset_peak_memory(self) -> None:
        self._torch.reset_peak_memory_stats()

    def max_memory_allocated_gb(self) -> float:
        return self._torch.max_memory_allocated() / GIB

    def max_memory_reserved_gb(self) -> float:
        return self._torch.max_memory_reserved() / GIB

    def network_environment(self, master_addr: str) -> dict[str, str]:
        return {}  # the cluster decides on the interface between nodes: launch/runtime_env.*.yaml

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def release_cache(self) -> None:
        self._torch.empty_cache()


class CudaPlatform(_Accelerator):
    """NVIDIA GPUs through torch.cuda and NCCL."""

    name = "cuda"
    distributed_backend = "nccl"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise EnvironmentFault(
                f"cluster.device=cuda, but torch {torch.__version__} sees no CUDA device on this host: "
                "install the cuda extra and a driver, or set cluster.device=cpu"
            )

    def apply_patches(self) -> None:
        apply(rows_for("cuda"))

    def deterministic(self) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Megatron's deterministic mode refuses Transformer Engine without it
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        # Read when the first communicator is made. By default NCCL may sum in the switches (NVLS), in an order that is
        # not fixed.
        os.environ.setdefault("NCCL_ALGO", "Ring")
        torch.backends.cudnn.benchmark = False
        _deterministic_kernels()

    def span(self, name: str) -> AbstractContextManager[Any]:
        both = ExitStack()
        both.enter_context(torch.profiler.record_function(name))
        both.enter_context(torch.cuda.nvtx.range(name))
        return both

    def profiled(self) -> list[torch.profiler.ProfilerActivity]:
        return [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]

    def capture(self, begins: bool) -> None:
        (torch.cuda.profiler.start if begins else torch.cuda.profiler.stop)()


class NpuPlatform(_Accelerator):
    """Ascend NPUs through torch_npu and HCCL. An Atlas A3 card has two of them."""

    name = "npu"
    distributed_backend = "hccl"

    def __init__(self) -> None:
        try:
            importlib.import_module("torch_npu")  # adds torch.npu
        except ImportError as error:
            raise EnvironmentFault(
                f"cluster.device=npu, but torch_npu cannot be imported ({error}); install the npu extra and CANN, "
                "source CANN's set_env.sh, or set cluster.device to cuda or cpu"
            ) from error
        if not torch.npu.is_available():
            raise EnvironmentFault(
                "cluster.device=npu, but torch_npu sees no NPU on this host: check `npu-smi info`, "
                "ASCEND_RT_VISIBLE_DEVICES and that CANN's set_env.sh was sourced"
            )
        check_npu_environment(os.environ)

    def apply_patches(self) -> None:
        """Applies the remaining rows. MindSpeed did the rest before Megatron was imported."""
        apply(rows_for("npu"))

    def deterministic(self) -> None:
        os.environ["HCCL_DETERMINISTIC"] = "true"  # read when a communicator is made
        _deterministic_kernels()
