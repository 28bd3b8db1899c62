"""This rank's part of a checkpoint: weights, master weights, moments, step counts and random states, out of Megatron and back into it.

Megatron's own optimizer checkpoints bring Adam's step back wrong without Transformer Engine and are pickles; ours are safetensors files
whose manifest speaks Hugging Face coordinates, so one reader serves every layout (mrl.checkpoint.stored_tensors).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from mrl.checkpoint.manifest import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, Entry, Manifest, RankFiles, read_manifest
from mrl.checkpoint.safetensors_file import file_bytes, write_tensors
from mrl.checkpoint.stored_tensors import StoredTensors
from mrl.errors import ConfigError, EnvironmentFault
from mrl.megatron.adam_state import AdamState
from mrl.megatron.offload import OPTIMIZER, PARAMETERS, check_resident
from mrl.megatron.optimizer import current_lr, is_frozen
from mrl.megatron.rank_shards import RankShards, plain_name
from mrl.model.megatron_shards import Shard, local_shapes, source_shards

MOMENTS = {EXP_AVG: "exp_avg", EXP_AVG_SQ: "exp_avg_sq"}  # role -> name in torch's Adam


@dataclass(frozen=True)
class Held:
    """A parameter of this rank, what it is in Hugging Face coordinates, and the optimizer that has a part of it."""

    shard: Shard
    parameter: torch.nn.Parameter
    optimizer: DistributedOptimizer | None  # None: this data-parallel rank updates no part of it
    flat: tuple[int, int] | None  # that part of the flattened parameter
    adam: AdamState | None = None  # of that optimizer

    @property
    def key(self) -> str:
        """Name in the file."""
        return f"{self.shard.vp_chunk}.{self.shard.megatron_name}"

    @property
    def masters_itself(self) -> bool:
        """float32 weights are their own master weights: the optimizer's tensor is a view of them, or a copy with the same values."""
        return self.parameter.dtype is torch.float32

    def main(self) -> Tensor:
        """What the distributed optimizer has of this rank's part: its master weights, or a shard of the weights where Adam has those."""
        group, order = self.optimizer.model_param_group_index_map[self.parameter]
        return self.optimizer.optimizer.param_groups[group]["params"][order]


class HostCopy:
    """This rank's part of a checkpoint in host memory: copied there while training waits, written while it goes on.

    The buffers are made by the first copy and used again by every later one.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._entries: tuple[Entry, ...] = ()
        self._facts: dict[str, Any] = {}
        self._file = ""
        self._in_use = Lock()  # two saves at once would mix two steps in one file

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What was copied last, by its name in the file."""
        return self._buffers

    def take(self, actor) -> int:
        """Copies everything that this rank saves; returns the bytes that `write` will need. Raises EnvironmentFault during a `write`."""
        if not self._in_use.acquire(blocking=False):
            raise EnvironmentFault("the checkpoint before is still being written: the disk is slower than saves come")
        try:
            with actor.residence.using(PARAMETERS, OPTIMIZER):
                self._copy(actor)
        finally:
            self._in_use.release()
        return file_bytes(self._buffers)

    def _copy(self, actor) -> None:
        self._file = f"rank-{actor.rank:05d}.safetensors"
        entries: list[Entry] = []
        for held in held_parameters(actor):
            for role, tensor, flat in _stored(actor, held):
                entries.append(Entry(self._file, f"{role}/{held.key}", role, held.shard.local_shape, flat, held.shard.pieces))
                self._keep(entries[-1].key, tensor)
        for name, state in _random_states(actor).items():
            self._keep(f"rng/{name}", state)
        self._entries, self._facts = tuple(entries), _optimizer_facts(actor)

    def write(self, folder: Path) -> RankFiles:
        """Writes `rank-R.safetensors` into `folder`, durably. Raises EnvironmentFault when the disk does not take it."""
        with self._in_use:
            path = folder / self._file
            try:
                facts = write_tensors(path, self._buffers)
            except OSError as error:
                raise EnvironmentFault(f"{path} cannot be written ({error.strerror})") from error
            return RankFiles(self._entries, {self._file: facts}, self._facts)

    def _keep(self, key: str, tensor: Tensor) -> None:
        check_resident(key, [tensor])
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        buffer.copy_(tensor.detach())


