"""Opens a checkpoint for reading, Hugging Face's or mrl's: its tensors, their files, and the model.

Megatron's own format (torch_dist) is recognised by its file names and refused. `mrl.tools.torch_dist` opens it.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from mrl.checkpoint.adapter_reader import MergedReader, StoredAdapters, stored_adapters
from mrl.checkpoint.manifest import (
    CONSTANT,
    HF_FOLDER,
    MANIFEST,
    WEIGHT,
    FileFacts,
    Manifest,
    StoredTensor,
    check_digest,
    check_files,
    read_manifest,
)
from mrl.checkpoint.step_folders import newest_checkpoint
from mrl.checkpoint.stored_boxes import (
    Boxes,
    BoxReader,
    Fp8Reader,
    Int4Reader,
    Mxfp4Reader,
    RoundingReader,
    TensorFiles,
)
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import ModelSpec, TensorSpec, load_model_spec, read_hf_config, tensor_specs, with_predicting
from mrl.model.boxes import Box
from mrl.model.hf_config import without_quantization
from mrl.model.hf_files import (
    FP8,
    INT32,
    ITEM_BITS,
    TensorBytes,
    check_checkpoint,
    int4_parts,
    int4_scale_of,
    read_safetensors_header,
    scale_of,
    weight_files,
)
from mrl.model.int4 import COLUMNS, PACKED
from mrl.model.megatron_shards import Piece, Shard
from mrl.model.mxfp4 import BLOCKS, CODE
from mrl.model.mxfp4 import SCALES as OF_BLOCKS
from mrl.model.peft_files import base_digest
from mrl.model.registry import family_of, inner_tensors
from mrl.model.weight_map import Inner
from mrl.plain_files import read_text, reason

DTYPES = {"F32": "float32", "BF16": "bfloat16"}  # safetensors' names -> names in the configuration
CODES = {name: code for code, name in DTYPES.items()}
TORCH_DIST_METADATA = ".metadata"
TORCH_DIST_TRACKER = "latest_checkpointed_iteration.txt"
TRUST_FLAG = "--trust-checkpoint"
_SHOWN = 5
_Tensor = TypeVar("_Tensor", TensorSpec, Shard)


@dataclass(frozen=True)
class Checkpoint:
    """The location of each tensor in a checkpoint. `manifest` is None unless mrl wrote the checkpoint."""

    folder: Path
    hf_files: Path  # the folder with configuration and tokenizer
    model: ModelSpec
    hf_config: dict[str, Any]
    dtype: str  # of the weights: "float32", "bfloat16"
    entries: tuple[StoredTensor, ...]
    files: TensorFiles
    manifest: Manifest | None
    left_out: tuple[str, ...]  # tensors that no conversion copies: those that a model computes itself, random states
    scales: Mapping[str, str] = field(default_factory=dict)  # for each FP8 matrix, the file with its scales
    rounded: frozenset[str] = frozenset()  # float32 tensors that are read as bfloat16
    adapters: StoredAdapters | None = None  # merged into the weights when they are read
    has_critic: bool = False  # beside the model; no conversion copies it

    @property
    def roles(self) -> tuple[str, ...]:
        """What is stored of each parameter: weights, and possibly master weights and moments."""
        return tuple(dict.fromkeys(entry.role for entry in self.entries))

    @property
    def identity(self) -> str:
        """A digest that changes with the size or time of any file."""
        names = sorted({entry.file for entry in self.entries} | set(self.scales.values()))
        facts = [(name, (stat := (self.folder / name).stat()).st_size, stat.st_mtime_ns) for name in names]
        of_all = [str(self.folder.resolve()), facts, self.hf_config]
        if self.adapters is not None:
            of_all += [self.adapters.lora, self.adapters.facts]
        return hashlib.sha256(repr(tuple(of_all)).encode()).hexdigest()

    def reader(self) -> BoxReader:
        """Opens a reader of the checkpoint's tensors. The caller closes it."""
        if self.adapters is not None:  # of families that have neither scales nor rounded tensors
            return MergedReader(self.folder, self.entries, self.files, self.adapters)
        if self.model.int4_group:
            return Int4Reader(self.folder, self.entries, self.files, self.scales)
        if self.model.is_mxfp4:
            return Mxfp4Reader(self.folder, self.entries, self.files, self.scales)
        if self.scales:
            return Fp8Reader(self.folder, self.entries, self.files, self.scales, self.model.fp8_block, self.rounded)
        if self.rounded:
            return RoundingReader(self.folder, self.entries, self.files, self.rounded)
        return BoxReader(self.folder, self.entries, self.files)


