"""Ascend NPUs through torch_npu and HCCL. Written against the documented interfaces; never run on hardware.

MindSpeed has to be in place before Megatron is imported: see mrl.platforms.npu_mindspeed.
"""

import importlib
import os

import torch

from mrl.errors import EnvironmentFault
from mrl.platforms.npu_environment import check_environment

_GIB = 1024**3


class NpuPlatform:
    """One process an NPU (an Atlas A3 card is two of them)."""

    name = "npu"
    distributed_backend = "hccl"

    def __init__(self) -> None:
        try:
            importlib.import_module("torch_npu")  # adds torch.npu
        except ImportError as error:
            raise EnvironmentFault(
                f"cluster.device=npu, but torch_npu cannot be imported ({error}); install the npu extra and CANN, source CANN's "
                "set_env.sh, or set cluster.device to cuda or cpu"
            ) from error
        if not torch.npu.is_available():
            raise EnvironmentFault(
                "cluster.device=npu, but torch_npu sees no NPU on this host: check `npu-smi info`, ASCEND_RT_VISIBLE_DEVICES and that "
                "CANN's set_env.sh was sourced"
            )
        check_environment(os.environ)

    @property
    def device(self) -> torch.device:
        return torch.device("npu", torch.npu.current_device())

    def set_device(self, local_rank: int) -> None:
        # Ray shows each process only its own NPU, which is then number 0.
        torch.npu.set_device(local_rank % torch.npu.device_count())

    def apply_patches(self) -> None:
        """Nothing is left to do: MindSpeed replaced what Megatron needs before Megatron was imported."""

    def deterministic(self) -> None:
        os.environ["HCCL_DETERMINISTIC"] = "true"  # read when a communicator is made
        torch.use_deterministic_algorithms(True)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch.npu.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        return torch.npu.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.npu.set_rng_state(state)

    def synchronize(self) -> None:
        torch.npu.synchronize()

    def reset_peak_memory(self) -> None:
        torch.npu.reset_peak_memory_stats()

    def max_memory_allocated_gb(self) -> float:
        return torch.npu.max_memory_allocated() / _GIB

    def max_memory_reserved_gb(self) -> float:
        return torch.npu.max_memory_reserved() / _GIB

    def network_environment(self, master_addr: str) -> dict[str, str]:
        return {}  # which interface HCCL and gloo use between nodes is the cluster's to say: launch/runtime_env.npu.yaml

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def release_cache(self) -> None:
        torch.npu.empty_cache()
