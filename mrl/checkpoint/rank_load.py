"""Loads a checkpoint of ours into the ranks of any layout.

    bytes                  read by
    digests of files       one rank a file
    weights                one of the ranks that have the same part, which hands it on to the others
    masters, moments       the rank whose part of the distributed optimizer they are

So what storage gives is given once for digests and once for values, whatever the layouts. Read by more ranks is what
each of several tensor-parallel ranks has whole (norms, routers), and rows that a stored tensor has whole of which ranks
want columns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from mrl.checkpoint.manifest import ACTOR, CRITIC, MASTER, Manifest, check_files, read_manifest, share_of_files
from mrl.checkpoint.open_checkpoint import SafetensorsFiles, weight_role
from mrl.checkpoint.rank_parameters import MOMENTS, RankParameter, rank_parameters
from mrl.checkpoint.rank_save import CODES, rank_file
from mrl.checkpoint.stored_boxes import BoxReader, Descriptions
from mrl.config.schema_actor import OPTIMIZER, PARAMETERS
from mrl.errors import EnvironmentFault
from mrl.megatron.optimizer import current_lr, is_frozen
from mrl.model import model_spec
from mrl.model.megatron_shards import Piece

THREADS = 4  # of a rank that hashes its files; several ranks share a host
DTYPES = {code: dtype for dtype, code in CODES.items()}
# carry the bits of an element of so many bytes
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorLoader:
    """Reads the tensors of one checkpoint, and the descriptions of those ranks that wrote what is asked for.

    Raises EnvironmentFault where something that is asked for is not stored, or not in as many bytes as described. So it
    does where the descriptions that are read have an element twice. A conversion alone reads all descriptions, and
    compares them with the model and with each file. So it alone sees a fault in what no rank asks for: an element twice
    in a description that nobody reads, a tensor that the model does not have, a dtype that is not its role's. A
    manifest of format 1 has all descriptions: there parts that overlap, or do not add up, are found here too.
    """

    def __init__(self, folder: Path, manifest: Manifest, check_first: bool = True, rank: int = 0):
        """`check_first`: files are compared with their digests when they are first opened. `rank`: who reads."""
        files = SafetensorsFiles(folder, manifest.files(), check_first, when_needed=True)
        known = [entry for part in manifest.ranks for entry in part.entries or ()]  # of a manifest of format 1
        self._reader = BoxReader(folder, known, files, Descriptions(folder, manifest.ranks, rank))
        self._reader.boxes.check_whole(folder)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return self._reader.bytes_read

    def fill(self, role: str, pieces: Iterable[Piece], out: Tensor) -> None:
        """Writes the elements that `pieces` name into `out`, a tensor in their local frame; others stay.

        Raises EnvironmentFault when the checkpoint does not hold all of them.
        """
        for piece in pieces:
            for stored, common in self._reader.overlaps(role, piece.hf_name, piece.hf_box):
                values = torch.empty(common.shape, dtype=DTYPES[self._reader.dtype(stored)])
                self._reader.read(stored, common, _words(values))
                out[common.rebase(piece.hf_box, piece.local_box).slices] = values

    def random_state(self, rank: int, name: str) -> Tensor:
        """The bytes of a generator's state."""
        return torch.from_numpy(self._reader.tensor_bytes(rank_file(rank), f"rng/{name}"))

    def close(self) -> None:
        """Closes the files."""
        self._reader.close()


def _words(values: Tensor) -> np.ndarray:
    """Views the values' memory as integers."""
    return values.view(_WORDS[values.element_size()]).numpy()


@dataclass(frozen=True)
class BytesRead:
    """Bytes that one rank read from storage."""

    checked: int
    loaded: int


def load_rank(actor, folder: Path, kind: str = ACTOR) -> BytesRead:
    """Puts a checkpoint into a freshly built actor of the same or another layout; all ranks at once.

    `kind`: CRITIC where `actor` is one that stands beside the actor, and is loaded after it.

    Random states come back only at the layout that wrote them. A checkpoint converted from weights alone is a fresh
    start from them. Raises EnvironmentFault for one that is damaged or of another model: on the rank that finds it,
    while others may wait.
    """
    whole = read_manifest(folder)
    manifest = replace(whole, critic=())
    if kind == CRITIC:
        manifest = whole.of_critic
    if not manifest.ranks:
        raise EnvironmentFault(f"{folder}: a checkpoint without a critic, and algorithm.adv_estimator needs one")
    _check_model(actor, manifest, folder)
    checked = share_of_files(manifest.files_of_ranks(), actor.rank, actor.layout.world_size)
    check_files(folder, checked, THREADS)
    dist.barrier()  # nobody reads, and stumbles over, what another has not compared yet
    loader = TensorLoader(folder, manifest, check_first=False, rank=actor.rank)
    facts = manifest.optimizer
    with torch.no_grad(), actor.residence.using(PARAMETERS, OPTIMIZER):
        parameters = list(rank_parameters(actor))
        _load_weights(loader, parameters)
        for parameter in parameters:
            if parameter.optimizer is not None:
                _load_optimizer_part(loader, parameter, facts["step"], not manifest.weights_only)
    if not manifest.weights_only:
        _restore_schedule(actor, facts, folder)
    _restore_counts(actor, facts)
    if kind == ACTOR and not manifest.converted and manifest.layout == actor.config.actor.layout.model_dump():
        _restore_random_states(actor, loader)
    loader.close()
    return BytesRead(sum(facts["bytes"] for facts in checked.values()), loader.bytes_read)


