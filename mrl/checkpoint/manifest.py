"""What a checkpoint of ours says about itself: one JSON file that describes every stored tensor in Hugging Face coordinates.

A checkpoint is a folder `step-N` of safetensors files, one a rank, and `manifest.json`, which is written last: a folder without it is not a
checkpoint. Each entry stores a local Megatron tensor, or a flat range of it where the distributed optimizer cuts it over data parallelism.
"""

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from mrl.errors import EnvironmentFault, NumericAbort
from mrl.model.boxes import Box, first_overlap
from mrl.model.megatron_shards import Piece

FORMAT = 1
MANIFEST = "manifest.json"
WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ = ROLES = ("weight", "master", "exp_avg", "exp_avg_sq")
# what `mrl convert` writes under "converted" of a manifest's trainer part
WEIGHTS_ONLY, WITH_OPTIMIZER = "weights", "weights and optimizer"


@dataclass(frozen=True)
class Entry:
    """One stored tensor."""

    file: str
    key: str  # in the safetensors file
    role: str  # of ROLES
    shape: tuple[int, ...]  # of the whole local tensor
    flat: tuple[int, int] | None  # the part of the flattened local tensor that is stored; None: all of it
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class RankFiles:
    """What one rank wrote."""

    entries: tuple[Entry, ...]
    files: dict[str, dict[str, Any]]  # name -> {"bytes", "sha256"}
    optimizer: dict[str, Any]  # step count, learning rates, scheduler: must agree over ranks

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it back."""
        return {"entries": [_entry_json(e) for e in self.entries], "files": self.files, "optimizer": self.optimizer}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RankFiles":
        """From `to_json`."""
        return cls(tuple(_entry(e) for e in data["entries"]), data["files"], data["optimizer"])


@dataclass(frozen=True)
class Manifest:
    """The whole checkpoint."""

    step: int
    layout: dict[str, Any]  # degrees, as in the configuration
    dtype: str
    hf_config: dict[str, Any]
    ranks: tuple[RankFiles, ...]
    trainer: dict[str, Any]  # data cursor, metrics of the step
    versions: dict[str, str]

    def entries(self) -> Iterable[Entry]:
        """Of all ranks."""
        return (entry for rank in self.ranks for entry in rank.entries)

    def files(self) -> dict[str, dict[str, Any]]:
        """Size and digest of every file."""
        return {name: facts for rank in self.ranks for name, facts in rank.files.items()}

    @property
    def converted(self) -> bool:
        """Written by `mrl convert`: it has no random states."""
        return "converted" in self.trainer

    @property
    def weights_only(self) -> bool:
        """Converted from weights alone: there are no master weights, moments and schedule either, and training starts from the weights."""
        return self.trainer.get("converted") == WEIGHTS_ONLY

    @property
    def optimizer(self) -> dict[str, Any]:
        """What all ranks say of the optimizer. Raises ValueError where two say something else.

        A rank that holds no part of the optimizer knows no `step`; that is no disagreement.
        """
        agreed: dict[str, Any] = {}
        for number, rank in enumerate(self.ranks):
            for name, value in rank.optimizer.items():
                if agreed.get(name) is None:
                    agreed[name] = value
                elif value != agreed[name] and not (name == "step" and value is None):
                    raise ValueError(f"rank {number} has optimizer {name} {value}, a rank before it {agreed[name]}")
        return agreed


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes manifest.json of a finished folder, durably. Raises NumericAbort when the ranks disagree about the optimizer."""
    try:
        updates = manifest.optimizer["num_updates"]
    except ValueError as error:
        raise NumericAbort(f"step {manifest.step} is not saved: {error}; resume from the checkpoint before") from error
    data = asdict(manifest) | {"format": FORMAT, "num_updates": updates, "ranks": [rank.to_json() for rank in manifest.ranks]}
    path = folder / MANIFEST
    path.write_text(json.dumps(data))
    fsync(path)
    fsync(folder)


