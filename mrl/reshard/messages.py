"""The parts of a plan: the devices of the processes, one copy, one message.

Parameter names are opaque strings here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mrl.model.boxes import Box
from mrl.model.device_grid import DeviceId


@dataclass(frozen=True)
class Topology:
    """Node and device of each source rank and each engine worker. Processes with equal `DeviceId` share a device."""

    ranks: tuple[DeviceId, ...]
    workers: tuple[DeviceId, ...]


@dataclass(frozen=True)
class Copy:
    """One box from one source shard into one target parameter.

    `source_box` and `hf_box` have the same shape. `target_box` has it along `axes`, as in TargetPiece.
    """

    hf_name: str
    hf_box: Box
    source_name: str
    vp_chunk: int
    source_box: Box
    parameter: str
    target_box: Box
    axes: tuple[int, ...]
    dtype: str | None = None  # on the wire; None means the plan's


@dataclass(frozen=True)
class Message:
    """All that one rank sends to one worker in one round.

    The copies follow each other, each contiguous in Hugging Face orientation, in the engine's number format or their
    own. Copies with a wider format of their own come first, so that every element is aligned.
    """

    round: int
    source: int
    worker: int
    copies: tuple[Copy, ...]
    nbytes: int


def by_round(messages: Iterable[Message]) -> list[list[Message]]:
    """Groups the messages of one process by round, in their order. Empty rounds are left out."""
    rounds: dict[int, list[Message]] = {}
    for message in messages:
        rounds.setdefault(message.round, []).append(message)
    return list(rounds.values())


def module_of(parameter: str) -> str:
    """Returns the module of a target parameter. The engine creates and processes a module as a unit."""
    return parameter.rpartition(".")[0]
