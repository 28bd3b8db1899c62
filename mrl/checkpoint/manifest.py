"""A checkpoint's description of itself: JSON that describes every stored tensor in Hugging Face coordinates.

    step-N/manifest.json            size and digest of all other files; what all ranks share
    step-N/rank-R.json              the entries of rank R: what each tensor in its files is
    step-N/rank-R.safetensors       its tensors
    step-N/critic-R.json, ...       the same of a critic, where there is one
    step-N/hf/                      configuration and tokenizer
    step-N/group-M.A.npz            groups generated ahead, if training is not synchronous

`manifest.json` is written last: a folder without it is not a checkpoint. Each entry stores a local Megatron tensor, or
a flat range of it if the distributed optimizer splits it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mrl.checkpoint.tensor_names import TensorNames, tensor_names
from mrl.errors import DamagedCheckpoint, EnvironmentFault, NumericAbort
from mrl.model import ModelSpec, model_spec, with_predicting
from mrl.model.boxes import Box
from mrl.model.megatron_shards import Piece
from mrl.model.trained_tower import PROJECTOR, TRAINED
from mrl.plain_files import read_json

FORMAT = 2
MOST_READERS = 16  # of files at once; hashing releases the interpreter lock
MANIFEST = "manifest.json"
HF_FOLDER = "hf"  # configuration and tokenizer of every mrl checkpoint
WEIGHT = "weight"
MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
CONSTANT = "constant"
# prefixes of the names of files that ranks write
ACTOR = "rank"
CRITIC = "critic"
# values of "converted", which `mrl convert` writes into a manifest's trainer part
WEIGHTS_ONLY = "weights"
WITH_OPTIMIZER = "weights and optimizer"
FileFacts = dict[str, dict[str, Any]]  # file name -> {"bytes", "sha256"}; the digest only where it is needed


@dataclass(frozen=True)
class StoredTensor:
    """A local Megatron tensor, or a flat range of it."""

    file: str
    key: str  # in the safetensors file
    role: str  # WEIGHT, CONSTANT, MASTER, EXP_AVG or EXP_AVG_SQ
    shape: tuple[int, ...]  # of the complete local tensor
    flat: tuple[int, int] | None  # stored range of the flattened local tensor; None: all of it
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class RankFiles:
    """What one rank wrote."""

    entries: tuple[StoredTensor, ...] | None  # None: they are in the file of `description`
    files: FileFacts  # files with tensors
    optimizer: dict[str, Any]  # step count, learning rates, scheduler, skipped updates: equal on all ranks
    description: FileFacts = field(default_factory=dict)  # the file of the entries; empty if they are known without it
    holds: TensorNames = field(default_factory=dict)  # names of the tensors of the entries

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, which `from_json` reads back."""
        entries = {}
        if self.entries is not None:
            entries = {"entries": [_entry_json(entry) for entry in self.entries]}
        described = {}
        if self.entries is None:
            described = {"description": self.description, "holds": self.holds}
        return {"files": self.files, "optimizer": self.optimizer} | entries | described

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RankFiles":
        """Reads what `to_json` made."""
        if "entries" in data:
            return cls(tuple(_entry(entry) for entry in data["entries"]), data["files"], data["optimizer"])
        return cls(None, data["files"], data["optimizer"], data["description"], data["holds"])

    def read_entries(self, folder: Path) -> tuple[StoredTensor, ...]:
        """Returns the entries, which a checkpoint in `folder` has in a file.

        Raises DamagedCheckpoint if the file's bytes have changed.
        """
        if self.entries is not None:
            return self.entries
        return tuple(entry for name in self.description for entry in _read_description(folder, name, self.description))


def described(folder: Path, rank: int, part: RankFiles, kind: str = ACTOR) -> RankFiles:
    """Writes the entries of a rank durably into a file of `folder`. Returns the rank's files with that one.

    A rank without entries gets no file. Raises OSError.
    """
    if not part.entries:
        return replace(part, entries=None)
    path = folder / f"{kind}-{rank:05d}.json"
    data = json.dumps([_entry_json(entry) for entry in part.entries], separators=(",", ":")).encode()
    path.write_bytes(data)
    fsync(path)
    holds = tensor_names(piece.hf_name for entry in part.entries for piece in entry.pieces)
    return replace(part, entries=None, description={path.name: facts_of(data)}, holds=holds)


