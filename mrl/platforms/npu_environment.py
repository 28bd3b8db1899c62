"""Environment of processes on Ascend: what we set and why, and what must not be set. No torch, no torch_npu.

Sources: documentation of vllm-ascend 0.23 (reinforcement learning, additional configuration), MindSpeed core_r0.16.0 and CANN 9.1.
"""

from collections.abc import Mapping

from mrl.errors import EnvironmentFault

_SHARED_DEVICE_PORTS = {
    # HCCL listens on 16666 by default, so a second process on the same NPU (an engine beside an actor) fails with EJ0003
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
}

ACTOR = _SHARED_DEVICE_PORTS | {
    # one queue per device keeps the order in which Megatron overlaps communication with compute; Megatron asserts it
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "HCCL_CONNECT_TIMEOUT": "1800",  # s; the default of 120 is short while rank 0 still reads weights
    "HCCL_EXEC_TIMEOUT": "7200",  # s; ranks are idle while the engines generate
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",  # lengths differ from step to step; fixed segments fragment
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # transformers 5 loads in threads, which is not stable on torch_npu
}

ENGINE = _SHARED_DEVICE_PORTS | {
    "VLLM_ASCEND_ENABLE_NZ": "0",  # FRACTAL_NZ storage cannot be written in place: new weights would come out as garbage
    "VLLM_ASCEND_AUTO_DETECT_QUANTIZATION": "0",  # a bf16 checkpoint is never to be taken for a quantised one
    "TASK_QUEUE_ENABLE": "1",  # 2 dispatches faster, conflicts with captured graphs and raises the peak of memory
    "VLLM_ALL2ALL_BACKEND": "flashinfer_all2allv",  # the one that data and expert parallelism work with on NPU
}

# vLLM argument: vllm-ascend's switch for reinforcement learning (0.23 and later) turns NZ off and drops expandable segments
ENGINE_ARGUMENTS = {"additional_config": {"rl_config": {"enabled": True}}}


# fields of a transformer config that are MindSpeed's alone: it takes them when it is applied, and Megatron's own class has no such fields
MINDSPEED_FIELDS = frozenset(
    ("use_flash_attn", "use_fused_rmsnorm", "use_fused_swiglu", "use_fused_rotary_pos_emb", "fused_permute_unpermute", "swap_optimizer")
)


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises EnvironmentFault that lists every variable of this process that is known to break training on Ascend."""
    if faults := environment_faults(environment):
        raise EnvironmentFault("the environment is not fit for training on NPUs: " + "; ".join(faults))


def environment_faults(environment: Mapping[str, str]) -> list[str]:
    """Variables that must not be set as they are, each with the reason and the cure."""
    rows = (
        (
            environment.get("VLLM_ASCEND_ENABLE_NZ", "0") != "0",
            "VLLM_ASCEND_ENABLE_NZ is on: weights in FRACTAL_NZ cannot be updated in place; unset it or set 0",
        ),
        (
            bool(environment.get("VLLM_PLUGINS")) and "ascend" not in environment["VLLM_PLUGINS"].split(","),
            "VLLM_PLUGINS leaves vllm-ascend's platform plugin out, so vLLM would not see the NPUs; unset it or add ascend and mrl",
        ),
        (
            environment.get("VLLM_ASCEND_ENABLE_FUSED_MC2", "0") != "0",
            "VLLM_ASCEND_ENABLE_FUSED_MC2 is on: it keeps copies of the expert weights that no update reaches; unset it or set 0",
        ),
        (
            environment.get("TASK_QUEUE_ENABLE", "1") == "2",
            "TASK_QUEUE_ENABLE is 2, which conflicts with the engines' captured graphs; unset it or set 1",
        ),
    )
    return [message for broken, message in rows if broken]
