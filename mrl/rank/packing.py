"""Makes the model's form of one micro-batch: sequences packed end to end, or padded to one length. Pure numpy.

Micro-batches are also cut for context parallelism. Every sequence is cut into 2 * context chunks. Context-parallel rank
r holds chunk r and chunk 2 * context - 1 - r ("zigzag"). So all ranks have the same share of a causal attention's work.
Which position predicts which token is decided before the cut, inside each sequence. A row of several branches
(mrl.data.samples) is several sequences for the model, and one row for the loss.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Generic

import numpy as np

from mrl.data.batch import Array, TokenValues, TrainBatch
from mrl.data.routes import missing_in
from mrl.units import round_up


@dataclass(frozen=True)
class Shape:
    """The multiples that lengths in memory need. `tensor` is 1 without sequence parallelism."""

    packed: bool
    context: int = 1
    tensor: int = 1

    @property
    def sequence_multiple(self) -> int:
        """The multiple that each sequence is padded to. Context parallelism cuts a sequence into two parts for each
        rank.
        """
        if self.context > 1:
            return 2 * self.context
        return 1

    @property
    def total_multiple(self) -> int:
        """The multiple that the whole pack is padded to. Sequence parallelism cuts it into one part for each tensor
        rank.
        """
        return self.sequence_multiple * self.tensor

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the length in memory of each sequence, int64 [rows], over all context-parallel ranks."""
        if not self.packed:
            return np.full(len(lengths), round_up(int(lengths.max()), self.total_multiple), dtype=np.int64)
        padded = -(-lengths.astype(np.int64) // self.sequence_multiple) * self.sequence_multiple
        padded[-1] += round_up(int(padded.sum()), self.total_multiple) - int(padded.sum())
        return padded

    def tokens(self, lengths: np.ndarray) -> int:
        """Returns the tokens computed for one micro-batch of these sequences, over all context-parallel ranks."""
        return int(self.padded(lengths).sum())


@dataclass(frozen=True)
class MicroImages:
    """The images of a micro-batch whose tokens are on one context-parallel rank, on the host."""

    names: tuple[str, ...]  # as in RowImage
    places: tuple[np.ndarray, ...]  # of each image, int64 [its tokens here]: index into batch * length
    parts: tuple[np.ndarray, ...]  # of each image, int64 [its tokens here]: which of its tokens they are


@dataclass(frozen=True)
class Drafted(Generic[Array]):
    """What a layer is to predict that sees the token behind each position (mrl/rank/predicting.py)."""

    next_ids: Array  # int64 [batch, length]: the following token of the sequence; 0 where there is none
    # of the tokens that count and are the third of their sequence or later, where the position two before is here:
    predictors: Array  # int64 [tokens]: index into batch * length of that position
    targets: Array  # int64 [tokens]
    temperature: Array  # float32 [tokens]

    def mapped(self, function: Callable[[Array], Any]) -> "Drafted":
        """Returns the same with `function` applied to every array."""
        return Drafted(*(function(getattr(self, f.name)) for f in fields(self)))


@dataclass(frozen=True)
class MicroBatch(TokenValues[Array]):
    """One micro-batch of one context-parallel rank: numpy arrays when it is cut, tensors when the model gets it.

    `tokens` are the response tokens whose predicting position is on this rank. `batch` is 1 if sequences are packed,
    else their number. `response_length` is the longest one in the micro-batch. The values of TokenValues are [rows,
    response_length].
    """

    input_ids: Array  # int64 [batch, length]
    position_ids: Array  # int64 [batch, length]: position inside its sequence
    real: Array  # bool [batch, length]: neither padding nor a filler
    predicting: Array  # bool [batch, length]: real, and not its sequence's last token, whose output is unused
    # int32 [sequences + 1]: bounds of sequences in the pack, before the cut; None: padded
    sequence_starts: Array | None
    predictors: Array  # int64 [tokens]: index into batch * length of the position that predicts the token
    targets: Array  # int64 [tokens]
    slots: Array  # int64 [tokens]: index of the token into rows * response_length
    token_temperature: Array  # float32 [tokens]
    response_mask: Array  # bool [rows, response_length]: tokens that count: not context, not rejected, not a filler's
    scored: Array | None  # bool, includes rejected ones: tokens that have log-probs; None: those that count
    routes: Array | None  # integers [batch, length, MoE layers, topk]; missing for padding
    # int32 [batch, length, 3]: position by time, row and column, where rows have images; None: all are position_ids
    positions: Array | None
    images: MicroImages | None
    # tokens in memory of each sequence, before the cut; on the host, so that reading them needs no wait for the device
    lengths: tuple[int, ...]
    # digest of all inputs of a forward, before the cut: equal if two passes cut a batch into the same micro-batches
    content: bytes
    drafted: Drafted[Array] | None = None  # if it was asked for

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return max(self.lengths)

    @property
    def has_log_probs(self) -> Array:
        """Tells which tokens' log-probs are computed, bool [rows, response_length]."""
        if self.scored is None:
            return self.response_mask
        return self.scored

    def mapped(self, function: Callable[[Array], Any]) -> "MicroBatch":
        """Returns the micro-batch with `function` applied to every array."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        drafted = self.drafted and self.drafted.mapped(function)
        arrays = {k: function(v) for k, v in given.items() if v is not None and k not in _NO_ARRAYS}
        return replace(self, **arrays, drafted=drafted)


_NO_ARRAYS = ("content", "lengths", "images", "drafted")  # fields of MicroBatch


def micro_batch(
    batch: TrainBatch,
    rows: np.ndarray,
    shape: Shape,
    context_rank: int = 0,
    is_filler: bool = False,
    drafts: bool = False,
) -> MicroBatch[np.ndarray]:
    """Cuts the rows out of the batch and arranges their sequences in memory.

    Without old log-probs in the batch, the pass computes them, for rejected tokens too. `drafts`: with what a
    predicting layer learns.
    """
    picked = batch.rows(rows)
    lengths = picked.sequence_lengths
    padded = shape.padded(lengths)
    starts = np.concatenate([[0], np.cumsum(padded)])
    ids, positions, left = _laid_out(picked.token_ids, lengths, padded, starts)
    responses = np.arange(max(int(picked.response_lengths.max()), 1))[None] < picked.response_lengths[:, None]
    width = responses.shape[1]
    mask = in_rows(picked.loss_mask, responses) & (not is_filler)
    scored = None
    if picked.keep is not None and picked.old_log_probs is None:
        scored = in_rows(picked.is_sampled, responses) & (not is_filler)
    row, column = np.nonzero(mask if scored is None else scored)
    begins = np.cumsum(picked.lengths) - picked.response_lengths  # positions of responses among the rows' tokens
    target = np.flatnonzero(left)[begins[row] + column]
    kept = kept_positions(padded, shape.context, context_rank)
    local = np.full(len(ids), -1, dtype=np.int64)
    local[kept] = np.arange(len(kept))
    here = local[target - 1] >= 0
    lines = 1
    if not shape.packed:
        lines = len(lengths)
    drafted = None
    if drafts:
        counted, number = np.nonzero(mask)
        places = np.flatnonzero(left)[begins[counted] + number]
        drafted = _drafted(ids, positions, left, local, places, picked.temperature[counted])
        drafted = replace(drafted, next_ids=drafted.next_ids[kept].reshape(lines, -1))
    return MicroBatch(
        input_ids=ids[kept].reshape(lines, -1),
        position_ids=positions[kept].reshape(lines, -1),
        real=((left > 0) & (not is_filler))[kept].reshape(lines, -1),
        predicting=((left > 1) & (not is_filler))[kept].reshape(lines, -1),
        sequence_starts=starts.astype(np.int32) if shape.packed else None,
        predictors=local[target - 1][here],
        targets=ids[target][here],
        slots=(row * width + column)[here],
        token_temperature=picked.temperature[row][here],
        response_mask=mask,
        scored=scored,
        **{name: None if flat is None else in_rows(flat, responses) for name, flat in picked.token_values.items()},
        routes=None
        if picked.routes is None
        else _laid_out_routes(picked, left, kept).reshape(lines, -1, *picked.routes.shape[1:]),
        positions=None
        if picked.positions is None
        else _laid_out_positions(picked, left, positions)[kept].reshape(lines, -1, picked.positions.shape[1]),
        images=_images(picked, np.flatnonzero(left), local),
        lengths=tuple(padded.tolist()),
        content=_digest(ids, lengths, padded, rows),
        drafted=drafted,
    )


def _drafted(
    ids: np.ndarray,
    positions: np.ndarray,
    left: np.ndarray,
    local: np.ndarray,
    places: np.ndarray,
    temperature: np.ndarray,
) -> Drafted[np.ndarray]:
    """Returns what is to be predicted of the tokens at `places`, with `next_ids` of all context-parallel ranks.

    `local`: a place's index on this rank; -1: it is elsewhere.
    """
    next_ids = np.append(ids[1:], 0) * (left > 1)
    here = (positions[places] >= 2) & (local[places - 2] >= 0)
    places = places[here]
    return Drafted(next_ids, local[places - 2], ids[places], temperature[here])


class MicroBatches:
    """The micro-batches of a pass. Each is prepared and copied to the device when needed, once for all chunks.

    If all were prepared at once, a whole step's routes would be on the device: hundreds of bytes for each token. Chunks
    of an interleaved pipeline use the same micro-batch at different times, at most `kept` micro-batches apart.
    """

    def __init__(self, count: int, lay_out: Callable[[int], MicroBatch], kept: int = 1):
        """`lay_out` returns a micro-batch by its number. `kept`: how many of the newest are kept for further use."""
        self._count = count
        self._lay_out = lay_out
        self._limit = kept
        self._kept: OrderedDict[int, MicroBatch] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self.__getitem__, range(self._count))

    def __getitem__(self, number: int) -> MicroBatch:
        if number not in self._kept:
            while len(self._kept) >= self._limit:
                self._kept.popitem(last=False)  # first, so that its memory is free
            self._kept[number] = self._lay_out(number)
        return self._kept[number]


def _digest(*whole: np.ndarray) -> bytes:
    """Digests arrays that all context-parallel ranks have completely.

    Row numbers stand for their routes, of which no rank has all.
    """
    digest = hashlib.blake2b(digest_size=16)
    for array in whole:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.digest()


def in_rows(values: np.ndarray, responses: np.ndarray) -> np.ndarray:
    """Returns [rows, response_length, ...] from [response tokens, ...], rows end to end.

    Values go where `responses` is true. Other elements are 0.
    """
    padded = np.zeros((*responses.shape, *values.shape[1:]), values.dtype)
    padded[responses] = values
    return padded


def _laid_out(
    token_ids: np.ndarray, lengths: np.ndarray, padded: np.ndarray, starts: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Returns tokens with padding as they are in memory, all int64 [sum of padded].

    These are token ids with zeros for padding, positions, and numbers of real tokens left in each sequence. That number
    includes the token itself, and is 0 for padding.
    """
    ids, positions, left = (np.zeros(int(starts[-1]), dtype=np.int64) for _ in range(3))
    for start, length, size in zip(starts, lengths, padded, strict=False):
        positions[start : start + size] = np.arange(size)
        left[start : start + length] = np.arange(length, 0, -1)
    ids[left > 0] = token_ids
    return ids, positions, left


def _laid_out_routes(batch: TrainBatch, left: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns routes [kept, MoE layers, topk] of a rank's positions.

    They are missing for padding, and for tokens without routes in the batch.
    """
    places = np.full(len(left), -1, np.int64)
    places[left > 0] = batch.token_route_rows
    here = places[kept]
    dtype = batch.routes.dtype
    laid_out = np.full((len(kept), *batch.routes.shape[1:]), missing_in(dtype), dtype)
    laid_out[here >= 0] = batch.routes[here[here >= 0]]
    return laid_out


def _laid_out_positions(batch: TrainBatch, left: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """Returns positions [all places, 3]. Padding has its plain positions. No real token sees it."""
    whole = np.repeat(plain[:, None], batch.positions.shape[1], axis=1).astype(np.int32)
    whole[left > 0] = batch.positions
    return whole


def _images(batch: TrainBatch, in_memory: np.ndarray, local: np.ndarray) -> MicroImages | None:
    """Returns the images with tokens on this rank; None without images in the batch.

    `in_memory`: place of each of the batch's tokens. `local`: a place's index on this rank; -1: it is elsewhere.
    """
    if batch.image_counts is None:
        return None
    begins = np.repeat(np.cumsum(batch.lengths) - batch.lengths, batch.image_counts) + batch.image_starts
    chosen, places, parts = [], [], []
    for image, (begin, tokens) in enumerate(zip(begins, batch.image_tokens, strict=True)):
        index = local[in_memory[begin : begin + tokens]]
        here = np.flatnonzero(index >= 0)
        if len(here):
            chosen.append(image)
            places.append(index[here])
            parts.append(here)
    names = tuple(batch.image_names[image].decode() for image in chosen)
    return MicroImages(names, tuple(places), tuple(parts))


def computed_tokens(
    lengths: np.ndarray, rows: np.ndarray, shape: Shape, context_rank: int, tensor_rank: int
) -> np.ndarray:
    """Returns the tokens of a batch that this rank's routers see in a micro-batch, int64.

    The batch has sequences of `lengths` end to end, and the micro-batch has those numbered `rows`. Under sequence
    parallelism (`shape.tensor` above 1) a tensor-parallel rank's routers see only its part of the positions.
    """
    padded = shape.padded(lengths[rows])
    ends = np.cumsum(padded)
    kept = kept_positions(padded, shape.context, context_rank).reshape(1 if shape.packed else len(rows), -1)
    kept = np.split(kept, shape.tensor, axis=1)[tensor_rank].ravel()
    row = np.searchsorted(ends, kept, side="right")
    offset = kept - (ends - padded)[row]
    real = offset < lengths[rows][row]
    return ((np.cumsum(lengths) - lengths)[rows][row] + offset)[real]


def kept_positions(padded: np.ndarray, context: int, rank: int) -> np.ndarray:
    """Returns the positions that a context-parallel rank holds, int64, for sequences end to end.

    Each sequence is a multiple of 2 * context long.
    """
    if context == 1:
        return np.arange(int(padded.sum()))
    kept = []
    start = 0
    for size in map(int, padded):
        chunk = size // (2 * context)
        for number in (rank, 2 * context - 1 - rank):
            kept.append(np.arange(start + number * chunk, start + (number + 1) * chunk))
        start += size
    return np.concatenate(kept)
