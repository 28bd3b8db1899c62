"""Finds the fastest whole step on some devices: layout and micro-batches of the actor, and settings of the engines.
Seconds come from the function that a plan prints (mrl/plan/times.py).

Actor and engines are searched separately, because their seconds add up. Then pairs are tried in the order of their sum.
The first is taken whose whole plan fits and that breaks no rule. The actor's layouts come from `search`, the fastest
also with larger micro-batches. For engines every tensor and data-parallel degree is tried, with experts spread over
data-parallel ranks. Several shares of memory and numbers of sequences are tried, too.

After a calibration (cluster.calibration) an actor's seconds are the mean over assumptions that all explain the measured
runs. An actor that is slower on average may be the faster one by some of them. Such a run is worth a trial: measured,
it tells what those runs leave open, and is the faster one or not.

Example: two of four assumptions give A 10 s and B 8 s, and two 10 s and 13 s. A is the fastest, with 10 s against 10.5.
B spares 1 s on average, if it is kept where it is the faster one: it is the trial.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np

from mrl.config.load import ResolvedConfig
from mrl.config.rollout_rules import engine_splits_heads
from mrl.config.rules import violations
from mrl.config.schema import RunConfig, with_values
from mrl.config.yaml_tree import dump_value
from mrl.errors import ConfigError
from mrl.model import ModelSpec
from mrl.plan.calibration_file import CONSTANTS, allowed_by, assumptions_of, measured_actors
from mrl.plan.devices import Assumptions, Device
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import PlanInputs, batch_plan, engine_of, shape_of_actor
from mrl.plan.times import engine_seconds, phase_seconds, rank_seconds, update_seconds
from mrl.reshard.plan import no_collection
from mrl.tools.search import Candidate, SearchProblem, SearchResult, best_fit, heaviest_stage, unlike_stages
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
_WORTH = 0.005  # share of a step that a trial must spare on average
_FOLLOWS = 0.5  # correlation of a trial's seconds with an assumption on which they depend


class _Actor(NamedTuple):
    """A layout of the actor with its micro-batches."""

    seconds: np.ndarray  # of a step but its generation, by each of the assumptions
    settings: dict[str, Any]
    held: int  # bytes of the fullest phase

    @property
    def expected(self) -> float:
        return float(self.seconds.mean())


@dataclass(frozen=True)
class Trial:
    """A run that may be faster than the fastest one, by what measured runs leave open.

    `low`, `high`: its seconds as shares of the fastest one's, by the assumptions of which a twentieth gives less or
    more. `chance`: share of them by which it is the faster one. `follows`: assumptions on which that depends.
    """

    config: RunConfig
    low: float
    high: float
    chance: float
    follows: tuple[str, ...]


@dataclass(frozen=True)
class WholeRun:
    """A configuration with the settings found, and its predicted seconds without the sync."""

    config: RunConfig
    settings: dict[str, Any]  # dotted keys with the changes, some of which may repeat the given values
    seconds: float
    trial: Trial | None = None


def step_of(
    config: RunConfig, model: ModelSpec, device: Device, assumed: Assumptions | None = None
) -> dict[str, float]:
    """Returns the seconds of every phase except the sync, as `mrl plan` prints them. `assumed`: by default those of
    cluster.calibration. Raises ConfigError for illegal layouts.
    """
    inputs = PlanInputs.of(config, model, device, assumed)
    return phase_seconds(inputs, batch_plan(config, inputs.train), engine_of(inputs))


def expected_seconds(config: RunConfig, model: ModelSpec, device: Device) -> float:
    """Returns the seconds of a step without its sync, after a calibration the mean over what its runs leave open."""
    assumed = allowed_by(config.cluster.calibration, device) or (None,)
    return float(np.mean([sum(step_of(config, model, device, each).values()) for each in assumed]))


@no_collection()
def fastest_run(config: RunConfig, problem: SearchProblem, result: SearchResult) -> WholeRun | None:
    """Returns the fastest run that fits and breaks no rule, for devices, batch and limits of `config`.

    It has all switches that `mrl init` writes.
    """
    model = problem.model
    device = problem.device
    switches = missing_switches(config, model)
    config = with_values(config, switches)
    allowed = allowed_by(config.cluster.calibration, device)
    found = sorted(_actors(config, problem, result, allowed), key=lambda actor: actor.expected)
    if not found:
        return None
    leanest = with_values(config, min(found, key=lambda actor: actor.held).settings)
    # of an actor that breaks no rule, so that none of its breaches counts against engines
    faster = sorted(engines_of(leanest, model, device), key=lambda engine: engine[0])
    engines = list(islice((e for e in faster if _fits(with_values(leanest, e[1]), model, device)), _ENGINES))
    if not engines:
        return None
    smallest = min(engines, key=lambda engine: engine[1]["rollout.gpu_memory_utilization"])[1]
    # the search counts the actor alone; beside an engine that sleeps the fastest may not fit
    beside = (actor for actor in found if _fits(with_values(config, actor.settings | smallest), model, device))
    actors = list(islice(beside, _ACTORS))
    pairs = sorted(product(actors, engines), key=lambda pair: pair[0].expected + pair[1][0])
    for actor, engine in pairs[:_TRIED]:
        settings = switches | actor.settings | engine[1]
        whole = with_values(config, settings)
        if _is_possible(whole, model, device):
            best = WholeRun(whole, settings, expected_seconds(whole, model, device))
            return replace(best, trial=_trial(best, actor, found, allowed, problem))
    return None


def _is_possible(config: RunConfig, model: ModelSpec, device: Device) -> bool:
    return not violations(ResolvedConfig(config, {}), model) and _fits(config, model, device)


def expected_gains(seconds: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Returns what a trial of each run spares on average, if it is kept where it is faster than `best` (expected
    improvement: Jones, Schonlau and Welch 1998).

    `seconds`: [runs, assumptions]; `best`: [assumptions]; the result: [runs].
    """
    return np.maximum(best - seconds, 0.0).mean(axis=1)


