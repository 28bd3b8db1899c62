"""The plan of a run as plain data with a hash: devices of ranks, memory of phases, predicted times, weight sync,
batches.

It is stored as plan.json in a run directory, and compared with the plan of a run that starts later.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from mrl.config.deployment import Deployment, rank_devices, rollout_layout
from mrl.config.schema import RunConfig
from mrl.config.schema_rollout import MTP
from mrl.errors import ConfigError, verbose
from mrl.model import ModelSpec, active_parameter_count, parameter_count
from mrl.model.device_grid import DeviceId
from mrl.model.layout import TrainLayout
from mrl.model.quantised_shards import ranks_fault
from mrl.plain_files import JSON_BYTES, parse_json, read_text, reason
from mrl.plan.devices import Assumptions, Device, devices, faster, slower
from mrl.plan.engine_memory import EngineMemory
from mrl.plan.fit import error_of, fit_of
from mrl.plan.generation_times import draft_section, sequences_together
from mrl.plan.host_memory import resume_seconds
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import BatchPlan, PlanInputs, batch_plan, device_for, engine_of, sync_budget
from mrl.plan.step_work import mean_lengths
from mrl.plan.suggest_fixes import fitting_changes
from mrl.plan.sync_times import Link, reshard_summary
from mrl.plan.teacher_costs import teacher_inputs
from mrl.plan.times import actor_seconds, phase_seconds, step_flops
from mrl.plan.vision_costs import vision_section
from mrl.platforms.hosting import get_hosting
from mrl.reshard.plan import ReshardPlan, Topology, plan_reshard
from mrl.reshard.setup import pair_route
from mrl.units import GIB

FORMAT = 1
_SHOWN = 8  # differences in one message
_MANY_WAVES = 4  # so many batches of an engine in a step are reported
_NOT_COMPARED = ("hash", "seconds", "reshard.plan_seconds")


def plan_of(
    config: RunConfig, model: ModelSpec, device: Device, validation_prompts: int | None = None
) -> dict[str, Any]:
    """Makes the plan of a configuration that has passed its rules. Takes the arguments of PlanInputs.of."""
    return make_plan(PlanInputs.of(config, model, device, validation_prompts=validation_prompts))


def make_plan(inputs: PlanInputs) -> dict[str, Any]:
    """Makes the whole plan, with its hash. Raises ConfigError for layouts that do not fit on the cluster.

    Measured times are not part of the hash: `reshard.plan_seconds`, and `seconds`, which callers add.
    """
    batch = batch_plan(inputs.config, inputs.train)
    engine = engine_of(inputs)
    ranks, workers = rank_devices(Deployment.of(inputs.config))
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
        "reshard": sync_of(inputs),
        "assumptions": asdict(inputs.assumptions),
    }
    if (vision := vision_section(inputs, batch)) is not None:
        plan["vision"] = vision
    return plan | {"hash": plan_hash(plan)}


def plan_hash(plan: dict[str, Any]) -> str:
    """Returns the SHA-256 of the canonical JSON of everything planned."""
    planned = {k: v for k, v in plan.items() if k not in ("hash", "seconds")}
    planned["reshard"] = {k: v for k, v in plan["reshard"].items() if k != "plan_seconds"}
    text = json.dumps(planned, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _device(inputs: PlanInputs) -> dict[str, Any]:
    d = inputs.device
    return {
        "name": d.name,
        "memory": d.memory,
        "usable": d.usable,
        "communicators": d.communicators + d.communicators_of_ranks,
        "flops": d.flops,
        "memory_rate": d.memory_rate,
        "source": d.source,
    }


def _layout(inputs: PlanInputs, ranks: tuple[DeviceId, ...], workers: tuple[DeviceId, ...]) -> dict[str, Any]:
    train = inputs.train
    rollout = inputs.rollout
    beside = {"critic": inputs.critic, "teacher": teacher_inputs(inputs)}
    others = {
        name: _degrees(other.train)
        for name, other in beside.items()
        if other is not None and _degrees(other.train) != _degrees(train)
    }
    return {
        "placement": inputs.config.cluster.placement,
        "nodes": inputs.config.cluster.nnodes,
        "devices_per_node": inputs.config.cluster.n_gpus_per_node,
        "actor": _degrees(train),
        **others,
        "stages": [_stage(train, pipeline_rank) for pipeline_rank in range(train.pipeline)],
        "engines": {
            "number": rollout.num_engines,
            "tensor": rollout.tensor,
            "data": rollout.data,
            "expert": rollout.expert,
        },
        "ranks": [_rank(inputs, rank, device) for rank, device in enumerate(ranks)],
        "workers": [
            {"worker": w, **rollout.coords(w)._asdict(), **device._asdict()} for w, device in enumerate(workers)
        ],
    }


def _degrees(train: TrainLayout) -> dict[str, Any]:
    return {
        "world_size": train.world_size,
        "tensor": train.tensor,
        "pipeline": train.pipeline,
        "virtual_pipeline": train.virtual_pipeline,
        "context": train.context,
        "expert": train.expert,
        "expert_tensor": train.expert_tensor,
        "data": train.data,
        "expert_data": train.expert_data,
        "sequence_parallel": train.sequence_parallel,
    }


def _stage(train: TrainLayout, pipeline_rank: int) -> list[list[int]]:
    """Returns the layers of each chunk of a pipeline stage."""
    return [_layers(train.stage_layers(pipeline_rank, chunk)) for chunk in range(train.virtual_pipeline)]


def _layers(layers: range) -> list[int]:
    """Returns the first layer and the one after the last."""
    return [layers.start, layers.stop]


def _rank(inputs: PlanInputs, rank: int, device: DeviceId) -> dict[str, int]:
    dense = inputs.train.dense_coords(rank)
    expert = inputs.train.expert_coords(rank)
    return {"rank": rank, **device._asdict(), **dense._asdict(), **expert._asdict()}


def _times(inputs: PlanInputs, batch: BatchPlan, engine: EngineMemory) -> dict[str, Any]:
    lengths = mean_lengths(inputs.config, inputs.assumptions)
    return {
        "predicted": True,
        "mean_prompt_tokens": lengths.prompt,
        "mean_response_tokens": lengths.response,
        "flops": step_flops(inputs, batch),
        "pipeline_bubble": actor_seconds(inputs, batch)[1].bubble_share,
        "phase_seconds": phase_seconds(inputs, batch, engine),
        "phase_seconds_low": phase_seconds(with_assumptions(inputs, faster), batch, engine),
        "phase_seconds_high": phase_seconds(with_assumptions(inputs, slower), batch, engine),
        "sequences_together": sequences_together(inputs, batch, engine),
        "waves": batch.samples
        / (sequences_together(inputs, batch, engine) * inputs.rollout.num_engines * inputs.rollout.data),
        "resume_seconds": resume_seconds(inputs),
        "drafts": draft_section(inputs, batch),
    }


def with_assumptions(inputs: PlanInputs, change: Callable[[Assumptions], Assumptions]) -> PlanInputs:
    """Returns the same inputs under other assumptions."""
    return replace(inputs, assumptions=change(inputs.assumptions))


def sync_of(inputs: PlanInputs) -> dict[str, Any]:
    """Returns bytes, rounds, staging and predicted seconds of one weight sync, with the hash that both sides will
    compare.

    `plan_seconds` is measured and differs from run to run.
    """
    begun = perf_counter()
    plan = reshard_plan_of(inputs.config, inputs.model, inputs.train)
    seconds = perf_counter() - begun
    device = inputs.device
    rates, starts = inputs.sync_rates
    return reshard_summary(plan, link_of(inputs), rates, seconds, starts, device.memory_rate)


def link_of(inputs: PlanInputs) -> Link:
    """Returns the rates between two processes: on one device, on two of a node, on two nodes.

    The transport that serves each such pair decides. A copy within a device reads and writes its memory.
    """
    device = inputs.device
    share = inputs.assumptions.link_share
    kind = inputs.config.reshard.transport
    reach = get_hosting(device.platform).memory_reach
    here, neighbour = (pair_route(kind, DeviceId(0, 0), DeviceId(0, number), reach) for number in (0, 1))
    rates = {"p2p": device.node_rate, "ipc": device.node_rate, "shm": device.host_path_rate}
    on_device = device.memory_rate / 2 if here == "ipc" else rates[here]
    return Link(device.network_rate * share, rates[neighbour] * share, on_device * share)


def reshard_plan_of(config: RunConfig, model: ModelSpec, train: TrainLayout) -> ReshardPlan:
    """Returns the plan of a configuration's weight sync. Raises ConfigError for layouts that do not fit on the
    cluster.
    """
    return plan_reshard(
        model.with_trained_tower(config.model.vision).holding(config.rollout.drafts_with_model),
        train,
        rollout_layout(config.rollout),
        dialect=config.cluster.device,
        dtype=config.rollout_dtype,
        topology=Topology(*rank_devices(Deployment.of(config))),
        budget_bytes=sync_budget(config),
        fp8_block=_planned_block(config, model, train),
    )


def _planned_block(config: RunConfig, model: ModelSpec, train: TrainLayout) -> int:
    """Blocks of what a sync is planned for; 0 where ranks cut them, which only the slow path may.

    Then the plan is that of the weights as they are trained, about twice the bytes.
    """
    block = config.rollout.fp8_block
    if config.reshard.path == "slow" and ranks_fault(model, train, block):
        return 0
    return block


# ---------------------------------------------------------------- as it is stored and compared


def plan_text(plan: dict[str, Any]) -> str:
    """Returns the plan in its stored form."""
    return json.dumps(plan, indent=1)


def read_plan(text: str, where: str) -> dict[str, Any]:
    """Reads a stored plan. Raises ConfigError for a text that is no plan."""
    try:
        plan = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}); remove it or write it anew with mrl plan") from None
    if not isinstance(plan, dict) or plan.get("format") != FORMAT:
        raise ConfigError(
            f"{where} is no plan of this version (format {FORMAT}); remove it or write it anew with mrl plan"
        )
    if not isinstance(plan.get("reshard"), dict) or plan_hash(plan) != plan.get("hash"):
        raise ConfigError(f"{where} is not as it was written (its hash differs); remove it or write it anew")
    return plan


def load_plan(file: Path) -> dict[str, Any]:
    """Reads the plan in a file. Raises ConfigError for a file that has none."""
    try:
        return read_plan(read_text(file, JSON_BYTES), str(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {reason(error)}; remove it or write it anew with mrl plan") from None


def plan_again(
    config: RunConfig, model: ModelSpec, file: Path, validation_prompts: int | None = None
) -> dict[str, Any]:
    """Makes the plan of the current configuration.

    Device and number of validation prompts come from the plan stored in `file` where they are not given.
    """
    stored = _stored(file)
    if validation_prompts is None and stored is not None:  # 0: it was unknown
        validation_prompts = stored["memory"]["host"]["held_out_prompts"] or None
    return plan_of(config, model, _same_device(config, stored), validation_prompts)


def plan_report(config: RunConfig, model: ModelSpec, file: Path) -> list[str]:
    """Returns what a run prints of its plan before it starts.

    It says whether the plan is the stored one, what changed, and what will not fit.
    """
    stored = _stored(file)
    plan = plan_again(config, model, file)
    problems = [*_problems(plan["memory"]), slow_generation(plan)]
    number = f"; {plan['hash'][:16]}" if verbose() else ""
    return [f"{verdict(plan)}{number}{_compared(stored, plan)}"] + [
        f"note: {problem}" for problem in problems if problem
    ]


def verdict(plan: dict[str, Any]) -> str:
    """Describes the plan in one line: whether it fits, its fullest phase, and about how long a step takes."""
    phases = plan["times"]["phase_seconds"] | {"sync": plan["reshard"]["predicted_seconds"]}
    times = ", ".join(f"{phase} {seconds_text(seconds)}" for phase, seconds in phases.items())
    low, expected, high = step_seconds(plan)
    step = f"a step about {seconds_text(expected)}, {seconds_text(low)} to {seconds_text(high)} ({times})"
    return f"{memory_verdict(plan['memory'], plan['device']['name'])}; {step}"


def memory_lines_of(config: RunConfig, model: ModelSpec) -> list[str]:
    """Returns a line that says whether the plan of a legal configuration fits; none where there is no plan of it."""
    device = device_for(config)
    try:
        memory = memory_section(PlanInputs.of(config, model, device))
    except ConfigError:
        return []
    asks = "" if memory["fits"] else "; mrl plan says what would"
    named = "" if config.cluster.accelerator or device.platform == "cpu" else " (cluster.accelerator names another)"
    return [f"{memory_verdict(memory, device.name + named)}{asks}"]


def memory_verdict(memory: dict[str, Any], device: str) -> str:
    """Describes whether a plan's memory fits on a device, and its fullest phase, or what is too small where all phases
    fit.
    """
    name, fullest = max(memory["phases"].items(), key=lambda phase: phase[1]["bytes"] / phase[1]["device_bytes"])
    text = f"{fullest['bytes'] / GIB:.1f} of {fullest['device_bytes'] / GIB:.1f} GiB in {name}, the fullest phase"
    terms = fullest["terms"]
    if fullest["fits"] and not memory["fits"]:
        text = _too_small_beside(memory)
        terms = memory["host"]["terms"]
    fit = fit_of(memory)
    if fit == "may not fit":
        text += f", give or take the {error_of(terms) / GIB:.1f} GiB that the plan may be wrong by"
    return f"plan: {fit if memory['fits'] else fit.upper()} {device}: {text}"


def _too_small_beside(memory: dict[str, Any]) -> str:
    """Describes what is too small where every phase fits: an engine's cache, or a node's host memory."""
    host = memory["host"]
    said = [memory["kv_cache"]["change"]]
    if not host["fits"]:
        used, whole = host["bytes_per_node"] / GIB, host["node_bytes"] / GIB
        said.append(f"{used:.1f} of {whole:.0f} GiB of a node's host memory; change: {host['change']}")
    return "; ".join(filter(None, said))


def step_seconds(plan: dict[str, Any]) -> tuple[float, float, float]:
    """Returns low, expected and high seconds of a step, its sync included."""
    sync = plan["reshard"]["predicted_seconds"]
    times = plan["times"]
    low = sum(times["phase_seconds_low"].values())
    expected = sum(times["phase_seconds"].values())
    high = sum(times["phase_seconds_high"].values())
    return low + sync, expected + sync, high + sync


def slow_generation(plan: dict[str, Any]) -> str:
    """Returns a warning where engines work through many small batches, so that a step that fits is too slow; else
    empty.
    """
    times = plan["times"]
    engines = plan["layout"]["engines"]
    seconds = times["phase_seconds"]["generation"]
    step = step_seconds(plan)[1]
    if times["waves"] < _MANY_WAVES or seconds < step / 2:
        return ""
    together = int(times["sequences_together"] * engines["data"])
    waves = times["waves"]
    return (
        f"generation {seconds:,.0f} s of a step of {step:,.0f} s: {together} sequences fit an engine, so there are "
        f"{waves:.0f} batches one after the other; give engines fewer tensor ranks and more data parallelism with "
        "rollout.expert_parallel_size, a larger rollout.gpu_memory_utilization or max_num_seqs"
    )


def drafts_text(plan: dict[str, Any]) -> str:
    """Says what drafts save or cost, and up to which batch; empty where the model has nothing to draft with."""
    found = plan["times"]["drafts"]
    if found is None:
        return ""
    without = seconds_text(found["seconds_without"])
    if not found.get("seconds"):
        why = "they would pay in no batch"
        if found["method"] != MTP:
            why = "how many are accepted depends on the text: calibrate with a run (mrl plan --calibrate)"
        return f"drafts ({found['method']}): generation {without} without; {why}"
    pays = f"pays up to {found['pays_up_to_sequences']} sequences of an engine's rank at once"
    if not found["pays_up_to_sequences"]:
        pays = "pays in no batch"
    best = f"; best: {found['best_tokens']} tokens" if found["best_tokens"] else ""
    use = "" if found["used"] else ", if rollout.speculation used the model's predicting layers"
    return (
        f"drafts ({found['method']}): generation {seconds_text(found['seconds'])} with {found['tokens']} tokens "
        f"drafted and {found['tokens_per_step']:.2f} made a step, {without} without{use}; this {pays}{best}"
    )


def seconds_text(seconds: float) -> str:
    """Returns seconds as pages print them: whole from ten on, else with two digits."""
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.2g} s"


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns `layout.actor.tensor: 2 -> 4` for every value that differs. Lists of ranks count as one value."""
    before = dict(_leaves(old))
    after = dict(_leaves(new))
    keys = [key for key in before | after if key not in _NOT_COMPARED]
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys if before.get(key) != after.get(key)]


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{path}.{key}" if path else key)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [(path, f"{len(value)} entries, {hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]}")]
    return [(path, value)]


