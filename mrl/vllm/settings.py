"""From the run's configuration to what one engine is started with. No vLLM import."""

import json
from pathlib import Path
from typing import Any

from mrl.config.schema import RunConfig
from mrl.data.routes import RouteShape
from mrl.model import load_model_spec, tensor_specs
from mrl.platforms.hosting import get_hosting
from mrl.vllm.launch import EngineLaunch, engine_launches
from mrl.vllm.requests import EngineSettings, Sampling


def engine_settings(config: RunConfig, engine_id: int, logs: Path) -> EngineSettings:
    """Arguments of one engine; `rollout.engine_kwargs.vllm` adds to them and wins. `logs` is the run's folder for logs."""
    rollout = config.rollout
    max_model_len = config.data.max_prompt_length + config.data.max_response_length
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "dtype": rollout.dtype or config.model.dtype,
        "seed": config.trainer.seed,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "generation_config": "vllm",  # never the sampling defaults that a model's folder brings along
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "trust_remote_code": False,
        **_launch(config, engine_id).arguments,
    }
    if rollout.enforce_eager is not None:
        arguments["enforce_eager"] = rollout.enforce_eager
    if rollout.enable_chunked_prefill is not None:
        arguments["enable_chunked_prefill"] = rollout.enable_chunked_prefill
    if rollout.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = rollout.max_num_batched_tokens
    hosting = get_hosting(config.cluster.device)
    arguments |= hosting.engine_arguments(max_model_len, rollout.max_num_batched_tokens)
    wants_routes = config.actor.router_replay == "R3"
    if wants_routes and hosting.returns_routes:
        arguments["enable_return_routed_experts"] = True
    arguments |= rollout.engine_kwargs.get("vllm", {})
    model = load_model_spec(config.model.path)
    expected = tuple((tensor.name, tensor.shape) for tensor in tensor_specs(model))
    segments = str(logs / f"engine-{engine_id}.segments")
    # with spread experts vLLM's CPU kernel can hold weights but not generate; the rules refuse such a run, and a test of weights needs none
    checks_order = hosting.checks_batch_order and rollout.expert_parallel_size == 1
    routes = RouteShape(model.num_layers, model.moe_layers, model.num_experts_per_tok, model.num_experts) if model.is_moe else None
    captures = wants_routes and not hosting.returns_routes
    return EngineSettings(engine_id, arguments, checks_order, model.vocab_size, expected, segments, routes, captures)


def _launch(config: RunConfig, engine_id: int) -> EngineLaunch:
    """How the engine is started; one with several data-parallel ranks, and so actors, never gets here (mrl/config/capabilities.py)."""
    (launch,) = [launch for launch in engine_launches(config) if launch.engine == engine_id]
    return launch


def training_sampling(config: RunConfig) -> Sampling:
    """How training responses are sampled: on the whole distribution, so that log-probs mean the same on both sides."""
    rollout = config.rollout
    stop, routes = stop_token_ids(config.model.path), config.actor.router_replay == "R3"
    return Sampling(rollout.temperature, config.data.max_response_length, stop, rollout.top_p, rollout.top_k, routes)


def validation_sampling(config: RunConfig) -> Sampling:
    """How validation responses are sampled."""
    val = config.rollout.val_kwargs
    return Sampling(val.temperature, config.data.max_response_length, stop_token_ids(config.model.path), val.top_p, val.top_k)


def stop_token_ids(model_path: str) -> tuple[int, ...]:
    """End-of-sequence ids of the model: those of config.json and of generation_config.json (a list in Qwen3) together.

    vLLM reads the second only when it also takes the model's sampling defaults, which training must not.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = Path(model_path) / name
        if path.exists():
            ids = json.loads(path.read_text()).get("eos_token_id")
            found |= set(ids if isinstance(ids, list) else [ids] if ids is not None else [])
    return tuple(sorted(found))
