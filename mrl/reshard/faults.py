"""Faults of a plan, found from its copies and the descriptions of both sides alone.

A fault is a sentence that names tensor and parameter. A plan with a fault is never executed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from mrl.model.boxes import cover_fault
from mrl.model.layout import RolloutLayout
from mrl.model.megatron_shards import Piece, Shard
from mrl.model.vllm_parameters import Dialect, TargetParameter, TargetPiece, target_parameters
from mrl.reshard.messages import Copy, Message
from mrl.reshard.streams import Grain, Miniature, StreamTemplate

ShardTable = Mapping[tuple[int, str], Shard]  # by chunk and name


class PlanFault(Exception):
    """A plan with a fault. This is a defect of mrl, never the user's."""


def shard_table(shards: Iterable[Shard]) -> ShardTable:
    """Returns the shards of one rank by chunk and name."""
    return {(shard.vp_chunk, shard.megatron_name): shard for shard in shards}


def target_faults(parameters: Sequence[TargetParameter], copies: Iterable[Copy]) -> Iterator[str]:
    """Yields elements that the `copies` of one worker do not write exactly once, or fill from a wrong offset."""
    arriving: dict[tuple[str, str], list[Copy]] = defaultdict(list)
    for copy in copies:
        arriving[copy.parameter, copy.hf_name].append(copy)
    for parameter in parameters:
        pieces: dict[str, list[TargetPiece]] = defaultdict(list)
        for piece in parameter.pieces:
            pieces[piece.hf_name].append(piece)
        for hf_name, of_tensor in pieces.items():
            yield from _tensor_faults(parameter.name, of_tensor, arriving.pop((parameter.name, hf_name), []))
    for name, hf_name in arriving:
        yield f"{name} receives {hf_name}, which does not belong there"


def _tensor_faults(name: str, pieces: Sequence[TargetPiece], copies: Sequence[Copy]) -> Iterator[str]:
    """Yields faults of the copies of one tensor, of which a parameter may hold several pieces.

    A copy outside all pieces is checked against the first one.
    """
    if len(pieces) == 1:
        yield from _piece_faults(name, pieces[0], copies)
        return
    of_piece: list[list[Copy]] = [[] for _ in pieces]
    for copy in copies:
        within = (number for number, piece in enumerate(pieces) if piece.hf_box.contains(copy.hf_box))
        of_piece[next(within, 0)].append(copy)
    for piece, own in zip(pieces, of_piece, strict=True):
        yield from _piece_faults(name, piece, own)


def _piece_faults(name: str, piece: TargetPiece, copies: Sequence[Copy]) -> Iterator[str]:
    if fault := cover_fault(piece.hf_box, [copy.hf_box for copy in copies]):
        yield f"{name}: {piece.hf_name} {fault}"
    for copy in copies:
        if copy.axes != piece.axes or not _is_in_place(copy, piece):
            yield (
                f"{name}: {piece.hf_name} {copy.hf_box.ranges} is written to {copy.target_box.ranges} along {copy.axes}"
            )


def _is_in_place(copy: Copy, piece: TargetPiece) -> bool:
    """Tells whether the copy has the same offset from the piece's corner in the parameter as in the tensor."""
    wanted = list(piece.local_box.ranges)
    for (start, stop), (first, _), axis in zip(copy.hf_box.ranges, piece.hf_box.ranges, piece.axes, strict=True):
        origin = piece.local_box.ranges[axis][0] - first
        wanted[axis] = (start + origin, stop + origin)
    return copy.target_box.ranges == tuple(wanted)


def source_fault(shards: ShardTable, copy: Copy) -> str | None:
    """Returns why a rank with these shards cannot make the copy; None when it can."""
    shard = shards.get((copy.vp_chunk, copy.source_name))
    if shard is None:
        return f"there is no {copy.source_name} in chunk {copy.vp_chunk}"
    if any(piece.hf_name == copy.hf_name and _is_held(piece, copy) for piece in shard.pieces):
        return None
    return (
        f"{copy.source_box.ranges} of {copy.source_name} in chunk {copy.vp_chunk} is not "
        f"{copy.hf_name} {copy.hf_box.ranges}"
    )


def _is_held(piece: Piece, copy: Copy) -> bool:
    """Tells whether the copy's source box is inside the piece, and as far from its corner as in the tensor.

    The loop makes no new boxes, as a plan asks this a hundred thousand times.
    """
    boxes = (copy.source_box, copy.hf_box, piece.local_box, piece.hf_box)
    for source, tensor, local, origin in zip(*(box.ranges for box in boxes), strict=True):
        if not (local[0] <= source[0] and source[1] <= local[1]):
            return False
        offset = origin[0] - local[0]
        if tensor != (source[0] + offset, source[1] + offset):
            return False
    return True


