"""A checkpoint to read, Hugging Face's or ours, as one thing: stored blocks in Hugging Face coordinates, a region of them at a time.

Bits are moved and never interpreted, so numpy's unsigned integers stand for every dtype. Files are read with `pread` into small buffers:
mapped pages would count as this process's memory.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mrl.checkpoint.manifest import MANIFEST, WEIGHT, Entry, Manifest, check_disjoint, holders, read_manifest
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import load_model_spec, model_spec, read_hf_config, tensor_specs
from mrl.model.boxes import Box
from mrl.model.hf_files import TensorBytes, check_checkpoint, read_safetensors_header, weight_files
from mrl.model.megatron_shards import Piece
from mrl.model.spec import ModelSpec

HF_FOLDER = "hf"  # configuration and tokenizer, beside the weights of every checkpoint of ours
DTYPES = {"F32": "float32", "BF16": "bfloat16"}  # safetensors' names -> the configuration's
CODES = {name: code for code, name in DTYPES.items()}
SCRATCH_BYTES = 1024**2
_SHOWN = 5


@dataclass(frozen=True)
class Checkpoint:
    """What is stored where. `manifest` is None unless it is one of ours."""

    folder: Path
    hf_files: Path  # the folder of configuration and tokenizer
    model: ModelSpec
    hf_config: dict[str, Any]
    dtype: str  # of the weights: "float32", "bfloat16"
    entries: tuple[Entry, ...]
    tensors: Mapping[tuple[str, str], TensorBytes]  # (file, key) -> its place; from the files' own headers
    manifest: Manifest | None
    left_out: tuple[str, ...]  # tensors that no conversion carries: those that a model computes by itself, and random states

    @property
    def roles(self) -> tuple[str, ...]:
        """What is stored of the parameters: weights, and perhaps master weights and moments."""
        return tuple(dict.fromkeys(entry.role for entry in self.entries))

    @property
    def identity(self) -> str:
        """Changes when a file does: its size or the time it was written."""
        names = sorted({entry.file for entry in self.entries})
        facts = [(name, (stat := (self.folder / name).stat()).st_size, stat.st_mtime_ns) for name in names]
        return hashlib.sha256(repr((str(self.folder.resolve()), facts, self.hf_config)).encode()).hexdigest()


def open_hf(folder: Path) -> Checkpoint:
    """A Hugging Face checkpoint. Raises ConfigError for an unsupported model, EnvironmentFault for files that are not its weights."""
    try:
        model = load_model_spec(folder)
        check_checkpoint(folder, model)
    except (ConfigError, EnvironmentFault) as error:
        raise type(error)(str(error).removeprefix("model.path ")) from None
    found = {(f.name, name): at for f in weight_files(folder) for name, at in read_safetensors_header(f).items()}
    file_of = {name: file for file, name in found}
    entries = []
    for spec in tensor_specs(model):
        whole = Box.whole(spec.shape)
        entries.append(Entry(file_of[spec.name], spec.name, WEIGHT, spec.shape, None, (Piece(spec.name, whole, whole),)))
    code = one_dtype(folder, {entry.key: found[entry.file, entry.key].dtype for entry in entries})
    left_out = _left_out(found, entries)
    checkpoint = Checkpoint(folder, folder, model, read_hf_config(folder), DTYPES[code], tuple(entries), found, None, left_out)
    _check_places(checkpoint)
    return checkpoint


def open_ours(folder: Path) -> Checkpoint:
    """A checkpoint of ours, with the manifest held against the files' headers. Raises EnvironmentFault."""
    manifest = read_manifest(folder)
    if manifest.dtype not in CODES:
        raise EnvironmentFault(f"{folder / MANIFEST}: dtype {manifest.dtype}; allowed: {', '.join(CODES)}")
    found = {(name, key): at for name in manifest.files() for key, at in read_safetensors_header(folder / name).items()}
    model = model_spec(manifest.hf_config)
    entries = tuple(manifest.entries())
    left_out = _left_out(found, entries)
    checkpoint = Checkpoint(folder, folder / HF_FOLDER, model, manifest.hf_config, manifest.dtype, entries, found, manifest, left_out)
    _check_places(checkpoint)
    _check_names(checkpoint)
    check_disjoint(folder, holders(entries))
    return checkpoint


def _left_out(found: Iterable[tuple[str, str]], entries: Iterable[Entry]) -> tuple[str, ...]:
    return tuple(sorted({key for _, key in found} - {entry.key for entry in entries}))


def one_dtype(folder: Path, codes: dict[str, str]) -> str:
    """All weights are of one dtype, as in training: a cast would not be the same checkpoint any more."""
    names = {code: name for name, code in codes.items()}
    if len(names) == 1 and (code := next(iter(names))) in DTYPES:
        return code
    shown = ", ".join(f"{code} ({name})" for code, name in sorted(names.items()))
    raise EnvironmentFault(
        f"{folder}: weights of dtype {shown}; checkpoints are converted bit by bit, so all weights must be of one of "
        f"{', '.join(DTYPES)}: save the model in one of them first"
    )