def _stored(file: Path) -> dict[str, Any] | None:
    """Returns the plan in a file; None where there is no file. Raises ConfigError for a file that holds something
    else.
    """
    if file.is_file():
        return load_plan(file)
    return None


def _same_device(config: RunConfig, stored: dict[str, Any] | None) -> Device:
    before = None
    if stored and config.cluster.accelerator is None:
        before = devices().get(stored["device"]["name"])
    if before is not None and before.platform == config.cluster.device:
        return before
    return device_for(config)


def _compared(stored: dict[str, Any] | None, plan: dict[str, Any]) -> str:
    if stored is None:
        return ""
    changed = differences(stored, plan)
    if not changed:
        return ", as planned before"
    more = ""
    if len(changed) > _SHOWN:
        more = f"; and {len(changed) - _SHOWN} more"
    return f", not as planned before ({stored['hash'][:16]}): {'; '.join(changed[:_SHOWN])}{more}"


def _problems(memory: dict[str, Any]) -> list[str]:
    """Returns what does not fit. These are estimates, so a run starts all the same."""
    phases = [
        f"by the plan's estimate phase {name} takes {phase['bytes'] / GIB:.1f} of {phase['device_bytes'] / GIB:.1f} "
        f"GiB, most of it {phase['largest']}; change: {phase['change']}"
        for name, phase in memory["phases"].items()
        if not phase["fits"]
    ]
    return [*phases, *(memory[part]["change"] for part in ("kv_cache", "host") if memory[part]["change"])]
