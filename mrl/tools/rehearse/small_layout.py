"""Shrinks a layout to at most four ranks and two engine workers (four where they share the ranks' devices).

Every degree above 1 stays above 1 where it fits. All small layouts are tried, and the best is taken. It keeps first the
degrees that change most code (see `_WORTH`). Then it has no degree that the original does not have. Then it has few
ranks. Degrees that do not fit are named.

An example, Qwen3-235B on 128 ranks: TP4 x PP8 x DP4 with EP16 becomes TP2 x PP2 with EP2 on 4 ranks. Data parallelism
is named as missing. Stages of 11, 12, ..., 12, 11 layers become stages of 1 and 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mrl.config.schema import RunConfig
from mrl.model.layout import RolloutLayout
from mrl.model.layout_degrees import LayoutDegrees
from mrl.tools.rehearse.notes import OutOfReach

RANKS = 4
WORKERS = {"separate": 2, "colocated": 4}
ENGINE_TENSOR = 2  # largest size with which vLLM's CPU build was seen to work
_SIZES = (1, 2, 4)
_ACTOR = "actor.layout"
_CRITIC = "critic.layout"
_ROLLOUT = "rollout"


@dataclass(frozen=True)
class Ranks:
    """Degrees of the actor by which a small layout is chosen."""

    world: int
    tensor: int
    pipeline: int
    expert: int
    context: int
    expert_tensor: int

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        return self.world // (self.expert * self.expert_tensor * self.pipeline)

    @property
    def is_whole(self) -> bool:
        """Whether both kinds of data parallelism are whole numbers."""
        dense = self.tensor * self.pipeline * self.context
        experts = self.expert * self.expert_tensor * self.pipeline
        return self.world % dense == 0 and self.world % experts == 0


# degree -> worth of keeping it above 1; each outweighs all that follow
_WORTH = {"tensor": 64, "pipeline": 32, "expert": 16, "context": 8, "expert_tensor": 4, "data": 2, "expert_data": 1}
_ENGINE_WORTH = {"tensor": 4, "data": 2, "num_engines": 1}
_KEYS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
    "context": "context_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "data": "data parallelism",
    "expert_data": "data parallelism of experts",
}
_ENGINE_KEYS = {"tensor": "tensor_model_parallel_size", "data": "data_parallel_size", "num_engines": "num_engines"}


@dataclass(frozen=True)
class SmallLayout:
    """Degrees of the rehearsal under the configuration's own keys, the layers that they need, and what does not fit."""

    actor: dict[str, Any]  # keys of actor.layout
    layers: int
    engines: RolloutLayout
    out_of_reach: tuple[OutOfReach, ...]
    critic: dict[str, Any] | None = None  # keys of critic.layout; None: it lies as the actor

    @property
    def ranks(self) -> int:
        return self.actor["world_size"]


def small_layout(config: RunConfig) -> SmallLayout:
    """Shrinks the layout of a legal configuration."""
    degrees = config.actor.layout
    own = config.critic.layout
    if own is None or not config.algorithm.needs_critic:
        original = _ranks_of(degrees)
        return _small(config, degrees, max(_candidates(original), key=lambda small: _merit(original, small)))
    small, other = _small_pair(degrees, own)
    found = _small(config, degrees, small)
    critic = _in_layers(own, other, found.layers)
    lost = (*found.out_of_reach, *_lost_degrees(own, other, _CRITIC))
    if own.virtual_pipeline > 1 and critic["virtual_pipeline_model_parallel_size"] is None:
        lost = (*lost, OutOfReach(f"{_CRITIC}.virtual_pipeline_model_parallel_size", "there are too few layers here"))
    return replace(found, critic=critic, out_of_reach=lost)


def _small(config: RunConfig, degrees: LayoutDegrees, small: Ranks) -> SmallLayout:
    engines = _small_engines(config, small.world)
    actor, layers = _with_stages(degrees, small)
    lost = [*_lost_degrees(degrees, small, _ACTOR), *_lost_engines(config, engines)]
    if degrees.virtual_pipeline > 1 and small.pipeline == 1:
        lost.append(OutOfReach(f"{_ACTOR}.virtual_pipeline_model_parallel_size", "there is one stage here"))
    return SmallLayout(actor, layers, engines, tuple(lost))


