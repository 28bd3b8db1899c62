"""What mrl reaches through objects of other packages, where no import says so: class -> attributes, by hand.

A name stands here for as long as mrl uses it: the check asks both sides. `file`: where mrl uses it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reached:
    """Attributes and methods of one class that mrl touches."""

    dependencies: tuple[str, ...]
    owner: str
    names: tuple[str, ...]
    file: str


_BOTH, _NEW, _OLD = ("vllm 0.32.0", "vllm 0.23.0"), ("vllm 0.32.0",), ("vllm 0.23.0",)
_PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "enable_eplb",
    "expert_placement_strategy",
    "data_parallel_index",
    "world_size",
    "rank",
)
_COMMON, _RELOAD = "mrl/engine/v0_common.py", "vllm.model_executor.model_loader.reload"

REACHED = (
    Reached(_BOTH, "vllm.config.parallel.ParallelConfig", _PARALLEL, _COMMON),
    Reached(
        _BOTH,
        f"{_RELOAD}.types.LayerReloadingInfo",
        ("can_load", "reset", "kernel_tensors", "restore_metadata"),
        _COMMON,
    ),
    Reached(
        _BOTH,
        "vllm.model_executor.layers.quantization.base_config.QuantizeMethodBase",
        ("process_weights_after_loading",),
        _COMMON,
    ),
    Reached(
        _BOTH,
        "vllm.distributed.device_communicators.shm_broadcast.SpinCondition",
        ("wait", "last_read", "busy_loop_s"),
        "mrl/engine/cpu_worker.py",
    ),
    Reached(
        _NEW,
        "vllm.v1.core.sched.scheduler.Scheduler",
        ("dynamic_sd_lookup", "num_spec_tokens", "scheduler_config"),
        "mrl/engine/drafting_scheduler.py",
    ),
    Reached(
        _BOTH, "vllm.v1.worker.cpu_worker.CPUWorker", ("execute_model", "sleep", "wake_up"), "mrl/engine/cpu_worker.py"
    ),
    Reached(
        _BOTH,
        "vllm.v1.worker.gpu_worker.Worker",
        ("model_runner", "weight_transfer_engine", "parallel_config"),
        _COMMON,
    ),
    Reached(
        _BOTH, "vllm.v1.worker.gpu_model_runner.GPUModelRunner", ("get_model", "kv_caches"), "mrl/engine/sleeping.py"
    ),
    Reached(
        _BOTH,
        "vllm.v1.engine.async_llm.AsyncLLM",
        ("from_engine_args", "collective_rpc", "errored", "generate"),
        "mrl/engine/",
    ),
    Reached(
        _BOTH,
        "vllm.v1.engine.async_llm.AsyncLLM",
        ("pause_generation", "resume_generation", "reset_prefix_cache"),
        "mrl/engine/",
    ),
    Reached(_NEW, "vllm.v1.engine.async_llm.AsyncLLM", ("update_weight_version",), "mrl/engine/vllm_engine.py"),
    Reached(_BOTH, "vllm.model_executor.layers.attention.attention.Attention", ("attn_backend",), _COMMON),
    Reached(_NEW, "vllm.v1.worker.gpu_worker.Worker", ("_weight_update_active",), "mrl/engine/v0_32.py"),
    Reached(
        _NEW,
        "vllm.distributed.weight_transfer.base.WeightTransferEngine",
        ("parse_update_info", "reset_weight_update_target", "supports_draft_weight_update"),
        "mrl/engine/v0_32.py",
    ),
    Reached(
        _OLD,
        "vllm.v1.worker.gpu_worker.Worker",
        ("_weight_update_active", "_is_checkpoint_format"),
        "mrl/engine/v0_23.py",
    ),
    Reached(
        _OLD, "vllm.distributed.weight_transfer.base.WeightTransferUpdateInfo", ("update_kind",), "mrl/engine/v0_23.py"
    ),
    Reached(
        ("vllm-ascend",),
        "vllm_ascend.worker.worker.NPUWorker",
        ("sleep", "wake_up", "_sleep_saved_buffers"),
        "mrl/engine/ascend_wake.py",
    ),
    Reached(
        ("vllm-ascend",),
        "vllm_ascend.device_allocator.camem.CaMemAllocator",
        ("get_instance", "sleep", "wake_up", "pointer_to_data"),
        "mrl/engine/",
    ),
    Reached(
        ("mindspeed",), "mindspeed.megatron_adaptor", ("patch_features", "repatch"), "mrl/platforms/npu_mindspeed.py"
    ),
    Reached(
        ("mindspeed",),
        "mindspeed.args_utils",
        ("get_mindspeed_args", "get_full_args"),
        "mrl/platforms/npu_mindspeed.py",
    ),
    Reached(
        ("mbridge",),
        "mbridge.core.LLMBridge",
        (
            "set_extra_args",
            "get_model",
            "load_weights",
            "export_weights",
            "_get_transformer_layer_spec",
            "config",
        ),
        "mrl/rank/bridge.py",
    ),
    Reached(
        ("megatron-core",),
        "megatron.core.distributed.DistributedDataParallel",
        ("buffers", "expert_parallel_buffers", "zero_grad_buffer", "ddp_config", "no_sync", "start_param_sync"),
        "mrl/rank/",
    ),
    Reached(
        ("megatron-core",),
        "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer",
        ("grad_data",),
        "mrl/rank/",
    ),
    Reached(
        ("megatron-core",),
        "megatron.core.optimizer.optimizer.ChainedOptimizer",
        ("chained_optimizers",),
        "mrl/rank/",
    ),
    Reached(
        ("megatron-core",),
        "megatron.core.transformer.moe.router.TopKRouter",
        ("router_replay", "expert_bias"),
        "mrl/rank/",
    ),
    Reached(
        ("megatron-core",),
        "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler",
        ("num_steps", "state_dict", "step"),
        "mrl/",
    ),
    Reached(
        ("vllm-ascend",),
        "vllm_ascend.ops.rotary_embedding",
        ("_cos_cache", "_sin_cache", "_cos_sin_cache"),
        "mrl/engine/constants.py",
    ),
    Reached(
        ("vllm-ascend",),
        "vllm_ascend.ops.fused_moe.moe_comm_method",
        ("_MoECommMethods",),
        "mrl/engine/constants.py",
    ),
    Reached(
        ("vllm-ascend",),
        "vllm_ascend.ops.fused_moe.moe_comm_method.MoECommMethod",
        ("token_dispatcher",),
        "mrl/engine/constants.py",
    ),
    Reached(
        ("vllm-ascend",),
        "vllm_ascend.ops.fused_moe.token_dispatcher.TokenDispatcherWithAll2AllV",
        ("expert_ids_per_ep_rank",),
        "mrl/engine/constants.py",
    ),
    Reached(
        ("torch-npu",),
        "torch_npu.npu",
        (
            "is_available",
            "device_count",
            "current_device",
            "set_device",
            "get_device_name",
            "synchronize",
            "get_rng_state",
            "set_rng_state",
            "Stream",
            "stream",
            "current_stream",
            "Event",
            "empty_cache",
            "memory_snapshot",
            "mem_get_info",
            "memory_allocated",
            "memory_reserved",
            "max_memory_allocated",
            "max_memory_reserved",
            "reset_peak_memory_stats",
        ),
        "mrl/platforms/",
    ),
    Reached(
        ("torch-npu",),
        "torch_npu._C._distributed_c10d.ProcessGroupHCCL",
        ("abort_hccl_comm",),
        "mrl/platforms/transfer.py",
    ),
)
