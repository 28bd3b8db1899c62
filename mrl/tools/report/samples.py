"""Training samples for people: selects interesting responses of a step, and decodes their tokens."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from mrl.plain_files import parse_json
from mrl.record.sample_files import GROUND_TRUTH, read_samples, readable, rows_of
from mrl.record.shown_rows import ShownRows, extreme_rows
from mrl.tools.report.page import ResponsePart, Token

_TORN = "\ufffd"  # a decoder's output for incomplete characters
_WHOLE_AFTER = 4  # tokens; no character of UTF-8 has more bytes


@dataclass(frozen=True)
class PartHead:
    """What begins at a token of a response: a turn, or another branch of an agent."""

    first_token: int
    words: str


class ShownImage(NamedTuple):
    """An image of a prompt or of a later turn."""

    name: str  # of its file in the run directory's images
    start: int  # its first token
    tokens: int


@dataclass(frozen=True)
class TrainingSample:
    """One response of a training step. `versions`: the weights that generated it, oldest first."""

    row: int
    prompt_id: int
    prompt_ids: list[int]
    response_ids: list[int]
    rollout_log_probs: list[float]
    stop_reason: str
    versions: tuple[int, ...]
    score: float
    reason: str
    old_log_probs: list[float | None] | None = None  # the trainer's, for the first LONGEST tokens
    sampled: list[bool] | None = None  # False for context, whose log-probs have no meaning; None: all are sampled
    truth: str = ""  # the row's ground truth, where it is written
    images: tuple[ShownImage, ...] = ()
    heads: tuple[PartHead, ...] = ()  # with several turns: how each ended, its calls and their duration; and branches

    @property
    def log_probs(self) -> list[float | None]:
        """Log-probs of the engine; None for context."""
        if self.sampled is None:
            return self.rollout_log_probs
        pairs = zip(self.rollout_log_probs, self.sampled, strict=True)
        return [value if sampled else None for value, sampled in pairs]


def looked_at(folder: Path, step: int, shown: ShownRows | None) -> dict[str, list[TrainingSample]]:
    """Returns the best and worst responses of a step by kind, and the most changed if `shown` belongs to it.

    Of a large file only the scores and the shown rows are read. Raises DataError for a damaged file.
    """
    with readable(folder, step):
        file = folder / f"step-{step}.parquet"
        if not file.exists():
            samples = [
                _sample(
                    row["sample_id"], row, (row["weight_version"],), row["reward"]["score"], row["reward"]["reason"]
                )
                for row in read_samples(folder, step)
            ]
            scores = [one.score for one in samples]
            reasons = [one.reason for one in samples]
            kinds = extreme_rows(scores, [one.prompt_id for one in samples], reasons)
            return _by_kind(kinds, samples)
        columns = pq.read_table(file, columns=["score", "group_id", "sample_id", "reason"])
        of_rows = [columns[name].to_pylist() for name in ("score", "group_id", "reason")]
        kinds = extreme_rows(*of_rows)
        by_id = {}
        if shown is not None and shown.step == step:
            by_id = shown.log_probs
        # the file may have fewer rows than the step (record.samples)
        log_probs = {row: by_id[id] for row, id in enumerate(columns["sample_id"].to_pylist()) if id in by_id}
        if log_probs:
            kinds["changed"] = sorted(log_probs.keys() - {row for rows in kinds.values() for row in rows})
        wanted = sorted({row for rows in kinds.values() for row in rows})
        found = zip(wanted, rows_of(file, np.array(wanted, np.int64)), strict=True)
        samples = {}
        for row, values in found:
            versions = tuple(span["version"] for span in values["weight_version"])
            samples[row] = replace(
                _sample(row, values, versions, values["score"], values["reason"]), old_log_probs=log_probs.get(row)
            )
        return _by_kind(kinds, samples)


def _by_kind(
    kinds: Mapping[str, Sequence[int]], samples: Sequence[TrainingSample] | Mapping[int, TrainingSample]
) -> dict[str, list[TrainingSample]]:
    """Returns the samples of each kind, given the rows of each kind."""
    return {kind: [samples[row] for row in rows] for kind, rows in kinds.items()}


def _sample(
    number: int, row: dict[str, Any], versions: tuple[int, ...], score: float, reason: str | None
) -> TrainingSample:
    response_ids = _ids(row["response_ids"])
    log_probs = [float(value) for value in row["rollout_log_probs"]]
    if len(response_ids) != len(log_probs):
        raise ValueError(f"{len(response_ids)} tokens with {len(log_probs)} log-probs")
    sampled = row.get("sampled")
    if sampled is not None and len(sampled) != len(response_ids):
        raise ValueError(f"{len(response_ids)} tokens with {len(sampled)} marks of what was sampled")
    return TrainingSample(
        number,
        int(row["prompt_id"]),
        _ids(row["prompt_ids"]),
        response_ids,
        log_probs,
        str(row["stop_reason"]),
        tuple(map(int, versions)),
        float(score),
        str(reason),
        sampled=sampled,
        truth=truth_of(row.get("reward")),
        images=images_of(row),
        heads=_heads(row),
    )


def images_of(row: dict[str, Any]) -> tuple[ShownImage, ...]:
    """Returns the images of a row of samples in their order; none where there is no such column."""
    found = (ShownImage(each["name"], each["first_token"], each["tokens"]) for each in row.get("images") or ())
    return tuple(sorted(found, key=lambda image: image.start))


def truth_of(reward: Any) -> str:
    """Returns the ground truth among the parts of a reward, which are JSON in files of columns; empty without one."""
    parts = parse_json(reward) if isinstance(reward, str) else reward
    truth = parts.get(GROUND_TRUTH) if isinstance(parts, dict) else None
    if truth is None or isinstance(truth, str):
        return truth or ""
    return json.dumps(truth, ensure_ascii=False)


def _heads(row: dict[str, Any]) -> tuple[PartHead, ...]:
    """Returns heads in the order of their tokens; a branch stands before the turn that begins with it."""
    branches = [int(branch["first_token"]) for branch in row.get("branches") or []][1:]
    heads = [PartHead(first, f"branch {number}") for number, first in enumerate(branches, start=2)]
    turns = row.get("turns") or []
    if len(turns) > 1:
        heads += _turns(turns, iter(row.get("calls") or []))
    return tuple(sorted(heads, key=lambda head: head.first_token))


def _turns(turns: Sequence[dict[str, Any]], calls: Iterator[dict[str, Any]]) -> Iterator[PartHead]:
    for number, turn in enumerate(turns, start=1):
        called = list(map(_call, islice(calls, turn["calls"])))
        words = [f"turn {number}: {', '.join(called) or 'no call'}"]
        if called:
            words.append(f"{turn['seconds']:.2f} s in all")
        if turn.get("reward"):
            words.append(f"reward {turn['reward']:g}")
        yield PartHead(int(turn["first_token"]), " · ".join([*words, f"ended by {turn['stop_reason']}"]))


def _call(call: dict[str, Any]) -> str:
    return f"{call['name'] or 'no tool'} {call['reason']} {call['seconds']:.2f} s"


def _ids(values: Sequence[int]) -> list[int]:
    if not all(type(value) is int and 0 <= value < 2**31 for value in values):
        raise ValueError(f"{str(values)[:80]} where token ids are expected")
    return list(values)


Decode = Callable[[Sequence[int]], str]


def decoder(folders: Sequence[Path]) -> Decode | None:
    """Returns a decoder from the first folder's readable tokenizer.json; None if there is none, or if the package is
    missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    for folder in folders:
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the package raises a plain Exception for any problem
            continue
        return lambda ids, tokenizer=tokenizer: tokenizer.decode(list(ids), skip_special_tokens=False)
    return None


