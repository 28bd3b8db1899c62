"""How processes of each device are hosted: Ray resources, environment, engine arguments. Loads no torch.

Settings for Ascend come from the documentation of vllm-ascend 0.23 (reinforcement learning, additional configuration),
MindSpeed core_r0.16.0 and CANN 9.1.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mrl.errors import EnvironmentFault

# Which processes can open another one's device memory: none, those on the same device, or all of the node.
MemoryReach = Literal["process", "device", "node"]

_VISIBLE = {"GPU": "CUDA_VISIBLE_DEVICES", "NPU": "ASCEND_RT_VISIBLE_DEVICES"}  # by Ray's name of the accelerator

CPU_WORKER = "mrl.engine.cpu_worker.CpuWorker"  # vLLM's argument worker_cls

BUCKET_FOLDER = "mrl-sync-"  # prefix of an engine's folders in /dev/shm, through which buckets of weights pass

_NPU_SHARED_DEVICE = {
    # HCCL listens on 16666 by default, so a second process on the same NPU (an engine beside an actor) fails with
    # EJ0003.
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    # MB, twice for each pair of a rank and a worker that a weight sync connects. At the default of 20, the 254 pairs of
    # a device of a 235B run would take 10 GB, which is in no plan of an engine's memory.
    "P2P_HCCL_BUFFSIZE": "8",
}

# Lengths change from step to step, and fixed segments fragment, so ranks get expandable ones. Engines must not have
# them. Memory in them cannot be opened with the handles that vLLM's all-reduce exchanges when it captures graphs (the
# process exits with `custom_all_reduce.cuh: invalid argument`, vllm-project/vllm#42609), nor with those of weight
# syncs. Sleeping memory refuses them too. False is written and not left out: the job's environment may set it, and
# vllm-ascend adds True where nothing is set. torch reads PYTORCH_ALLOC_CONF only if the device's own variable is not
# set (c10/cuda/CUDAAllocatorConfig.h).
_SEGMENTS = {"cuda": "PYTORCH_CUDA_ALLOC_CONF", "npu": "PYTORCH_NPU_ALLOC_CONF"}


def _segments(device: str, expandable: bool) -> dict[str, str]:
    return {_SEGMENTS[device]: f"expandable_segments:{expandable}"}


_NPU_ACTOR = _NPU_SHARED_DEVICE | {
    # one queue for each device keeps the order in which Megatron overlaps communication with computation; Megatron
    # asserts it
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "HCCL_CONNECT_TIMEOUT": "1800",  # seconds; the default of 120 is too short while rank 0 still reads weights
    "HCCL_EXEC_TIMEOUT": "7200",  # seconds; ranks are idle while the engines generate
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # transformers 5 loads in threads, which is not stable on torch_npu
}

# Read by Transformer Engine 2.11 at every grouped product (common/gemm/cublaslt_gemm.cu). It takes cuBLAS all the same
# without a word for other devices than Hopper, float32, FP8, and inner sizes that are no multiples of 128.
_CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"


def set_rank_defaults(device: str, cuts_layers: bool, grouped_gemm: str) -> None:
    """Sets variables of a rank's process that its device and layers read. What is set already stays.

    Call it before the device's first use. `cuts_layers`: tensor or context ranks share a layer. Then one queue keeps
    the order in which Megatron overlaps communication with computation, and Megatron demands it (training/arguments.py;
    not from Blackwell on, where it does no harm). Otherwise copies and exchanges have queues of their own.
    """
    if device != "cuda":
        return
    if cuts_layers:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault(_CUTLASS, str(int(grouped_gemm == "cutlass")))


def grouped_gemm_text() -> str:
    """Says how Transformer Engine multiplies the tokens of experts in this process."""
    if os.environ.get(_CUTLASS, "0") == "1":
        return "experts multiplied by CUTLASS, their weights' gradients by cuBLAS"
    return "experts multiplied one by one by cuBLAS"


# What each process with communicators gets where the user has set nothing, in the job's environment or a node's. HCCL
# has no such sums in switches, and reports errors without being told.
_COMMUNICATORS = {
    # NVLink SHARP keeps several GB of a device for each rank's communicators, while engines have the device (verl's
    # 235B scripts switch it off as well). The exchanges of training are gathers and all-to-alls, which gain nothing.
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",  # silent otherwise, also about the reason of an error; INFO shows interface and transport
}


def set_communicator_defaults() -> None:
    """Sets variables of this process that communicators read when they are made. What is set already stays."""
    for name, value in _COMMUNICATORS.items():
        os.environ.setdefault(name, value)


_NPU_ENGINE = _NPU_SHARED_DEVICE | {
    # FRACTAL_NZ storage cannot be written in place: new weights would become garbage
    "VLLM_ASCEND_ENABLE_NZ": "0",
    "TASK_QUEUE_ENABLE": "1",  # 2 dispatches faster, but conflicts with captured graphs and raises peak memory
}

# The argument of vLLM that equals VLLM_ASCEND_ENABLE_NZ. Some checks of vllm-ascend read this one, some the variable.
_NPU_ENGINE_ARGUMENTS = {"additional_config": {"weight_nz_mode": 0}}


# An argument of vLLM. On Blackwell vLLM would use FlashInfer's MoE kernels, whose expert layout differs from that of
# the weight sync's plan. On older devices this is its own default.
_CUDA_ENGINE_ARGUMENTS = {"moe_backend": "triton"}

# vLLM and Megatron compile a few integer functions again in every process, the first time with a C++ compiler: 4 to 20
# s.
_CPU_EAGER = {"TORCHDYNAMO_DISABLE": "1"}


# What makes an update faster and costs nothing, by its documentation. Rules refuse some of it for some models.
_OVERLAPS = {
    "actor.override_ddp_config.overlap_grad_reduce": True,  # beside the backward of the last micro-batch
    "actor.override_ddp_config.overlap_param_gather": True,  # beside the next forward
}
_CUDA_SWITCHES = _OVERLAPS | {
    "model.override_transformer_config.apply_rope_fusion": True,
    "model.override_transformer_config.moe_permute_fusion": True,
}
# Two are defaults already, but MindSpeed replaces the experts' product and exchange only where it is told so. Its
# documentation has both overlaps for Megatron's optimizer (docs/features/async-ddp-param-gather.md).
_NPU_SWITCHES = _OVERLAPS | {
    "model.override_transformer_config.use_flash_attn": True,
    "model.override_transformer_config.use_fused_rotary_pos_emb": True,
    "model.override_transformer_config.moe_grouped_gemm": True,
    "model.override_transformer_config.moe_token_dispatcher_type": "alltoall",
    "model.override_transformer_config.moe_permute_fusion": True,
}


@dataclass(frozen=True)
class Hosting:
    """One kind of device, as the process that starts others on it needs it."""

    device: str  # also the name of the layout of an engine's final weights
    ray_resource: str | None  # Ray's name of the accelerator
    checks_batch_order: bool  # generation must not depend on the rest of the batch; only the CPU can guarantee it
    # how far device memory can be opened from other processes, by mrl.platforms.transfer
    memory_reach: MemoryReach = "process"
    orders_devices: bool = True  # a process may be shown devices in any order; CANN requires ascending order
    interleaves_stages: bool = True  # a rank may hold several stages of a pipeline; MindSpeed's cannot be mapped
    # Megatron's switches of fused MoE kernels that the update can use there. Transformer Engine brings them. MindSpeed
    # core_r0.16.0 has a permutation of its own under that name (core/fusions/fused_moe_permute.py), but no router.
    moe_fusions: tuple[str, ...] = ()
    grouped_gemms: tuple[str, ...] = ("cublas",)  # values of model.grouped_gemm
    delta_kernels: tuple[str, ...] = ("torch",)  # values of model.gated_delta
    # What `mrl init` writes, presets have, and `mrl plan --search` counts with (mrl/tools/switches.py). A CPU has none:
    # there are no such kernels, and exchanges beside computing would take its cores.
    switches: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # vLLM's argument linear_backend of engines in FP8. By default it takes kernels there that repack words, or round
    # scales to powers of two. Then what engines hold could not be compared with what they were sent.
    fp8_backend: str = ""
    counts_graphs: bool = False  # vLLM itself takes captured graphs from an engine's share of the memory
    has_flex_dispatcher: bool = False  # the kernels of DeepEP and HybridEP need NVIDIA devices
    returns_routes: bool = True  # vLLM itself returns routed experts; on CPU its model runner for this lacks Triton
    profilers: tuple[str, ...] = ("torch",)  # values of record.profile.tool

    def ray_resources(self, cpus: float, devices: int) -> dict[str, float]:
        """Returns the resources of one process that uses `devices` accelerators."""
        return {"CPU": cpus} | ({self.ray_resource: float(devices)} if self.ray_resource else {})

    def visible_devices(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the environment that shows a process only these devices of its node, in this order.

        Ray is told not to change it.
        """
        if self.ray_resource is None:
            return {}
        variable = _VISIBLE[self.ray_resource]
        return {variable: ",".join(names), f"RAY_EXPERIMENTAL_NOSET_{variable}": "1"}

    def actor_environment(self) -> dict[str, str]:
        """Returns the environment of one Megatron rank."""
        if self.device == "cpu":
            return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | _CPU_EAGER
        own = _NPU_ACTOR if self.device == "npu" else {}
        return own | _segments(self.device, expandable=True)

    def engine_environment(self, engine_id: int, engines: int, workers: int, kvcache_gib: int) -> dict[str, str]:
        """Returns the environment of one engine of `workers` processes."""
        common = {
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            # whatever the command's environment has: no pickles between its processes
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        }
        if self.device != "cpu":
            common |= _segments(self.device, expandable=False)
        if self.device == "npu":
            return common | _NPU_ENGINE  # no VLLM_PLUGINS: vllm-ascend consists of several plugins itself
        common["VLLM_PLUGINS"] = "mrl"
        if self.device != "cpu":
            return common
        return {
            **common,
            **_CPU_EAGER,
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CPU_KVCACHE_SPACE": str(kvcache_gib),
            # The split of a sequence's keys among threads depends on the rest of the step, and the bits would, too.
            "VLLM_CPU_ATTN_SPLIT_KV": "0",
            # libgomp lets a waiting thread spin for milliseconds (300,000 rounds) if the process has no more threads
            # than cores. Front ends, engine cores and ranks share these cores, so spinning stops the thread that is
            # waited for, at every operation of a step. This value, about 0.05 ms, is libgomp's own choice if it knows
            # that cores are few.
            "GOMP_SPINCOUNT": "1000",
            "VLLM_CPU_OMP_THREADS_BIND": cpu_binding(sorted(os.sched_getaffinity(0)), engine_id, engines, workers),
        }

    def engine_arguments(
        self, max_model_len: int, max_num_batched_tokens: int | None, sleeps: bool = False
    ) -> dict[str, Any]:
        """Returns the arguments of vLLM that this device needs. The run's own arguments follow and override them.

        `sleeps`: the engine gives its memory to an actor on the same device. On the CPU every engine can.
        """
        if self.device != "cpu":
            own = _NPU_ENGINE_ARGUMENTS if self.device == "npu" else _CUDA_ENGINE_ARGUMENTS
            return own | ({"enable_sleep_mode": True} if sleeps else {})
        return {
            # A chunked prefill ends a request that has a seed, and makes log-probs depend on the rest of the batch.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_num_batched_tokens or 4096, max_model_len),
            "enforce_eager": True,
            "worker_cls": CPU_WORKER,  # vLLM's own worker keeps its memory during sleep
        }


