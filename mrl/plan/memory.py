"""The memory of a plan: every phase on its fullest device, the KV cache, the host."""

from itertools import groupby
from typing import Any

from mrl.config.places import rank_places
from mrl.model.device_grid import Place
from mrl.plan.engine_memory import EngineMemory, cache_bytes_per_token
from mrl.plan.inputs import PlanInputs, activations_of, actor_bytes, batch_plan, engine_bytes, engine_of, recompute_of
from mrl.plan.phases import HOST_CURE, PACKED_CURES, ActorBytes, Phase, actor_phases, colocated_phases, engine_phases

_CACHE_CURE = "the cache holds not one sequence: raise rollout.tensor_model_parallel_size or gpu_memory_utilization"


def memory_section(inputs: PlanInputs) -> dict[str, Any]:
    """Bytes on the fullest device of every phase, with what they consist of, the KV cache, and the host memory of the fullest node."""
    batch, engine = batch_plan(inputs.config, inputs.train), engine_of(inputs)
    ranks, _ = rank_places(inputs.config)
    actors = [actor_bytes(inputs, batch, pp) for pp in range(inputs.train.pipeline)]
    worker, cache, host = engine_bytes(inputs, engine), _cache(inputs, engine), _host(inputs, actors, ranks)
    per_stage = [colocated_phases(a, worker, inputs.device) if inputs.colocated else actor_phases(a, inputs.device) for a in actors]
    fullest = {phase.name: _fullest(inputs, per_stage, number) for number, phase in enumerate(per_stage[0])}
    if not inputs.colocated:
        fullest |= {phase.name: {"stage": None, **phase.to_json()} for phase in engine_phases(worker, inputs.device)}
    return {
        "phases": fullest,
        "fits": all(phase["fits"] for phase in fullest.values()) and cache["longest_sequences_per_engine"] > 0 and host["fits"],
        "recompute": str(recompute_of(inputs.config)),
        "activation_terms_of_a_layer": activations_of(inputs, batch.micro).layer(inputs.model.is_moe),
        "kv_cache": cache,
        "host": host,
    }


def _fullest(inputs: PlanInputs, per_stage: list[list[Phase]], number: int) -> dict[str, Any]:
    """The stage with the most bytes in one phase."""
    stage = max(range(len(per_stage)), key=lambda pp: per_stage[pp][number].total)
    phase = per_stage[stage][number]
    packed = PACKED_CURES if inputs.config.actor.use_dynamic_bsz and not phase.fits else {}
    return {"stage": stage, **phase.to_json(), "change": packed.get(phase.largest, phase.cure)}


def _cache(inputs: PlanInputs, engine: EngineMemory) -> dict[str, Any]:
    length = inputs.config.data.max_prompt_length + inputs.config.data.max_response_length
    return {
        "bytes_per_worker": engine.cache,
        "bytes_per_token": cache_bytes_per_token(inputs.model, inputs.rollout.tensor, inputs.engine_element_bytes),
        "tokens_per_engine": engine.cache_tokens,
        "longest_sequences_per_engine": engine.cache_tokens // length,
        "change": "" if engine.cache_tokens >= length else _CACHE_CURE,
    }


def _host(inputs: PlanInputs, actors: list[ActorBytes], ranks: tuple[Place, ...]) -> dict[str, Any]:
    """Host memory of the fullest node, for what is offloaded."""
    stages = [inputs.train.dense_coords(rank).pp for rank in range(len(ranks))]
    nodes = groupby(sorted((place.node, stages[rank]) for rank, place in enumerate(ranks)), key=lambda at: at[0])
    used = max(sum(actors[pp].host for _, pp in on_node) for _, on_node in nodes)
    fits = used <= inputs.device.host_memory
    return {"bytes_per_node": used, "node_bytes": inputs.device.host_memory, "fits": fits, "change": "" if fits else HOST_CURE}
