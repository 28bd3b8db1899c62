"""What a plan consists of: where the processes stand, one copy, one message.

Parameter names are opaque strings here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mrl.model.boxes import Box
from mrl.model.device_grid import Place


@dataclass(frozen=True)
class Topology:
    """Where each source rank and each engine worker stands. Two processes at one place share the device."""

    ranks: tuple[Place, ...]
    workers: tuple[Place, ...]


@dataclass(frozen=True)
class Copy:
    """One box from one source shard into one target parameter.

    `source_box` and `hf_box` have one shape; `target_box` has it along `axes` (see TargetPiece).
    """

    hf_name: str
    hf_box: Box
    source_name: str
    vp_chunk: int
    source_box: Box
    parameter: str
    target_box: Box
    axes: tuple[int, ...]
    dtype: str | None = None  # on the wire; None: the plan's


@dataclass(frozen=True)
class Message:
    """All that one rank sends to one worker in one round.

    Its copies follow each other in order, each contiguous in Hugging Face orientation, in the engine's number format
    or their own. Those of a wider format come first, so that every element is aligned.
    """

    round: int
    source: int
    worker: int
    copies: tuple[Copy, ...]
    nbytes: int


def by_round(messages: Iterable[Message]) -> list[list[Message]]:
    """Messages of one process, round by round in their order; empty rounds left out."""
    rounds: dict[int, list[Message]] = {}
    for message in messages:
        rounds.setdefault(message.round, []).append(message)
    return list(rounds.values())


def module_of(parameter: str) -> str:
    """The module of a target parameter: what the engine materialises and processes as one."""
    return parameter.rpartition(".")[0]