def template_faults(
    miniature: Miniature,
    pipeline: int,
    rollout: RolloutLayout,
    templates: Sequence[StreamTemplate],
    dialect: Dialect,
    dtype: str,
) -> Iterator[str]:
    """Yields faults of the templates for `pipeline` stages: of the cover of each position in an engine, and of each
    sender.
    """
    # by the identity of the grains that fill it; workers have many grains in common
    covered: dict[tuple[int, ...], TargetParameter] = {}
    for position, template in enumerate(templates):
        filling = _by_parameter(template)
        parameters = target_parameters(miniature.model, rollout, position, dialect, dtype, miniature.fp8_block)
        unseen = [p for p in parameters if covered.get(_identity(filling.get(p.name, ()))) != p]
        names = dict.fromkeys([p.name for p in unseen]) | dict.fromkeys(filling.keys() - {p.name for p in parameters})
        arriving = [part for name in names for part in filling.get(name, ())]
        copies = [_copy_of(grain, layer, grain.holders[0].source_name) for layer, grain in arriving]
        for fault in target_faults(unseen, copies):
            yield f"worker {position} of each engine: {fault}"
        covered |= {_identity(filling.get(p.name, ())): p for p in unseen}
    yield from _sender_faults(miniature, pipeline, templates)


def _by_parameter(template: StreamTemplate) -> dict[str, list[tuple[int, Grain]]]:
    """Returns, for each parameter, what fills it: the layer of the miniature, and the grain."""
    filling: dict[tuple[int, str], list[tuple[int, Grain]]] = defaultdict(list)
    for block, grains in enumerate(template.blocks):
        for grain in grains:
            filling[block - 1, grain.parameter].append((block - 1, grain))  # block n + 1 is layer n
    return {name.format(layer): grains for (layer, name), grains in filling.items()}


def _identity(grains: Sequence[tuple[int, Grain]]) -> tuple[int, ...]:
    return tuple(sorted(id(grain) for _, grain in grains))


def _sender_faults(miniature: Miniature, pipeline: int, templates: Sequence[StreamTemplate]) -> Iterator[str]:
    """Yields grains that one of their stated holders does not have."""
    shards = [shard_table(of_rank) for of_rank in miniature.shards]
    blocks = [(block - 1, of_block) for template in templates for block, of_block in enumerate(template.blocks)]
    distinct = {(layer, id(grain)): grain for layer, of_block in blocks for grain in of_block}
    checked = set()
    for (layer, _), grain in distinct.items():
        key = (layer, grain.hf_name, grain.hf_box, grain.source_box, id(grain.holders))
        if key in checked:
            continue
        checked.add(key)
        copies = {name: _copy_of(grain, layer, name) for name in {holder.source_name for holder in grain.holders}}
        proven: dict[str, tuple[Piece, ...]] = {}  # by the parameter's name: most ranks hold the same pieces of it
        for holder in grain.holders:
            table = shards[miniature.rank_of(holder, pipeline)]
            copy = copies[holder.source_name]
            shard = table.get((copy.vp_chunk, copy.source_name))
            if shard is not None and shard.pieces == proven.get(copy.source_name):
                continue
            if fault := source_fault(table, copy):
                yield f"rank {holder.offset} of its stage: {fault}"
            elif shard is not None:
                proven[copy.source_name] = shard.pieces


def _copy_of(grain: Grain, layer: int, source_name: str) -> Copy:
    """Returns the grain as a copy of the miniature, where every layer is in chunk 0."""
    return Copy(
        grain.hf_name.format(layer),
        grain.hf_box,
        source_name.format(layer),
        0,
        grain.source_box,
        grain.parameter.format(layer),
        grain.target_box,
        grain.axes,
        grain.dtype,
    )


def worker_faults(
    parameters: Sequence[TargetParameter], messages: Iterable[Message], shards_of: Callable[[int], ShardTable]
) -> Iterator[str]:
    """Yields faults of what a worker receives: boxes that senders do not hold, elements not written exactly once."""
    copies: list[Copy] = []
    for message in messages:
        shards = shards_of(message.source)
        for copy in message.copies:
            if fault := source_fault(shards, copy):
                yield f"rank {message.source}: {fault}"
        copies += message.copies
    yield from target_faults(parameters, copies)