def _ranks_of(d: LayoutDegrees) -> Ranks:
    return Ranks(
        d.world_size,
        d.tensor_model_parallel_size,
        d.pipeline_model_parallel_size,
        d.expert_model_parallel_size,
        d.context_parallel_size,
        d.expert_tensor,
    )


def _merit(original: Ranks, small: Ranks) -> tuple[int, int, int, int]:
    kept = sum(worth for name, worth in _WORTH.items() if getattr(small, name) > 1 and getattr(original, name) > 1)
    added = sum(getattr(small, name) > 1 and getattr(original, name) == 1 for name in _WORTH)
    return kept, -added, -small.world, -small.expert * small.tensor * small.pipeline


def _small_pair(degrees: LayoutDegrees, critic: LayoutDegrees) -> tuple[Ranks, Ranks]:
    """The actor's and a critic's degrees on the same ranks; what is kept of the actor's counts first."""
    original = _ranks_of(degrees)
    own = _ranks_of(critic)

    def merit(pair: tuple[Ranks, Ranks]) -> tuple[Any, ...]:
        of_actor, *rest = _merit(original, pair[0])
        of_critic, *others = _merit(own, pair[1])
        return of_actor, of_critic, rest, others

    pairs = product(_candidates(original), _candidates(own))
    fitting = [
        (small, other)
        for small, other in pairs
        if small.world == other.world and other.pipeline <= _with_stages(degrees, small)[1]
    ]
    return max(fitting, key=merit)


def _in_layers(d: LayoutDegrees, small: Ranks, layers: int) -> dict[str, Any]:
    """Keys of critic.layout for so many layers, which are listed where they do not divide evenly."""
    keys, _ = _with_stages(d, small)
    even, _ = _stages(d, 1, 1)
    chunks = small.pipeline * (keys["virtual_pipeline_model_parallel_size"] or 1)
    if chunks > layers:
        chunks = small.pipeline
        keys["virtual_pipeline_model_parallel_size"] = None
    each, more = divmod(layers, chunks)
    listed = None
    if more:
        listed = tuple(each + (number < more) for number in range(chunks))
    return keys | even | {"pipeline_layers": listed}


def _candidates(original: Ranks) -> Iterator[Ranks]:
    """Yields small layouts that cut only in directions in which the original cuts, data parallelism excepted."""
    cuts = ("tensor", "pipeline", "expert", "context", "expert_tensor")
    choices = [_SIZES if getattr(original, name) > 1 else (1,) for name in cuts]
    for world in (size for size in _SIZES if size <= RANKS):
        for degrees in product(*choices):
            small = Ranks(world, *degrees)
            if small.is_whole:
                yield small


def _small_engines(config: RunConfig, world: int) -> RolloutLayout:
    rollout = config.rollout
    colocated = config.cluster.placement == "colocated"
    workers = WORKERS[config.cluster.placement]
    original = RolloutLayout(rollout.num_engines, rollout.tensor_model_parallel_size, rollout.data_parallel_size)
    if colocated and original.world_size <= config.actor.layout.world_size:
        workers = min(workers, world)  # as in the original, every engine shares devices with ranks

    def merit(small: RolloutLayout) -> tuple[int, int]:
        kept = sum(worth for name, worth in _ENGINE_WORTH.items() if getattr(small, name) > 1)
        return kept, small.world_size if colocated else -small.world_size

    best = max((e for e in _engine_candidates(original) if e.world_size <= workers), key=merit)
    spread = rollout.expert_parallel_size > 1
    return replace(best, expert=best.workers_per_engine if spread else 1)


def _engine_candidates(original: RolloutLayout) -> Iterator[RolloutLayout]:
    sizes = [[s for s in _SIZES if s == 1 or n > 1] for n in (original.num_engines, original.tensor, original.data)]
    yield from (RolloutLayout(e, t, d) for e, t, d in product(*sizes) if t <= ENGINE_TENSOR)


