"""Training samples for people: which of a step's responses are worth a look, and their tokens as text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mrl.errors import DataError
from mrl.extras.report.page import Token
from mrl.record.sample_files import read_samples

EACH = 3  # responses of each kind: best, worst
LONGEST = 1500  # tokens of a response that are shown
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


def extremes(folder: Path, step: int) -> dict[str, list[TrainingSample]]:
    """The best and the worst of a step's responses, EACH at most, none twice.

    Of a large file only the scores and what is shown are read. Raises DataError for a damaged one.
    """
    try:
        file = folder / f"step-{step}.parquet"
        if not file.exists():
            return _chosen([_old_row(row) for row in read_samples(folder, step)])
        columns = pq.read_table(file, columns=["score", "prompt_id"])
        best, worst = chosen_rows(columns["score"].to_pylist(), columns["prompt_id"].to_pylist())
        samples = dict(_rows(file, sorted({*best, *worst})))
        return {"best": [samples[i] for i in best], "worst": [samples[i] for i in worst]}
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"{folder}: the samples of step {step} cannot be read ({type(error).__name__}: {error})"
        ) from error


def chosen_rows(scores: Sequence[float], prompts: Sequence[int]) -> tuple[list[int], list[int]]:
    """(best, worst) rows, EACH at most; of different prompts as long as there are such, and none of them in both."""
    order = sorted(range(len(scores)), key=lambda row: scores[row])
    best = _of_different(order[::-1], prompts)
    return best, _of_different([row for row in order if row not in best], prompts)


def _of_different(order: Sequence[int], prompts: Sequence[int]) -> list[int]:
    """The first EACH rows, those of a prompt that is there already after all others."""
    seen: set[int] = set()
    first = [row for row in order if not (prompts[row] in seen or seen.add(prompts[row]))]
    return [*first, *(row for row in order if row not in first[:EACH])][:EACH]


def _chosen(samples: Sequence[TrainingSample]) -> dict[str, list[TrainingSample]]:
    best, worst = chosen_rows([one.score for one in samples], [one.prompt_id for one in samples])
    return {"best": [samples[i] for i in best], "worst": [samples[i] for i in worst]}


def _rows(file: Path, wanted: Sequence[int]) -> Iterator[tuple[int, TrainingSample]]:
    """Rows by number, row group by row group."""
    with pq.ParquetFile(file) as parquet:
        first = 0
        for group in range(parquet.num_row_groups):
            count = parquet.metadata.row_group(group).num_rows
            here = [row for row in wanted if first <= row < first + count]
            if here:
                table = parquet.read_row_group(group)
                for row in here:
                    yield row, _new_row(row, table.slice(row - first, 1).to_pylist()[0])
            first += count


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
    found, start = [], 0
    for stop in range(1, len(ids) + 1):
        text = decode(ids[start:stop])
        if _TORN in text and stop - start < _WHOLE_AFTER and stop < len(ids):
            continue
        known = [value for value in values[start:stop] if value is not None]
        found.append(Token(text, max(known, key=abs) if known else None))
        start = stop
    return tuple(found)
