"""Proofs about a plan, from its copies alone; of the planner they use nothing but the descriptions of the two sides.

A fault is a sentence that names tensor and parameter. A plan that has one is never executed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from mrl.model.boxes import cover_fault
from mrl.model.layout import RolloutLayout
from mrl.model.megatron_shards import Shard
from mrl.model.vllm_parameters import Dialect, TargetParameter, TargetPiece, target_parameters
from mrl.reshard.messages import Copy, Message
from mrl.reshard.streams import Grain, Holder, Miniature, Stream

ShardTable = Mapping[tuple[int, str], Shard]  # by chunk and name


class PlanFault(Exception):
    """A plan that does not hold: a defect of mrl, never the user's."""


def shard_table(shards: Iterable[Shard]) -> ShardTable:
    """The shards of one rank by chunk and name."""
    return {(shard.vp_chunk, shard.megatron_name): shard for shard in shards}


def target_faults(parameters: Sequence[TargetParameter], copies: Iterable[Copy]) -> Iterator[str]:
    """What `copies` of one worker do not write exactly once, or write with something else than its parameters want."""
    arriving: dict[tuple[str, str], list[Copy]] = defaultdict(list)
    for copy in copies:
        arriving[copy.parameter, copy.hf_name].append(copy)
    for parameter in parameters:
        for piece in parameter.pieces:
            yield from _piece_faults(parameter.name, piece, arriving.pop((parameter.name, piece.hf_name), []))
    for name, hf_name in arriving:
        yield f"{name} receives {hf_name}, which does not belong there"


def _piece_faults(name: str, piece: TargetPiece, copies: Sequence[Copy]) -> Iterator[str]:
    if fault := cover_fault(piece.hf_box, [copy.hf_box for copy in copies]):
        yield f"{name}: {piece.hf_name} {fault}"
    for copy in copies:
        if copy.axes != piece.axes or not _lies_right(copy, piece):
            yield f"{name}: {piece.hf_name} {copy.hf_box.ranges} is written to {copy.target_box.ranges} along {copy.axes}"


def _lies_right(copy: Copy, piece: TargetPiece) -> bool:
    """Whether the copy stands in the parameter as far from the piece's corner as it stands in the tensor."""
    wanted = list(piece.local_box.ranges)
    for (start, stop), (first, _), axis in zip(copy.hf_box.ranges, piece.hf_box.ranges, piece.axes, strict=True):
        origin = piece.local_box.ranges[axis][0] - first
        wanted[axis] = (start + origin, stop + origin)
    return copy.target_box.ranges == tuple(wanted)


def source_fault(shards: ShardTable, copy: Copy) -> str | None:
    """Why a rank with these shards cannot make the copy; None when it can."""
    shard = shards.get((copy.vp_chunk, copy.megatron_name))
    if shard is None:
        return f"there is no {copy.megatron_name} in chunk {copy.vp_chunk}"
    for piece in shard.pieces:
        if piece.hf_name == copy.hf_name and piece.local_box.contains(copy.source_box):
            offsets = [hf[0] - local[0] for hf, local in zip(piece.hf_box.ranges, piece.local_box.ranges, strict=True)]
            if all((a + by, b + by) == at for (a, b), by, at in zip(copy.source_box.ranges, offsets, copy.hf_box.ranges, strict=True)):
                return None
    return f"{copy.source_box.ranges} of {copy.megatron_name} in chunk {copy.vp_chunk} is not {copy.hf_name} {copy.hf_box.ranges}"


def template_faults(
    small: Miniature, pipeline: int, rollout: RolloutLayout, streams: Sequence[Stream], dialect: Dialect, dtype: str
) -> Iterator[str]:
    """What is wrong with the templates of a plan for `pipeline` stages: the cover of every place inside an engine, and every sender."""
    # block n + 1 is layer n of the miniature
    shards = [shard_table(held) for held in small.shards]
    seen = set()
    for place, one in enumerate(streams):
        grains = [(block - 1, grain) for block, part in enumerate(one.blocks) for grain in part]
        parameters = target_parameters(small.model, rollout, place, dialect, dtype)
        for fault in target_faults(parameters, [_named(grain, layer, grain.holders[0]) for layer, grain in grains]):
            yield f"worker {place} of each engine: {fault}"
        for layer, grain in grains:
            key = (layer, grain.hf_name, grain.hf_box, grain.source_box, id(grain.holders))
            if key in seen:
                continue
            seen.add(key)
            for holder in grain.holders:
                rank = small.rank_of(holder, pipeline)
                if fault := source_fault(shards[rank], _named(grain, layer, holder)):
                    yield f"rank {holder.offset} of its stage: {fault}"


def _named(grain: Grain, layer: int, holder: Holder) -> Copy:
    names = (text.format(layer) for text in (grain.hf_name, holder.megatron_name, grain.parameter))
    hf_name, megatron_name, parameter = names
    return Copy(hf_name, grain.hf_box, megatron_name, 0, grain.source_box, parameter, grain.target_box, grain.axes)


def worker_faults(
    parameters: Sequence[TargetParameter], messages: Iterable[Message], shards_of: Callable[[int], ShardTable]
) -> Iterator[str]:
    """What is wrong with all that one worker receives: boxes that their senders do not hold, and what is not written exactly once."""
    copies: list[Copy] = []
    for message in messages:
        shards = shards_of(message.source)
        for copy in message.copies:
            if fault := source_fault(shards, copy):
                yield f"rank {message.source}: {fault}"
        copies += message.copies
    yield from target_faults(parameters, copies)
