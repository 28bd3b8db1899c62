"""`mrl plan --search`: lists the layouts that fit a configuration, or only a model, as plain data.

The search itself considers the actor alone. For a configuration, the fastest layouts are shown that fit the plan of the
whole run: with reference model, engines and real staging. If a layout fits only with recomputation, this is tried, and
the layout moves down in the order.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from mrl.config.efficiency_rules import scales_are_delayed
from mrl.config.load import ResolvedConfig
from mrl.config.quantisation_rules import ranks_block
from mrl.config.rollout_rules import engine_splits_heads
from mrl.config.rules import violations
from mrl.config.schema import LayoutConfig, RunConfig, with_values
from mrl.config.teacher_model import teacher_of
from mrl.config.yaml_tree import dump_value
from mrl.errors import ConfigError, Violation
from mrl.model import ModelSpec, planning_model_spec
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.precision import BF16
from mrl.model.quantised_shards import workers_fault
from mrl.plan.activations import Recompute
from mrl.plan.calibration_file import assumptions_of
from mrl.plan.devices import Device
from mrl.plan.engine_memory import engine_memory, engine_share
from mrl.plan.memory import memory_section, offload_of
from mrl.plan.memory_phases import Phase
from mrl.plan.plan_inputs import PlanInputs, engine_passes, precision_of, sync_budget, update_micro_batch
from mrl.plan.suggest_fixes import HOST_ADAM
from mrl.plan.times import overlap_of, sample_work
from mrl.tools.search import (
    Candidate,
    SearchProblem,
    SearchResult,
    candidate_of,
    first_fit,
    heaviest_stage,
    recomputes,
    search,
    stronger,
    unlike_stages,
)
from mrl.tools.switches import deepep_would_spare, with_switches
from mrl.units import GIB

_OF_LAYOUT = ("actor.layout.", "distillation.")  # rules that another layout may meet
_MORE_DEVICES = (2, 4, 8)  # times as many as asked for
_TRIED = 100  # layouts at most whose whole runs are planned, each with every recomputation that it needs
# tokens of a usual run with long answers
PROMPT = 2048
RESPONSE = 8192
# prompts of a step, prompts of an update, responses for each prompt
PROMPTS = 128
MINI = 32
N = 8


def usual_batch(devices: int) -> tuple[int, int]:
    """Returns default (prompts of a step, prompts of an update), so that every rank has a sample in each update."""
    mini = max(MINI, devices // N)
    return max(PROMPTS, 4 * mini), mini


def search_problem(
    config: RunConfig, model: ModelSpec, device: Device, devices: int, per_node: int, megatron: str
) -> SearchProblem:
    """Returns the actor's work in `config` on so many devices, with the switches that `mrl init` writes.

    Its own layout does not matter.
    """
    config = with_switches(config, model)
    assumed = assumptions_of(config.cluster.calibration, device)
    micro_of = partial(update_micro_batch, config)
    micro = micro_of(TrainLayout.build({"world_size": devices}, model))
    work = sample_work(config, model, micro, config.actor.ppo_mini_batch_size * config.rollout.n, assumed)
    return SearchProblem(
        work=replace(work, predicting=model.holding(config.actor.mtp.train).predicting_layers),
        assumptions=assumed,
        device=device,
        devices=devices,
        per_node=per_node,
        sync_staging=2 * sync_budget(config),
        megatron=megatron,
        precision=precision_of(config, BF16.parameters),
        micro_of=micro_of,
        offload=offload_of(config),
        scores_old=not config.algorithm.on_policy,
        overlap=overlap_of(config, config.updates_per_step),
        lora=config.actor.lora.adapters,
        dropout=config.actor.lora.dropout > 0,
        fp8_block=ranks_block(config),
        ways=_recomputes_of(config, model),
    )


def _recomputes_of(config: RunConfig, model: ModelSpec) -> tuple[Recompute, ...]:
    """Returns the ways of recomputation to try. Megatron refuses norms and activations in FP8 with delayed scaling."""
    ways = recomputes(model)
    if scales_are_delayed(config):
        ways = tuple(way for way in ways if "layernorm" not in way.modules)
    return ways


def problem_with(problem: SearchProblem, config: RunConfig) -> SearchProblem:
    """Returns the problem with the micro-batches of `config`."""
    micro_of = partial(update_micro_batch, config)
    micro = micro_of(TrainLayout.build({"world_size": problem.devices}, problem.model))
    return replace(problem, micro_of=micro_of, work=replace(problem.work, micro=micro))


def search_report(
    config: RunConfig, problem: SearchProblem, top: int, planned: bool = False, result: SearchResult | None = None
) -> dict[str, Any]:
    """Returns the `top` best layouts with their reasons, and what is wrong with those that do not fit.

    `planned`: show only layouts with which the plan of the whole `config` fits. `result`: of a search that was already
    made.
    """
    result = result or search(problem)
    shown, left_out = result.fitting[:top], {}
    if planned:
        allows = partial(_is_legal_layout, config, problem.model)
        shown, left_out = fastest_that_fit(config, problem, result, top, allows)
    return {
        "device": problem.device.name,
        "devices": problem.devices,
        "devices_per_node": problem.per_node,
        "micro_batch": vars(problem.work.micro),
        "samples": config.actor.ppo_mini_batch_size * config.rollout.n,
        "updates": config.updates_per_step,
        "legal": result.legal,
        "fitting": len(result.fitting),
        "near": result.near,
        "fit": "fits" if shown else ("may not fit" if result.near else "does not fit"),
        "layouts": [_row(config, problem, candidate) for candidate in shown],
        "planned": planned,
        "left_out": dict(left_out),
        "too_large": dict(result.too_large.most_common()),
        "engines": _engine_lines(config, problem),
    }


def ways_out(config: RunConfig, problem: SearchProblem, megatron: str, planned: bool) -> dict[str, Any]:
    """Returns what would make a layout fit where none does.

    `would_fit_with`: settings that keep Adam's states on the host, with a layout where the whole plan was asked for;
    empty where that does not help. `would_fit_on`: devices on which a layout of the actor alone fits as it is, of
    `tried_devices` at most; None where none does.
    """
    devices = problem.devices

    def problem_on(config: RunConfig, count: int) -> SearchProblem:
        return search_problem(config, problem.model, problem.device, count, problem.per_node, megatron)

    counts = [devices * factor for factor in _MORE_DEVICES]
    enough = next((count for count in counts if first_fit(problem_on(config, count))), None)
    settings = _settings_on_host(config, problem, problem_on, planned)
    return {"would_fit_with": settings, "would_fit_on": enough, "tried_devices": counts[-1]}


def _settings_on_host(
    config: RunConfig, problem: SearchProblem, problem_on: Callable[[RunConfig, int], SearchProblem], planned: bool
) -> list[str]:
    """Returns settings with which Adam's states lie on the host, where a layout then fits. Empty where none does."""
    if problem.device.platform == "cpu" or config.actor.optim.override_optimizer_config.get("optimizer_cpu_offload"):
        return []
    settings = {f"actor.optim.override_optimizer_config.{key}": value for key, value in HOST_ADAM.items()}
    offloaded = with_values(config, settings)
    on_host = problem_on(offloaded, problem.devices)
    if not planned:
        return _assignments(settings) if _fits_host(on_host, first_fit(on_host)) else []
    allows = partial(_is_legal_layout, offloaded, problem.model)
    fastest, _ = fastest_that_fit(offloaded, on_host, search(on_host), 1, allows)
    layouts = [run_with(offloaded, found.degrees, found.recompute) for found in fastest]
    return _assignments(differing(config, layouts[0])) if layouts else []