class SafetensorsFiles:
    """`TensorFiles` of safetensors files. Headers are read once."""

    def __init__(
        self, folder: Path, facts: FileFacts | None = None, check_first: bool = False, when_needed: bool = False
    ):
        """`facts` belong to a manifest's files. `check_first` compares a file with its digest when it is first needed.

        `when_needed` reads headers only then, too.
        """
        self._folder = folder
        self._facts = facts or {}
        self._check_first = check_first
        self._reads_headers = when_needed or check_first
        self._headers: dict[str, dict[str, TensorBytes]] = {}

    def read_headers(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Returns (file, key) of all tensors in `names`. Raises EnvironmentFault for a damaged or missing file."""
        self._headers |= {name: read_safetensors_header(self._folder / name) for name in names}
        return [(name, key) for name, header in self._headers.items() for key in header]

    def find(self, file: str, key: str) -> TensorBytes | None:
        if self._reads_headers and file not in self._headers:
            if self._check_first:
                self.check(file)
            self.read_headers([file])
        return self._headers.get(file, {}).get(key)

    def checkable(self) -> tuple[str, ...]:
        return tuple(self._facts)

    def check(self, file: str) -> int:
        check_digest(self._folder, file, self._facts)
        return 0


def open_hf(folder: Path, predicting: bool = False, *, vision: str | None = None) -> Checkpoint:
    """Opens a Hugging Face checkpoint.

    `predicting`: its predicting layers are part of the model. `vision`: as model.vision; a vision tower that is trained
    is part of it, too.

    Raises ConfigError for an unsupported model or Megatron's format, EnvironmentFault for files that are not its
    weights.
    """
    if find_torch_dist(folder) is not None:
        raise ConfigError(
            f"{folder}: Megatron's torch_dist format, not Hugging Face files; use mrl convert "
            f"megatron-to-megatron with {TRUST_FLAG}"
        )
    try:
        model = load_model_spec(folder, vision).holding(predicting)
        check_checkpoint(folder, model)
    except (ConfigError, EnvironmentFault) as error:
        raise type(error)(str(error).removeprefix("model.path ")) from None
    files = SafetensorsFiles(folder)
    stored = files.read_headers(file.name for file in weight_files(folder))
    file_of = {key: file for file, key in stored}
    entries = tuple(_hf_entries(files, stored, model))
    codes = {entry.key: files.find(entry.file, entry.key).dtype for entry in entries if entry.role == WEIGHT}
    rounded = _rounded(codes, family_of(model).rounded)
    scales = {name: file_of[scale_of(name)] for name, code in codes.items() if code == FP8}
    if model.int4_group:
        matrices = [name for name, code in codes.items() if code == INT32]
        scales = {name: file_of[int4_scale_of(name.removesuffix(PACKED))] for name in matrices}
    if model.is_mxfp4:
        matrices = [name for name, code in codes.items() if code == CODE]
        scales = {name: file_of[name.removesuffix(BLOCKS) + OF_BLOCKS] for name in matrices}
    dtype = DTYPES[one_dtype(folder, codes | dict.fromkeys([*scales, *rounded], CODES["bfloat16"]))]
    of_matrices = {part for name in scales for part in (scale_of(name), *int4_parts(name.removesuffix(PACKED)))}
    of_matrices |= {name.removesuffix(BLOCKS) + OF_BLOCKS for name in scales}
    left_out = tuple(name for name in _left_out(stored, entries) if name not in of_matrices)
    hf_config = with_predicting(without_quantization(read_hf_config(folder)), predicting)
    checkpoint = Checkpoint(folder, folder, model, hf_config, dtype, entries, files, None, left_out, scales, rounded)
    _check_locations(checkpoint)
    return checkpoint


def _hf_entries(files: SafetensorsFiles, stored: Iterable[tuple[str, str]], model: ModelSpec) -> Iterable[StoredTensor]:
    """Returns the stored tensors of the model in the order of its layers. `stored`: (file, key) of all."""
    specs = {spec.name: spec for spec in tensor_specs(model)}
    if family_of(model).inside is None:
        file_of = {key: file for file, key in stored}
        return (_whole(spec, file_of) for spec in specs.values())
    entry_of: dict[str, StoredTensor] = {}
    for file, key in stored:
        entry = stored_tensor(model, key, files.find(file, key).shape, file)
        entry_of |= {piece.hf_name: entry for piece in entry.pieces}
    return dict.fromkeys(entry_of[name] for name in specs)  # each once, in the order of its first tensor


def _whole(spec: TensorSpec, file_of: Mapping[str, str]) -> StoredTensor:
    """Describes a tensor that is stored by itself, maybe as 4-bit integers under another name."""
    packed = spec.name + PACKED
    if packed in file_of:
        return replace(whole_tensor(spec.name, spec.shape, file_of[packed], weight_role(spec)), key=packed)
    return whole_tensor(spec.name, spec.shape, file_of[spec.name], weight_role(spec))


def stored_tensor(model: ModelSpec, key: str, shape: tuple[int, ...], file: str = "") -> StoredTensor:
    """Describes a stored tensor that contains tensors of the model. If there are several, all axes but the last are
    merged into one; vectors lie one behind the other.
    """
    inner = tuple(inner_tensors(model, key, shape))
    if not inner:
        return StoredTensor(file, key, WEIGHT, shape, None, ())
    if inner[0].shape == shape:
        return StoredTensor(file, key, WEIGHT, shape, None, whole_tensor(inner[0].name, shape).pieces)
    if len(inner[0].shape) == 1:
        (count,) = inner[0].shape
        merged: tuple[int, ...] = (len(inner) * count,)
        boxes: list[tuple[tuple[int, int], ...]] = [((n * count, n * count + count),) for n in range(len(inner))]
    elif inner[0].is_turned:
        merged = (prod(shape[:-1]), shape[-1])
        boxes = [_turned_box(each, shape) for each in inner]
    else:
        width = inner[0].shape[-1]
        merged = (sum(each.rows for each in inner), width)
        boxes = [((each.first, each.first + each.rows), (0, width)) for each in inner]
    pieces = tuple(
        Piece(each.name, Box.whole(each.shape), Box(box), each.is_turned)
        for each, box in zip(inner, boxes, strict=True)
    )
    return StoredTensor(file, key, WEIGHT, merged, None, pieces)


def _turned_box(inner: Inner, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Returns the rows and columns of a turned tensor, of a stored one whose experts lie one under the other."""
    _, height, width = shape
    expert, column = inner.expert_and_column(width)
    return (expert * height, expert * height + height), (column, column + inner.rows)


def _rounded(codes: Mapping[str, str], ends: tuple[str, ...]) -> frozenset[str]:
    """Returns float32 tensors of a bfloat16 checkpoint that are read as bfloat16. Their names may have these `ends`."""
    if set(codes.values()) - {FP8} != {CODES["float32"], CODES["bfloat16"]}:
        return frozenset()
    return frozenset(key for key, code in codes.items() if code == CODES["float32"] and key.endswith(ends))


def whole_tensor(name: str, shape: tuple[int, ...], file: str = "", role: str = WEIGHT) -> StoredTensor:
    """Describes a Hugging Face tensor that is stored unchanged."""
    whole = Box.whole(shape)
    return StoredTensor(file, name, role, shape, None, (Piece(name, whole, whole),))


def open_adapters(folder: Path) -> tuple[StoredAdapters, Manifest]:
    """Opens the adapters of an mrl checkpoint that has only them. Raises ConfigError for one with whole weights."""
    manifest = _checked_manifest(folder)
    if not manifest.adapters:
        raise ConfigError(f"{folder}: holds whole weights and no adapters; use mrl convert megatron-to-hf")
    files = SafetensorsFiles(folder)  # `stored_adapters` compares them with their digests
    files.read_headers(manifest.files())
    return stored_adapters(folder, manifest, files, manifest.model), manifest


def open_merged(folder: Path, base: Path | None = None) -> Checkpoint:
    """Opens the full model that results from a checkpoint of adapters and their base model, in the adapters' dtype.

    `base` is the present path of that model, if it has moved. Raises ConfigError for another model.
    """
    adapters, manifest = open_adapters(folder)
    recorded = manifest.adapters["base"]
    path = base or Path(recorded["path"])
    if not path.is_dir():
        raise ConfigError(
            f"{folder}: adapters on the model in {path}, which does not exist; name its folder (mrl convert "
            "--base, model.path of mrl eval), or restore it"
        )
    if base_digest(path) != recorded["digest"]:
        raise ConfigError(
            f"{folder}: adapters on another model than that in {path} (its weights' digest differs); give the model "
            "that they were trained on"
        )
    return replace(open_hf(path), dtype=adapters.dtype, adapters=adapters, has_critic=bool(manifest.critic))


def _checked_manifest(folder: Path) -> Manifest:
    """Raises EnvironmentFault for a manifest of another dtype, or damaged configuration or tokenizer files."""
    manifest = read_manifest(folder)
    if manifest.dtype not in CODES:
        raise EnvironmentFault(f"{folder / MANIFEST}: dtype {manifest.dtype}; allowed: {', '.join(CODES)}")
    check_files(folder, manifest.files_for_others(), 1)  # no rank reads them, but every conversion copies them
    return manifest


def open_mrl(folder: Path, base: Path | None = None) -> Checkpoint:
    """Opens an mrl checkpoint, after comparing its manifest with the files' headers. Raises EnvironmentFault.

    Adapters are merged into their base model; `base` as in `open_merged`.
    """
    manifest = _checked_manifest(folder)
    if manifest.adapters:
        return open_merged(folder, base)
    files = SafetensorsFiles(folder, manifest.of_actor.files_of_ranks() | manifest.files_for_others())
    stored = files.read_headers(manifest.files())
    model = manifest.model
    entries = tuple(manifest.read_entries(folder))
    left_out = _left_out(stored, entries)
    checkpoint = Checkpoint(
        folder, folder / HF_FOLDER, model, manifest.hf_config, manifest.dtype, entries, files, manifest, left_out,
        has_critic=bool(manifest.critic),
    )  # fmt: skip
    _check_locations(checkpoint)
    _check_names(checkpoint)
    Boxes(entries).check_whole(folder)
    return checkpoint


def open_saved(path: Path, base: Path | None = None) -> Checkpoint:
    """Opens the mrl checkpoint in a `step-N` folder, or the newest complete one of a run directory.

    `base` as in `open_merged`. Raises ConfigError for Megatron's format, EnvironmentFault if no complete one exists.
    """
    if find_torch_dist(path) is not None:
        raise ConfigError(
            f"{path}: Megatron's torch_dist format, whose description is a pickle; a pickle can be made to run "
            f"anything. Give {TRUST_FLAG} if you know where it comes from (its weights are then read without running "
            "what the pickle names)"
        )
    return open_mrl(step_folder(path), base)


def step_folder(path: Path) -> Path:
    """Returns the folder of an mrl checkpoint: `path` itself, or the newest complete step of the run directory
    `path`.

    Raises ConfigError for a checkpoint of another kind, EnvironmentFault if there is none.
    """
    if find_torch_dist(path) is not None:
        raise ConfigError(
            f"{path}: Megatron's torch_dist format; convert it with mrl convert megatron-to-hf, and name "
            "the result as model.path"
        )
    newest = path if (path / MANIFEST).exists() else _newest_of_run(path)
    if newest is None:
        raise EnvironmentFault(f"{path}: neither a checkpoint (no {MANIFEST}) nor a run directory with a complete one")
    if not (newest / HF_FOLDER / "config.json").is_file():
        raise EnvironmentFault(
            f"{newest / HF_FOLDER} is missing, the model's configuration and tokenizer; choose another checkpoint"
        )
    return newest


def _newest_of_run(run_dir: Path) -> Path | None:
    newest = newest_checkpoint(run_dir / "checkpoints")
    for error in newest.damaged.values():
        print(f"passed over: {error}")
    return newest.path


def find_torch_dist(path: Path) -> Path | None:
    """Returns the folder of a checkpoint in Megatron's format; None if there is none.

    It is `path`, or below it the iteration that Megatron's tracker names, or the newest. Only file names and the
    tracker are read.
    """
    if (path / TORCH_DIST_METADATA).is_file() or any(path.glob("*.distcp")):
        return path
    tracker = path / TORCH_DIST_TRACKER
    if tracker.is_file():
        try:
            word = read_text(tracker, 4096).strip()
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"{tracker}: cannot be read: {reason(error)}") from None
        if not re.fullmatch(r"\d{1,18}|[A-Za-z]\w*", word):
            raise EnvironmentFault(f"{tracker}: names no iteration: {word[:80]!r}")
        return path / (f"iter_{int(word):07d}" if word.isdecimal() else word)
    below = sorted(file.parent for file in (*path.glob("iter_*/*.distcp"), *path.glob("dist_ckpt/*.distcp")))
    if below:
        return below[-1]
    return None


