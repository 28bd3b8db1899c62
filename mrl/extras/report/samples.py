"""Training samples for people: which of a step's responses are worth a look, and their tokens as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mrl.errors import DataError
from mrl.extras.report.page import Token
from mrl.record.sample_files import read_samples, rows_of
from mrl.record.shown_rows import ShownRows, extreme_rows

_TORN = "\ufffd"  # what a decoder gives for bytes that are no whole character
_WHOLE_AFTER = 4  # tokens: no character of UTF-8 has more bytes


@dataclass(frozen=True)
class TrainingSample:
    """One response of a training step. `versions`: weights that made it, oldest first."""

    row: int
    prompt_id: int
    prompt_ids: list[int]
    response_ids: list[int]
    rollout_log_probs: list[float]
    stop_reason: str
    versions: tuple[int, ...]
    score: float
    reason: str
    old_log_probs: list[float | None] | None = None  # the trainer's, of the first LONGEST tokens


def looked_at(folder: Path, step: int, shown: ShownRows | None) -> dict[str, list[TrainingSample]]:
    """The best, the worst and, where `shown` is of this step, the most changed of a step's responses, by kind.

    Of a large file only the scores and what is shown are read. Raises DataError for a damaged one.
    """
    try:
        file = folder / f"step-{step}.parquet"
        if not file.exists():
            samples = [_old_row(row) for row in read_samples(folder, step)]
            kinds = extreme_rows([one.score for one in samples], [one.prompt_id for one in samples])
            return {kind: [samples[row] for row in rows] for kind, rows in kinds.items()}
        columns = pq.read_table(file, columns=["score", "group_id", "sample_id"])
        kinds = extreme_rows(columns["score"].to_pylist(), columns["group_id"].to_pylist())
        by_id = shown.log_probs if shown is not None and shown.step == step else {}
        # the file may have fewer rows than the step had (record.samples)
        log_probs = {row: by_id[id] for row, id in enumerate(columns["sample_id"].to_pylist()) if id in by_id}
        if log_probs:
            kinds["changed"] = sorted(log_probs.keys() - {row for rows in kinds.values() for row in rows})
        wanted = sorted({row for rows in kinds.values() for row in rows})
        found = zip(wanted, rows_of(file, np.array(wanted, np.int64)), strict=True)
        samples = {row: _new_row(row, values) for row, values in found}
        return {
            kind: [replace(samples[row], old_log_probs=log_probs.get(row)) for row in rows]
            for kind, rows in kinds.items()
        }
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"{folder}: the samples of step {step} cannot be read ({type(error).__name__}: {error})"
        ) from error


def _new_row(number: int, row: dict[str, Any]) -> TrainingSample:
    versions = tuple(span["version"] for span in row["weight_version"])
    return _sample(number, row, versions, row["score"], row["reason"])


def _old_row(row: dict[str, Any]) -> TrainingSample:
    return _sample(row["sample_id"], row, (row["weight_version"],), row["reward"]["score"], row["reward"]["reason"])


def _sample(
    number: int, row: dict[str, Any], versions: tuple[int, ...], score: float, reason: str | None
) -> TrainingSample:
    return TrainingSample(
        number, row["prompt_id"], row["prompt_ids"], row["response_ids"], row["rollout_log_probs"],
        str(row["stop_reason"]), versions,
        float(score), str(reason),
    )  # fmt: skip


Decode = Callable[[Sequence[int]], str]


def decoder(folders: Sequence[Path]) -> Decode | None:
    """Token ids to text by the first folder's tokenizer.json that can be read; None where there is none, or no package
    for it.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    for folder in folders:
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the package raises a plain Exception for whatever it does not like
            continue
        return lambda ids, tokenizer=tokenizer: tokenizer.decode(list(ids), skip_special_tokens=False)
    return None


def text_of(ids: Sequence[int], decode: Decode | None) -> str:
    """As text; the numbers where no tokenizer is at hand."""
    return " ".join(map(str, ids)) if decode is None else decode(ids)


def tokens_of(ids: Sequence[int], values: Sequence[float | None], decode: Decode | None) -> tuple[Token, ...]:
    """Each token's text with its value. Tokens that only together are a character stand together, with the largest of
    their values.
    """
    if decode is None:
        return tuple(Token(f"{one} ", value) for one, value in zip(ids, values, strict=True))
    tokens, start = [], 0
    for stop in range(1, len(ids) + 1):
        text = decode(ids[start:stop])
        if _TORN in text and stop - start < _WHOLE_AFTER and stop < len(ids):
            continue
        known = [value for value in values[start:stop] if value is not None]
        tokens.append(Token(text, max(known, key=abs) if known else None))
        start = stop
    return tuple(tokens)