def _fits_host(problem: SearchProblem, candidate: Candidate | None) -> bool:
    """Tells whether a node's memory holds what the optimizer keeps there."""
    if candidate is None:
        return False
    stages = unlike_stages(problem.model, candidate.layout)
    states = [problem.state(candidate.layout, pp) for pp in stages]
    of_a_node = problem.per_node * max(state.optimizer_host for state in states)
    return of_a_node <= problem.device.host_memory


def _assignments(values: dict[str, Any]) -> list[str]:
    return [f"{key}={dump_value(value)}" for key, value in values.items()]


def differing(config: RunConfig, other: RunConfig) -> dict[str, Any]:
    """Returns dotted keys with different values, with the other's value. Fields of an `override_*` key are separate."""
    before = dict(_leaves(config.model_dump()))
    after = dict(_leaves(other.model_dump()))
    return {key: after.get(key) for key in before | after if before.get(key) != after.get(key)}


def _leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _row(config: RunConfig, problem: SearchProblem, candidate: Candidate) -> dict[str, Any]:
    return {
        "degrees": candidate.degrees,
        "data": candidate.layout.data,
        "expert_data": candidate.layout.expert_data,
        "recompute": str(candidate.recompute),
        "micro_batch": vars(problem.work_in(candidate.layout).micro),
        "micro_batches": candidate.micro_batches,
        "seconds": candidate.seconds.total,
        "deepep_seconds": _deepep_seconds(problem, candidate),
        "parts": vars(candidate.seconds),
        "bytes": candidate.phase.total,
        "device_bytes": candidate.phase.device_bytes,
        "terms": candidate.phase.terms,
        "why": candidate.reasons(problem.per_node),
    }


def _deepep_seconds(problem: SearchProblem, candidate: Candidate) -> float | None:
    """Returns the seconds of an update with DeepEP; None where it changes nothing, or is on already."""
    layout = candidate.layout
    if not deepep_would_spare(problem, layout.expert * layout.expert_tensor):
        return None
    other = replace(problem, work=replace(problem.work, once_a_node=True))
    return _with_recompute(other, candidate, candidate.recompute).seconds.total


