"""Finds the fastest whole step on some devices: layout and micro-batches of the actor, and settings of the engines.
Seconds come from the function that a plan prints (mrl/plan/times.py).

Actor and engines are searched separately, because their seconds add up. Then pairs are tried in the order of their sum.
The first is taken whose whole plan fits and that breaks no rule. The actor's layouts come from `search`, the fastest
also with larger micro-batches. For engines every tensor and data-parallel degree is tried, with experts spread over
data-parallel ranks. Several shares of memory and numbers of sequences are tried, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from mrl.config.load import ResolvedConfig
from mrl.config.rollout_rules import engine_splits_heads
from mrl.config.rules import violations
from mrl.config.schema import RunConfig, with_values
from mrl.config.yaml_tree import dump_value
from mrl.errors import ConfigError
from mrl.model import ModelSpec
from mrl.plan.devices import Device
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import PlanInputs, batch_plan, engine_of
from mrl.plan.times import phase_seconds
from mrl.reshard.plan import no_collection
from mrl.tools.search import Candidate, SearchProblem, SearchResult, best_fit
from mrl.tools.search_report import differing, holds_teacher, problem_with, run_with
from mrl.tools.switches import DEEPEP, deepep_would_spare, missing_switches

_SHARES = (0.88, 0.8, 0.7, 0.6)  # of a device's memory, for an engine that has it alone
_SEQUENCES = (256, 512, 1024)
_SAMPLES = (1, 2, 4)  # longest samples that fit into a micro-batch
_LAYOUTS = 20  # layouts of the actor for which larger micro-batches are tried
# numbers of candidates of which pairs are tried
_ACTORS = 20
_ENGINES = 6
_TRIED = 120  # plans of whole runs at most
_PER_SHARE = 0.02  # a smaller share of the memory is preferred if generation slows by less than this


_Actor = tuple[float, dict[str, Any], int]


@dataclass(frozen=True)
class WholeRun:
    """A configuration with the settings found, and its predicted seconds without the sync."""

    config: RunConfig
    settings: dict[str, Any]  # dotted keys with the changes, some of which may repeat the given values
    seconds: float


def step_of(config: RunConfig, model: ModelSpec, device: Device) -> dict[str, float]:
    """Returns the seconds of every phase except the sync, as `mrl plan` prints them. Raises ConfigError for illegal
    layouts.
    """
    inputs = PlanInputs.of(config, model, device)
    return phase_seconds(inputs, batch_plan(config, inputs.train), engine_of(inputs))


@no_collection()
def fastest_run(config: RunConfig, problem: SearchProblem, result: SearchResult) -> WholeRun | None:
    """Returns the fastest run that fits and breaks no rule, for devices, batch and limits of `config`.

    It has all switches that `mrl init` writes.
    """
    model = problem.model
    device = problem.device
    switches = missing_switches(config, model)
    config = with_values(config, switches)
    found = sorted(_actors(config, problem, result), key=lambda actor: actor[0])
    if not found:
        return None
    leanest = with_values(config, min(found, key=lambda actor: actor[2])[1])
    # of an actor that breaks no rule, so that none of its breaches counts against engines
    faster = sorted(engines_of(leanest, model, device), key=lambda engine: engine[0])
    engines = list(islice((e for e in faster if _fits(with_values(leanest, e[1]), model, device)), _ENGINES))
    if not engines:
        return None
    smallest = min(engines, key=lambda engine: engine[1]["rollout.gpu_memory_utilization"])[1]
    # the search counts the actor alone; beside an engine that sleeps the fastest may not fit
    beside = (a for a in found if _fits(with_values(config, a[1] | smallest), model, device))
    actors = list(islice(beside, _ACTORS))
    pairs = sorted(product(actors, engines), key=lambda pair: pair[0][0] + pair[1][0])
    for actor, engine in pairs[:_TRIED]:
        settings = switches | actor[1] | engine[1]
        whole = with_values(config, settings)
        if not violations(ResolvedConfig(whole, {}), model) and _fits(whole, model, device):
            return WholeRun(whole, settings, sum(step_of(whole, model, device).values()))
    return None


def run_report(config: RunConfig, problem: SearchProblem, result: SearchResult) -> dict[str, Any] | None:
    """Returns the seconds of a step with `config`, those of the fastest run, and the changes; None if nothing fits.

    `deepep_seconds` are those of the fastest run with DeepEP, where that would spare traffic.
    """
    best = fastest_run(config, problem, result)
    if best is None:
        return None
    return {
        "seconds": sum(step_of(config, problem.model, problem.device).values()),
        "best_seconds": best.seconds,
        "calibrated": config.cluster.calibration is not None,
        "deepep_seconds": _deepep_seconds(best, problem),
        "settings": settings_between(config, best.config),
    }


def _deepep_seconds(best: WholeRun, problem: SearchProblem) -> float | None:
    layout = best.config.actor.layout
    if not deepep_would_spare(problem, layout.expert_model_parallel_size * layout.expert_tensor):
        return None
    return sum(step_of(with_values(best.config, DEEPEP), problem.model, problem.device).values())


def settings_between(config: RunConfig, other: RunConfig) -> list[str]:
    """Returns arguments of --set that turn one configuration into the other."""
    return [f"{key}={dump_value(value)}" for key, value in differing(config, other).items()]


def _fits(config: RunConfig, model: ModelSpec, device: Device) -> bool:
    try:
        return memory_section(PlanInputs.of(config, model, device))["fits"]
    except ConfigError:
        return False


# ---------------------------------------------------------------- the actor


def _actors(config: RunConfig, problem: SearchProblem, result: SearchResult) -> Iterator[_Actor]:
    """Yields (seconds of a step but its generation, keys, bytes of the fullest phase) of the fastest layouts.

    Each appears as it was found, and with other micro-batches.
    """
    longest = config.data.max_sample_length
    for samples in _SAMPLES:
        larger = with_values(
            config, {"actor.use_dynamic_bsz": True, "actor.ppo_max_token_len_per_gpu": samples * longest}
        )
        wider = problem_with(problem, larger)
        held = (one for one in result.fitting if holds_teacher(run_with(larger, one.degrees, one.recompute)))
        for candidate in islice(held, _LAYOUTS):
            for found in _recomputed(wider, candidate):
                yield _actor(larger, wider, found, samples * longest)


def _recomputed(problem: SearchProblem, candidate: Candidate) -> Iterator[Candidate]:
    """Yields candidates with the least recomputation that fits, and with more.

    Engines may leave less memory than the search counts.
    """
    ways = problem.recomputes
    for first, recompute in enumerate(ways):
        found = best_fit(problem, candidate.degrees, candidate.layout, ways[first:])
        if isinstance(found, Candidate) and (first == 0 or found.recompute == recompute):
            yield found


def _actor(config: RunConfig, problem: SearchProblem, found: Candidate, tokens: int) -> _Actor:
    run = run_with(config, found.degrees, found.recompute)
    phases = step_of(run, problem.model, problem.device)
    settings = {
        "actor.layout": run.actor.layout.model_dump(),
        "actor.use_dynamic_bsz": True,
        "actor.ppo_max_token_len_per_gpu": tokens,
        "model.override_transformer_config": run.model.override_transformer_config,
    }
    seconds = sum(spent for name, spent in phases.items() if name != "generation")
    return seconds, settings, found.phase.total


# ---------------------------------------------------------------- the engines


def engines_of(config: RunConfig, model: ModelSpec, device: Device) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yields (seconds of generation, keys) of all engines for the devices that the configuration gives them."""
    cluster = config.cluster
    rollout = config.rollout
    devices = rollout.num_engines * rollout.workers_per_engine
    tensors = [n for n in range(1, cluster.n_gpus_per_node + 1) if engine_splits_heads(n, model)]
    datas = [n for n in range(1, devices + 1) if devices % n == 0] if model.is_moe else [1]
    shares = _SHARES if device.platform != "cpu" else (rollout.gpu_memory_utilization,)
    for tensor, data, share, sequences in product(tensors, datas, shares, _SEQUENCES):
        if devices % (tensor * data):
            continue
        settings = {
            "rollout.num_engines": devices // (tensor * data),
            "rollout.tensor_model_parallel_size": tensor,
            "rollout.data_parallel_size": data,
            # sliced over all workers of such an engine, an expert is too narrow for fast kernels
            "rollout.expert_parallel_size": tensor * data if data > 1 else 1,
            "rollout.gpu_memory_utilization": share,
            "rollout.max_num_seqs": sequences,
        }
        found = with_values(config, settings)
        if seconds := _generation(found, model, device):
            # between equals, the smaller share and fewer sequences are preferred
            yield seconds * (1 + _PER_SHARE * (share + sequences / 10000)), settings


def _generation(config: RunConfig, model: ModelSpec, device: Device) -> float | None:
    """Returns the seconds of generation; None for illegal engines, or without cache for one sequence."""
    if any(violation.field.startswith("rollout.") for violation in violations(ResolvedConfig(config, {}), model)):
        return None
    inputs = PlanInputs.of(config, model, device)
    if engine_of(inputs).cache_tokens < config.data.max_sample_length * inputs.rollout.data:
        return None
    return phase_seconds(inputs, batch_plan(config, inputs.train), engine_of(inputs))["generation"]
