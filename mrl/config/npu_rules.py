"""Combinations that are known to fail on Ascend NPUs, each with where that was seen. Checked for cluster.device: npu only."""

from collections.abc import Iterator

from mrl.config.schema import RunConfig
from mrl.config.violation import Broken
from mrl.model import ModelSpec

_VLLM = "rollout.engine_kwargs.vllm"
_TRANSFORMER = "model.override_transformer_config"


def npu_rules(config: RunConfig, model: ModelSpec) -> Iterator[Broken]:
    if config.cluster.device != "npu":
        return
    if (config.actor.layout.virtual_pipeline_model_parallel_size or 1) > 1:
        why = "mbridge and virtual pipeline stages exclude each other on NPU: MindSpeed's schedule builds chunks that mbridge cannot map"
        yield Broken("actor.layout.virtual_pipeline_model_parallel_size", "must be left out on npu", why, (None,))
    if config.model.override_transformer_config.get("moe_use_legacy_grouped_gemm"):
        why = "its expert weights are flattened and transposed, which no name mapping of ours describes"
        yield Broken("model.override_transformer_config.moe_use_legacy_grouped_gemm", "must be false on npu", why, (False,))
    if config.model.override_transformer_config.get("use_flash_attn") is False:
        why = "MindSpeed's packed and context-parallel attention exist in that form only"
        yield Broken("model.override_transformer_config.use_flash_attn", "must be true on npu, or left out", why, (True,))
    if config.model.override_transformer_config.get("swap_optimizer") and config.actor.optimizer_offload:
        why = "both empty and fill the same storages, each without knowing of the other"
        yield Broken("actor.optimizer_offload", f"must be false with {_TRANSFORMER}.swap_optimizer", why, (False,))
    yield from _engines(config)


def npu_notes(config: RunConfig) -> Iterator[str]:
    """What who trains on NPUs has to know."""
    if config.cluster.device == "npu":
        yield (
            "cluster.device npu: written against the documented interfaces and never run on hardware; begin with few steps, and read the "
            "metrics of mismatch between engine and trainer"
        )


def _engines(config: RunConfig) -> Iterator[Broken]:
    given = config.rollout.engine_kwargs.get("vllm", {})
    additional = given.get("additional_config") or {}
    if given.get("enable_eplb") or (additional.get("eplb_config") or {}).get("dynamic_eplb"):
        yield Broken(
            f"{_VLLM}.enable_eplb", "must be off on npu", "redundant experts move between workers, and the sync's plan would be wrong"
        )
    if given.get("additional_config") is None:
        return
    key = f"{_VLLM}.additional_config"
    if not (additional.get("rl_config") or {}).get("enabled"):
        why = "it replaces ours, and without that switch vllm-ascend stores weights in FRACTAL_NZ, which cannot be updated in place"
        yield Broken(key, "must keep rl_config: {enabled: true}", why)
    if additional.get("weight_nz_mode"):
        yield Broken(f"{key}.weight_nz_mode", "must be 0", "weights in FRACTAL_NZ cannot be updated in place", (0,))
    if additional.get("enable_fused_mc2"):
        yield Broken(f"{key}.enable_fused_mc2", "must be off", "it keeps copies of the expert weights that no update reaches", (0,))