def _with_stages(d: LayoutDegrees, small: Ranks) -> tuple[dict[str, Any], int]:
    """Returns keys of actor.layout and the number of layers.

    A stage has two layers, a virtual stage one. Stages stay uneven where they were.
    """
    chunks = 1
    if d.virtual_pipeline > 1 and small.pipeline > 1:
        chunks = 2
    keys = {
        "world_size": small.world,
        "tensor_model_parallel_size": small.tensor,
        "pipeline_model_parallel_size": small.pipeline,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "context_parallel_size": small.context,
        "expert_model_parallel_size": small.expert,
        "expert_tensor_parallel_size": d.expert_tensor_parallel_size and small.expert_tensor,
        "sequence_parallel": d.sequence_parallel and small.tensor > 1,
    }
    uneven, layers = _stages(d, small.pipeline, chunks)
    return keys | uneven, layers


def _stages(d: LayoutDegrees, stages: int, chunks: int) -> tuple[dict[str, Any], int]:
    """Returns the keys of the pipeline split, shrunk, and the number of layers."""
    even = {
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "pipeline_layers": None,
    }
    each = 2
    if chunks > 1:
        each = 1
    if stages == 1:
        return even, each
    if d.pipeline_layers is not None:
        listed = [1] * (stages * chunks)
        listed[-1] += len(set(d.pipeline_layers)) > 1
        return even | {"pipeline_layers": tuple(listed)}, sum(listed)
    if d.end_stages:
        return _end_stages(d, even, stages, chunks)
    extras = {name: getattr(d, name) for name in even if name.startswith("account_for")}
    layers = stages * chunks * each
    if d.counted_extras:
        layers = stages * chunks * 2 - d.counted_extras
    return even | extras, layers


def _end_stages(d: LayoutDegrees, even: dict[str, Any], stages: int, chunks: int) -> tuple[dict[str, Any], int]:
    """Shrinks end stages. The first stage is shorter. Stages between the ends have two layers a chunk."""
    first = d.num_layers_in_first_pipeline_stage
    last = d.num_layers_in_last_pipeline_stage
    both = first is not None and last is not None
    ends = [chunks] * (1 + both)
    if both and stages == 2:
        ends[1] = 2 * chunks
    named = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    given = named
    if last is None:
        given = named[:1]
    elif first is None:
        given = named[1:]
    return even | dict(zip(given, ends, strict=True)), sum(ends) + 2 * chunks * (stages - len(ends))


def _lost_degrees(d: LayoutDegrees, small: Ranks, section: str) -> Iterator[OutOfReach]:
    original = _ranks_of(d)
    text = _in_words(small)
    for name, key in _KEYS.items():
        if getattr(original, name) > 1 and getattr(small, name) == 1:
            where = f"{section}.{key}"
            if " " in key:
                where = key if section == _ACTOR else f"{key}, {section}"
            yield OutOfReach(where, f"{getattr(original, name)} there, 1 here: {text} take all of {RANKS} ranks")


def _lost_engines(config: RunConfig, small: RolloutLayout) -> Iterator[OutOfReach]:
    rollout = config.rollout
    text = f"engines of TP{small.tensor}" + f" x DP{small.data}" * (small.data > 1)
    for name, key in _ENGINE_KEYS.items():
        was = getattr(rollout, key)
        if was > 1 and getattr(small, name) == 1:
            why = f"{was} there, 1 here: {text} take all of {small.world_size} engine workers"
            yield OutOfReach(f"{_ROLLOUT}.{key}", why)
    if rollout.expert_parallel_size > 1 and small.expert == 1:
        yield OutOfReach(f"{_ROLLOUT}.expert_parallel_size", "an engine has one worker here")


def _in_words(small: Ranks) -> str:
    named = (
        ("TP", small.tensor),
        ("PP", small.pipeline),
        ("CP", small.context),
        ("EP", small.expert),
        ("ETP", small.expert_tensor),
    )
    words = [f"{name}{size}" for name, size in (*named, ("DP", small.data)) if size > 1]
    return " x ".join(words) or "one rank"
