"""A run's plan as plain data: where every rank stands, memory of every phase, predicted times, the weight sync, the batches; hashed."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from mrl.config.places import rank_places
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.model import ModelSpec, active_parameter_count, parameter_count
from mrl.model.device_grid import Place
from mrl.plan.devices import Device
from mrl.plan.engine_memory import EngineMemory
from mrl.plan.inputs import BatchPlan, PlanInputs, batch_plan, engine_of
from mrl.plan.memory import memory_section
from mrl.plan.suggest_fixes import fitting_changes
from mrl.plan.sync_cost import sync_section
from mrl.plan.times import bubble, mean_lengths, phase_seconds, step_flops

FORMAT = 1


def plan_of(config: RunConfig, model: ModelSpec, device: Device) -> dict[str, Any]:
    """`make_plan` of a configuration that has passed its rules."""
    return make_plan(PlanInputs.of(config, model, device))


def make_plan(inputs: PlanInputs) -> dict[str, Any]:
    """The whole plan, with its hash. Measured times (`reshard.plan_seconds`, and `seconds`, which callers add) do not enter the hash.

    Raises ConfigError for layouts that cannot stand on the cluster.
    """
    batch, engine = batch_plan(inputs.config, inputs.train), engine_of(inputs)
    ranks, workers = rank_places(inputs.config)
    memory = memory_section(inputs)
    plan = {
        "format": FORMAT,
        "model": {
            "path": inputs.config.model.path,
            "family": inputs.model.family,
            "parameters": parameter_count(inputs.model),
            "active_parameters": active_parameter_count(inputs.model),
        },
        "device": _device(inputs),
        "layout": _layout(inputs, ranks, workers),
        "batch": batch.to_json(),
        "memory": memory | {"would_fit_with": [] if memory["fits"] else fitting_changes(inputs)},
        "times": _times(inputs, batch, engine),
        "reshard": sync_section(inputs, ranks, workers),
        "assumptions": asdict(inputs.assumptions),
    }
    return plan | {"hash": plan_hash(plan)}


def plan_hash(plan: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON of all that is planned."""
    planned = {k: v for k, v in plan.items() if k not in ("hash", "seconds")}
    planned["reshard"] = {k: v for k, v in plan["reshard"].items() if k != "plan_seconds"}
    text = json.dumps(planned, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _device(inputs: PlanInputs) -> dict[str, Any]:
    d = inputs.device
    return {"name": d.name, "memory": d.memory, "usable": d.usable, "flops": d.flops, "memory_rate": d.memory_rate, "source": d.source}


def _layout(inputs: PlanInputs, ranks: tuple[Place, ...], workers: tuple[Place, ...]) -> dict[str, Any]:
    train, rollout = inputs.train, inputs.rollout
    return {
        "placement": inputs.config.cluster.placement,
        "nodes": inputs.config.cluster.nnodes,
        "devices_per_node": inputs.config.cluster.n_gpus_per_node,
        "actor": {
            "world_size": train.world_size, "tensor": train.tensor, "pipeline": train.pipeline, "virtual_pipeline": train.virtual_pipeline,
            "context": train.context, "expert": train.expert, "expert_tensor": train.expert_tensor, "data": train.data,
            "expert_data": train.expert_data, "sequence_parallel": train.sequence_parallel,
        },
        "stages": [[_layers(train.stage_layers(pp, vp)) for vp in range(train.virtual_pipeline)] for pp in range(train.pipeline)],
        "engines": {"number": rollout.num_engines, "tensor": rollout.tensor, "data": rollout.data, "expert": rollout.expert},
        "ranks": [_rank(inputs, rank, place) for rank, place in enumerate(ranks)],
        "workers": [{"worker": w, **rollout.coords(w)._asdict(), **place._asdict()} for w, place in enumerate(workers)],
    }  # fmt: skip


def _layers(layers: range) -> list[int]:
    """First layer and the one after the last."""
    return [layers.start, layers.stop]


def _rank(inputs: PlanInputs, rank: int, place: Place) -> dict[str, int]:
    dense, expert = inputs.train.dense_coords(rank), inputs.train.expert_coords(rank)
    return {"rank": rank, **place._asdict(), **dense._asdict(), **expert._asdict()}


def _times(inputs: PlanInputs, batch: BatchPlan, engine: EngineMemory) -> dict[str, Any]:
    lengths = mean_lengths(inputs)
    return {
        "predicted": True,
        "mean_prompt_tokens": lengths.prompt,
        "mean_response_tokens": lengths.response,
        "flops": step_flops(inputs, batch),
        "pipeline_bubble": bubble(inputs, batch),
        "phase_seconds": phase_seconds(inputs, batch, engine),
    }


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`layout.actor.tensor: 2 -> 4` for every value that differs, lists of ranks as a whole."""
    then, now = dict(_leaves(old)), dict(_leaves(new))
    keys = [*then, *(key for key in now if key not in then)]
    skipped = ("hash", "seconds", "reshard.plan_seconds")
    return [f"{key}: {then.get(key)} -> {now.get(key)}" for key in keys if key not in skipped and then.get(key) != now.get(key)]


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{path}.{key}" if path else key)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [(path, f"{len(value)} entries, {hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]}")]
    return [(path, value)]


def read_plan(text: str, where: str) -> dict[str, Any]:
    """A stored plan. Raises ConfigError for a text that is none."""
    try:
        plan = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}); remove it or write it anew with mrl plan") from None
    if not isinstance(plan, dict) or plan.get("format") != FORMAT:
        raise ConfigError(f"{where} is no plan of this version (format {FORMAT}); remove it or write it anew with mrl plan")
    return plan
