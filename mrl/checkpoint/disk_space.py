"""Checks that one more checkpoint fits on the disk: by arithmetic before a run, by the ranks' real sizes before each
save.
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

BESIDE_TENSORS = 4 * MIB  # bytes for manifest, tokenizer and configuration of the model, and rounding to blocks


def checkpoint_bytes(model: ModelSpec, dtype: str, lora: Lora | None = None, has_critic: bool = False) -> int:
    """Returns the size of a checkpoint: weights, float32 master weights of narrower weights, and Adam's two moments.

    Each is stored once. With `lora`, adapters are all that is stored.
    """
    precision = FLOAT32 if dtype == "float32" else BF16
    elements = parameter_count(model)
    if model.trained_tower is not None:
        elements += model.trained_tower.sizes.parameters
    if lora is not None:
        elements = adapter_count(model, lora)
    if has_critic:
        elements += critic_count(model.holding(False))
    return elements * precision.checkpoint + BESIDE_TENSORS


def route_bytes(actor: ActorConfig, model: ModelSpec) -> int:
    """Returns the bytes of a token's routes in samples; 0 if samples have none."""
    if actor.router_replay != "R3":
        return 0
    shape = RouteShape.of(model)
    return shape.token_bytes


def groups_ahead_bytes(schedule: Schedule, data: DataConfig, token_routes: int) -> int:
    """Returns an upper bound of the bytes that groups generated ahead add to a checkpoint.

    Every checkpoint contains them, but finished groups are hard-linked, not copied. The bound counts columns without
    the compression of files. `token_routes`: bytes of a token's routes.
    """
    if schedule.is_synchronous:
        return 0
    response = column_bytes(data.max_prompt_length, data.max_response_length, token_routes)
    return schedule.max_groups * schedule.responses * response


def replay_bytes(schedule: Schedule, data: DataConfig, token_routes: int, async_save: bool) -> int:
    """Returns an upper bound of the bytes of responses that wait for a start from the newest checkpoint.

    They are those of one step. While the next checkpoint is written beside training, those behind it are there too.
    `token_routes`: bytes of a token's routes.
    """
    response = column_bytes(data.max_prompt_length, data.max_response_length, token_routes)
    return schedule.batch * schedule.responses * response * (1 + async_save)


def free_bytes(folder: Path) -> int:
    """Returns the space for this user on the disk of `folder`, or of its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_disk_space(folder: Path, needed: int) -> None:
    """Raises EnvironmentFault if the disk of `folder` has fewer than `needed` bytes free."""
    free = free_bytes(folder)
    if free < needed:
        raise EnvironmentFault(
            f"{folder}: a checkpoint needs {_size(needed)} and {_size(free)} are free; make room, or give a run "
            "directory on another disk (--run-dir)"
        )


def disk_space_note(folder: Path, size: int, kept: int, replays: int = 0) -> list[str]:
    """Returns a line for a disk that has room for one checkpoint, but not for all kept ones.

    `folder` has the checkpoints, `size` is the bytes of one, `kept` is the number that the run keeps. `replays`: see
    `replay_bytes`.
    """
    wanted = kept + 1
    present = len(list(folder.glob("checkpoints/step-*")))
    free = free_bytes(folder)
    if free >= size * (wanted - present) + replays:
        return []
    fitting = max(0, free - replays) // size
    beside = ""
    if replays:
        beside = f" beside up to {_size(replays)} of responses that a restart would use"
    return [
        f"note: {_size(free)} are free, room for {fitting} more checkpoints of {_size(size)}{beside}; "
        f"trainer.max_actor_ckpt_to_keep is {wanted - 1}, and one more exists while it is written. A save without "
        "enough space is skipped"
    ]


def _size(nbytes: int) -> str:
    if nbytes >= 1e9:
        return f"{ceil(nbytes / 1e7) / 100:.2f} GB"
    return f"{ceil(nbytes / 1e4) / 100:.2f} MB"
