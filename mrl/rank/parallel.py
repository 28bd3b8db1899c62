"""Joins this process to the run: torch.distributed, Megatron's process groups and generators, from the layout."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel import random as generators

from mrl.crash_points import crash_point, is_wanted_at
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model.layout import TrainLayout
from mrl.platforms import Platform
from mrl.platforms.collective_trail import keep_trail


def init_distributed(
    platform: Platform, rank: int, world_size: int, master_addr: str, master_port: int, timeout_s: float
) -> None:
    """Meets the other ranks. Every later collective fails after `timeout_s` instead of waiting forever.

    Raises EnvironmentFault when the ranks do not meet in that time, or the port is taken.
    """
    os.environ.update(platform.network_environment(master_addr))
    try:
        dist.init_process_group(
            platform.distributed_backend,
            init_method=f"tcp://{master_addr}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"actor rank {rank} of {world_size} could not meet the others at {master_addr}:{master_port} within "
            f"{timeout_s:.0f} s: {error}"
        ) from error


def count_collectives(rank: int) -> None:
    """Begins to count collectives, so that a rank that misses one can be named. A crash point may leave one out."""
    leaves_out = None
    if is_wanted_at("rank", rank, "collective"):
        leaves_out = partial(crash_point, "rank", rank, "collective")
    keep_trail(leaves_out)


def release_scratch() -> None:
    """Releases the buffer of the largest sequence that Megatron has gathered.

    Megatron keeps it for the next one, which would occupy memory that other users of the device need.
    """
    mpu.get_global_memory_buffer().buffer.clear()


def init_model_parallel(layout: TrainLayout, seed: int, timeout_s: float) -> None:
    """Makes Megatron's groups and random states.

    It must be called after `init_distributed`. Raises ConfigError if the world has another size.
    """
    if dist.get_world_size() != layout.world_size:
        raise ConfigError(
            f"actor.layout.world_size: the layout has {layout.world_size} ranks, {dist.get_world_size()} were started"
        )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
        create_gloo_process_groups=False,  # only Megatron's own optimizer checkpoints use them
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


class OtherGroups:
    """The groups and generators of a second model on the same ranks.

    Megatron has those of one model, as globals of two modules. The second model is built and computes within
    `in_place`. `init_model_parallel` is called there once, too.
    """

    def __init__(self) -> None:
        self._held = {name: {} if isinstance(value, dict) else None for name, value in _globals().items()}
        self._generators = dict.fromkeys(_GENERATORS)
        self._are_in_place = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes these groups Megatron's until the block ends, and then restores the others.

        Raises RuntimeError within such a block of its own: a second exchange would bring the others back.
        """
        if self._are_in_place:
            raise RuntimeError("these process groups are in place already; leave the inner in_place out")
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        self._are_in_place = not self._are_in_place
        before = _globals()
        vars(mpu).update(self._held)
        self._held = before
        tracked = {name: getattr(generators, name) for name in _GENERATORS}
        vars(generators).update(self._generators)
        self._generators = tracked


# the tracker of generators, and whether it exists
_GENERATORS = ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")


def _globals() -> dict[str, Any]:
    """Returns all of Megatron's globals about its groups and this rank's place in them."""
    return {name: value for name, value in vars(mpu).items() if name.startswith("_") and name.isupper()}


def close() -> None:
    """Leaves the run. It is safe to call twice."""
    if dist.is_initialized():
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def holds_everywhere(condition: bool, device: torch.device) -> bool:
    """Tells whether the condition holds on every rank. Collective."""
    flag = torch.tensor(int(condition), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def holds_result() -> bool:
    """Tells whether this rank returns results of the last pipeline stage.

    One rank of each data-parallel replica does.
    """
    first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    return first and on_last_stage()


def on_last_stage() -> bool:
    """Tells whether this rank computes log-probs and losses."""
    return mpu.is_pipeline_last_stage(ignore_virtual=True)