def _trial(
    best: WholeRun, actor: _Actor, others: Sequence[_Actor], allowed: Sequence[Assumptions], problem: SearchProblem
) -> Trial | None:
    """Returns the run with the largest expected gain that is possible with the best run's engines; None where none is
    worth it. It is none whose actor was measured: that would tell nothing new.

    Both runs generate alike, for the seconds that the calibration's own values give, whatever `allowed` says of them:
    `low` and `high` leave out what the runs leave open of generation.
    """
    if not allowed:
        return None
    gains = expected_gains(np.array([other.seconds for other in others]), actor.seconds)
    measured = measured_actors(best.config.cluster.calibration, problem.device)
    for place in np.argsort(-gains)[:_ACTORS]:
        if gains[place] < _WORTH * best.seconds:
            return None
        other = others[place]
        config = with_values(best.config, other.settings)
        if shape_of_actor(config, problem.model) in measured:
            continue
        if _is_possible(config, problem.model, problem.device):
            generation = step_of(best.config, problem.model, problem.device)["generation"]
            shares = (other.seconds + generation) / (actor.seconds + generation)
            low, high = np.quantile(shares, (0.05, 0.95))
            return Trial(config, float(low), float(high), float(np.mean(shares < 1)), _followed(shares, allowed))
    return None


def _followed(shares: np.ndarray, allowed: Sequence[Assumptions]) -> tuple[str, ...]:
    """Returns the assumptions that `shares` follow, the most telling first."""
    values = np.log([[getattr(each, name) for name in CONSTANTS] for each in allowed])
    varied = np.flatnonzero(values.std(axis=0) > 0)
    if shares.std() == 0:
        return ()
    alike = np.abs([np.corrcoef(shares, values[:, place])[0, 1] for place in varied])
    return tuple(CONSTANTS[varied[place]] for place in np.argsort(-alike) if alike[place] > _FOLLOWS)


def run_report(config: RunConfig, problem: SearchProblem, result: SearchResult) -> dict[str, Any] | None:
    """Returns the seconds of a step with `config`, those of the fastest run, and the changes; None if nothing fits.

    `deepep_seconds` are those of the fastest run with DeepEP, where that would spare traffic.
    """
    best = fastest_run(config, problem, result)
    if best is None:
        return None
    return {
        "seconds": expected_seconds(config, problem.model, problem.device),
        "best_seconds": best.seconds,
        "calibrated": config.cluster.calibration is not None,
        "deepep_seconds": _deepep_seconds(best, problem),
        "settings": settings_between(config, best.config),
        "trial": _trial_report(best),
    }


def _trial_report(best: WholeRun) -> dict[str, Any] | None:
    trial = best.trial
    if trial is None:
        return None
    return {
        "low": trial.low,
        "high": trial.high,
        "chance": trial.chance,
        "follows": list(trial.follows),
        "settings": settings_between(best.config, trial.config),
    }


