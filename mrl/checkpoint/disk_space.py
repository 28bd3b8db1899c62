"""Whether one more checkpoint fits on the disk: counted from arithmetic before a run starts, and from the ranks' own
sizes before each is written.
"""

import shutil
from math import ceil
from pathlib import Path

from mrl.config.schema import ActorConfig, DataConfig
from mrl.data.routes import RouteShape
from mrl.data.samples import column_bytes
from mrl.errors import EnvironmentFault
from mrl.model import ModelSpec, parameter_count
from mrl.model.adapters import Lora, adapter_count
from mrl.model.critic_weights import critic_count
from mrl.model.precision import BF16, FLOAT32
from mrl.schedule.staleness import Schedule
from mrl.units import MIB

BESIDE_TENSORS = 4 * MIB  # bytes: manifest, tokenizer and configuration of the model, rounding to blocks


def checkpoint_bytes(model: ModelSpec, dtype: str, lora: Lora | None = None, has_critic: bool = False) -> int:
    """Size of one checkpoint: weights, float32 master weights where the weights are narrower, and Adam's two moments,
    each once. `lora`: of adapters, which then are all that it has.
    """
    precision = FLOAT32 if dtype == "float32" else BF16
    elements = parameter_count(model)
    if lora is not None:
        elements = adapter_count(model, lora)
    if has_critic:
        elements += critic_count(model)
    return elements * precision.checkpoint + BESIDE_TENSORS


def route_bytes(actor: ActorConfig, model: ModelSpec) -> int:
    """Bytes of a token's routes as they come with samples; 0 where they do not come."""
    if actor.router_replay != "R3":
        return 0
    shape = RouteShape.of(model)
    return shape.token_bytes


def groups_ahead_bytes(schedule: Schedule, data: DataConfig, token_routes: int) -> int:
    """Upper bound of the bytes that groups generated ahead add to a checkpoint.

    They are in every checkpoint; finished groups are hard-linked, not copied. Columns are counted, and files are
    compressed. `token_routes`: bytes of a token's routes.
    """
    if schedule.is_synchronous:
        return 0
    response = column_bytes(data.max_prompt_length, data.max_response_length, token_routes)
    return schedule.max_groups * schedule.responses * response


def free_bytes(folder: Path) -> int:
    """Space left for this user on the disk of `folder`, or of its nearest parent that is there."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_disk_space(folder: Path, needed: int) -> None:
    """Raises EnvironmentFault when `needed` bytes do not fit on the disk of `folder`."""
    free = free_bytes(folder)
    if free < needed:
        raise EnvironmentFault(
            f"{folder}: a checkpoint needs {_size(needed)} and {_size(free)} are free; make room, or give a run "
            "directory on another disk (--run-dir)"
        )


def disk_space_note(folder: Path, size: int, kept: int) -> list[str]:
    """A line for a disk that has room for one checkpoint, but not for all that the run is to keep and one more.

    `folder`: of the checkpoints; `size`: bytes of one; `kept`: how many the run is to keep.
    """
    wanted = kept + 1
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
    if nbytes >= 1e9:
        return f"{ceil(nbytes / 1e7) / 100:.2f} GB"
    return f"{ceil(nbytes / 1e4) / 100:.2f} MB"