def _load_weights(loader: TensorLoader, parameters: Sequence[RankParameter]) -> None:
    """Ranks that have the same part read some of it each, at once, and then hand it on to the others."""
    readers = _readers(parameters)
    for parameter, reader in zip(parameters, readers, strict=True):
        if parameter.replicas is None or dist.get_rank(parameter.replicas) == reader:
            loader.fill(weight_role(parameter.shard), parameter.shard.pieces, parameter.parameter.data)
    for parameter, reader in zip(parameters, readers, strict=True):
        if (group := parameter.replicas) is not None:
            dist.broadcast(parameter.parameter.data, dist.get_global_rank(group, reader), group)


def _readers(parameters: Sequence[RankParameter]) -> list[int]:
    """The rank of each parameter's group that reads it: the one that has the least to read so far.

    All ranks of a group count alike, so they agree.
    """
    loads: dict[int, list[int]] = {}
    readers = []
    for parameter in parameters:
        group = parameter.replicas
        read = loads.setdefault(id(group), [0] * (1 if group is None else dist.get_world_size(group)))
        readers.append(read.index(min(read)))
        read[readers[-1]] += parameter.parameter.numel()
    return readers


def _load_optimizer_part(loader: TensorLoader, parameter: RankParameter, step: float | None, has_masters: bool) -> None:
    """Master weights that are not in the checkpoint, or are the weights themselves, come from the loaded weights.

    A frozen parameter starts with zero moments: Adam would follow the saved ones for many steps, without any gradient.
    """
    main = parameter.main()
    master = parameter.adam.master(main)
    whole, pieces = torch.zeros(parameter.shard.local_shape, dtype=torch.float32), parameter.own_pieces()

    def part(role: str) -> Tensor:
        loader.fill(role, pieces, whole)
        return whole.reshape(-1)[slice(*parameter.flat)].reshape(master.shape)

    weights = parameter.parameter.detach().reshape(-1)[slice(*parameter.flat)]
    values = part(MASTER) if has_masters and not parameter.is_own_master else weights.reshape(master.shape)
    for tensor in (main, master):  # they may be one
        tensor.copy_(values)
    if step is not None:
        frozen = is_frozen(parameter.parameter)
        moments = {name: torch.zeros_like(master) if frozen else part(role).clone() for role, name in MOMENTS.items()}
        parameter.adam.set_moments(main, step, moments)


def _restore_counts(actor, facts: dict[str, Any]) -> None:
    actor.num_updates = facts["num_updates"]
    actor.skipped_in_a_row = facts.get("skipped_in_a_row", 0)  # a checkpoint may be older than the count


def _restore_schedule(actor, facts: dict[str, Any], folder: Path) -> None:
    """The rate follows from the step count; when the schedule is the saved one it must be the saved rate."""
    now = actor.scheduler.state_dict()
    then = dict(facts["scheduler"])
    actor.scheduler.num_steps = then["num_steps"]
    actor.scheduler.step(0)
    same = all(now[k] == then[k] for k in now if k != "num_steps")
    if same and current_lr(actor.optimizer) != facts["lr"]:
        raise EnvironmentFault(
            f"{folder}: the learning rate comes back as {current_lr(actor.optimizer)}, not as {facts['lr']}"
        )


def _check_model(actor, manifest: Manifest, folder: Path) -> None:
    if model_spec(manifest.hf_config) != actor.model:
        raise EnvironmentFault(f"{folder}: a checkpoint of another model than model.path {actor.config.model.path}")
    if bool(manifest.adapters) != (actor.lora is not None):
        kind = "adapters alone" if manifest.adapters else "whole weights"
        raise EnvironmentFault(
            f"{folder}: a checkpoint of {kind}, and actor.lora.rank is {actor.config.actor.lora.rank}"
        )
    if manifest.dtype != actor.config.model.dtype:
        raise EnvironmentFault(
            f"{folder}: weights are {manifest.dtype}, model.dtype is {actor.config.model.dtype}; "
            "set model.dtype to match"
        )


def _restore_random_states(actor, loader: TensorLoader) -> None:
    torch.set_rng_state(loader.random_state(actor.rank, "cpu"))
    actor.platform.set_rng_state(loader.random_state(actor.rank, "device"))
    tracker = get_cuda_rng_tracker()
    states = {
        name: _as_state(old, loader.random_state(actor.rank, f"tracker/{name}"))
        for name, old in tracker.get_states().items()
    }
    tracker.set_states(states)


def _as_state(old: Any, saved: Tensor) -> Any:
    if isinstance(old, torch.Generator):
        old.set_state(saved)
        return old
    return saved
