"""Whether a checkpoint fits on its disk: from arithmetic before a run starts, and from the ranks' own sizes before each is written."""

import shutil
from math import ceil
from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.errors import EnvironmentFault
from mrl.model import ModelSpec, parameter_count
from mrl.model.precision import BF16, FLOAT32

BESIDE_TENSORS = 4 * 1024**2  # bytes: manifest, tokenizer and configuration of the model, rounding to blocks


def checkpoint_bytes(model: ModelSpec, dtype: str) -> int:
    """Size of one checkpoint: weights, float32 master weights where the weights are narrower, and Adam's two moments, each once."""
    precision = FLOAT32 if dtype == "float32" else BF16
    return parameter_count(model) * precision.checkpoint + BESIDE_TENSORS


def free_bytes(folder: Path) -> int:
    """Space left for this user on the disk of `folder`, or of its nearest parent that is there."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_room(folder: Path, needed: int) -> None:
    """Raises EnvironmentFault when `needed` bytes do not fit on the disk of `folder`."""
    free = free_bytes(folder)
    if free < needed:
        raise EnvironmentFault(
            f"{folder}: a checkpoint needs {_size(needed)} and {_size(free)} are free; make room, or give a run directory on another disk "
            "(--run-dir)"
        )


def room_note(config: RunConfig, model: ModelSpec, folder: Path) -> list[str]:
    """A line when the disk of `folder` holds one checkpoint, and not as many as the run is to keep with one more beside them."""
    one, wanted = checkpoint_bytes(model, config.model.dtype), config.trainer.max_actor_ckpt_to_keep + 1
    there = len(list(folder.glob("checkpoints/step-*")))
    free = free_bytes(folder)
    if free >= one * (wanted - there):
        return []
    return [
        f"note: {_size(free)} are free, room for {free // one} more checkpoints of {_size(one)}; trainer.max_actor_ckpt_to_keep is "
        f"{wanted - 1}, and one more lies there while it is written. A save that finds no room is left out"
    ]


def _size(size: int) -> str:
    return f"{ceil(size / 1e7) / 100:.2f} GB" if size >= 1e9 else f"{ceil(size / 1e4) / 100:.2f} MB"
