"""The `step-N` folders of a run: which are complete, the newest readable one, writing one whole, removing one, room for
more.

Room is counted from arithmetic before a run starts, and from the ranks' own sizes before each is written.
"""

import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import MappingProxyType

from mrl.checkpoint.manifest import MANIFEST, Manifest, fsync, read_manifest
from mrl.config.schedule_rules import schedule_of
from mrl.config.schema import RunConfig
from mrl.data.routes import RouteShape
from mrl.data.samples import column_bytes
from mrl.errors import EnvironmentFault
from mrl.model import ModelSpec, parameter_count
from mrl.model.precision import BF16, FLOAT32
from mrl.units import MIB


def checkpoint_steps(folder: Path) -> list[tuple[int, Path]]:
    """Finished checkpoints below `folder`, oldest first: those that have a manifest."""
    named = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.glob("step-*"))
    return sorted((int(match[1]), path) for match, path in named if match and (path / MANIFEST).exists())


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint that can be read, and the newer ones that cannot."""

    path: Path | None  # None: there is none that can be read
    manifest: Manifest | None
    damaged: dict[Path, EnvironmentFault]  # newest first, with what is wrong


def newest_checkpoint(folder: Path, known: Mapping[Path, EnvironmentFault] = MappingProxyType({})) -> Newest:
    """Looks below `folder`, newest first, until manifest and sizes are right. Bytes are compared with their digests by
    those who read them, in parallel; `known`: which were found damaged so.
    """
    damaged: dict[Path, EnvironmentFault] = {}
    for _, path in reversed(checkpoint_steps(folder)):
        try:
            if path in known:
                raise known[path]
            return Newest(path, read_manifest(path), damaged)
        except EnvironmentFault as error:
            damaged[path] = error
    return Newest(None, None, damaged)


def superseded(folder: Path, saved: int, keep: int) -> list[Path]:
    """Checkpoints that are not among the `keep` newest up to step `saved`, which was saved just now and stays.

    A folder of a later step is of another attempt; it neither counts nor goes.
    """
    return [path for step, path in checkpoint_steps(folder) if step <= saved][:-keep]


def write_atomically(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write(work)` on a fresh folder, then gives it the name `folder`, durably. What was there stays until then.

    A process killed in between leaves `work`, `folder` with `.tmp-` and a suffix; opening the run again removes it.
    """
    work = _aside(folder)
    work.mkdir()
    try:
        write(work)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
        fsync(folder.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def set_aside(checkpoint: Path) -> Path:
    """Renames a damaged `step-N` to `damaged-step-N`, so that a step trained again can be saved under its name;
    returns the new path.
    """
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
    return checkpoint.rename(aside)


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint.

    It loses its name first: a kill in the middle leaves nothing that looks like a damaged one.
    """
    try:
        shutil.rmtree(checkpoint.rename(_aside(checkpoint)))
    except OSError as error:
        print(f"warning: {checkpoint}, which is no longer wanted, cannot be removed: {error}", flush=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")


# ---------------------------------------------------------------- whether one more fits on the disk


BESIDE_TENSORS = 4 * MIB  # bytes: manifest, tokenizer and configuration of the model, rounding to blocks


def checkpoint_bytes(model: ModelSpec, dtype: str) -> int:
    """Size of one checkpoint: weights, float32 master weights where the weights are narrower, and Adam's two moments,
    each once.
    """
    precision = FLOAT32 if dtype == "float32" else BF16
    return parameter_count(model) * precision.checkpoint + BESIDE_TENSORS


def route_bytes(config: RunConfig, model: ModelSpec) -> int:
    """Of a token's routes, as they come with samples; 0 where they do not."""
    if config.actor.router_replay != "R3":
        return 0
    shape = RouteShape.of(model)
    return shape.token_bytes


def groups_ahead_bytes(config: RunConfig, model: ModelSpec) -> int:
    """Of groups that generation is ahead with, at most: they are in every checkpoint, finished ones by a second name.

    Counted as columns; files are compressed.
    """
    if (schedule := schedule_of(config)) is None:
        return 0
    lengths = config.data.max_prompt_length, config.data.max_response_length
    response = column_bytes(*lengths, route_bytes(config, model))
    return schedule.places * schedule.responses * response


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
            f"{folder}: a checkpoint needs {_size(needed)} and {_size(free)} are free; make room, or give a run "
            "directory on another disk (--run-dir)"
        )


def room_note(config: RunConfig, model: ModelSpec, folder: Path) -> list[str]:
    """A line when the disk of `folder` holds one checkpoint,
    and not as many as the run is to keep with one more beside them.
    """
    size = checkpoint_bytes(model, config.model.dtype) + groups_ahead_bytes(config, model)
    wanted = config.trainer.max_actor_ckpt_to_keep + 1
    present = len(list(folder.glob("checkpoints/step-*")))
    free = free_bytes(folder)
    if free >= size * (wanted - present):
        return []
    return [
        f"note: {_size(free)} are free, room for {free // size} more checkpoints of {_size(size)}; "
        f"trainer.max_actor_ckpt_to_keep is {wanted - 1}, and one more lies there while it is written. A save that "
        "finds no room is left out"
    ]


def _size(nbytes: int) -> str:
    return f"{ceil(nbytes / 1e7) / 100:.2f} GB" if nbytes >= 1e9 else f"{ceil(nbytes / 1e4) / 100:.2f} MB"
