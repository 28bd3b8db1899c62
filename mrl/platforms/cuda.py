"""NVIDIA GPUs through torch.cuda and NCCL."""

import os

import torch

from mrl.errors import EnvironmentFault
from mrl.platforms.patches import apply, rows_for

_GIB = 1024**3


class CudaPlatform:
    """One process a GPU."""

    name = "cuda"
    distributed_backend = "nccl"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise EnvironmentFault(
                f"cluster.device=cuda, but torch {torch.__version__} sees no CUDA device on this host: "
                "install the cuda extra and a driver, or set cluster.device=cpu"
            )

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def set_device(self, local_rank: int) -> None:
        # A scheduler that shows each process only its own GPU makes that GPU number 0.
        torch.cuda.set_device(local_rank % torch.cuda.device_count())

    def apply_patches(self) -> None:
        apply(rows_for("cuda"))

    def deterministic(self) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault(
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"
        )  # Megatron's deterministic mode refuses Transformer Engine without it
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def max_memory_allocated_gb(self) -> float:
        return torch.cuda.max_memory_allocated() / _GIB

    def max_memory_reserved_gb(self) -> float:
        return torch.cuda.max_memory_reserved() / _GIB

    def network_environment(self, master_addr: str) -> dict[str, str]:
        return {}

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def release_cache(self) -> None:
        torch.cuda.empty_cache()
