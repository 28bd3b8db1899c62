"""A response that was made in several requests: each goes on from the tokens before it, and they are put together.

An example: the prompt 7 8, at most 5 tokens, cut off after 1 2 by an update of the weights from version 4 to 5:

                 prompt       response   spans            routes of (computed tokens)
    kept         7 8          1 2        0: 4             7 8 1
    more         7 8 1 2      3 9        0: 5             7 8 1 2 3     its first three are those of kept, computed anew
    joined       7 8          1 2 3 9    0: 4, 2: 5       7 8 1 | 2 3

What was returned with a token stays its own: log-probs and routes of kept tokens are never taken from a later
request, which computed them by other weights. The last kept token was sampled and not computed; its route comes from
the request that did.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields

import numpy as np

from mrl.data.routes import is_missing, recoded
from mrl.data.samples import STOP_REASONS, Samples
from mrl.errors import DataError


@dataclass(frozen=True)
class Continuation:
    """What is asked of an engine so that it goes on with a response."""

    prompt_ids: np.ndarray  # int32: the prompt's, then the kept ones
    max_tokens: int  # that it may add
    seed: int


def continuation(samples: Samples, row: int, max_tokens: int) -> Continuation:
    """How row `row` goes on by at most `max_tokens` more. Raises DataError for a response that has ended by itself."""
    if not samples.truncated[row]:
        raise DataError(f"sample {samples.sample_id[row]} has ended and cannot go on")
    one = samples.rows(slice(row, row + 1))
    return Continuation(one.token_ids, max_tokens, continuation_seed(int(one.seed[0]), int(one.response_lengths[0])))


def continuation_seed(seed: int, kept: int) -> int:
    """Of the request that goes on after `kept` tokens, 48 bits; the response's own where nothing is kept.

    An engine begins its random numbers at the seed: with the same one they would be those of the first tokens again.
    """
    if kept == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{kept}".encode(), digest_size=6).digest(), "big")


def joined(kept: Samples, more: Samples) -> Samples:
    """Each row of `kept` with what the same row of `more`, whose prompt it was, adds to it.

    Raises DataError where a row of `more` goes on from other tokens, or where only one of the two has routes.
    """
    _check_goes_on(kept, more)
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
    ended = np.flatnonzero(kept.stop_reason != STOP_REASONS.index("length"))
    if len(ended):
        raise DataError(f"sample {kept.sample_id[ended[0]]} has ended and cannot go on")


def _prompts(samples: Samples) -> np.ndarray:
    return np.concatenate([np.zeros(0, samples.token_ids.dtype), *samples.prompts()])


def _column(which: Field, kept: Samples, more: Samples) -> np.ndarray:
    """One column of the joined rows, but for those that are numbers of their own."""
    first, second = getattr(kept, which.name), getattr(more, which.name)
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
    """All tokens but the last were computed: `kept` has routes of all rows but one, `more` those from that one on."""
    firsts = (routes[:-1] for routes in _of_rows(kept.routes, kept.lengths))
    later = _of_rows(recoded(more.routes, kept.routes.dtype), more.lengths)
    seconds = (routes[start - 1 :] for routes, start in zip(later, kept.lengths.tolist(), strict=True))
    return _end_to_end(firsts, seconds)


def _spans(kept: Samples, more: Samples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(starts, versions, counts) of the joined rows. A span with the version of the one before is part of it."""
    shifts = np.repeat(kept.response_lengths, more.span_counts)
    pairs = zip(
        _of_rows(kept.span_starts, kept.span_counts), _of_rows(more.span_starts + shifts, more.span_counts),
        _of_rows(kept.span_versions, kept.span_counts), _of_rows(more.span_versions, more.span_counts), strict=True,
    )  # fmt: skip
    lengths = (kept.response_lengths + more.response_lengths).tolist()
    rows = [
        _merged(np.concatenate([a, b]), np.concatenate([v, w]), end)
        for (a, b, v, w), end in zip(pairs, lengths, strict=True)
    ]
    starts, versions = (np.concatenate(column) for column in zip(*rows, strict=True))
    counts = np.array([len(starts) for starts, _ in rows], kept.span_counts.dtype)
    return starts.astype(kept.span_starts.dtype), versions, counts


def _merged(starts: np.ndarray, versions: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Without spans that have no token, or the version of the one before; a response without tokens keeps its last."""
    has_tokens = np.append(starts[1:], length) > starts
    has_tokens[-1] |= not has_tokens.any()
    starts, versions = starts[has_tokens], versions[has_tokens]
    begins = np.append(True, versions[1:] != versions[:-1])
    return starts[begins], versions[begins]


def check_routes(samples: Samples) -> None:
    """Raises DataError where routes are not those of all tokens but the last: prompt + tokens - 1 of them."""
    if samples.routes is None:
        return
    known = ~is_missing(samples.routes).any(1)
    ends = np.cumsum(samples.lengths)
    expected = np.ones(len(known), bool)
    expected[ends[samples.lengths > 0] - 1] = False
    if len(wrong := np.flatnonzero(known != expected)):
        row = int(np.searchsorted(ends, wrong[0], side="right"))
        raise DataError(f"sample {samples.sample_id[row]}: routes are not those of all its tokens but the last")


def token_versions(samples: Samples) -> np.ndarray:
    """int64 [response tokens]: version of the weights that made each."""
    counts = samples.span_counts.astype(np.int64)
    last = np.cumsum(counts) - 1
    ends = np.append(samples.span_starts[1:], 0).astype(np.int64)
    ends[last] = samples.response_lengths
    return np.repeat(samples.span_versions, ends - samples.span_starts)