def one_dtype(folder: Path, codes: dict[str, str]) -> str:
    """Returns the dtype of all weights, given each one's in `codes`. A cast would make another checkpoint."""
    names = {code: name for name, code in codes.items()}
    if len(names) == 1 and (code := next(iter(names))) in DTYPES:
        return code
    shown = ", ".join(f"{code} ({name})" for code, name in sorted(names.items()))
    raise EnvironmentFault(
        f"{folder}: weights of dtype {shown}; checkpoints are converted bit by bit, so all weights must be of one of "
        f"{', '.join(DTYPES)}: save the model in one of them first"
    )


def weight_role(tensor: TensorSpec | Shard) -> str:
    """Returns the role of a tensor's values: a constant, without master weights and moments, or a weight."""
    if tensor.is_constant:
        return CONSTANT
    return WEIGHT


def of_role(tensors: Iterable[_Tensor], role: str) -> list[_Tensor]:
    """Returns the tensors that are stored under a role."""
    return [tensor for tensor in tensors if tensor.is_constant == (role == CONSTANT)]


def code_of(role: str, dtype: str) -> str:
    """Returns safetensors' dtype of a role for weights of `dtype`. Everything except weights is float32."""
    if role == WEIGHT:
        return CODES[dtype]
    return CODES["float32"]