def text_of(ids: Sequence[int], decode: Decode | None) -> str:
    """Decodes token ids. Returns the numbers if there is no tokenizer."""
    if decode is None:
        return " ".join(map(str, ids))
    return decode(ids)


def text_with_images(ids: Sequence[int], images: Sequence[ShownImage], decode: Decode | None, first: int = 0) -> str:
    """Decodes a part of a row, with words in the place of each image's tokens. `first`: the row's tokens before it."""
    pieces = []
    last = 0
    for number, image in enumerate(images, 1):
        start = image.start - first
        if 0 <= start < len(ids):
            pieces += [text_of(ids[last:start], decode), words_of(number, image)]
            last = start + image.tokens
    return "".join([*pieces, text_of(ids[last:], decode)])


def words_of(number: int, image: ShownImage) -> str:
    """Returns the words that stand for an image's tokens. `number` counts the images of a row from 1."""
    return f" [image {number}: {image.tokens} tokens] "


def parts_of(sample: TrainingSample, values: Sequence[float | None], decode: Decode | None) -> tuple[ResponsePart, ...]:
    """Returns the first tokens of a response, as many as there are values, under their heads.

    Heads of what is not shown are at the end, without tokens.
    """
    shown = len(values)
    heads = sample.heads
    if not heads or heads[0].first_token > 0:
        heads = (PartHead(0, ""), *heads)
    edges = [max(0, min(head.first_token, shown)) for head in heads] + [shown]
    return tuple(
        ResponsePart(head.words, tuple(_runs(sample, values, start, stop, decode)))
        for head, (start, stop) in zip(heads, pairwise(edges), strict=True)
    )


def _runs(
    sample: TrainingSample, values: Sequence[float | None], start: int, stop: int, decode: Decode | None
) -> Iterator[Token]:
    """Yields tokens from `start` to `stop`; none is joined with one that came another way. An image is one of them."""
    sampled = sample.sampled or [True] * len(sample.response_ids)
    shown = {}
    borders = {at for at in range(start + 1, stop) if sampled[at] != sampled[at - 1]}
    for number, image in enumerate(sample.images, 1):
        first = image.start - len(sample.prompt_ids)
        shown[first] = words_of(number, image)
        borders |= {edge for edge in (first, first + image.tokens) if start < edge < stop}
    for first, end in pairwise([start, *sorted(borders), stop]):
        if first in shown and first < end:
            yield Token(shown[first], None, is_context=True)
            continue
        tokens = tokens_of(sample.response_ids[first:end], values[first:end], decode)
        is_context = first < end and not sampled[first]
        yield from (replace(token, is_context=is_context) for token in tokens)


def tokens_of(ids: Sequence[int], values: Sequence[float | None], decode: Decode | None) -> tuple[Token, ...]:
    """Returns each token's text with its value. Tokens that together form one character are joined, with the largest
    value.
    """
    if decode is None:
        return tuple(Token(f"{one} ", value) for one, value in zip(ids, values, strict=True))
    tokens = []
    start = 0
    for stop in range(1, len(ids) + 1):
        text = decode(ids[start:stop])
        if _TORN in text and stop - start < _WHOLE_AFTER and stop < len(ids):
            continue
        known = [value for value in values[start:stop] if value is not None]
        tokens.append(Token(text, max(known, key=abs) if known else None))
        start = stop
    return tuple(tokens)
