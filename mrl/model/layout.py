"""Parallel layouts as pure integers: degrees, rank <-> coordinates, group membership, pipeline stage -> layers.

Ranks are ordered as Megatron-core 0.16.1 orders them by default ("tp-cp-ep-dp-pp": tensor fastest, pipeline slowest).
Dense parameters are on a grid (tp, cp, dp, pp). Experts are on a second grid over the same ranks (etp, ep, edp, pp).
Both share the pipeline axis. All other code gets ranks from a `TrainLayout` or a `RolloutLayout`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from mrl.errors import ConfigError
from mrl.model.layout_degrees import LayoutDegrees
from mrl.model.layout_rules import (
    ModelFacts,
    check_train_layout,
    chunk_layer_counts,
    is_legal_layout,
    padded_vocab_size,
)

__all__ = [
    "DenseCoords",
    "ExpertCoords",
    "LayoutDegrees",
    "ModelFacts",
    "RolloutLayout",
    "TrainLayout",
    "WorkerCoords",
    "check_train_layout",
    "is_legal_layout",
    "padded_vocab_size",
]


class DenseCoords(NamedTuple):
    """Coordinates of a rank among the ranks that share dense parameters."""

    tp: int
    cp: int
    dp: int
    pp: int


class ExpertCoords(NamedTuple):
    """Coordinates of a rank among the ranks that share experts."""

    etp: int
    ep: int
    edp: int
    pp: int


@dataclass(frozen=True)
class TrainLayout:
    """A legal layout of the actor.

    `TrainLayout.build` makes it, and refuses an illegal one with all violations at once.
    """

    tensor: int
    pipeline: int
    virtual_pipeline: int  # model chunks for each pipeline stage; 1: no interleaving
    context: int
    expert: int
    expert_tensor: int
    data: int
    expert_data: int
    sequence_parallel: bool
    chunk_layers: tuple[tuple[int, ...], ...]  # [pipeline][virtual_pipeline]: number of layers of each model chunk

    @classmethod
    def build(cls, degrees: Mapping[str, Any] | LayoutDegrees, model: ModelFacts) -> "TrainLayout":
        """Builds a layout. `degrees` may be a mapping with the keys of LayoutDegrees. Raises ConfigError with all
        violations.
        """
        d = LayoutDegrees.of(degrees)
        if violations := check_train_layout(d, model):
            none = "; allowed: none while the other keys stay as they are"
            raise ConfigError(
                "illegal parallel layout:\n" + "\n".join(f"  {v}{'' if v.allowed else none}" for v in violations)
            )
        return replace(cls.grids(d), chunk_layers=chunk_layer_counts(d, model.num_layers))

    @classmethod
    def grids(cls, degrees: Mapping[str, Any] | LayoutDegrees) -> "TrainLayout":
        """Makes the two grids of ranks without checks and layers, for uses without a model."""
        d = LayoutDegrees.of(degrees)
        return cls(
            tensor=d.tensor_model_parallel_size,
            pipeline=d.pipeline_model_parallel_size,
            virtual_pipeline=d.virtual_pipeline,
            context=d.context_parallel_size,
            expert=d.expert_model_parallel_size,
            expert_tensor=d.expert_tensor,
            data=d.data_parallel_size,
            expert_data=d.world_size // d.expert_ranks,
            sequence_parallel=d.uses_sequence_parallel,
            chunk_layers=(),
        )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return prod(self.dense_sizes)

    @property
    def dense_sizes(self) -> DenseCoords:
        """Sizes of the grid for all parameters except experts. The first axis changes fastest with the rank."""
        return DenseCoords(self.tensor, self.context, self.data, self.pipeline)

    @property
    def expert_sizes(self) -> ExpertCoords:
        """Sizes of the grid for experts, over the same ranks as `dense_sizes`."""
        return ExpertCoords(self.expert_tensor, self.expert, self.expert_data, self.pipeline)

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return sum(map(sum, self.chunk_layers))

    def dense_coords(self, rank: int) -> DenseCoords:
        """Returns the coordinates of `rank` for all parameters except experts, each from 0."""
        return DenseCoords(*_unravel(rank, self.dense_sizes))

    def expert_coords(self, rank: int) -> ExpertCoords:
        """Returns the coordinates of `rank` for experts, each from 0."""
        return ExpertCoords(*_unravel(rank, self.expert_sizes))

    def dense_group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Returns the ranks, ascending, that differ from `rank` only along `axes` ("tp", "cp", "dp", "pp").

        dense_group(r, "cp", "dp") is Megatron's data-parallel group with context parallelism.
        """
        return _group(DenseCoords._fields, self.dense_sizes, self.dense_coords(rank), axes)

    def expert_group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Returns the ranks, ascending, that differ from `rank` only along `axes` ("etp", "ep", "edp", "pp")."""
        return _group(ExpertCoords._fields, self.expert_sizes, self.expert_coords(rank), axes)

    def stage_layers(self, pp_rank: int, vp_rank: int = 0) -> range:
        """Returns the global layer numbers (from 0) of one chunk.

        Chunks are ordered by virtual chunk, then by stage.
        """
        ends = list(
            accumulate(self.chunk_layers[p][v] for v in range(self.virtual_pipeline) for p in range(self.pipeline))
        )
        end = ends[vp_rank * self.pipeline + pp_rank]
        return range(end - self.chunk_layers[pp_rank][vp_rank], end)

    def is_first_chunk(self, pp_rank: int, vp_rank: int = 0) -> bool:
        """Tells whether the chunk has the word embeddings."""
        return pp_rank == 0 and vp_rank == 0

    def is_last_chunk(self, pp_rank: int, vp_rank: int = 0) -> bool:
        """Tells whether the chunk has the final norm and the output layer."""
        return pp_rank == self.pipeline - 1 and vp_rank == self.virtual_pipeline - 1

    def pipeline_rows(self) -> list[list[str]]:
        """Returns the split as Megatron's `pipeline_model_parallel_layout`: one row for each chunk, in model order.

        It can express every uneven split.
        """
        rows = [
            ["decoder"] * self.chunk_layers[p][v] for v in range(self.virtual_pipeline) for p in range(self.pipeline)
        ]
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
        return rows


class WorkerCoords(NamedTuple):
    """Coordinates of a vLLM worker: engine, data-parallel rank within it, tensor rank within that."""

    engine: int
    dp: int
    tp: int


@dataclass(frozen=True)
class RolloutLayout:
    """Groups of vLLM workers, numbered by engine, then data-parallel rank, then tensor rank.

    vLLM's expert parallelism is a switch. With `expert` = tensor * data, whole experts are spread over all workers of
    an engine. With `expert` = 1, each expert is sliced over all of them.
    """

    num_engines: int = 1
    tensor: int = 1
    data: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.expert not in (1, self.workers_per_engine):
            raise ConfigError(
                f"rollout.expert_parallel_size = {self.expert}: vLLM spreads experts over all workers of an engine or "
                f"over none; allowed: 1, {self.workers_per_engine} (tensor x data)"
            )

    @property
    def workers_per_engine(self) -> int:
        """Number of workers of all data-parallel ranks of an engine."""
        return self.tensor * self.data

    @property
    def world_size(self) -> int:
        """Number of workers of all engines."""
        return self.num_engines * self.workers_per_engine

    def coords(self, worker: int) -> WorkerCoords:
        """Returns the coordinates of a worker, numbered over all engines.

        Tensor ranks change fastest, engines slowest.
        """
        tp, dp, engine = _unravel(worker, (self.tensor, self.data, self.num_engines))
        return WorkerCoords(engine, dp, tp)

    def expert_coords(self, worker: int) -> tuple[int, int]:
        """Returns (expert-parallel rank, tensor rank within an expert) of a worker."""
        flat = worker % self.workers_per_engine
        if self.expert > 1:
            return (flat, 0)
        return (0, flat)

    @property
    def expert_tensor(self) -> int:
        """Number of workers over which one expert is sliced."""
        return self.workers_per_engine // self.expert


@lru_cache(maxsize=1 << 16)
def _unravel(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the coordinates of `index`, first axis fastest. Raises IndexError outside the grid."""
    if not 0 <= index < prod(sizes):
        raise IndexError(f"rank {index} is outside a grid of {prod(sizes)}")
    coords = []
    for size in sizes:
        index, coord = divmod(index, size)
        coords.append(coord)
    return tuple(coords)


@lru_cache(maxsize=1 << 12)
def _group(
    names: tuple[str, ...], sizes: tuple[int, ...], coords: tuple[int, ...], axes: tuple[str, ...]
) -> tuple[int, ...]:
    if unknown := set(axes) - set(names):
        raise ValueError(f"no axis {sorted(unknown)}; axes are {names}")
    ranks = [0]
    stride = 1
    for name, size, coord in zip(names, sizes, coords, strict=True):
        choices = range(size) if name in axes else (coord,)
        ranks = [rank + stride * choice for choice in choices for rank in ranks]
        stride *= size
    return tuple(sorted(ranks))
