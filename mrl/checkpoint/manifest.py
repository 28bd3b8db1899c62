"""What a checkpoint of ours says about itself: one JSON file that describes every stored tensor in Hugging Face
coordinates.

A checkpoint is a folder `step-N` of safetensors files, one a rank, and `manifest.json`, which is written last: a folder
without it is not a checkpoint. Each entry stores a local Megatron tensor, or a flat range of it where the distributed
optimizer cuts it over data parallelism.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrl.errors import DamagedCheckpoint, EnvironmentFault, NumericAbort
from mrl.model.boxes import Box
from mrl.model.megatron_shards import Piece

FORMAT = 1
MOST_READERS = 16  # of files at once; hashing lets go of the interpreter
MANIFEST = "manifest.json"
WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ, CONSTANT = ("weight", "master", "exp_avg", "exp_avg_sq", "constant")
# what `mrl convert` writes under "converted" of a manifest's trainer part
WEIGHTS_ONLY, WITH_OPTIMIZER = "weights", "weights and optimizer"
FileFacts = dict[str, dict[str, Any]]  # file name -> {"bytes", "sha256"}; the digest only where something reads it


@dataclass(frozen=True)
class StoredTensor:
    """A local Megatron tensor, or a flat range of it."""

    file: str
    key: str  # in the safetensors file
    role: str  # WEIGHT, MASTER, EXP_AVG or EXP_AVG_SQ
    shape: tuple[int, ...]  # of the whole local tensor
    flat: tuple[int, int] | None  # the part of the flattened local tensor that is stored; None: all of it
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class RankFiles:
    """What one rank wrote."""

    entries: tuple[StoredTensor, ...]
    files: FileFacts
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

    def entries(self) -> Iterable[StoredTensor]:
        """Of all ranks."""
        return (entry for rank in self.ranks for entry in rank.entries)

    def files(self) -> FileFacts:
        """Size and digest of every file."""
        return {name: facts for rank in self.ranks for name, facts in rank.files.items()}

    def files_beside(self) -> FileFacts:
        """The same of files without tensors of the model: groups that generation was ahead with."""
        return self.trainer.get("ahead", {}).get("files", {})

    @property
    def converted(self) -> bool:
        """Written by `mrl convert`: it has no random states."""
        return "converted" in self.trainer

    @property
    def weights_only(self) -> bool:
        """Converted from weights alone: there are no master weights, moments and schedule either,
        and training starts from the weights.
        """
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
    """Writes manifest.json of a finished folder, durably.

    Raises NumericAbort when the ranks disagree about the optimizer.
    """
    try:
        updates = manifest.optimizer["num_updates"]
    except ValueError as error:
        raise NumericAbort(f"step {manifest.step} is not saved: {error}; resume from the checkpoint before") from error
    data = asdict(manifest) | {
        "format": FORMAT,
        "num_updates": updates,
        "ranks": [rank.to_json() for rank in manifest.ranks],
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(data))
    fsync(path)
    fsync(folder)


def read_manifest(folder: Path) -> Manifest:
    """Reads manifest.json and checks that every file it names is there at its size, and that the ranks agree about the
    optimizer.

    Raises EnvironmentFault naming what is wrong.
    """
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EnvironmentFault(
            f"{path}: not a readable checkpoint manifest ({error}); choose another step-N folder"
        ) from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise EnvironmentFault(f"{path}: not a manifest of format {FORMAT}; convert it with the mrl that wrote it")
    try:
        updates = data.pop("num_updates")
        manifest = Manifest(**data | {"ranks": tuple(RankFiles.from_json(r) for r in data["ranks"])})
        if manifest.optimizer["num_updates"] != updates:
            raise ValueError(
                f"ranks count {manifest.optimizer['num_updates']} optimizer updates, the manifest {updates}"
            )
        sizes = {name: facts["bytes"] for name, facts in (manifest.files() | manifest.files_beside()).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EnvironmentFault(f"{path}: not a whole manifest ({error!r}); choose another step-N folder") from error
    for name, size in sizes.items():
        file = folder / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} bytes, not {size}"
            raise EnvironmentFault(f"{file} {state}; the checkpoint is damaged, resume from an older one")
    return manifest


def check_digests(folder: Path, manifest: Manifest) -> None:
    """Reads every file of a checkpoint, several at once: one core hashes at a fraction of what storage gives.

    Raises DamagedCheckpoint naming the first, in the manifest's order, whose bytes are not those that were written.
    """
    check_files(folder, manifest.files() | manifest.files_beside(), min(MOST_READERS, os.cpu_count() or 1))


def share_of_files(files: FileFacts, reader: int, readers: int) -> FileFacts:
    """Those that one of `readers` checks, so that all bytes are read once and nobody reads much more than others."""
    loads, own = [0] * readers, {}
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        least = loads.index(min(loads))
        loads[least] += files[name]["bytes"]
        if least == reader:
            own[name] = files[name]
    return own


def check_files(folder: Path, files: FileFacts, threads: int) -> None:
    """Reads files, several at once. Raises DamagedCheckpoint naming the first whose bytes are not those of `files`."""
    with ThreadPoolExecutor(threads) as pool:
        checks = [pool.submit(check_digest, folder, name, files) for name in files]
        try:
            for check in checks:
                check.result()
        finally:
            pool.shutdown(cancel_futures=True)


def check_digest(folder: Path, name: str, files: FileFacts) -> None:
    """Compares one file with its size and digest in `files`, a manifest's.

    Raises DamagedCheckpoint for other bytes, EnvironmentFault for a file that cannot be read or is not listed.
    """
    if name not in files or Path(name).name != name:
        raise EnvironmentFault(f"{folder}: the manifest does not list {name}")
    try:
        actual = file_facts(folder / name)
    except OSError as error:
        raise EnvironmentFault(
            f"{folder / name} cannot be read ({error.strerror}); if it stays so, move {folder} away: then an older "
            "checkpoint is taken"
        ) from error
    if actual != files[name]:
        raise DamagedCheckpoint(
            f"{folder / name}: its bytes are not those that were written (SHA-256 differs); resume "
            "from an older checkpoint",
            str(folder),
        )


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


def _entry_json(entry: StoredTensor) -> dict[str, Any]:
    pieces = [[p.hf_name, p.hf_box.ranges, p.local_box.ranges] for p in entry.pieces]
    return {
        "file": entry.file,
        "key": entry.key,
        "role": entry.role,
        "shape": entry.shape,
        "flat": entry.flat,
        "pieces": pieces,
    }


def _entry(data: dict[str, Any]) -> StoredTensor:
    pieces = tuple(Piece(name, _box(hf), _box(local)) for name, hf, local in data["pieces"])
    flat = tuple(data["flat"]) if data["flat"] else None
    return StoredTensor(data["file"], data["key"], data["role"], tuple(data["shape"]), flat, pieces)


def _box(ranges: list[list[int]]) -> Box:
    return Box(tuple((start, stop) for start, stop in ranges))