def _engine_lines(config: RunConfig, problem: SearchProblem) -> list[str]:
    """Describes the smallest engines that hold at least one sequence, and the tokens of their cache."""
    model = problem.model
    device = problem.device
    length = config.data.max_sample_length
    lines = []
    block = config.rollout.fp8_block
    for tensor in (n for n in range(1, problem.per_node + 1) if engine_splits_heads(n, model)):
        rollout = RolloutLayout(1, tensor)
        if workers_fault(model, rollout, block):
            continue
        share = engine_share(device, config.rollout.gpu_memory_utilization, config.rollout.enforce_eager)
        engine = engine_memory(model, rollout, share, **engine_passes(config))
        if engine.cache_tokens >= length:
            lines.append(
                f"engine of {tensor}: weights {engine.weights / GIB:.1f} GiB a device, cache of "
                f"{engine.cache_tokens} tokens"
            )
    return lines or ["no engine inside a node holds the model and one sequence"]


# ---------------------------------------------------------------- layouts that fit with the whole configuration


def fastest_that_fit(
    config: RunConfig,
    problem: SearchProblem,
    result: SearchResult,
    top: int,
    allows: Callable[[Candidate], bool] = lambda _: True,
) -> tuple[list[Candidate], Counter[str]]:
    """Returns the `top` best layouts whose plan fits, with the plan's phase, and why earlier ones were left out.

    Layouts that the caller does not allow are skipped, neither planned nor counted.
    """
    number = count()
    # sorted, so it is a heap; the last entry is the plan, once made
    waiting = [(candidate.order, next(number), candidate, None) for candidate in result.fitting]
    shown: list[Candidate] = []
    left_out: Counter[str] = Counter()
    tried = 0
    while waiting and len(shown) < top and tried < _TRIED:
        *_, candidate, memory = heapq.heappop(waiting)
        if memory is None and not allows(candidate):
            continue
        tried += 1
        memory = memory or _planned(config, problem, candidate)
        if memory["fits"]:
            shown.append(replace(candidate, phase=planned_phase(memory)))
            continue
        for way in stronger(problem, candidate.recompute):
            recomputed = _with_recompute(problem, candidate, way)
            memory = _planned(config, problem, recomputed)
            if memory["fits"]:
                heapq.heappush(waiting, (recomputed.order, next(number), recomputed, memory))
                break
        else:
            left_out[_too_large(memory)] += 1
    return shown, left_out


def broken_with(config: RunConfig, model: ModelSpec, candidate: Candidate) -> list[Violation]:
    """Returns the rules of a configuration that a layout breaks."""
    return violations(ResolvedConfig(run_with(config, candidate.degrees, candidate.recompute), {}), model)


def _is_legal_layout(config: RunConfig, model: ModelSpec, candidate: Candidate) -> bool:
    """Tells whether a layout breaks no rule of layouts, and a teacher can lie as it would in it."""
    if not holds_teacher(run_with(config, candidate.degrees, candidate.recompute)):
        return False
    return not any(broken.field.startswith(_OF_LAYOUT) for broken in broken_with(config, model, candidate))


def holds_teacher(config: RunConfig) -> bool:
    """Tells whether the teacher, where there is one, can lie as it would in this layout of the actor."""
    try:
        teacher_of(config, lambda path: planning_model_spec(path)[0])
    except ConfigError:
        return False
    return True


def run_with(config: RunConfig, degrees: dict[str, Any], recompute: Recompute) -> RunConfig:
    """Returns `config` with another layout of its actor and this recomputation."""
    given = {k: v for k, v in config.model.override_transformer_config.items() if not k.startswith("recompute_")}
    given |= recompute.settings
    actor = config.actor.model_copy(update={"layout": LayoutConfig(**degrees)})
    model = config.model.model_copy(update={"override_transformer_config": given})
    return config.model_copy(update={"actor": actor, "model": model})


def _planned(config: RunConfig, problem: SearchProblem, candidate: Candidate) -> dict[str, Any]:
    changed = run_with(config, candidate.degrees, candidate.recompute)
    try:
        return memory_section(PlanInputs.of(changed, problem.model, problem.device, problem.assumptions))
    except ConfigError as error:
        return {"fits": False, "refused": str(error)}


def _with_recompute(problem: SearchProblem, candidate: Candidate, recompute: Recompute) -> Candidate:
    """Returns the candidate's layout with this recomputation."""
    states = [problem.state(candidate.layout, pp) for pp in unlike_stages(problem.model, candidate.layout)]
    return candidate_of(
        problem, candidate.degrees, candidate.layout, recompute, candidate.phase, heaviest_stage(states)
    )


def planned_phase(memory: dict[str, Any]) -> Phase:
    """Returns the fullest phase of the actor's devices."""
    actor = {name: phase for name, phase in memory["phases"].items() if phase["stage"] is not None}
    name = max(actor, key=lambda phase: actor[phase]["bytes"])
    return Phase(name, actor[name]["terms"], actor[name]["device_bytes"])


def _too_large(memory: dict[str, Any]) -> str:
    if "refused" in memory:
        return memory["refused"]
    large = [(phase["bytes"], name, phase["largest"]) for name, phase in memory["phases"].items() if not phase["fits"]]
    if large:
        _, name, term = max(large)
        return f"{name}, most {term}"
    if not memory["host"]["fits"]:
        return "host memory"
    return "a cache of less than one sequence"
