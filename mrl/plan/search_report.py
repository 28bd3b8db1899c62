"""`mrl plan --search`: from a configuration, or only a model, to the layouts that fit, as plain data."""

from functools import partial
from typing import Any

from mrl.config.capabilities import missing_capabilities
from mrl.config.schema import LayoutConfig, RunConfig
from mrl.model import ModelSpec, forward_flops_per_token
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.precision import BF16
from mrl.plan.assumptions import USUAL
from mrl.plan.devices import Device
from mrl.plan.engine_memory import engine_memory
from mrl.plan.inputs import offload_of, precision_of, update_micro_batch
from mrl.plan.search import Candidate, SearchProblem, search
from mrl.plan.search_fits import fastest_that_fit
from mrl.plan.step_time import UpdateWork

_MIB, _GIB = 1024**2, 1024**3
_PROMPT, _RESPONSE, _PROMPTS, _N = 2048, 8192, 64, 16  # where there is only a model: a usual run of long answers


def config_for_model(path: str, devices: int, platform: str) -> RunConfig:
    """A configuration that says no more than the model and the devices; one sample at a time."""
    return RunConfig.model_validate(
        {
            "model": {"path": path},
            "actor": {"layout": {"world_size": devices}, "ppo_mini_batch_size": _PROMPTS, "ppo_micro_batch_size_per_gpu": 1},
            "rollout": {"n": _N},
            "data": {"train_batch_size": _PROMPTS, "max_prompt_length": _PROMPT, "max_response_length": _RESPONSE},
            "cluster": {"device": platform},
        }
    )


def search_problem(config: RunConfig, model: ModelSpec, device: Device, devices: int, per_node: int, megatron: str) -> SearchProblem:
    """The actor's work in `config` on so many devices; its own layout does not matter."""
    assumed, data = USUAL, config.data
    micro_of = partial(update_micro_batch, config)
    mean = data.max_prompt_length * assumed.prompt_share + data.max_response_length * assumed.response_share
    tokens = config.actor.ppo_mini_batch_size * config.rollout.n * mean
    micro = micro_of(TrainLayout.build({"world_size": devices}, model))
    work = UpdateWork(model, micro, tokens, forward_flops_per_token(model, (mean + 1) / 2))
    staging, offload = 2 * config.reshard.budget_mb * _MIB, offload_of(config)
    precision = precision_of(config, BF16.parameters)
    return SearchProblem(work, device, devices, per_node, staging, megatron, assumed, precision, micro_of, offload)


def search_report(config: RunConfig, problem: SearchProblem, top: int, planned: bool = False) -> dict[str, Any]:
    """The `top` best layouts with their reasons, and what is wrong with those that do not fit.

    `planned`: show only those with which the plan of the whole `config` fits too.
    """
    result = search(problem)
    shown, left_out = fastest_that_fit(config, problem, result, top) if planned else (result.fitting[:top], {})
    return {
        "device": problem.device.name,
        "devices": problem.devices,
        "devices_per_node": problem.per_node,
        "micro_batch": vars(problem.work.micro),
        "legal": result.legal,
        "fitting": len(result.fitting),
        "layouts": [_row(config, problem, candidate) for candidate in shown],
        "planned": planned,
        "left_out": dict(left_out),
        "too_large": dict(result.too_large.most_common()),
        "engines": _engine_lines(config, problem),
    }


def _row(config: RunConfig, problem: SearchProblem, found: Candidate) -> dict[str, Any]:
    return {
        "degrees": found.degrees,
        "data": found.layout.data,
        "expert_data": found.layout.expert_data,
        "recompute": str(found.recompute),
        "micro_batch": vars(problem.work_in(found.layout).micro),
        "micro_batches": found.micro_batches,
        "seconds": found.seconds.total,
        "parts": vars(found.seconds),
        "bytes": found.phase.total,
        "device_bytes": found.phase.device_bytes,
        "terms": found.phase.terms,
        "why": found.reasons(problem.per_node),
        "missing": _missing(config, found.degrees),
    }


def _missing(config: RunConfig, degrees: dict[str, Any]) -> list[str]:
    """What this layout, not the rest of the configuration, asks for that `mrl train` cannot do yet."""
    plain, wanted = ({"world_size": degrees["world_size"]}, degrees)
    before, after = (
        missing_capabilities(config.model_copy(update={"actor": config.actor.model_copy(update={"layout": LayoutConfig(**layout)})}))
        for layout in (plain, wanted)
    )
    return [message for message in after if message not in before]


def _engine_lines(config: RunConfig, problem: SearchProblem) -> list[str]:
    """Smallest engines that hold at least one sequence, and how many tokens their cache has."""
    model, device, length = problem.model, problem.device, config.data.max_prompt_length + config.data.max_response_length
    lines = []
    for tensor in (n for n in range(1, problem.per_node + 1) if model.num_attention_heads % n == 0):
        kv = model.num_key_value_heads
        if kv % tensor and tensor % kv:
            continue
        engine = engine_memory(model, RolloutLayout(1, tensor), round(device.memory * config.rollout.gpu_memory_utilization))
        if engine.cache_tokens >= length:
            lines.append(f"engine of {tensor}: weights {engine.weights / _GIB:.1f} GiB a device, cache of {engine.cache_tokens} tokens")
    return lines or ["no engine inside a node holds the model and one sequence"]