def save_rank(actor, folder: Path) -> RankFiles:
    """Writes `rank-R.safetensors` into `folder`, durably. Every element of the model is written by one rank only."""
    copy = HostCopy()
    copy.take(actor)
    return copy.write(folder)


def load_rank(actor, folder: Path) -> None:
    """Puts a checkpoint into a freshly built actor of the same or another layout. Raises EnvironmentFault when it does not fit.

    Random states come back only at the layout that wrote them. A checkpoint converted from weights alone is a fresh start from them.
    """
    manifest = read_manifest(folder)
    _check_model(actor, manifest, folder)
    stored = StoredTensors(folder, manifest)
    facts = manifest.optimizer
    with torch.no_grad(), actor.residence.using(PARAMETERS, OPTIMIZER):
        for held in held_parameters(actor):
            stored.fill(WEIGHT, held.shard.pieces, held.parameter.data)
            if held.optimizer is not None:
                _load_optimizer_part(stored, held, facts["step"], not manifest.weights_only)
    if not manifest.weights_only:
        _restore_schedule(actor, facts, folder)
    actor.num_updates = facts["num_updates"]
    if not manifest.converted and manifest.layout == actor.config.actor.layout.model_dump():
        _restore_random_states(actor, stored)


def held_parameters(actor) -> Iterator[Held]:
    """Every parameter of this rank, in a fixed order. Raises RuntimeError when the model has others than its description.

    They and their optimizer states have to be on the device for as long as they are read or written.
    """
    actor.residence.require(PARAMETERS, OPTIMIZER)
    states = {id(o): AdamState(o.optimizer) for o in _optimizers(actor)}
    described = {(s.vp_chunk, s.megatron_name): s for s in source_shards(actor.model, actor.layout, actor.rank)}
    RankShards(actor.chunks).check(local_shapes(described.values()))
    for number, chunk in enumerate(actor.chunks):
        for name, parameter in chunk.named_parameters():
            optimizer = next((o for o in _optimizers(actor) if parameter in o.model_param_group_index_map), None)
            part = optimizer._get_model_param_range_map(parameter)["param"] if optimizer else None
            states_of = states[id(optimizer)] if optimizer else None
            yield Held(described[number, plain_name(name)], parameter, optimizer, (part.start, part.end) if part else None, states_of)


def _optimizers(actor) -> list[DistributedOptimizer]:
    parts = [p for p in actor.optimizer.chained_optimizers if not getattr(p, "is_stub_optimizer", False)]
    if not all(isinstance(p, DistributedOptimizer) for p in parts):
        raise ConfigError("actor.override_ddp_config.use_distributed_optimizer: checkpoints need the distributed optimizer; leave it on")
    return parts


def _stored(actor, held: Held) -> Iterator[tuple[str, Tensor, tuple[int, int] | None]]:
    """(role, tensor, flat range) of what this rank writes of a parameter: nothing of what another rank writes as well."""
    if held.shard.primary == actor.rank:
        yield WEIGHT, held.parameter, None
    if held.optimizer is None or not _writes_optimizer_part(actor, held.shard):
        return
    main = held.main()
    master, moments = held.adam.master(main), held.adam.moments(main)
    if not held.masters_itself:
        yield MASTER, master, held.flat
    for role, name in MOMENTS.items():
        # before the first update there are no moments; they are zero
        yield role, moments[name] if name in moments else torch.zeros_like(master), held.flat


