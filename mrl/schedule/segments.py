"""Joins a response from several requests. Each request continues from the tokens before it.

Example: the prompt 7 8 and at most 5 tokens. An update from version 4 to 5 interrupts it after 1 2:

                 prompt       response   spans            routes of (computed tokens)
    kept         7 8          1 2        0: 4             7 8 1
    more         7 8 1 2      3 9        0: 5             7 8 1 2 3     its first three are those of kept, computed anew
    joined       7 8          1 2 3 9    0: 4, 2: 5       7 8 1 | 2 3

Log-probs and routes of kept tokens stay. They are never taken from a later request, which computed them with other
weights. The last kept token was sampled but not computed. Its route comes from the next request, which computes it.

A turn is such a continuation with context in between, which `with_context` appends. So a response that has ended can
continue. The request before the context did not compute it, so its routes come from the next request.

                 prompt       response   sampled          routes of
    kept         7 8          1 2        T T              7 8 1
    with context 7 8          1 2 5 6    T T F F          7 8 1
    more         7 8 1 2 5 6  3          T                7 8 1 2 5 6
    joined       7 8          1 2 5 6 3  T T F F T        7 8 1 | 2 5 6
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, fields, replace

import numpy as np

from mrl.data.routes import missing_in, recoded
from mrl.data.samples import STOP_REASONS, RowImage, Samples, with_images, with_turns
from mrl.errors import DataError


@dataclass(frozen=True)
class Continuation:
    """The request with which an engine continues a response."""

    prompt_ids: np.ndarray  # int32: tokens of the prompt, then the kept ones
    max_tokens: int  # tokens that it may add
    seed: int


def continuation(samples: Samples, row: int, max_tokens: int) -> Continuation:
    """Returns the continuation of row `row` by at most `max_tokens` further tokens.

    Raises DataError for a response that has ended by itself, unless context follows.
    """
    if not samples.truncated[row] and not _trailing_context(samples)[row]:
        raise DataError(f"sample {samples.sample_id[row]} has ended and cannot go on")
    one = samples.rows(slice(row, row + 1))
    return Continuation(one.token_ids, max_tokens, continuation_seed(int(one.seed[0]), int(one.response_lengths[0])))


def continuation_seed(seed: int, kept: int) -> int:
    """Returns the seed, 48 bits, of the request that continues after `kept` tokens; without kept tokens the response's
    own.

    An engine starts its random numbers at the seed. The same seed would repeat the random numbers of the first tokens.
    """
    if kept == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{kept}".encode(), digest_size=6).digest(), "big")


def with_context(
    samples: Samples,
    context: Sequence[np.ndarray],
    calls: np.ndarray,
    seconds: np.ndarray,
    images: Sequence[Sequence[RowImage]] = (),
) -> Samples:
    """Returns the rows with context, int32 token ids, after each. The context ends a turn and begins another.

    `calls`, `seconds` [rows]: tool calls of the ended turn, and their duration. `images`: those of each row's context,
    whose tokens are counted from its beginning; empty for none. Raises DataError if the turn has no sampled token.
    """
    samples = with_turns(samples)
    if any(images):
        samples = _with_more_images(samples, images)
    added = np.array([len(ids) for ids in context], samples.response_lengths.dtype)
    _check_has_sampled(samples)
    return replace(
        samples,
        response_lengths=samples.response_lengths + added,
        token_ids=_end_to_end(_of_rows(samples.token_ids, samples.lengths), iter(context)),
        rollout_log_probs=_filled(samples.rollout_log_probs, samples.response_lengths, added, 0.0),
        sampled=_filled(samples.sampled, samples.response_lengths, added, False),
        routes=_with_missing_routes(samples, added),
        turn_counts=samples.turn_counts + 1,
        turn_starts=_with_last(samples.turn_starts, samples, samples.response_lengths + added),
        turn_stops=_with_last(samples.turn_stops, samples, samples.stop_reason),
        turn_calls=_with_last(_last_set(samples.turn_calls, samples, calls), samples, np.zeros(len(samples))),
        turn_seconds=_with_last(_last_set(samples.turn_seconds, samples, seconds), samples, np.zeros(len(samples))),
        turn_rewards=_with_last(samples.turn_rewards, samples, np.zeros(len(samples))),
    )


def _with_more_images(samples: Samples, images: Sequence[Sequence[RowImage]]) -> Samples:
    """Adds images of the context that follows the rows' tokens."""
    samples = with_images(samples)
    given = {
        "image_names": [image.name.encode() for row in images for image in row],
        "image_starts": [end + image.start for end, row in zip(samples.lengths, images, strict=True) for image in row],
        "image_tokens": [image.tokens for row in images for image in row],
        "image_grids": [image.grid for row in images for image in row],
    }
    counts = np.array([len(row) for row in images], samples.image_counts.dtype)
    columns = {}
    for name, values in given.items():
        column = getattr(samples, name)
        more = np.array(values, column.dtype).reshape(-1, *column.shape[1:])
        columns[name] = _end_to_end(_of_rows(column, samples.image_counts), _of_rows(more, counts))
    return replace(samples, **columns, image_counts=samples.image_counts + counts)


