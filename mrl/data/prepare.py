"""Converts a user's local copy of a data set to a parquet file in verl's schema.

A report says what became of every row.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mrl.data.images import image_bytes, open_image, with_images
from mrl.data.prompt_store import SeenPrompts
from mrl.data.row_files import BATCH_BYTES, BadRow, RawRow, has_some, may_have, read_foreign_rows
from mrl.data.sources import BadSourceRow, Source, SourceRow
from mrl.errors import DataError
from mrl.units import counted
from mrl.whole_file import appears_whole

ROWS_AT_ONCE = 4096
EXAMPLES = 5
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string()), ("solution", pa.string())])),
    ]
)
SEEN = "images"
_PICTURES = (SEEN, "image")
_VIDEOS = ("videos", "video")
MOST_PIXELS = 16_777_216  # of an image, as data.max_image_pixels has it unless it is set
# of files that have the column
SEEN_SCHEMA = SCHEMA.append(pa.field(SEEN, pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))))


@dataclass
class PrepareReport:
    """Counts of the rows: read = written + bad + duplicates.

    Lengths are characters of all messages of a prompt together.
    """

    read: int = 0
    written: int = 0
    bad: int = 0
    duplicates: int = 0
    images: int = 0
    conflicts: int = 0  # duplicates with a ground truth that was not seen with their prompt before
    data_sources: Counter = field(default_factory=Counter)
    abilities: Counter = field(default_factory=Counter)
    roles: Counter = field(default_factory=Counter)
    prompt_length: dict[str, float] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)  # of bad rows: file, row, reason
    schema: dict[str, str] = field(default_factory=lambda: {f.name: str(f.type) for f in SCHEMA})
    first: dict = field(default_factory=dict)  # the first row written

    def to_json(self) -> dict:
        """Returns the report as plain data."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def __str__(self) -> str:
        length = ", ".join(f"{name} {value:.0f}" for name, value in self.prompt_length.items())
        lines = [
            f"{counted(self.read, 'row')} read: {self.written} written, {self.bad} bad, "
            f"{counted(self.duplicates, 'duplicate')} ({self.conflicts} with another truth)",
            f"data_source: {_counts(self.data_sources)}; ability: {_counts(self.abilities)}; "
            f"roles: {_counts(self.roles)}",
            f"prompt characters: {length}" + (f"; images: {self.images}" if self.images else ""),
            *(f"column {name}: {kind}" for name, kind in self.schema.items()),
            f"first row: {json.dumps(self.first, ensure_ascii=False)[:600]}",
            *(f"bad: {example}" for example in self.examples),
        ]
        return "\n".join(lines)


def _counts(counter: Counter) -> str:
    return ", ".join(f"{name} {n}" for name, n in counter.most_common(5))