def _writes_optimizer_part(actor, shard: Shard) -> bool:
    """Replicas over data parallelism each have a part of their own; those over tensor or pipeline parallelism have the same parts again."""
    layout = actor.layout
    peers = layout.expert_group(actor.rank, "edp") if shard.is_expert else layout.dense_group(actor.rank, "cp", "dp")
    return shard.primary in peers


def _load_optimizer_part(stored: StoredTensors, held: Held, step: float | None, has_masters: bool) -> None:
    """Without master weights in the checkpoint, and where weights are their own, they come from the weights, which are in place.

    A frozen parameter starts with zero moments: Adam would follow those of the updates before for many steps, with no gradient at all.
    """
    main = held.main()
    master = held.adam.master(main)
    whole = torch.zeros(held.shard.local_shape, dtype=torch.float32)

    def part(role: str) -> Tensor:
        stored.fill(role, held.shard.pieces, whole)
        return whole.reshape(-1)[slice(*held.flat)].reshape(master.shape)

    weights = held.parameter.detach().reshape(-1)[slice(*held.flat)]
    values = part(MASTER) if has_masters and not held.masters_itself else weights.reshape(master.shape)
    for tensor in (main, master):  # they may be one
        tensor.copy_(values)
    if step is not None:
        frozen = is_frozen(held.parameter)
        moments = {name: torch.zeros_like(master) if frozen else part(role).clone() for role, name in MOMENTS.items()}
        held.adam.set_moments(main, step, moments)


def _optimizer_facts(actor) -> dict[str, Any]:
    steps = {step for o in _optimizers(actor) for step in AdamState(o.optimizer).steps()}
    if len(steps) > 1:
        raise RuntimeError(f"parameters disagree on Adam's step: {sorted(steps)}")
    return {
        "step": steps.pop() if steps else None,
        "num_updates": actor.num_updates,
        "lr": current_lr(actor.optimizer),
        "scheduler": actor.scheduler.state_dict(),
    }


def _restore_schedule(actor, facts: dict[str, Any], folder: Path) -> None:
    """The rate follows from the step count; when the schedule is the saved one it must be the saved rate."""
    now, then = actor.scheduler.state_dict(), dict(facts["scheduler"])
    actor.scheduler.num_steps = then["num_steps"]
    actor.scheduler.step(0)
    same = all(now[k] == then[k] for k in now if k != "num_steps")
    if same and current_lr(actor.optimizer) != facts["lr"]:
        raise EnvironmentFault(f"{folder}: the learning rate comes back as {current_lr(actor.optimizer)}, not as {facts['lr']}")


def _check_model(actor, manifest: Manifest, folder: Path) -> None:
    from mrl.model import model_spec

    if model_spec(manifest.hf_config) != actor.model:
        raise EnvironmentFault(f"{folder}: a checkpoint of another model than model.path {actor.config.model.path}")
    if manifest.dtype != actor.config.model.dtype:
        raise EnvironmentFault(
            f"{folder}: weights are {manifest.dtype}, model.dtype is {actor.config.model.dtype}; set model.dtype to match"
        )


def _random_states(actor) -> dict[str, Tensor]:
    tracked = {f"tracker/{name}": _bytes(state) for name, state in get_cuda_rng_tracker().get_states().items()}
    return {"device": actor.platform.rng_state(), "cpu": torch.get_rng_state()} | tracked


def _bytes(state: Any) -> Tensor:
    return (state.get_state() if isinstance(state, torch.Generator) else state).clone()


def _restore_random_states(actor, stored: StoredTensors) -> None:
    file = f"rank-{actor.rank:05d}.safetensors"
    torch.set_rng_state(stored.tensor(file, "rng/cpu"))
    actor.platform.set_rng_state(stored.tensor(file, "rng/device"))
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name: _as_state(old, stored.tensor(file, f"rng/tracker/{name}")) for name, old in tracker.get_states().items()})


def _as_state(old: Any, saved: Tensor) -> Any:
    if isinstance(old, torch.Generator):
        old.set_state(saved)
        return old
    return saved