def _check_has_sampled(samples: Samples) -> None:
    starts = samples.turn_starts[np.cumsum(samples.turn_counts) - 1]
    empty = np.flatnonzero(starts >= samples.response_lengths)
    if len(empty):
        raise DataError(f"sample {samples.sample_id[empty[0]]}: context follows a turn without a token")


def _filled(column: np.ndarray, lengths: np.ndarray, added: np.ndarray, value: float | bool) -> np.ndarray:
    """Returns a flat column with `added` values more at the end of each row of `lengths`."""
    more = (np.full(count, value, column.dtype) for count in added.tolist())
    return _end_to_end(_of_rows(column, lengths), more)


def _with_missing_routes(samples: Samples, added: np.ndarray) -> np.ndarray | None:
    if (routes := samples.routes) is None:
        return None
    more = (np.full((count, *routes.shape[1:]), missing_in(routes.dtype), routes.dtype) for count in added.tolist())
    return _end_to_end(_of_rows(routes, samples.lengths), more)


def _with_last(column: np.ndarray, samples: Samples, last: np.ndarray) -> np.ndarray:
    """Returns a column of turns with one more turn in each row."""
    ones = np.ones(len(samples), np.int64)
    return _end_to_end(_of_rows(column, samples.turn_counts), _of_rows(last.astype(column.dtype), ones))


def _last_set(column: np.ndarray, samples: Samples, last: np.ndarray) -> np.ndarray:
    """Returns a column of turns with new numbers for each row's last turn."""
    changed = column.copy()
    changed[np.cumsum(samples.turn_counts) - 1] = last
    return changed


def _trailing_context(samples: Samples) -> np.ndarray:
    """Returns the number of context tokens at the end of each row, int64 [rows]. No request has computed them."""
    if samples.sampled is None:
        return np.zeros(len(samples), np.int64)
    rows = _of_rows(samples.sampled, samples.response_lengths)
    return np.array([int(np.argmax(row[::-1])) if row.any() else len(row) for row in rows], np.int64)


def joined(kept: Samples, more: Samples) -> Samples:
    """Returns each row of `kept`, continued by the same row of `more`, whose prompt it was.

    Raises DataError if a row of `more` continues from other tokens, or if only one of the two has routes.
    """
    _check_goes_on(kept, more)
    if kept.turn_counts is not None:
        more = with_turns(more)
    given = {
        which.name: _column(which, kept, more) for which in fields(Samples) if getattr(kept, which.name) is not None
    }
    starts, versions, counts = _spans(kept, more)
    own = {
        "response_lengths": kept.response_lengths + more.response_lengths,
        "stop_reason": more.stop_reason,
        "finite": kept.finite & more.finite,
        "routed": kept.routed | more.routed,
    }
    if kept.turn_counts is not None:
        own["sampled_counts"] = kept.sampled_counts + more.sampled_counts
        own["turn_stops"] = _last_set(kept.turn_stops, kept, more.stop_reason)
    return Samples(**{**given, **own, "span_starts": starts, "span_versions": versions, "span_counts": counts})


