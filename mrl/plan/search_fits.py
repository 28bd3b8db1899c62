"""Of the layouts that a search found, the fastest that fit by the plan of the whole run, with reference model, engine and real staging.

The search itself counts the actor alone. Recomputation is tried when a layout fits only with it; such a layout takes its later place.
"""

import heapq
from collections import Counter
from dataclasses import replace
from itertools import count
from typing import Any

from mrl.config.schema import LayoutConfig, RunConfig
from mrl.errors import ConfigError
from mrl.plan.activations import Recompute
from mrl.plan.inputs import PlanInputs
from mrl.plan.memory import memory_section
from mrl.plan.model_state import stage_state
from mrl.plan.memory_phases import Phase
from mrl.plan.search import RECOMPUTE, Candidate, SearchProblem, SearchResult, candidate_of, unlike_stages

_TRIED = 100  # plans at most: a search of thousands of layouts is not planned whole


def fastest_that_fit(config: RunConfig, problem: SearchProblem, result: SearchResult, top: int) -> tuple[list[Candidate], Counter[str]]:
    """The `top` best whose plan fits, their phase that of the plan; and why those before them were left out."""
    number = count()
    waiting = [(found.order, next(number), found, None) for found in result.fitting]  # sorted, so a heap; the plan, once made
    shown: list[Candidate] = []
    left_out: Counter[str] = Counter()
    for _ in range(_TRIED):
        if not waiting or len(shown) == top:
            break
        *_, found, memory = heapq.heappop(waiting)
        memory = memory or _planned(config, problem, found)
        if memory["fits"]:
            shown.append(replace(found, phase=_fullest(memory)))
            continue
        again = _recomputed(problem, found)
        memory = _planned(config, problem, again)
        if memory["fits"]:
            heapq.heappush(waiting, (again.order, next(number), again, memory))
        else:
            left_out[_why(memory)] += 1
    return shown, left_out


def run_with(config: RunConfig, degrees: dict[str, Any], recompute: Recompute) -> RunConfig:
    """`config` with another layout of its actor, recomputed in that way."""
    given = {k: v for k, v in config.model.override_transformer_config.items() if not k.startswith("recompute_")}
    if recompute.granularity == "full":
        given |= {"recompute_granularity": "full", "recompute_method": recompute.method, "recompute_num_layers": recompute.num_layers}
    actor = config.actor.model_copy(update={"layout": LayoutConfig(**degrees)})
    model = config.model.model_copy(update={"override_transformer_config": given})
    return config.model_copy(update={"actor": actor, "model": model})


def _planned(config: RunConfig, problem: SearchProblem, found: Candidate) -> dict[str, Any]:
    changed = run_with(config, found.degrees, found.recompute)
    try:
        return memory_section(PlanInputs.of(changed, problem.model, problem.device, problem.assumptions))
    except ConfigError as error:
        return {"fits": False, "refused": str(error)}


def _recomputed(problem: SearchProblem, found: Candidate) -> Candidate:
    """The same layout with the recomputation that saves most."""
    states = [stage_state(problem.model, found.layout, pp, problem.precision) for pp in unlike_stages(problem.model, found.layout)]
    heaviest = max(states, key=lambda state: state.parameters + state.gradients + state.optimizer)
    return candidate_of(problem, found.degrees, found.layout, RECOMPUTE[-1], found.phase, heaviest)


def _fullest(memory: dict[str, Any]) -> Phase:
    """The fullest phase of the actor's devices."""
    actor = {name: phase for name, phase in memory["phases"].items() if phase["stage"] is not None}
    name = max(actor, key=lambda phase: actor[phase]["bytes"])
    return Phase(name, actor[name]["terms"], actor[name]["device_bytes"])


def _why(memory: dict[str, Any]) -> str:
    if "refused" in memory:
        return memory["refused"]
    large = [(phase["bytes"], name, phase["largest"]) for name, phase in memory["phases"].items() if not phase["fits"]]
    if large:
        _, name, term = max(large)
        return f"{name}, most {term}"
    return "host memory" if not memory["host"]["fits"] else "a cache of less than one sequence"