@dataclass(frozen=True)
class Manifest:
    """The description of a whole checkpoint."""

    step: int
    layout: dict[str, Any]  # parallel degrees, as in the configuration
    dtype: str
    hf_config: dict[str, Any]
    ranks: tuple[RankFiles, ...]
    trainer: dict[str, Any]  # position in the data, metrics of the step
    versions: dict[str, str]
    hf_files: FileFacts = field(default_factory=dict)  # by name in HF_FOLDER
    # if only adapters are stored: their settings, and path and digest of the model on which they are trained
    adapters: dict[str, Any] = field(default_factory=dict)
    critic: tuple[RankFiles, ...] = ()  # of a critic beside the actor, rank by rank; empty: there is none
    vision: str | None = None  # model.vision of a run that trains a vision tower, which is among the weights

    @property
    def model(self) -> ModelSpec:
        """The model whose weights these are. Raises ConfigError for one that is not supported."""
        return model_spec(self.hf_config, self.vision)

    @property
    def of_actor(self) -> "Manifest":
        """The actor's part, without a critic beside it."""
        return replace(self, critic=())

    @property
    def of_critic(self) -> "Manifest":
        """The critic's part, as that of an actor, whose weights are whole. It has no predicting layers."""
        hf_config = with_predicting(self.hf_config, False)
        return replace(self, ranks=self.critic, critic=(), adapters={}, hf_config=hf_config)

    def read_entries(self, folder: Path) -> Iterator[StoredTensor]:
        """Yields the stored tensors of all ranks. Raises DamagedCheckpoint as RankFiles.read_entries does."""
        return (entry for rank in self.ranks for entry in rank.read_entries(folder))

    def files(self) -> FileFacts:
        """Returns size and digest of every file with tensors."""
        return {name: facts for rank in self.ranks for name, facts in rank.files.items()}

    def files_of_ranks(self) -> FileFacts:
        """Returns facts of all files that ranks read: tensors and descriptions, also those of a critic."""
        descriptions = {name: facts for rank in self.ranks for name, facts in rank.description.items()}
        own = self.files() | descriptions
        if self.critic:
            own |= self.of_critic.files_of_ranks()
        return own

    def files_for_others(self) -> FileFacts:
        """Returns facts of files that training does not read: configuration and tokenizer."""
        return {f"{HF_FOLDER}/{name}": facts for name, facts in self.hf_files.items()}

    def all_files(self) -> FileFacts:
        """Returns facts of every file except the manifest."""
        return self.files_of_ranks() | self.files_for_others() | self.files_beside()

    def files_beside(self) -> FileFacts:
        """Returns facts of files without tensors of the model: groups generated ahead."""
        return self.trainer.get("ahead", {}).get("files", {})

    @property
    def converted(self) -> bool:
        """Tells whether `mrl convert` wrote it. Then it has no random states."""
        return "converted" in self.trainer

    @property
    def weights_only(self) -> bool:
        """Tells whether the checkpoint was converted from weights alone.

        Then it has no master weights, moments and schedule either, and training starts from the weights.
        """
        return self.trainer.get("converted") == WEIGHTS_ONLY

    @property
    def optimizer(self) -> dict[str, Any]:
        """What all ranks say about the optimizer. Raises ValueError if two disagree.

        A rank without a part of the optimizer does not know `step`, which is no disagreement.
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
    """Writes manifest.json of a finished folder durably, and missing descriptions of ranks.

    Raises NumericAbort when the ranks disagree about the optimizer.
    """
    try:
        updates = manifest.optimizer["num_updates"]
        _ = manifest.of_critic.optimizer  # which raises where ranks disagree, as the actor's does
    except ValueError as error:
        raise NumericAbort(f"step {manifest.step} is not saved: {error}; resume from the checkpoint before") from error
    ranks = [
        rank if rank.entries is None else described(folder, number, rank) for number, rank in enumerate(manifest.ranks)
    ]
    data = asdict(replace(manifest, ranks=(), critic=())) | {
        "format": FORMAT,
        "num_updates": updates,
        "ranks": [rank.to_json() for rank in ranks],
        "critic": [rank.to_json() for rank in manifest.critic],
    }
    for name in ("adapters", "critic", "vision"):
        if not getattr(manifest, name):
            data.pop(name)
    path = folder / MANIFEST
    path.write_text(json.dumps(sealed(data)))
    fsync(path)
    fsync(folder)


def read_manifest(folder: Path) -> Manifest:
    """Reads manifest.json. Checks the sizes of all files that a resume needs, and that ranks agree about the optimizer.

    Raises EnvironmentFault that names the problem, and DamagedCheckpoint if it is a file.
    """
    path = folder / MANIFEST
    try:
        data = read_json(path, strict=False)  # its metrics may be NaN
    except (OSError, ValueError) as error:
        raise EnvironmentFault(
            f"{path}: not a readable checkpoint manifest ({error}); choose another step-N folder"
        ) from error
    number = None
    if isinstance(data, dict):
        number = data.pop("format", None)
    if number != FORMAT:
        raise EnvironmentFault(f"{path}: not a manifest of format {FORMAT}; convert it with the mrl that wrote it")
    try:
        written = _digest(data | {"format": number})
        digest = data.pop("digest")
        updates = data.pop("num_updates")
        of_ranks = {name: tuple(RankFiles.from_json(r) for r in data.get(name, ())) for name in ("ranks", "critic")}
        manifest = Manifest(**data | of_ranks)
        if manifest.optimizer["num_updates"] != updates:
            raise ValueError(
                f"ranks count {manifest.optimizer['num_updates']} optimizer updates, the manifest {updates}"
            )
        _check_kinds(manifest)
        read_by_runs = manifest.files_of_ranks() | manifest.files_beside()
        sizes = {name: facts["bytes"] for name, facts in read_by_runs.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EnvironmentFault(f"{path}: not a complete manifest ({error!r}); choose another step-N folder") from error
    if digest != written:
        raise DamagedCheckpoint(
            f"{path}: is not what was written (its digest differs); the checkpoint is damaged, resume from another",
            str(folder),
        )
    _check_sizes(folder, sizes)
    return manifest


def _check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raises DamagedCheckpoint for a file that is missing or has another size."""
    for name, size in sizes.items():
        file = folder / name
        actual = None
        if file.is_symlink():
            raise EnvironmentFault(
                f"{file} is a link, and a checkpoint has files of its own: replace it by the file that it points to"
            )
        if file.is_file():
            actual = file.stat().st_size
        if actual != size:
            state = "is missing"
            if actual is not None:
                state = f"has {actual} bytes, not {size}"
            raise DamagedCheckpoint(f"{file} {state}; the checkpoint is damaged, resume from an older one", str(folder))