def cpu_binding(cores: list[int], engine_id: int, engines: int, workers: int) -> str:
    """Returns vLLM's core list, `a,b|c,d`, with a part for each of `workers`. All workers of all engines get equal
    shares.

    A share of several cores leaves its last to the engine's scheduler, which waits in a busy loop. It would delay a
    worker's thread on that core at every operation. Shares wrap around if there are more workers than cores, which is
    slow but correct.
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
        grouped_gemms=("cublas", "cutlass"),
        delta_kernels=("torch", "fla"),
        switches=_CUDA_SWITCHES,
        counts_graphs=True,
        has_flex_dispatcher=True,
        fp8_backend="cutlass",
        profilers=("torch", "nsys"),
    ),
    "npu": Hosting(
        "npu",
        "NPU",
        checks_batch_order=False,
        memory_reach="device",
        orders_devices=False,
        interleaves_stages=False,
        moe_fusions=("moe_permute_fusion",),
        switches=_NPU_SWITCHES,
        profilers=(),  # theirs (torch_npu.profiler, msprof) is never started here
    ),
}


def get_hosting(device: str) -> Hosting:
    """Returns the hosting of a device by name. Raises EnvironmentFault for an unknown one."""
    if device not in _HOSTING:
        raise EnvironmentFault(f"cluster.device: {device} is not a device; available: {', '.join(_HOSTING)}")
    return _HOSTING[device]


def check_npu_environment(environment: Mapping[str, str]) -> None:
    """Raises EnvironmentFault with every variable of this process that is known to break training on Ascend."""
    if faults := _npu_faults(environment):
        raise EnvironmentFault("the environment is not fit for training on NPUs: " + "; ".join(faults))


def environment_faults(device: str, environment: Mapping[str, str]) -> list[str]:
    """Returns variables that are known to break a run on this kind of device, each with reason and cure."""
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