def _left_out(stored: Iterable[tuple[str, str]], entries: Iterable[StoredTensor]) -> tuple[str, ...]:
    return tuple(sorted({key for _, key in stored} - {entry.key for entry in entries}))


def _check_locations(checkpoint: Checkpoint) -> None:
    """Checks that every entry is in its file with the described dtype and size."""
    for entry in checkpoint.entries:
        location = checkpoint.files.find(entry.file, entry.key)
        code = _stored_code(checkpoint, entry)
        elements = entry.flat[1] - entry.flat[0] if entry.flat else prod(entry.shape)
        if code == INT32:
            elements //= COLUMNS
        if code == CODE:
            elements //= 2
        size = elements * ITEM_BITS[code] // 8
        if location is not None and (location.dtype, prod(location.shape), location.stop - location.start) == (
            code,
            elements,
            size,
        ):
            continue
        _refuse_rounded_constant(checkpoint, entry, location)
        in_file = "nothing"
        if location is not None:
            in_file = f"{location.dtype} {list(location.shape)}, {location.stop - location.start} bytes"
        raise EnvironmentFault(
            f"{checkpoint.folder / entry.file}: {entry.key} is described as {code} of {size} bytes and the file has "
            f"{in_file}; manifest and file do not belong together, choose another checkpoint"
        )