def _check_goes_on(kept: Samples, more: Samples) -> None:
    if (kept.routes is None) != (more.routes is None):
        raise DataError("a response has routes of one part and none of another: they cannot be joined")
    same_lengths = np.array_equal(kept.lengths, more.prompt_lengths)
    if (
        not same_lengths
        or not np.array_equal(kept.sample_id, more.sample_id)
        or not np.array_equal(kept.token_ids, _prompts(more))
    ):
        raise DataError(
            f"samples {more.sample_id.tolist()[:10]} do not go on from the tokens kept of "
            f"{kept.sample_id.tolist()[:10]}"
        )
    if more.turn_counts is not None:
        raise DataError("an answer of one request has no turns of its own: it cannot be joined to another")
    ended = np.flatnonzero((kept.stop_reason != STOP_REASONS.index("length")) & (_trailing_context(kept) == 0))
    if len(ended):
        raise DataError(f"sample {kept.sample_id[ended[0]]} has ended and cannot go on")


def _prompts(samples: Samples) -> np.ndarray:
    return np.concatenate([np.zeros(0, samples.token_ids.dtype), *samples.prompts()])


def _column(which: Field, kept: Samples, more: Samples) -> np.ndarray:
    """Returns one column of the joined rows. Columns with one number for each row are joined elsewhere."""
    first = getattr(kept, which.name)
    second = getattr(more, which.name)
    match which.metadata["of"]:
        case "response token":
            return _end_to_end(_of_rows(first, kept.response_lengths), _of_rows(second, more.response_lengths))
        case "token" if which.name == "routes":
            return _routes(kept, more)
        case "token":
            return _end_to_end(_of_rows(first, kept.lengths), more.responses())
        case "row" if which.name == "finite":
            return first & second
        case "row" if which.name == "routed":
            return first | second
        case _:
            return first


def _of_rows(array: np.ndarray, counts: np.ndarray) -> Iterator[np.ndarray]:
    ends = np.cumsum(counts)
    return (array[start:end] for start, end in zip(ends - counts, ends, strict=True))


def _end_to_end(firsts: Iterator[np.ndarray], seconds: Iterator[np.ndarray]) -> np.ndarray:
    return np.concatenate([part for both in zip(firsts, seconds, strict=True) for part in both])


def _routes(kept: Samples, more: Samples) -> np.ndarray:
    """Joins the routes.

    All tokens before the last sampled one were computed, and `more` has routes from that one on.
    """
    computed = (kept.lengths - 1 - _trailing_context(kept)).tolist()
    firsts = (routes[:end] for routes, end in zip(_of_rows(kept.routes, kept.lengths), computed, strict=True))
    later = _of_rows(recoded(more.routes, kept.routes.dtype), more.lengths)
    seconds = (routes[start:] for routes, start in zip(later, computed, strict=True))
    return _end_to_end(firsts, seconds)


def _spans(kept: Samples, more: Samples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (starts, versions, counts) of the joined rows. Neighbouring spans of the same version are merged."""
    shifts = np.repeat(kept.response_lengths, more.span_counts)
    pairs = zip(
        _of_rows(kept.span_starts, kept.span_counts),
        _of_rows(more.span_starts + shifts, more.span_counts),
        _of_rows(kept.span_versions, kept.span_counts),
        _of_rows(more.span_versions, more.span_counts),
        strict=True,
    )
    lengths = (kept.response_lengths + more.response_lengths).tolist()
    rows = [
        merged_spans(np.concatenate([a, b]), np.concatenate([v, w]), end)
        for (a, b, v, w), end in zip(pairs, lengths, strict=True)
    ]
    starts, versions = (np.concatenate(column) for column in zip(*rows, strict=True))
    counts = np.array([len(starts) for starts, _ in rows], kept.span_counts.dtype)
    return starts.astype(kept.span_starts.dtype), versions, counts


def merged_spans(starts: np.ndarray, versions: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Removes spans without tokens, and merges those of equal version with the span before.

    A response without tokens keeps its last span.
    """
    has_tokens = np.append(starts[1:], length) > starts
    has_tokens[-1] |= not has_tokens.any()
    starts = starts[has_tokens]
    versions = versions[has_tokens]
    begins = np.append(True, versions[1:] != versions[:-1])
    return starts[begins], versions[begins]