def _check_places(checkpoint: Checkpoint) -> None:
    """Every entry is in its file, with the dtype and the bytes that it describes."""
    for entry in checkpoint.entries:
        at, code = checkpoint.tensors.get((entry.file, entry.key)), code_of(entry.role, checkpoint.dtype)
        size = (entry.flat[1] - entry.flat[0] if entry.flat else prod(entry.shape)) * item_bytes(code)
        if at is None or at.dtype != code or at.stop - at.start != size or prod(at.shape) * item_bytes(code) != size:
            has = "nothing" if at is None else f"{at.dtype} {list(at.shape)}, {at.stop - at.start} bytes"
            raise EnvironmentFault(
                f"{checkpoint.folder / entry.file}: {entry.key} is described as {code} of {size} bytes and the file has {has}; "
                "manifest and file do not belong together, choose another checkpoint"
            )


def _check_names(checkpoint: Checkpoint) -> None:
    """Every role is of exactly the tensors of the model that the manifest's configuration describes."""
    wanted = {spec.name for spec in tensor_specs(checkpoint.model)}
    for role in checkpoint.roles:
        found = {piece.hf_name for entry in checkpoint.entries if entry.role == role for piece in entry.pieces}
        if odd := sorted(wanted ^ found):
            raise EnvironmentFault(
                f"{checkpoint.folder / MANIFEST}: its {role} tensors are not those of its hf_config ({len(odd)} differ): "
                f"{', '.join(odd[:_SHOWN])}{' ...' if len(odd) > _SHOWN else ''}; it is damaged or of another model"
            )


def code_of(role: str, dtype: str) -> str:
    """Safetensors' dtype of a role in a checkpoint whose weights are `dtype`: master weights and moments are always float32."""
    return CODES[dtype] if role == WEIGHT else CODES["float32"]


def item_bytes(code: str) -> int:
    """Bytes of one element."""
    return {"F32": 4, "BF16": 2}[code]


def word_type(code: str) -> np.dtype:
    """The unsigned integer that carries the bits of an element."""
    return np.dtype(f"<u{item_bytes(code)}")


class Reader:
    """Fills regions from a checkpoint's files, which stay open until `close`."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._holders = holders(checkpoint.entries)
        self._handles: dict[str, int] = {}
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8)

    def close(self) -> None:
        """Closes the files."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def fill(self, role: str, name: str, box: Box, out: np.ndarray) -> None:
        """Writes region `box` of tensor `name` into `out`, words of the role's width and of the box's shape.

        Raises EnvironmentFault when the checkpoint does not hold all of it.
        """
        filled = 0
        for group, held in self._holders.get((role, name), ()):
            common = held.hf_box.intersect(box)
            if common is None:
                continue
            target = out[common.rebase(box, Box.whole(box.shape)).slices]
            self._copy(group, common.rebase(held.hf_box, held.local_box), target)
            filled += common.volume
        if filled != box.volume:
            raise EnvironmentFault(
                f"{self.checkpoint.folder}: holds {filled} of {box.volume} elements of {name} ({role}) at {box.origin}; "
                "it is damaged or of another model"
            )

    def _copy(self, group: tuple[Entry, ...], local: Box, target: np.ndarray) -> None:
        """Region `local` of a local tensor that is stored in the flat parts `group`. Whole rows are read at once."""
        (first, last), *tail = local.ranges
        columns, shape = Box(tuple(tail)), group[0].shape
        if columns == Box.whole(shape[1:]) and target.flags.c_contiguous:
            self._read_rows(group, first, target.reshape(-1))
            return
        row_bytes = prod(shape[1:]) * target.itemsize
        step = max(1, len(self._scratch) // row_bytes)
        space = self._scratch if row_bytes <= len(self._scratch) else np.empty(row_bytes, np.uint8)
        for row in range(first, last, step):
            count = min(step, last - row)
            rows = space[: count * row_bytes].view(target.dtype).reshape(count, *shape[1:])
            self._read_rows(group, row, rows.reshape(-1))
            target[row - first : row - first + len(rows)] = rows[(slice(None), *columns.slices)]

    def _read_rows(self, group: tuple[Entry, ...], first: int, out: np.ndarray) -> None:
        """Fills the flat `out` from row `first` on."""
        begin = first * prod(group[0].shape[1:])
        end, read = begin + out.size, 0
        for entry in group:
            low, high = entry.flat or (0, prod(entry.shape))
            start, stop = max(begin, low), min(end, high)
            if start < stop:
                at = self.checkpoint.tensors[entry.file, entry.key].start + (start - low) * out.itemsize
                self._read_bytes(entry.file, at, memoryview(out[start - begin : stop - begin]).cast("B"))
                read += stop - start
        if read != out.size:
            raise EnvironmentFault(
                f"{self.checkpoint.folder}: {group[0].key} is stored in parts that do not add up; a rank's file is missing"
            )

    def _read_bytes(self, file: str, at: int, view: memoryview) -> None:
        if file not in self._handles:
            self._handles[file] = os.open(self.checkpoint.folder / file, os.O_RDONLY)
        try:
            while view:
                count = os.preadv(self._handles[file], [view], at)
                if count == 0:
                    raise EnvironmentFault(f"{self.checkpoint.folder / file} ended early: it is being changed, or was cut short")
                view, at = view[count:], at + count
        except OSError as error:
            raise EnvironmentFault(f"{self.checkpoint.folder / file} cannot be read ({error.strerror}); the disk may be damaged") from error
