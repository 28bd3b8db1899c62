"""Loads an mrl checkpoint into the ranks of any layout.

    bytes                  read by
    digests of files       one rank for each file
    weights                one of the ranks with the same part, which broadcasts it to the others
    masters, moments       the rank that has this part of the distributed optimizer

So storage is read once for digests and once for values, in any layout. There are two exceptions, which several ranks
read: tensors that several tensor-parallel ranks hold completely (norms, routers), and complete stored rows of which
ranks need columns.
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
from mrl.checkpoint.stored_boxes import BoxReader, Descriptions
from mrl.config.schema_actor import OPTIMIZER, PARAMETERS
from mrl.errors import EnvironmentFault
from mrl.model import ModelSpec
from mrl.model.megatron_shards import Piece
from mrl.rank.optimizer import current_lr
from mrl.rank.parameter_marks import is_frozen
from mrl.rank.rank_parameters import MOMENTS, RankParameter, rank_parameters
from mrl.rank.rank_save import CODES, rank_file

THREADS = 4  # of a rank that hashes its files; several ranks share a host
DTYPES = {code: dtype for dtype, code in CODES.items()}
# bytes of an element -> integer dtype that carries its bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorLoader:
    """Reads the tensors of one checkpoint, and the descriptions of the ranks that wrote the requested ones.

    Raises EnvironmentFault if a requested tensor is not stored, or has another size than described. It also raises if
    the descriptions that it reads contain an element twice.

    Only a conversion reads all descriptions, and compares them with the model and with each file. So only a conversion
    detects faults in what no rank requests: a doubled element in an unread description, a tensor that the model lacks,
    a wrong dtype. A manifest of format 1 has all descriptions, so overlapping or missing parts are detected here too.
    """

    def __init__(self, folder: Path, manifest: Manifest, check_first: bool = True, rank: int = 0):
        """`check_first` compares files with their digests when they are first opened. `rank` is the reading rank."""
        files = SafetensorsFiles(folder, manifest.files(), check_first, when_needed=True)
        known = [entry for part in manifest.ranks for entry in part.entries or ()]  # of a manifest of format 1
        self._reader = BoxReader(folder, known, files, Descriptions(folder, manifest.ranks, rank))
        self._reader.boxes.check_whole(folder)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return self._reader.bytes_read

    def fill(self, role: str, pieces: Iterable[Piece], out: Tensor) -> None:
        """Does what the function `fill` does, with this checkpoint."""
        fill(self._reader, role, pieces, out)

    def random_state(self, rank: int, name: str) -> Tensor:
        """Returns the bytes of a generator's state."""
        return torch.from_numpy(self._reader.tensor_bytes(rank_file(rank), f"rng/{name}"))

    def close(self) -> None:
        self._reader.close()


def fill(reader: BoxReader, role: str, pieces: Iterable[Piece], out: Tensor) -> None:
    """Writes the elements that `pieces` name into `out`, a tensor in their local frame. Others stay unchanged.

    Raises EnvironmentFault if the checkpoint lacks some of them.
    """
    for piece in pieces:
        for stored, common in reader.overlaps(role, piece.hf_name, piece.hf_box):
            values = torch.empty(common.shape, dtype=DTYPES[reader.dtype(stored)])
            reader.read(stored, common, _as_integers(values))
            out[common.rebase(piece.hf_box, piece.local_box).slices] = values


def _as_integers(values: Tensor) -> np.ndarray:
    """Views the values' memory as integers."""
    return values.view(_INTEGERS[values.element_size()]).numpy()


@dataclass(frozen=True)
class BytesRead:
    """Bytes that one rank read from storage."""

    checked: int
    loaded: int