def prepare(
    source: Source, files: Sequence[str], output: Path, split: str, max_bad_share: float = 0.01
) -> PrepareReport:
    """Converts `files` into `output`, which appears whole or not at all, and returns a report.

    Raises DataError for unusable files, an existing output, more bad rows than allowed, or none left.
    """
    if output.exists():
        raise DataError(f"{output} is there already; give another --output or remove it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        report = PrepareReport()
        schema = SEEN_SCHEMA if any(may_have(file, SEEN) for file in files) else SCHEMA
        report.schema = {column.name: str(column.type) for column in schema}
        with appears_whole(output) as work:
            with pq.ParquetWriter(work, schema) as writer:
                for chunk in _chunks(_rows(source, files, split, report)):
                    writer.write_table(pa.Table.from_pylist(chunk, schema))
            _check(report, max_bad_share)
    except OSError as error:
        raise DataError(f"cannot write {output}: {error.strerror}") from error
    return report


def _rows(source: Source, files: Sequence[str], split: str, report: PrepareReport) -> Iterator[dict]:
    """Yields the rows to write, in order, and fills the report on the way."""
    seen = SeenPrompts()
    pairs = SeenPrompts()
    for raw in chain.from_iterable(map(read_foreign_rows, files)):
        report.read += 1
        try:
            if raw.problem:
                raise BadSourceRow(raw.problem)
            row = source.convert(raw.value, Path(raw.file).stem)
            _check_text(row)
            images = _images_of(row, raw, report)
        except (BadSourceRow, BadRow) as problem:
            report.bad += 1
            if len(report.examples) < EXAMPLES:
                report.examples.append(f"{raw.file}, row {raw.row}: {problem}")
            continue
        key = json.dumps([row.prompt, *(hashlib.sha256(image).hexdigest() for image in images)])
        new_pair = pairs.add(f"{key} {row.ground_truth}")
        if not seen.add(key):
            report.duplicates += 1
            report.conflicts += new_pair
            continue
        written = _written(row, report, split)
        report.images += len(images)
        if SEEN in report.schema:
            written[SEEN] = [{"bytes": image, "path": None} for image in images]
        yield written


def _images_of(row: SourceRow, raw: RawRow, report: PrepareReport) -> list[bytes]:
    """Returns the encoded images of a row, all of which can be read. Raises BadRow, also for a row that would lose what
    its prompt asks about.
    """
    if any(has_some(raw.value.get(name)) for name in _VIDEOS):
        raise BadRow("it has a video, and videos are not read: give single images of it")
    read = (SEEN,) if row.images else ()
    if lost := next((name for name in _PICTURES if name not in read and has_some(raw.value.get(name))), None):
        raise BadRow(
            f"its column {lost} is not empty and would be lost: images are read from the column {SEEN}, of the data "
            "sets geo3k and verl"
        )
    folder = Path(raw.file).parent
    found = [image_bytes(entry, number, folder) for number, entry in enumerate(row.images, 1)]
    for number, data in enumerate(found, 1):
        open_image(data, number, MOST_PIXELS)
    with_images(row.prompt, len(found))
    return found


def _check_text(row: SourceRow) -> None:
    """Raises BadSourceRow for a lone surrogate, which no file of text can hold."""
    try:
        json.dumps(asdict(replace(row, images=[])), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise BadSourceRow(f"half of a character: {error.object[error.start : error.end]!a}") from None


def _written(row: SourceRow, report: PrepareReport, split: str) -> dict:
    length = sum(len(message["content"]) for message in row.prompt)
    known = report.prompt_length or {"min": length, "mean": 0.0, "max": length}
    mean = known["mean"] + (length - known["mean"]) / (report.written + 1)
    report.prompt_length = {"min": min(known["min"], length), "mean": mean, "max": max(known["max"], length)}
    value = {
        "data_source": row.data_source,
        "prompt": row.prompt,
        "ability": row.ability,
        "reward_model": {"style": row.style, "ground_truth": row.ground_truth},
        "extra_info": {"index": report.written, "split": split, "solution": row.solution},
    }
    report.first = report.first or value
    report.data_sources[row.data_source] += 1
    report.abilities[row.ability] += 1
    report.roles[" ".join(message["role"] for message in row.prompt)] += 1
    report.written += 1
    return value


def _chunks(rows: Iterator[dict]) -> Iterator[list[dict]]:
    """Yields lists of rows: ROWS_AT_ONCE, or fewer once they have BATCH_BYTES."""
    chunk: list[dict] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += _bytes_of(row)
        if len(chunk) == ROWS_AT_ONCE or size >= BATCH_BYTES:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


def _bytes_of(row: dict) -> int:
    """Returns about how many bytes the long values of a row have: its images and texts."""
    texts = [row["extra_info"]["solution"], *(message["content"] for message in row["prompt"])]
    return sum(len(image["bytes"]) for image in row.get(SEEN, ())) + sum(map(len, texts))


def _check(report: PrepareReport, max_bad_share: float) -> None:
    if report.bad > max_bad_share * report.read:
        raise DataError(
            f"{report.bad} of {report.read} rows are bad, more than {max_bad_share:g} of them:\n  "
            + "\n  ".join(report.examples)
        )
    if not report.written:
        raise DataError("no row is left to write")