def _deepep_seconds(best: WholeRun, problem: SearchProblem) -> float | None:
    layout = best.config.actor.layout
    if not deepep_would_spare(problem, layout.expert_model_parallel_size * layout.expert_tensor):
        return None
    return expected_seconds(with_values(best.config, DEEPEP), problem.model, problem.device)


def settings_between(config: RunConfig, other: RunConfig) -> list[str]:
    """Returns arguments of --set that turn one configuration into the other."""
    return [f"{key}={dump_value(value)}" for key, value in differing(config, other).items()]


def _fits(config: RunConfig, model: ModelSpec, device: Device) -> bool:
    try:
        return memory_section(PlanInputs.of(config, model, device))["fits"]
    except ConfigError:
        return False


# ---------------------------------------------------------------- the actor


def _actors(
    config: RunConfig, problem: SearchProblem, result: SearchResult, allowed: Sequence[Assumptions]
) -> Iterator[_Actor]:
    """Yields the fastest layouts, each as it was found, and with other micro-batches.

    `allowed`: assumptions by which their seconds are predicted; empty: the configuration's alone.
    """
    longest = config.data.max_sample_length
    layouts = _fastest_layouts(config, problem, result, allowed)
    assumed = allowed or (assumptions_of(config.cluster.calibration, problem.device),)
    for samples in _SAMPLES:
        larger = with_values(
            config, {"actor.use_dynamic_bsz": True, "actor.ppo_max_token_len_per_gpu": samples * longest}
        )
        wider = problem_with(problem, larger)
        for candidate in layouts:
            for found in _recomputed(wider, candidate):
                yield _actor(larger, wider, found, samples * longest, assumed)


def _fastest_layouts(
    config: RunConfig, problem: SearchProblem, result: SearchResult, allowed: Sequence[Assumptions]
) -> list[Candidate]:
    """Returns the layouts with the fastest updates, and that with the fastest one by each of the assumptions."""
    held = (one for one in result.fitting if holds_teacher(run_with(config, one.degrees, one.recompute)))
    if not allowed:
        return list(islice(held, _LAYOUTS))
    every = list(held)
    seconds = np.array([_update_seconds(problem, candidate, allowed) for candidate in every])
    places = [*range(min(_LAYOUTS, len(every))), *(seconds.argmin(axis=0).tolist() if every else ())]
    return [every[place] for place in dict.fromkeys(places)]


def _update_seconds(problem: SearchProblem, candidate: Candidate, allowed: Sequence[Assumptions]) -> list[float]:
    """Predicts an update in a layout by each of the assumptions."""
    layout = candidate.layout
    work = problem.work_in(layout)
    device = problem.device_in(layout)
    state = heaviest_stage(problem.state(layout, pp) for pp in unlike_stages(problem.model, layout))
    return [
        update_seconds(
            work, layout, device, problem.per_node, state, candidate.recompute, assumed, problem.overlap
        ).total
        for assumed in allowed
    ]


def _recomputed(problem: SearchProblem, candidate: Candidate) -> Iterator[Candidate]:
    """Yields candidates with the least recomputation that fits, and with more.

    Engines may leave less memory than the search counts.
    """
    ways = problem.recomputes
    for first, recompute in enumerate(ways):
        found = best_fit(problem, candidate.degrees, candidate.layout, ways[first:])
        if isinstance(found, Candidate) and (first == 0 or found.recompute == recompute):
            yield found


def _actor(
    config: RunConfig, problem: SearchProblem, found: Candidate, tokens: int, assumed: Sequence[Assumptions]
) -> _Actor:
    run = run_with(config, found.degrees, found.recompute)
    settings = {
        "actor.layout": run.actor.layout.model_dump(),
        "actor.use_dynamic_bsz": True,
        "actor.ppo_max_token_len_per_gpu": tokens,
        "model.override_transformer_config": run.model.override_transformer_config,
    }
    inputs = PlanInputs.of(run, problem.model, problem.device, assumed[0])
    batch = batch_plan(run, inputs.train)
    seconds = [sum(rank_seconds(replace(inputs, assumptions=each), batch).values()) for each in assumed]
    return _Actor(np.array(seconds), settings, found.phase.total)


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
    engine = engine_of(inputs)
    if engine.cache_tokens < config.data.max_sample_length * inputs.rollout.data:
        return None
    return engine_seconds(inputs, batch_plan(config, inputs.train), engine)