def load_rank(actor, folder: Path, kind: str = ACTOR, any_dtype: bool = False) -> BytesRead:
    """Loads a checkpoint into a freshly built actor of the same or another layout. All ranks call it together.

    `kind`: CRITIC if `actor` is a critic, which is loaded after the actor. `any_dtype`: also one of another number
    format, whose rounded weights become the master weights. Random states are restored only at the layout that wrote
    them. A checkpoint converted from weights alone gives a fresh start. Raises EnvironmentFault for
    one that is damaged or of another model. Only the rank that detects it raises, while others may wait.
    """
    whole = read_manifest(folder)
    manifest = whole.of_actor
    if kind == CRITIC:
        manifest = whole.of_critic
    if not manifest.ranks:
        raise EnvironmentFault(f"{folder}: a checkpoint without a critic, and algorithm.adv_estimator needs one")
    _check_model(actor, manifest, folder, any_dtype)
    checked = share_of_files(manifest.files_of_ranks(), actor.rank, actor.layout.world_size)
    check_files(folder, checked, THREADS)
    dist.barrier()  # no rank reads a file that another rank has not compared yet
    loader = TensorLoader(folder, manifest, check_first=False, rank=actor.rank)
    facts = manifest.optimizer
    with torch.no_grad(), actor.residence.using(PARAMETERS, OPTIMIZER):
        parameters = list(rank_parameters(actor))
        _load_weights(loader, parameters)
        actor.residence.forget_copies()  # routers' constants are frozen, but loaded
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
    """Loads weights. Ranks with the same part each read a share of it, at once, and then broadcast."""
    readers = _readers(parameters)
    for parameter, reader in zip(parameters, readers, strict=True):
        if parameter.replicas is None or dist.get_rank(parameter.replicas) == reader:
            loader.fill(weight_role(parameter.shard), parameter.shard.pieces, parameter.parameter.data)
    for parameter, reader in zip(parameters, readers, strict=True):
        if (group := parameter.replicas) is not None:
            dist.broadcast(parameter.parameter.data, dist.get_global_rank(group, reader), group)


def _readers(parameters: Sequence[RankParameter]) -> list[int]:
    """Returns, for each parameter, the rank of its group that reads it: the one with the fewest bytes so far.

    All ranks of a group compute the same, so they agree.
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
    """Loads master weights and moments. Masters that are not stored, or equal the weights, come from the loaded
    weights.

    A frozen parameter starts with zero moments. With saved moments, Adam would move it for many steps without a
    gradient.
    """
    main = parameter.main()
    master = parameter.adam.master(main)
    whole, pieces = torch.zeros(parameter.shard.local_shape, dtype=torch.float32), parameter.own_pieces()

    def part(role: str) -> Tensor:
        loader.fill(role, pieces, whole)
        return whole.reshape(-1)[slice(*parameter.flat)].reshape(master.shape)

    weights = parameter.parameter.detach().reshape(-1)[slice(*parameter.flat)]
    values = part(MASTER) if has_masters and not parameter.is_own_master else weights.reshape(master.shape)
    for tensor in (main, master):  # they may be the same tensor
        tensor.copy_(values)
    if step is not None:
        frozen = is_frozen(parameter.parameter)
        moments = {name: torch.zeros_like(master) if frozen else part(role).clone() for role, name in MOMENTS.items()}
        parameter.adam.set_moments(main, step, moments)


def _restore_counts(actor, facts: dict[str, Any]) -> None:
    actor.num_updates = facts["num_updates"]
    actor.skipped_in_a_row = facts.get("skipped_in_a_row", 0)  # converted weights have none


def _restore_schedule(actor, facts: dict[str, Any], folder: Path) -> None:
    """Restores the schedule. If it is the saved one, the learning rate must equal the saved rate."""
    then = dict(facts["scheduler"])
    for scheduler in actor.schedulers:
        if actor.config.actor.optim.lr_warmup_steps_ratio:  # a longer run does not warm up again
            scheduler.lr_warmup_steps = then["lr_warmup_steps"]
    now = actor.scheduler.state_dict()
    for scheduler in actor.schedulers:
        scheduler.num_steps = then["num_steps"]
        scheduler.step(0)
    same = all(now[k] == then[k] for k in now if k != "num_steps")
    if same and current_lr(actor.optimizer) != facts["lr"]:
        raise EnvironmentFault(
            f"{folder}: the learning rate after loading is {current_lr(actor.optimizer)}, not {facts['lr']}"
        )


def _check_model(actor, manifest: Manifest, folder: Path, any_dtype: bool) -> None:
    if not _is_same_model(manifest.model, actor.trained):
        raise EnvironmentFault(f"{folder}: not a checkpoint of the model in model.path {actor.config.model.path}")
    if bool(manifest.adapters) != (actor.lora is not None):
        kind = "adapters alone" if manifest.adapters else "whole weights"
        raise EnvironmentFault(
            f"{folder}: a checkpoint of {kind}, and actor.lora.rank is {actor.config.actor.lora.rank}"
        )
    if manifest.dtype != actor.config.model.dtype and not any_dtype:
        raise EnvironmentFault(
            f"{folder}: weights are {manifest.dtype}, model.dtype is {actor.config.model.dtype}; "
            "set model.dtype to match"
        )


def _is_same_model(stored: ModelSpec, own: ModelSpec) -> bool:
    """A tower of which another part is trained is the same one."""
    if stored.trained_tower is not None and own.trained_tower is not None:
        stored = replace(stored, trained_tower=replace(stored.trained_tower, part=own.trained_part))
    return stored == own


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
