"""CPU: Megatron over gloo, with stand-ins for what Megatron asks of torch.cuda (see cpu_patches)."""

import logging
import resource

import torch

from mrl.platforms.patches import apply, rows_for

_KIB_PER_GIB = 1024**2


class CpuPlatform:
    """One process a rank, one compute thread, gloo collectives."""

    name = "cpu"
    distributed_backend = "gloo"
    device = torch.device("cpu")

    def set_device(self, local_rank: int) -> None:
        pass

    def apply_patches(self) -> None:
        apply(rows_for("cpu"))
        # Megatron warns when the CPU generator moves inside its tracker's fork; here that generator is the tracked one.
        logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)

    def deterministic(self) -> None:
        # Sums over threads depend on how work is cut; filling fresh memory would only hide a read of it, at the price of a pass.
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def synchronize(self) -> None:
        pass

    def reset_peak_memory(self) -> None:
        pass

    def max_memory_allocated_gb(self) -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _KIB_PER_GIB

    def max_memory_reserved_gb(self) -> float:
        return self.max_memory_allocated_gb()

    def network_environment(self, master_addr: str) -> dict[str, str]:
        # gloo picks the interface that the host's name resolves to, which on a laptop may be none.
        return {"GLOO_SOCKET_IFNAME": "lo"} if master_addr in ("127.0.0.1", "localhost") else {}

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def release_cache(self) -> None:
        pass