def read_manifest(folder: Path) -> Manifest:
    """Reads manifest.json and checks that every file it names is there at its size, and that the ranks agree about the optimizer.

    Raises EnvironmentFault naming what is wrong.
    """
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{path}: not a readable checkpoint manifest ({error}); choose another step-N folder") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise EnvironmentFault(f"{path}: not a manifest of format {FORMAT}; convert it with the mrl that wrote it")
    try:
        updates = data.pop("num_updates")
        manifest = Manifest(**data | {"ranks": tuple(RankFiles.from_json(r) for r in data["ranks"])})
        if manifest.optimizer["num_updates"] != updates:
            raise ValueError(f"ranks count {manifest.optimizer['num_updates']} optimizer updates, the manifest {updates}")
        sizes = {name: facts["bytes"] for name, facts in manifest.files().items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EnvironmentFault(f"{path}: not a whole manifest ({error!r}); choose another step-N folder") from error
    for name, size in sizes.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise EnvironmentFault(f"{file} {state}; the checkpoint is damaged, resume from an older one")
    return manifest


Holder = tuple[tuple[Entry, ...], Piece]  # a local tensor, as the flat parts that make it up, and the piece that is asked for


def holders(entries: Iterable[Entry]) -> dict[tuple[str, str], list[Holder]]:
    """(role, Hugging Face name) -> the stored tensors that hold parts of it."""
    parts: dict[tuple, list[Entry]] = defaultdict(list)
    for entry in entries:
        parts[entry.role, entry.pieces].append(entry)  # flat parts of one local tensor describe the same pieces
    found: dict[tuple[str, str], list[Holder]] = defaultdict(list)
    for (role, pieces), group in parts.items():
        ordered = tuple(sorted(group, key=lambda e: e.flat or (0, 0)))
        for piece in pieces:
            found[role, piece.hf_name].append((ordered, piece))
    return found


def check_disjoint(folder: Path, held: Mapping[tuple[str, str], list[Holder]]) -> None:
    """No element is stored twice, of a tensor or of the flat parts of a local one: then counting elements tells what is missing.

    Raises EnvironmentFault naming the tensor.
    """
    damaged = "the checkpoint is damaged, choose another one"
    for (role, name), found in held.items():
        if len(found) == 1:
            continue
        boxes = [piece.hf_box for _, piece in found]
        if 0 in (ranks := {len(box.ranges) for box in boxes}) or len(ranks) > 1:
            raise EnvironmentFault(f"{folder}: the stored blocks of {name} ({role}) are of ranks {sorted(ranks)}; {damaged}")
        if pair := first_overlap(boxes):
            raise EnvironmentFault(f"{folder}: {name} ({role}) is stored twice, in {pair[0].ranges} and {pair[1].ranges}; {damaged}")
    for group in {id(group): group for found in held.values() for group, _ in found}.values():
        ranges = [entry.flat or (0, prod(entry.shape)) for entry in group]
        ends = [0, *(stop for _, stop in ranges)]
        if [start for start, _ in ranges] != ends[:-1] or ends[-1] != prod(group[0].shape):
            raise EnvironmentFault(
                f"{folder}: {group[0].key} is stored in parts that do not add up, {ranges}; a rank's file is missing or {damaged}"
            )


def check_digests(folder: Path, manifest: Manifest) -> None:
    """Reads every file of a checkpoint. Raises EnvironmentFault naming one whose bytes are not those that were written."""
    files = manifest.files()
    for name in files:
        check_digest(folder, name, files)


def check_digest(folder: Path, name: str, files: dict[str, dict[str, Any]]) -> None:
    """Holds one file against its size and digest in `files`, a manifest's. Raises EnvironmentFault."""
    if name not in files or Path(name).name != name:
        raise EnvironmentFault(f"{folder}: the manifest does not list {name}")
    try:
        found = file_facts(folder / name)
    except OSError as error:
        raise EnvironmentFault(f"{folder / name} cannot be read ({error.strerror}); resume from an older checkpoint") from error
    if found != files[name]:
        raise EnvironmentFault(
            f"{folder / name}: its bytes are not those that were written (SHA-256 differs); resume from an older checkpoint"
        )


def checkpoint_steps(folder: Path) -> list[tuple[int, Path]]:
    """Finished checkpoints below `folder`, oldest first: those that have a manifest."""
    found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name)) and (p / MANIFEST).exists()]
    return sorted(found)


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint that can be read, and the newer ones that cannot."""

    path: Path | None  # None: there is none that can be read
    manifest: Manifest | None
    damaged: dict[Path, EnvironmentFault]  # newest first, with what is wrong


def newest_checkpoint(folder: Path, digests: bool) -> Newest:
    """Looks below `folder`, newest first, until manifest and sizes are right; with `digests`, every byte (about 2 GB/s)."""
    damaged: dict[Path, EnvironmentFault] = {}
    for _, path in reversed(checkpoint_steps(folder)):
        try:
            manifest = read_manifest(path)
            if digests:
                check_digests(path, manifest)
        except EnvironmentFault as error:
            damaged[path] = error
        else:
            return Newest(path, manifest, damaged)
    return Newest(None, None, damaged)


def file_facts(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def fsync(path: Path) -> None:
    """Makes a file or a folder's list of names durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _entry_json(entry: Entry) -> dict[str, Any]:
    pieces = [[p.hf_name, p.hf_box.ranges, p.local_box.ranges] for p in entry.pieces]
    return {"file": entry.file, "key": entry.key, "role": entry.role, "shape": entry.shape, "flat": entry.flat, "pieces": pieces}


def _entry(data: dict[str, Any]) -> Entry:
    pieces = tuple(Piece(name, _box(hf), _box(local)) for name, hf, local in data["pieces"])
    flat = tuple(data["flat"]) if data["flat"] else None
    return Entry(data["file"], data["key"], data["role"], tuple(data["shape"]), flat, pieces)


def _box(ranges: list[list[int]]) -> Box:
    return Box(tuple((start, stop) for start, stop in ranges))
