"""Saves this rank's part of a checkpoint: weights, master weights, moments, step counts and random states.

Megatron's own optimizer checkpoints are pickles, and restore a wrong Adam step without Transformer Engine. Those of mrl
are safetensors files whose manifest uses Hugging Face coordinates, so one reader serves every layout.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from mrl.checkpoint.manifest import ACTOR, MASTER, RankFiles, StoredTensor, described
from mrl.checkpoint.open_checkpoint import weight_role
from mrl.checkpoint.safetensors_file import safetensors_header, write_blocks
from mrl.config.schema_actor import OPTIMIZER, PARAMETERS
from mrl.errors import EnvironmentFault
from mrl.model.megatron_shards import Shard
from mrl.rank.adam_state import AdamState
from mrl.rank.offload import check_resident
from mrl.rank.optimizer import current_lr
from mrl.rank.rank_parameters import MOMENTS, RankParameter, distributed_optimizers, rank_parameters
from mrl.units import MIB

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_WRITE_BYTES = 16 * MIB  # of one write; other threads run during each


class HostCopy:
    """This rank's part of a checkpoint in host memory. It is copied while training waits, and written while training
    runs.

    The first copy makes the buffers, and all later ones reuse them.
    """

    def __init__(self, kind: str = ACTOR) -> None:
        """`kind`: ACTOR, or CRITIC for what is beside it.

        Random states are saved with the actor alone: a critic has no dropout, so nothing in it draws numbers.
        """
        self._kind = kind
        self._buffers: dict[str, Tensor] = {}
        self._entries: tuple[StoredTensor, ...] = ()
        self._facts: dict[str, Any] = {}
        self._rank = 0
        self._in_use = Lock()  # two saves at once would mix two steps in one file

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The last copy, by name in the file."""
        return self._buffers

    def take(self, actor) -> int:
        """Copies everything that this rank saves. Returns the bytes that `write` will need.

        Raises EnvironmentFault during a `write`.
        """
        if not self._in_use.acquire(blocking=False):
            raise EnvironmentFault(
                "the previous checkpoint is still being written: the disk is too slow for this save interval"
            )
        try:
            with actor.residence.using(PARAMETERS, OPTIMIZER):
                self._copy(actor)
        finally:
            self._in_use.release()
        return file_bytes(self._buffers)

    def _copy(self, actor) -> None:
        self._rank = actor.rank
        file = rank_file(self._rank, self._kind)
        entries: list[StoredTensor] = []
        for parameter in rank_parameters(actor):
            shard = parameter.shard
            for role, tensor, flat in _saved_tensors(actor, parameter):
                entries.append(
                    StoredTensor(file, f"{role}/{parameter.key}", role, shard.local_shape, flat, shard.pieces)
                )
                self._keep(entries[-1].key, tensor)
        if self._kind == ACTOR:
            for name, state in _random_states(actor).items():
                self._keep(f"rng/{name}", state)
        self._entries = tuple(entries)
        self._facts = _optimizer_facts(actor)

    def write(self, folder: Path) -> RankFiles:
        """Writes `rank-R.safetensors`, or `critic-R.safetensors`, and its description into `folder`, durably.

        Raises EnvironmentFault if the disk refuses.
        """
        with self._in_use:
            path = folder / rank_file(self._rank, self._kind)
            try:
                facts = write_tensors(path, self._buffers)
                part = RankFiles(self._entries, {path.name: facts}, self._facts)
                return described(folder, self._rank, part, self._kind)
            except OSError as error:
                raise EnvironmentFault(f"{path} cannot be written ({error.strerror})") from error

    def facts(self) -> dict[str, Any]:
        """Returns what a manifest says of the file that `write` would make, by its name: size and SHA-256."""
        sha256 = hashlib.sha256()
        size = 0
        for block in _blocks(self._buffers):
            sha256.update(block)
            size += len(block)
        return {rank_file(self._rank, self._kind): {"bytes": size, "sha256": sha256.hexdigest()}}

    def _keep(self, key: str, tensor: Tensor) -> None:
        check_resident(key, [tensor])
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        buffer.copy_(tensor.detach())


def rank_file(rank: int, kind: str = ACTOR) -> str:
    """Returns the name of the file that a rank writes for the actor or a critic."""
    return f"{kind}-{rank:05d}.safetensors"


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Returns the size of the file that `write_tensors` makes of `tensors`."""
    return len(_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes contiguous host tensors durably. Returns size and SHA-256 in a manifest's form.

    Raises OSError, and KeyError for a dtype that the format does not have here.
    """
    return write_blocks(path, _blocks(tensors), digest=True, durable=True)


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield _header(tensors)
    for name in _order(tensors):
        data = memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy())
        yield from (data[start : start + _WRITE_BYTES] for start in range(0, len(data), _WRITE_BYTES))


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    described = ((name, tensors[name]) for name in _order(tensors))
    return safetensors_header(
        (name, CODES[tensor.dtype], tuple(tensor.shape), tensor.nbytes) for name, tensor in described
    )


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names with wide elements first, so that every tensor is aligned to its own width."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _random_states(actor) -> dict[str, Tensor]:
    tracked = {f"tracker/{name}": _state_bytes(state) for name, state in get_cuda_rng_tracker().get_states().items()}
    return {"device": actor.platform.rng_state(), "cpu": torch.get_rng_state()} | tracked


def _state_bytes(state: Any) -> Tensor:
    return (state.get_state() if isinstance(state, torch.Generator) else state).clone()


def _saved_tensors(actor, parameter: RankParameter) -> Iterator[tuple[str, Tensor, tuple[int, int] | None]]:
    """Yields (role, tensor, flat range) of what this rank writes of a parameter, and no other rank."""
    if parameter.shard.primary == actor.rank:
        yield weight_role(parameter.shard), parameter.parameter, None
    if parameter.optimizer is None or not _writes_optimizer_part(actor, parameter.shard):
        return
    main = parameter.main()
    master = parameter.adam.master(main)
    moments = parameter.adam.moments(main)
    if not parameter.is_own_master:
        yield MASTER, master, parameter.flat
    for role, name in MOMENTS.items():
        # before the first update there are no moments: they are zero
        yield role, moments[name] if name in moments else torch.zeros_like(master), parameter.flat


def _writes_optimizer_part(actor, shard: Shard) -> bool:
    """Tells whether this rank writes its part. Data-parallel replicas have different parts, tensor- and
    pipeline-parallel ones have the same.
    """
    layout = actor.layout
    peers = layout.expert_group(actor.rank, "edp") if shard.is_expert else layout.dense_group(actor.rank, "cp", "dp")
    return shard.primary in peers


def _optimizer_facts(actor) -> dict[str, Any]:
    steps = {step for optimizer in distributed_optimizers(actor) for step in AdamState(optimizer.optimizer).steps()}
    if len(steps) > 1:
        raise RuntimeError(f"parameters disagree on Adam's step: {sorted(steps)}")
    return {
        "step": steps.pop() if steps else None,
        "num_updates": actor.num_updates,
        "skipped_in_a_row": actor.skipped_in_a_row,
        "lr": current_lr(actor.optimizer),
        "scheduler": actor.scheduler.state_dict(),
    }
