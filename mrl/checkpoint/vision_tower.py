"""The vision tower of the model around the trained text model: copied byte for byte beside new weights.

A tower that was trained is among the new weights, and is written with them.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.checkpoint.manifest import FileFacts, Manifest, StoredTensor
from mrl.checkpoint.open_checkpoint import Checkpoint, open_hf
from mrl.checkpoint.planned_file import BLOCK_BYTES
from mrl.checkpoint.safetensors_file import safetensors_header, write_blocks
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model.hf_files import TensorBytes, check_same_architecture, read_safetensors_header, weight_files
from mrl.model.peft_files import tower_digest
from mrl.model.wrapped import VISION_TOWER

FILE = "model-vision.safetensors"
TOWER = "vision_tower"  # a key of Manifest.trainer: digest of the frozen tower that a run's text model was trained with
_OPTION = "--vision-from"


@dataclass(frozen=True)
class Whole:
    """A checkpoint of the model around the text model. Weights are written in its form."""

    checkpoint: Checkpoint
    # for each tensor of a tower that was not trained: its file and location
    tower: dict[str, tuple[Path, TensorBytes]]

    @property
    def entries(self) -> list[StoredTensor]:
        """The trained tensors as the files have them."""
        return list(self.checkpoint.entries)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes in the files, by key."""
        files = self.checkpoint.files
        return {entry.key: files.find(entry.file, entry.key).shape for entry in self.entries}

    @property
    def tower_bytes(self) -> int:
        """Bytes of the tower's tensors."""
        return sum(tensor.stop - tensor.start for _, tensor in self.tower.values())


def open_whole(folder: Path, source: Checkpoint) -> Whole:
    """Opens the checkpoint in `folder`, which must contain the same text model as `source`.

    Raises ConfigError for one without a vision tower, with another one than `source` was trained with, of another
    architecture or dtype, and the errors of `open_hf`.
    """
    checkpoint = open_hf(folder, vision=source.model.trained_part)
    check_same_architecture(_OPTION, folder, source.model)
    if checkpoint.dtype != source.dtype:
        raise ConfigError(
            f"{_OPTION} {folder}: weights are {checkpoint.dtype}, those to be written {source.dtype}; give a "
            "checkpoint of the same dtype"
        )
    tower = {}
    for file in weight_files(folder):
        header = read_safetensors_header(file)
        tower |= {name: (file, tensor) for name, tensor in header.items() if name.startswith(VISION_TOWER)}
    if not tower or not checkpoint.model.is_wrapped:
        raise ConfigError(f"{_OPTION} {folder}: it has no vision tower; leave the option out")
    if source.manifest is not None:
        check_same_tower(f"{_OPTION} {folder}", tower_digest(folder), source.manifest, source.folder)
    if source.model.trained_tower is not None:
        tower = {}
    return Whole(checkpoint, tower)


def check_same_tower(where: str, tower: str | None, manifest: Manifest, folder: Path) -> None:
    """Raises ConfigError if another vision tower was trained with. `tower`: digest of the one in `where`; None: of a
    run that sees nothing. `manifest`: of the checkpoint in `folder`.
    """
    then = manifest.trainer.get(TOWER)  # checkpoints of text, and older ones, have none
    if None not in (then, tower) and then != tower:
        raise ConfigError(
            f"{where} has another vision tower than the one that {folder} was trained with, by its digest; give the "
            "model that the run began with"
        )


def copy_tower(whole: Whole, folder: Path) -> FileFacts:
    """Writes the tower's tensors into a file of `folder`, if it was not trained. Returns the file's size and digest.

    Raises OSError, and EnvironmentFault for a source file that was truncated meanwhile.
    """
    if not whole.tower:
        return {}
    return {FILE: write_blocks(folder / FILE, _blocks(whole), digest=True, durable=True)}


def _blocks(whole: Whole) -> Iterator[bytes]:
    described = (
        (name, tensor.dtype, tensor.shape, tensor.stop - tensor.start) for name, (_, tensor) in whole.tower.items()
    )
    yield safetensors_header(described, {"format": "pt"})
    for file, tensor in whole.tower.values():
        with file.open("rb") as stream:
            yield from _read(stream, tensor)


def _read(stream: Any, tensor: TensorBytes) -> Iterator[bytes]:
    stream.seek(tensor.start, os.SEEK_SET)
    left = tensor.stop - tensor.start
    while left:
        block = stream.read(min(left, BLOCK_BYTES))
        if not block:
            raise EnvironmentFault(f"{stream.name} ended early: it is being changed, or was cut short")
        yield block
        left -= len(block)
