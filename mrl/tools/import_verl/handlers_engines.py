"""Handlers of verl's keys of engines other than vLLM, in whose place vLLM generates."""

from mrl.tools.import_verl.handlers_algorithm import Handler
from mrl.tools.import_verl.keys import R
from mrl.tools.import_verl.report import Import
from mrl.tools.import_verl.verl_command import Override, VerlSettings

_NAME = R + "name"
_KWARGS = R + "engine_kwargs."
# Engines that verl gives the same weights, sampling and limits as vLLM (workers/rollout of 0.9.1).
_ALIKE = {"sglang": "SGLang", "trtllm": "TensorRT-LLM"}
# Beginnings of their own settings that change speed or memory alone (ServerArgs of SGLang, LlmArgs of TensorRT-LLM).
# Any other may change what is sampled: quantization, kv_cache_dtype, json_model_override_args, sampling defaults.
_SPEED = {
    "sglang": (
        "attention_backend", "prefill_attention_backend", "decode_attention_backend", "mm_attention_backend",
        "sampling_backend", "chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "max_total_tokens",
        "mem_fraction_static", "schedule_", "cuda_graph_", "disable_cuda_graph", "disable_overlap_schedule",
        "disable_radix_cache", "page_size", "enable_dp_", "moe_a2a_backend", "moe_runner_backend", "deepep_mode",
        "enable_memory_saver", "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup", "mamba_scheduler_",
        "log_", "watchdog_timeout", "disable_custom_all_reduce", "enable_nccl_nvls", "enable_mixed_chunk",
        "num_continuous_decode_steps", "enable_metrics",
    ),
    "trtllm": (
        "batch_wait_", "cuda_graph_config.", "moe_config.backend", "enable_attention_dp", "max_num_tokens",
        "max_batch_size", "kv_cache_config.free_gpu_memory_fraction",
    ),
}  # fmt: skip


def _name(o: Override, out: Import, settings: VerlSettings) -> None:
    if o.value == "vllm":
        out.leave("implied", o.key, o.value, "as it is here", o.line)
    elif o.value in _ALIKE:
        why = f"vLLM generates in place of {_ALIKE[o.value]}, with the same weights, sampling and limits"
        out.leave("not_applicable", o.key, o.value, why, o.line)
    else:
        out.leave("unsupported", o.key, o.value, "engines are vLLM's", o.line)


def sets_nothing(o: Override, out: Import, settings: VerlSettings) -> bool:
    """Tells whether a key of `engine_kwargs` is empty or another engine's, and then reports it.

    verl's engines read the section of their own name alone; vLLM's leaves out what is null there (verl 0.9.1,
    workers/rollout).
    """
    name = settings.given(_NAME)
    if o.value in (None, {}):
        out.leave("implied", o.key, o.value, "it sets nothing", o.line)
    elif o.key.removeprefix(_KWARGS).partition(".")[0] != (name if name in _ALIKE else "vllm"):
        out.leave("not_applicable", o.key, o.value, "of engines that are not used", o.line)
    else:
        return False
    return True


def _own_setting(o: Override, out: Import, settings: VerlSettings) -> None:
    engine, _, name = o.key.removeprefix(_KWARGS).partition(".")
    if sets_nothing(o, out, settings):
        return
    if name.startswith(_SPEED[engine]):
        out.leave("not_applicable", o.key, o.value, f"a matter of {_ALIKE[engine]}'s speed or memory", o.line)
    else:
        why = f"a setting of {_ALIKE[engine]} that may change what is sampled, and vLLM generates here"
        out.leave("unsupported", o.key, o.value, why, o.line)


def _of_other_engines(o: Override, out: Import, settings: VerlSettings) -> None:
    """Handles a key of sampling that verl's vLLM engine does not read.

    `do_sample` is read by its rollout of transformers (hf), `over_sample_rate` by that of SGLang, up to 0.6.
    """
    usual = {"do_sample": True, "over_sample_rate": 0}[o.key.removeprefix(R)]
    engine = settings.given(_NAME) or "vllm"
    if engine == "vllm" and o.value != usual:
        out.leave("implied", o.key, o.value, "verl's vLLM engine does not read it", o.line)
    elif o.value in (usual, None):
        out.leave("implied", o.key, o.value, "as it is here", o.line)
    else:
        why = f"verl's {engine} engine reads it; here rollout.n responses are sampled for each prompt"
        out.leave("unsupported", o.key, o.value, why, o.line)


ENGINE_HANDLERS: dict[str, Handler] = {
    _NAME: _name,
    _KWARGS: _own_setting,
    **{R + name: _of_other_engines for name in ("do_sample", "over_sample_rate")},
}
