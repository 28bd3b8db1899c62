"""Host memory of a run: of each process, and of the fullest node.

A rank keeps host memory for everything that ever leaves its device, from its first move on. It also keeps the state of
an Adam that computes on the host, and an offloaded reference model. From the first save on it keeps the copy that
checkpoints are written from. An engine that sleeps at level 2 keeps no weights; at level 1 it keeps them all.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mrl.config.schema import RunConfig
from mrl.config.schema_rollout import TurnsConfig
from mrl.model.device_grid import DeviceId
from mrl.model.precision import Precision
from mrl.plan.engine_memory import EngineMemory
from mrl.plan.memory_phases import TERMS, ActorBytes
from mrl.plan.model_state import BufferNumel, adapter_numel, critic_numel, stage_numel
from mrl.plan.plan_inputs import BatchPlan, PlanInputs, precision_of, sync_budget
from mrl.plan.sample_bytes import (
    fetched_share,
    held_bytes,
    read_by_start,
    score_bytes,
    stored_beside_validation,
    stored_bytes,
    validation_bytes,
    written_group_bytes,
)
from mrl.platforms.hosting import get_hosting
from mrl.reshard.setup import pair_route
from mrl.units import GIB

_TOOL_PROCESS = 20 * 2**20  # one with its keeper, measured: 17 MB, of what they share each its part
_MCP_CLIENT = 50 * 2**20  # what the client of MCP servers adds to one, measured
_MCP_SERVER = 75 * 2**20  # a server of the reference ones in Python, measured


def host_section(
    inputs: PlanInputs,
    batch: BatchPlan,
    engine: EngineMemory,
    actors: Sequence[ActorBytes],
    ranks: Sequence[DeviceId],
    workers: Sequence[DeviceId],
) -> dict[str, Any]:
    """Returns the bytes of the fullest node by term, and of the process of each kind that has most.

    `actors`: bytes by pipeline stage.
    """
    rank_bytes = [held_bytes(inputs, batch, pp) for pp in range(inputs.train.pipeline)]
    stages = [inputs.train.dense_coords(rank).pp for rank in range(len(ranks))]
    of_ranks = [
        actors[pp].host | {"save": saved, "samples": rank_bytes[pp]}
        for pp, saved in zip(stages, save_bytes(inputs), strict=True)
    ]
    of_workers = [_worker_terms(inputs, engine, device, ranks) for device in workers]
    nodes: dict[int, Counter[str]] = {}
    for device, terms in zip((*ranks, *workers), (*of_ranks, *of_workers), strict=True):
        nodes.setdefault(device.node, Counter()).update(terms)
    stores = object_stores(inputs, batch, ranks, workers)
    for node, stored in stores.items():
        nodes[node]["object_store"] = stored
    nodes[min(nodes)]["kept_group"] = written_group_bytes(inputs)
    # the place of each engine rank's first worker: every rank has conversations of its own
    for device in workers[:: inputs.rollout.tensor]:
        nodes[device.node]["tools"] += tool_bytes(inputs.config)
    terms = dict(max(nodes.values(), key=lambda node: node.total()))
    terms = {name: size for name, size in terms.items() if size}
    used = sum(terms.values())
    limit = inputs.device.host_memory
    largest = max(terms, key=lambda name: terms[name])
    return {
        "terms": terms,
        "bytes_per_node": used,
        "node_bytes": limit,
        "fits": used <= limit,
        "change": "" if used <= limit else TERMS[largest].host_cure,
        "object_store_bytes": max(stores.values()),  # least size of a node's object store
        "held_out_prompts": inputs.validation_prompts,  # their answers are counted in it
        "bytes_of_a_rank": max(sum(rank.values()) for rank in of_ranks),
        "bytes_of_a_worker": max(sum(worker.values()) for worker in of_workers),
    }


def tool_bytes(config: RunConfig) -> int:
    """Bytes of the processes that one engine rank has for tools, environments or agents; 0 for responses of one turn.

    Each takes what rollout.turns.max_memory_gib allows. Without that limit only what is there before a user's file is
    counted, and what the file imports is not.
    """
    turns = config.rollout.turns
    if turns is None:
        return 0
    each = _TOOL_PROCESS
    if turns.max_memory_gib is not None:
        each = int(turns.max_memory_gib * GIB)
    kinds = 1 + bool(turns.environments)
    program = 0
    if turns.runs_programs:
        program = int(turns.python.max_memory_gib * GIB)
    return turns.num_workers * (kinds * each + program + _server_bytes(turns, each))


def _server_bytes(turns: TurnsConfig, each: int) -> int:
    """Bytes of the client of MCP servers in one process of tools, and of the servers below it."""
    if not turns.mcp_servers:
        return 0
    servers = sum(not entry.get("url") for entry in turns.mcp_servers.values())
    if turns.max_memory_gib is not None:  # it holds for each of them
        return servers * each
    return _MCP_CLIENT + servers * _MCP_SERVER


def object_stores(
    inputs: PlanInputs, batch: BatchPlan, ranks: Sequence[DeviceId], workers: Sequence[DeviceId]
) -> dict[int, int]:
    """Returns the object-store bytes of each node: what its engines generated, and what its ranks fetch.

    All fetched data is counted as coming from other nodes. A start reads groups of a checkpoint and of the spool on the
    driver's node. They stay there until they are trained on. Answers to validation prompts stay where they were
    generated. The step before is still there when they come.
    """
    whole = stored_bytes(inputs)
    read = read_by_start(inputs, batch)
    beside = stored_beside_validation(inputs, batch)
    scores = score_bytes(inputs, batch)
    answers = validation_bytes(inputs.config, inputs.validation_prompts)
    stores = {}
    nodes = sorted({device.node for device in (*ranks, *workers)})
    for node in nodes:
        generated = sum(device.node == node for device in workers) / len(workers)
        fetched = fetched_share(inputs, [rank for rank, device in enumerate(ranks) if device.node == node])
        share = min(1.0, generated + fetched)
        here = read * (node == nodes[0])
        stores[node] = math.ceil(max(_part(whole, here, share), _part(beside, here, share) + answers * generated))
        stores[node] += scores
    return stores


def _part(held: int, here: int, share: float) -> float:
    """Returns the bytes of a node: `here` of the `held` bytes, and `share` of the others."""
    here = min(here, held)
    return here + (held - here) * share


def save_bytes(inputs: PlanInputs) -> list[int]:
    """Returns the bytes that each rank saves and copies to the host: weights that only it writes, and its shard of
    Adam's state.

    The first data-parallel copy writes the weights (mrl/rank/rank_save.py). The few that all tensor ranks hold
    count on each of them.
    """
    saved = _saved_of_ranks(inputs, [_stored_numel(inputs, pp) for pp in range(inputs.train.pipeline)])
    own = inputs.critic
    if own is None:
        return saved
    of_critic = _saved_of_ranks(own, [critic_numel(own.model, own.train, pp) for pp in range(own.train.pipeline)])
    return [sum(both) for both in zip(saved, of_critic, strict=True)]


def _saved_of_ranks(inputs: PlanInputs, stages: Sequence[BufferNumel]) -> list[int]:
    """Returns the bytes that each rank saves of a model of which a rank of stage `pp` has `stages[pp]` elements."""
    train = inputs.train
    precision = precision_of(inputs.config, inputs.element_bytes)
    saved = []
    for rank in range(train.world_size):
        dense = train.dense_coords(rank)
        expert = train.expert_coords(rank)
        numel = stages[dense.pp]
        saved.append(
            _saved(numel.dense, precision, train.data * train.context, dense.dp == dense.cp == 0)
            + _saved(numel.expert, precision, train.expert_data, expert.edp == 0)
        )
    return saved


def _stored_numel(inputs: PlanInputs, pp: int) -> BufferNumel:
    """Returns the elements of a rank that a checkpoint has."""
    if inputs.lora is not None:
        return adapter_numel(inputs.model, inputs.train, pp, inputs.lora)
    return stage_numel(inputs.model, inputs.train, pp)


def resume_seconds(inputs: PlanInputs) -> float:
    """Predicts the seconds until ranks continue from a checkpoint, limited by hashing.

    Each rank verifies the bytes of a file of its size, all at once (mrl/rank/rank_load.py). Slower storage takes
    longer.
    """
    return max(save_bytes(inputs)) / inputs.assumptions.hash_rate


def _saved(numel: int, precision: Precision, shards: int, is_first: bool) -> int:
    return numel * precision.parameters * is_first + -(-numel // shards) * (precision.master + precision.moments)


def _worker_terms(
    inputs: PlanInputs, engine: EngineMemory, device: DeviceId, ranks: Sequence[DeviceId]
) -> dict[str, int]:
    asleep = 0
    if inputs.colocated and inputs.assumptions.sleep_level == 1:
        asleep = engine.weights
    staged = 0
    if _receives_through_host(inputs, device, ranks):
        staged = 2 * sync_budget(inputs.config)
    if inputs.colocated and inputs.device.platform != "cpu" and inputs.model.trained_tower is None:
        asleep += engine.tower  # which no sync would bring back
    return {"engine_weights": asleep, "staging": staged}


def _receives_through_host(inputs: PlanInputs, device: DeviceId, ranks: Sequence[DeviceId]) -> bool:
    """Returns whether a rank of the worker's node sends to it through shared memory."""
    reach = get_hosting(inputs.device.platform).memory_reach
    kind = inputs.config.reshard.transport
    fast = inputs.config.reshard.path == "fast"
    return fast and any(pair_route(kind, rank, device, reach) == "shm" for rank in ranks if rank.node == device.node)