def _refuse_rounded_constant(checkpoint: Checkpoint, entry: StoredTensor, location: TensorBytes | None) -> None:
    """Raises EnvironmentFault for a constant of a router in another dtype, in a checkpoint that mrl did not write."""
    if checkpoint.manifest is None and entry.role == CONSTANT and location is not None and location.dtype != "F32":
        raise EnvironmentFault(
            f"{checkpoint.folder / entry.file}: {entry.key} is {location.dtype}, and the constants of routers are read "
            "bit by bit in F32; save them in it"
        )


def _stored_code(checkpoint: Checkpoint, entry: StoredTensor) -> str:
    """Returns safetensors' dtype that an entry must have in its file."""
    if entry.key in checkpoint.scales:
        if checkpoint.model.is_mxfp4:
            return CODE
        return INT32 if checkpoint.model.int4_group else FP8
    if entry.key in checkpoint.rounded:
        return CODES["float32"]
    return code_of(entry.role, checkpoint.dtype)


def _check_names(checkpoint: Checkpoint) -> None:
    """Checks that every role has exactly the tensors of the model in the manifest's configuration."""
    for role in checkpoint.roles:
        wanted = {spec.name for spec in of_role(tensor_specs(checkpoint.model), role)}
        described = {piece.hf_name for entry in checkpoint.entries if entry.role == role for piece in entry.pieces}
        if odd := sorted(wanted ^ described):
            raise EnvironmentFault(
                f"{checkpoint.folder / MANIFEST}: its {role} tensors are not those of its hf_config ({len(odd)} "
                f"differ): {', '.join(odd[:_SHOWN])}{' ...' if len(odd) > _SHOWN else ''}; it is damaged or of another "
                "model"
            )
