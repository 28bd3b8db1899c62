"""What is to be written: files, and in each the entries in the order they are stored. Decided before the first byte."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from mrl.checkpoint.manifest import WEIGHT, Entry
from mrl.checkpoint.open_checkpoint import code_of, item_bytes
from mrl.model import tensor_specs
from mrl.model.boxes import Box
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import Piece, source_shards
from mrl.model.spec import ModelSpec

FILE_BYTES = 512 * 1024**2  # a file is what is written again after a kill, and what one process works on


@dataclass(frozen=True)
class PlannedFile:
    """One file of tensors."""

    name: str
    rank: int  # whose part it is; 0 in checkpoints that are of no layout
    entries: tuple[Entry, ...]


def entry_bytes(entry: Entry, dtype: str) -> int:
    """Bytes of a whole local tensor."""
    return prod(entry.shape) * item_bytes(code_of(entry.role, dtype))


def hf_plan(model: ModelSpec, dtype: str) -> tuple[PlannedFile, ...]:
    """`model-NNNNN.safetensors`, tensors in the order of the layers."""
    entries = []
    for spec in tensor_specs(model):
        whole = Box.whole(spec.shape)
        entries.append(Entry("", spec.name, WEIGHT, spec.shape, None, (Piece(spec.name, whole, whole),)))
    return tuple(_file(f"model-{n:05d}.safetensors", 0, part) for n, part in enumerate(parts(entries, dtype), 1))


def rank_plan(model: ModelSpec, layout: TrainLayout, roles: Iterable[str], dtype: str) -> tuple[PlannedFile, ...]:
    """The files of every rank. A local tensor is written by the first of its replicas only, and whole."""
    files: list[PlannedFile] = []
    for rank in range(layout.world_size):
        shards = [shard for shard in source_shards(model, layout, rank) if shard.primary == rank]
        entries = [
            Entry("", f"{role}/{shard.vp_chunk}.{shard.megatron_name}", role, shard.local_shape, None, shard.pieces)
            for role in roles
            for shard in shards
        ]
        portions = list(parts(entries, dtype))
        names = [f"rank-{rank:05d}{f'-{n:05d}' if len(portions) > 1 else ''}.safetensors" for n in range(len(portions))]
        files += [_file(name, rank, part) for name, part in zip(names, portions, strict=True)]
    return tuple(files)


def _file(name: str, rank: int, entries: list[Entry]) -> PlannedFile:
    # narrower elements last, so that every tensor is aligned to its own width
    ordered = sorted(entries, key=lambda entry: entry.role == WEIGHT)
    return PlannedFile(name, rank, tuple(Entry(name, e.key, e.role, e.shape, e.flat, e.pieces) for e in ordered))


def parts(entries: list[Entry], dtype: str) -> Iterator[list[Entry]]:
    """Consecutive entries of about FILE_BYTES; a larger tensor has a file of its own."""
    part: list[Entry] = []
    size = 0
    for entry in entries:
        nbytes = entry_bytes(entry, dtype)
        if part and size + nbytes > FILE_BYTES:
            yield part
            part, size = [], 0
        part.append(entry)
        size += nbytes
    if part:
        yield part
