"""How processes of each device are hosted: Ray resources, environment, engine arguments. No torch, so the driver stays
light.

Sources of what is set on Ascend: documentation of vllm-ascend 0.23 (reinforcement learning, additional configuration),
MindSpeed core_r0.16.0 and CANN 9.1.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mrl.errors import EnvironmentFault

# Other processes can open a process's device memory not at all, if they use the same device, or on any of the node.
Reach = Literal["process", "device", "node"]

_VISIBLE = {"GPU": "CUDA_VISIBLE_DEVICES", "NPU": "ASCEND_RT_VISIBLE_DEVICES"}  # by what Ray calls the accelerator

CPU_WORKER = "mrl.vllm.cpu_worker.CpuWorker"  # vLLM's argument worker_cls

BUCKET_FOLDER = "mrl-sync-"  # prefix of an engine's folders in /dev/shm that buckets of weights pass through

_NPU_SHARED_DEVICE = {
    # HCCL listens on 16666 by default, so a second process on the same NPU (an engine beside an actor) fails with
    # EJ0003
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    # MB, twice for each pair of a rank and a worker that a weight sync connects; at the default of 20 the 254 pairs of
    # a device of a 235B run would take 10 GB, which no plan of an engine's memory knows of
    "P2P_HCCL_BUFFSIZE": "8",
}

# Lengths differ from step to step, and fixed segments fragment; so ranks get expandable ones. Engines must not have
# them: what lies in them cannot be opened with the handles that vLLM's all-reduce exchanges when graphs are captured
# (the process exits with
# `custom_all_reduce.cuh: invalid argument`, vllm-project/vllm#42609), nor with those of weight syncs, and memory that
# sleeps refuses
# them. False is said, not left out: the job's environment may say otherwise, and vllm-ascend would add True where
# nothing is said.
# torch reads PYTORCH_ALLOC_CONF only where the device's own variable is not set (c10/cuda/CUDAAllocatorConfig.h).
_SEGMENTS = {"cuda": "PYTORCH_CUDA_ALLOC_CONF", "npu": "PYTORCH_NPU_ALLOC_CONF"}


def _segments(device: str, expandable: bool) -> dict[str, str]:
    return {_SEGMENTS[device]: f"expandable_segments:{expandable}"}


_NPU_ACTOR = _NPU_SHARED_DEVICE | {
    # one queue per device keeps the order in which Megatron overlaps communication with compute; Megatron asserts it
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "HCCL_CONNECT_TIMEOUT": "1800",  # s; the default of 120 is short while rank 0 still reads weights
    "HCCL_EXEC_TIMEOUT": "7200",  # s; ranks are idle while the engines generate
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # transformers 5 loads in threads, which is not stable on torch_npu
}

# one queue per device keeps the order in which Megatron overlaps communication with compute
_CUDA_ACTOR = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

_NPU_ENGINE = _NPU_SHARED_DEVICE | {
    # FRACTAL_NZ storage cannot be written in place: new weights would come out as garbage
    "VLLM_ASCEND_ENABLE_NZ": "0",
    "TASK_QUEUE_ENABLE": "1",  # 2 dispatches faster, conflicts with captured graphs and raises the peak of memory
}

# Argument of vLLM: the same as VLLM_ASCEND_ENABLE_NZ. Of vllm-ascend's own checks some read the one, some the other.
_NPU_ENGINE_ARGUMENTS = {"additional_config": {"weight_nz_mode": 0}}


# Argument of vLLM: on Blackwell it would take FlashInfer's MoE kernels, whose experts lie otherwise than the plan of a
# weight sync has them. On older devices this is what it takes by itself.
_CUDA_ENGINE_ARGUMENTS = {"moe_backend": "triton"}

# vLLM and Megatron compile a few functions of integers in every process anew, with a C++ compiler the first time: 4 to
# 20 s
_CPU_EAGER = {"TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True)
class Hosting:
    """One kind of device, seen from the process that starts others on it."""

    device: str  # also the dialect in which an engine's final weights are described
    ray_resource: str | None  # what Ray calls the accelerator
    checks_batch_order: bool  # generation must not depend on what else is in the batch; only CPU can promise it
    # how far device memory can be opened from another process; mrl.platforms.transfer does it
    memory_reach: Reach = "process"
    orders_devices: bool = True  # a process may be shown devices in any order; CANN takes them ascending only
    interleaves_stages: bool = True  # a rank may hold several stages of a pipeline; MindSpeed's cannot be mapped
    # Megatron's switches of fused MoE kernels that the update has there. Transformer Engine brings them; MindSpeed
    # core_r0.16.0 brings a permutation of its own under that name (core/fusions/fused_moe_permute.py), no router
    moe_fusions: tuple[str, ...] = ()
    # vLLM's argument linear_backend of engines in FP8. By itself it would take kernels there that repack words, or
    # round scales to powers of two, so that what engines hold could not be compared with what they were sent.
    fp8_backend: str = ""
    has_flex_dispatcher: bool = False  # the kernels of DeepEP and HybridEP are NVIDIA's
    returns_routes: bool = True  # vLLM itself returns routed experts; on CPU its model runner that does so lacks Triton

    def ray_resources(self, cpus: float, devices: int) -> dict[str, float]:
        """Resources of one process that uses `devices` accelerators."""
        return {"CPU": cpus} | ({self.ray_resource: float(devices)} if self.ray_resource else {})

    def visible_devices(self, names: Sequence[str]) -> dict[str, str]:
        """Environment that shows a process these devices of its node and no other, in this order;
        Ray is told to leave it alone.
        """
        if self.ray_resource is None:
            return {}
        variable = _VISIBLE[self.ray_resource]
        return {variable: ",".join(names), f"RAY_EXPERIMENTAL_NOSET_{variable}": "1"}

    def actor_environment(self) -> dict[str, str]:
        """Environment of one Megatron rank."""
        if self.device == "cpu":
            return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | _CPU_EAGER
        own = _NPU_ACTOR if self.device == "npu" else _CUDA_ACTOR
        return own | _segments(self.device, expandable=True)

    def engine_environment(self, engine_id: int, engines: int, workers: int, kvcache_gib: int) -> dict[str, str]:
        """Environment of one engine of `workers` processes."""
        common = {
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # whatever the command had: no pickles between its processes
        }
        if self.device != "cpu":
            common |= _segments(self.device, expandable=False)
        if self.device == "npu":
            return common | _NPU_ENGINE  # no VLLM_PLUGINS: vllm-ascend is a handful of plugins itself
        common["VLLM_PLUGINS"] = "mrl"
        if self.device != "cpu":
            return common
        return {
            **common,
            **_CPU_EAGER,
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CPU_KVCACHE_SPACE": str(kvcache_gib),
            # Where keys of a sequence are split among threads depends on what else is in the step, and so would its
            # bits.
            "VLLM_CPU_ATTN_SPLIT_KV": "0",
            # libgomp lets a thread that waits for others spin for milliseconds, 300,000 rounds, as long as the process
            # itself has no more threads than cores. Front ends, cores and ranks share these cores: the one that is
            # waited for is kept from running, at every operation of a step. So many rounds, some 0.05 ms, it takes
            # itself where it knows of too few cores.
            "GOMP_SPINCOUNT": "1000",
            "VLLM_CPU_OMP_THREADS_BIND": cpu_binding(sorted(os.sched_getaffinity(0)), engine_id, engines, workers),
        }

    def engine_arguments(
        self, max_model_len: int, max_num_batched_tokens: int | None, sleeps: bool = False
    ) -> dict[str, Any]:
        """Arguments of vLLM that this device needs; the run's own come after them and win.

        `sleeps`: the engine gives its memory to an actor on the same device; on the CPU every engine can.
        """
        if self.device != "cpu":
            own = _NPU_ENGINE_ARGUMENTS if self.device == "npu" else _CUDA_ENGINE_ARGUMENTS
            return own | ({"enable_sleep_mode": True} if sleeps else {})
        return {
            # A chunked prefill kills a request that has a seed, and makes log-probs depend on the rest of the batch.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_num_batched_tokens or 4096, max_model_len),
            "enforce_eager": True,
            "worker_cls": CPU_WORKER,  # vLLM's own keeps its memory when it is told to sleep
        }


def cpu_binding(cores: list[int], engine_id: int, engines: int, workers: int) -> str:
    """vLLM's core list, `a,b|c,d` with one part for each of `workers`; all workers of all engines get equal shares of
    the cores.

    A share of several leaves its last to the engine's scheduler, which waits for its workers in a busy loop. A thread
    of a worker on that core would be waited for at every operation. Shares wrap around when there are more workers than
    cores: slow, and still right.
    """
    share = max(1, len(cores) // (engines * workers))
    threads = max(1, share - 1)
    parts = []
    for worker in range(engine_id * workers, (engine_id + 1) * workers):
        parts.append(",".join(str(cores[(worker * share + i) % len(cores)]) for i in range(threads)))
    return "|".join(parts)


_HOSTING = {
    "cpu": Hosting("cpu", None, checks_batch_order=True, returns_routes=False),
    "cuda": Hosting(
        "cuda",
        "GPU",
        checks_batch_order=False,
        memory_reach="node",
        moe_fusions=("moe_permute_fusion", "moe_router_fusion"),
        has_flex_dispatcher=True,
        fp8_backend="cutlass",
    ),
    "npu": Hosting(
        "npu",
        "NPU",
        checks_batch_order=False,
        memory_reach="device",
        orders_devices=False,
        interleaves_stages=False,
        moe_fusions=("moe_permute_fusion",),
    ),
}


def get_hosting(device: str) -> Hosting:
    """Hosting of a device by name. Raises EnvironmentFault for an unknown one."""
    if device not in _HOSTING:
        raise EnvironmentFault(f"cluster.device: {device} is no device; available: {', '.join(_HOSTING)}")
    return _HOSTING[device]


def check_npu_environment(environment: Mapping[str, str]) -> None:
    """Raises EnvironmentFault that lists every variable of this process that is known to break training on Ascend."""
    if faults := _npu_faults(environment):
        raise EnvironmentFault("the environment is not fit for training on NPUs: " + "; ".join(faults))


def environment_faults(device: str, environment: Mapping[str, str]) -> list[str]:
    """Variables that are known to break a run on this kind of device, each with the reason and the cure."""
    if device == "npu":
        return _npu_faults(environment)
    return []


def _npu_faults(environment: Mapping[str, str]) -> list[str]:
    rows = (
        (
            environment.get("VLLM_ASCEND_ENABLE_NZ", "0") != "0",
            "VLLM_ASCEND_ENABLE_NZ is on: weights in FRACTAL_NZ cannot be updated in place; unset it or set 0",
        ),
        (
            bool(environment.get("VLLM_PLUGINS")) and "ascend" not in environment["VLLM_PLUGINS"].split(","),
            "VLLM_PLUGINS leaves vllm-ascend's platform plugin out, so vLLM would not see the NPUs; unset "
            "it or add ascend and mrl",
        ),
        (
            environment.get("VLLM_ASCEND_ENABLE_FUSED_MC2", "0") != "0",
            "VLLM_ASCEND_ENABLE_FUSED_MC2 is on: it keeps copies of the expert weights that no update "
            "reaches; unset it or set 0",
        ),
        (
            environment.get("TASK_QUEUE_ENABLE", "1") == "2",
            "TASK_QUEUE_ENABLE is 2, which conflicts with the engines' captured graphs; unset it or set 1",
        ),
    )
    return [message for broken, message in rows if broken]