def sealed(data: dict[str, Any]) -> dict[str, Any]:
    """Returns a manifest's values with a digest of all of them."""
    return data | {"digest": _digest(json.loads(json.dumps(data)))}


def _digest(data: dict[str, Any]) -> str:
    """Returns the SHA-256 of a manifest's values, except the digest, in sorted order."""
    text = json.dumps({key: value for key, value in data.items() if key != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


_KINDS = {
    "step": int,
    "layout": dict,
    "dtype": str,
    "hf_config": dict,
    "trainer": dict,
    "versions": dict,
    "hf_files": dict,
    "adapters": dict,
}


def _check_kinds(manifest: Manifest) -> None:
    """Raises ValueError for a field of another type than written, and for names that lead to other folders."""
    for name, kind in _KINDS.items():
        value = getattr(manifest, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{name} is {str(value)[:80]}")
    if manifest.vision not in (None, TRAINED, PROJECTOR):
        raise ValueError(f"vision is {str(manifest.vision)[:80]}")
    if not 0 <= manifest.step < 2**63:
        raise ValueError(f"step is {manifest.step}")
    world = manifest.layout.get("world_size", len(manifest.ranks))
    if len(manifest.critic) not in (0, len(manifest.ranks)):
        raise ValueError(f"files of {len(manifest.ranks)} ranks and of a critic on {len(manifest.critic)}")
    if not manifest.ranks or world != len(manifest.ranks):
        raise ValueError(f"files of {len(manifest.ranks)} ranks and a layout of {world}")
    for name, facts in manifest.all_files().items():
        if Path(name).name != name and name != f"{HF_FOLDER}/{Path(name).name}":
            raise ValueError(f"a file {name[:80]!r}")
        if not isinstance(facts["bytes"], int):
            raise ValueError(f"{name} has {str(facts['bytes'])[:80]} bytes")


def check_digests(folder: Path, manifest: Manifest) -> None:
    """Reads every file of a checkpoint, several at once, because one core hashes more slowly than storage reads.

    Raises DamagedCheckpoint that names the first changed file, in the manifest's order.
    """
    check_files(folder, manifest.all_files(), min(MOST_READERS, os.cpu_count() or 1))


def changed_files(folder: Path, files: FileFacts) -> list[str]:
    """Returns the names of `files` that are missing or changed."""
    changed = []
    for name in files:
        try:
            check_digest(folder, name, files)
        except EnvironmentFault:
            changed.append(name)
    return changed


def share_of_files(files: FileFacts, reader: int, readers: int) -> FileFacts:
    """Returns the files that one of `readers` checks. Each file is read once, and readers share the bytes evenly."""
    loads = [0] * readers
    own = {}
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        least = loads.index(min(loads))
        loads[least] += files[name]["bytes"]
        if least == reader:
            own[name] = files[name]
    return own


def check_files(folder: Path, files: FileFacts, threads: int) -> None:
    """Reads files, several at once. Raises DamagedCheckpoint that names the first file that differs from `files`."""
    with ThreadPoolExecutor(threads) as pool:
        checks = [pool.submit(check_digest, folder, name, files) for name in files]
        try:
            for check in checks:
                check.result()
        finally:
            pool.shutdown(cancel_futures=True)


def check_digest(folder: Path, name: str, files: FileFacts) -> None:
    """Compares one file with its size and digest in a manifest's `files`.

    Raises DamagedCheckpoint for other bytes, EnvironmentFault for a file that cannot be read or is not listed.
    """
    plain = Path(name).name
    if name not in files or name not in (plain, f"{HF_FOLDER}/{plain}"):
        raise EnvironmentFault(f"{folder}: the manifest does not list {name}")
    try:
        actual = file_facts(folder / name)
    except OSError as error:
        raise EnvironmentFault(
            f"{folder / name} cannot be read ({error.strerror}); if this persists, move {folder} away, then an older "
            "checkpoint is used"
        ) from error
    if actual != files[name]:
        raise DamagedCheckpoint(
            f"{folder / name}: its bytes are not those that were written (SHA-256 differs); resume "
            "from an older checkpoint",
            str(folder),
        )


def file_facts(path: Path) -> dict[str, Any]:
    """Returns size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def facts_of(data: bytes) -> dict[str, Any]:
    """Returns size and SHA-256 of a file's bytes."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def fsync(path: Path) -> None:
    """Makes a file, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_description(folder: Path, name: str, files: FileFacts) -> list[StoredTensor]:
    check_digest(folder, name, files)
    try:
        return [_entry(entry) for entry in read_json(folder / name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentFault(f"{folder / name}: not the description of a rank ({error!r})") from error


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
    flat = None
    if data["flat"]:
        flat = _numbers(data["flat"])
    words = [data["file"], data["key"], data["role"]]
    if not all(isinstance(word, str) for word in words) or (flat is not None and len(flat) != 2):
        raise ValueError(f"an entry of {str(words)[:200]}")
    shape = _numbers(data["shape"])
    for piece in pieces:
        _check_inside(piece, shape)
    return StoredTensor(*words, shape, flat, pieces)


def _check_inside(piece: Piece, shape: Sequence[int]) -> None:
    """Raises ValueError for a piece outside of its local tensor, or whose two boxes differ in shape."""
    local = piece.local_box
    is_inside = len(local.ranges) == len(shape) and all(
        stop <= size for (_, stop), size in zip(local.ranges, shape, strict=True)
    )
    if not is_inside or local.shape != piece.hf_box.shape:
        raise ValueError(f"{piece.hf_name} at {piece.hf_box.ranges} in {local.ranges} of a tensor of {tuple(shape)}")


def _numbers(values: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(values, list | tuple) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{str(values)[:80]} where sizes are expected")
    return tuple(values)


def _box(ranges: list[list[int]]) -> Box:
    return Box(tuple(_numbers([start, stop]) for start, stop in ranges))
