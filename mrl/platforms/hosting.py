"""How processes of each device are hosted: Ray resources, environment, engine arguments. No torch, so the driver stays light."""

import os
from dataclasses import dataclass
from typing import Any

from mrl.errors import EnvironmentFault
from mrl.platforms import npu_environment as npu


@dataclass(frozen=True)
class Hosting:
    """One kind of device, seen from the process that starts others on it."""

    device: str  # also the dialect in which an engine's final weights are described
    ray_resource: str | None  # what Ray calls the accelerator
    checks_batch_order: bool  # generation must not depend on what else is in the batch; only CPU can promise it
    returns_routes: bool = True  # vLLM itself returns routed experts; on CPU its model runner that does so lacks Triton

    def ray_resources(self, cpus: float, devices: int) -> dict[str, float]:
        """Resources of one process that uses `devices` accelerators."""
        return {"CPU": cpus} | ({self.ray_resource: float(devices)} if self.ray_resource else {})

    def actor_environment(self) -> dict[str, str]:
        """Environment of one Megatron rank."""
        if self.device == "cpu":
            return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if self.device == "npu":
            return npu.ACTOR
        # one queue per device keeps the order in which Megatron overlaps communication with compute
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def engine_environment(self, engine_id: int, engines: int, workers: int, kvcache_gib: int) -> dict[str, str]:
        """Environment of one engine of `workers` processes."""
        common = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        if self.device == "npu":
            return common | npu.ENGINE  # no VLLM_PLUGINS: vllm-ascend is a handful of plugins itself
        common["VLLM_PLUGINS"] = "mrl"
        if self.device != "cpu":
            return common
        return common | {
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CPU_KVCACHE_SPACE": str(kvcache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": cpu_binding(sorted(os.sched_getaffinity(0)), engine_id, engines, workers),
        }

    def engine_arguments(self, max_model_len: int, max_num_batched_tokens: int | None) -> dict[str, Any]:
        """Arguments of vLLM that this device needs, whatever the run says elsewhere."""
        if self.device == "npu":
            return npu.ENGINE_ARGUMENTS
        if self.device != "cpu":
            return {}
        return {
            # A chunked prefill kills a request that has a seed, and makes log-probs depend on the rest of the batch.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_num_batched_tokens or 4096, max_model_len),
            "enforce_eager": True,
        }


def cpu_binding(cores: list[int], engine_id: int, engines: int, workers: int) -> str:
    """vLLM's core list, `a,b|c,d` with one part for each of `workers`; all workers of all engines get equal shares of the cores.

    Shares wrap around when there are more workers than cores: slow, and still right.
    """
    share = max(1, len(cores) // (engines * workers))
    parts = []
    for worker in range(engine_id * workers, (engine_id + 1) * workers):
        parts.append(",".join(str(cores[(worker * share + i) % len(cores)]) for i in range(share)))
    return "|".join(parts)


_HOSTING = {
    "cpu": Hosting("cpu", None, checks_batch_order=True, returns_routes=False),
    "cuda": Hosting("cuda", "GPU", checks_batch_order=False),
    "npu": Hosting("npu", "NPU", checks_batch_order=False),
}


def get_hosting(device: str) -> Hosting:
    """Hosting of a device by name. Raises EnvironmentFault for an unknown one."""
    if device not in _HOSTING:
        raise EnvironmentFault(f"cluster.device: {device} is no device; available: {', '.join(_HOSTING)}")
    return _HOSTING[device]
