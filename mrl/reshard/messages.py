"""The words of a plan: where processes stand, one copy, one message."""

from dataclasses import dataclass

from mrl.model.boxes import Box
from mrl.model.device_grid import Place

__all__ = ["Copy", "Message", "Place", "Topology"]


@dataclass(frozen=True)
class Topology:
    """Where each Megatron rank and each vLLM worker stands. Two processes at one place share the device."""

    ranks: tuple[Place, ...]
    workers: tuple[Place, ...]


@dataclass(frozen=True)
class Copy:
    """One box from one shard into one parameter.

    `source_box` and `hf_box` have one shape; `target_box` has it along `axes` (see TargetPiece).
    """

    hf_name: str
    hf_box: Box
    megatron_name: str
    vp_chunk: int
    source_box: Box
    parameter: str
    target_box: Box
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Message:
    """All that one source sends to one worker in one round: its copies in order, each contiguous in Hugging Face orientation, in the
    engine's number format."""

    round: int
    source: int
    worker: int
    copies: tuple[Copy, ...]
    nbytes: int
