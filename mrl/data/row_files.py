"""Reads rows of parquet and JSONL files in record batches, and judges which can become prompts.

So a large file is never in memory as Python objects all at once.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from mrl.errors import DataError
from mrl.plain_files import LFS_POINTER, NOT_PULLED, TwiceNamed, parse_json, read_bytes
from mrl.units import MIB, plain_number

ROWS_AT_ONCE = 1024
ROW_BYTES = 16 * MIB  # limit of a line of JSON; the longest prompts have a few MiB
BATCH_BYTES = 256 * MIB
ARRAY_BYTES = 2048 * MIB  # limit of a JSON array, which is held whole
_IMAGES = "images"
OTHER_THAN_TEXT = (_IMAGES, "videos")  # columns of verl's rows that hold no text
PARQUET = ".parquet"
_PARQUET = b"PAR1"  # how such a file begins
# those of chat templates: of OpenAI's, and two older names of tools' answers
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation")
_READ_TOO = ("extra_info", *OTHER_THAN_TEXT)  # optional columns
_MESSAGES = re.compile(r"\s*\[\s*\{\s*['\"](role|content)['\"]\s*:")
BUFFER_BYTES = MIB  # a buffer for each column, so that a file of one large row group is not read whole


@dataclass(frozen=True)
class RawRow:
    """One row as it stands in a file. `row` counts from 1; in JSONL it is the line's number."""

    file: str
    row: int
    value: Any  # a mapping, unless there is a problem
    problem: str | None = None  # why the row is unusable


def read_rows(
    files: Sequence[str], prompt_key: str, source_key: str = "data_source", image_key: str = ""
) -> Iterator[RawRow]:
    """Yields all rows of all files in order. `image_key`: column of images that are read; empty: none are.

    Raises DataError for a file that is missing, unreadable, of another kind or without the columns.
    """
    more = (*_READ_TOO, image_key)
    readers = {PARQUET: partial(_parquet_rows, more=more), ".jsonl": _jsonl_rows}
    for file in files:
        path = Path(file).expanduser()
        if path.suffix not in readers and not path.is_dir():
            raise DataError(
                f"{file}: unknown kind of data file {path.suffix or '(no suffix)'!r}; allowed: {', '.join(readers)}"
            )
        _refuse_missing(file, path)
        yield from readers[path.suffix](path, (prompt_key, source_key, "reward_model"))


def _refuse_missing(file: str, path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{file}: is a folder; name the files in it")
    if not path.is_file():
        raise DataError(f"{file}: no such file (working directory: {Path.cwd()})")
    with suppress(OSError), path.open("rb") as begin:  # what cannot be read is told by its reader
        if begin.read(len(LFS_POINTER)) == LFS_POINTER:
            raise DataError(f"{file}: {NOT_PULLED}")


def read_foreign_rows(file: str) -> Iterator[RawRow]:
    """Returns all rows of a parquet, JSONL or JSON file, whatever its columns.

    Raises DataError for a file that is missing or unreadable.
    """
    path = Path(file).expanduser()
    _refuse_missing(file, path)
    if path.suffix == PARQUET:
        return _parquet_rows(path, ())
    if path.suffix not in (".jsonl", ".json"):
        raise DataError(
            f"{file}: unknown kind of data file {path.suffix or '(no suffix)'!r}; allowed: .parquet, .jsonl, .json"
        )
    with path.open("rb") as lines:
        is_array = lines.read(4096).lstrip()[:1] == b"["
    if is_array:
        return _json_array_rows(path)
    return _jsonl_rows(path, ())


def may_have(file: str, column: str) -> bool:
    """Tells whether rows of a file, as `read_foreign_rows` reads it, may have the column: parquet by its schema, and
    JSON if the word stands in it.

    Raises DataError for a file that is missing.
    """
    read_foreign_rows(file)
    path = Path(file).expanduser()
    if path.suffix == PARQUET:
        with suppress(pa.ArrowException, OSError, UnicodeDecodeError):  # of a file that reading refuses
            return column in pq.read_schema(path).names
        return False
    if path.stat().st_size == 0:
        return False
    with path.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as data:
        return data.find(f'"{column}"'.encode()) >= 0


def _json_array_rows(path: Path) -> Iterator[RawRow]:
    """Yields the objects of one JSON array, which has to fit into memory."""
    try:
        values = parse_json(read_bytes(path, ARRAY_BYTES), strict=False)
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    for row, value in enumerate(values, 1):
        problem = None
        if not isinstance(value, dict):
            problem = f"a JSON {type(value).__name__} where an object is expected"
        yield RawRow(str(path), row, value if problem is None else None, problem)


def missing_columns(found: Sequence[str], expected: Sequence[str]) -> str | None:
    """Returns a message about the expected columns that are missing; None if none is."""
    missing = [name for name in expected if name not in found]
    if not missing:
        return None
    lists = [", ".join(names) or "none" for names in (missing, found, expected)]
    return (
        "no column {}; found: {}; expected: {} (data.prompt_key names the prompt's, "
        "data.reward_fn_key that of data_source)"
    ).format(*lists)


def _parquet_rows(path: Path, expected: Sequence[str], more: Sequence[str] = _READ_TOO) -> Iterator[RawRow]:
    try:
        with pq.ParquetFile(path, buffer_size=BUFFER_BYTES) as parquet:
            names = parquet.schema_arrow.names
            problem = missing_columns(names, expected)
            if problem:
                raise DataError(f"{path}: {problem}")
            columns = [name for name in names if name in (*expected, *more)] if expected else names
            row = 1
            for group in range(parquet.num_row_groups):  # one reader over all groups would keep them in memory
                stored = parquet.metadata.row_group(group)
                mean = stored.total_byte_size // max(1, stored.num_rows)
                at_once = max(1, min(ROWS_AT_ONCE, BATCH_BYTES // max(1, mean)))
                for batch in parquet.iter_batches(at_once, row_groups=[group], columns=columns, use_threads=False):
                    for value, problem in _values(batch):
                        yield RawRow(str(path), row, value, problem)
                        row += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not readable as parquet: {error}") from error


def _values(batch: pa.RecordBatch) -> Iterator[tuple[Any, str | None]]:
    """Yields the rows of a batch as Python values, each with its problem or None.

    Arrow does not check UTF-8 before, so rows are read one by one after an error: only the wrong row is lost. The same
    holds for a row that is too long.
    """
    if batch.nbytes > ROW_BYTES and len(batch) > 1:
        for i in range(len(batch)):
            yield from _values(batch.slice(i, 1))
        return
    if batch.nbytes > ROW_BYTES:
        yield None, f"more than {ROW_BYTES} bytes"
        return
    try:
        yield from ((value, None) for value in batch.to_pylist())
    except UnicodeDecodeError:
        for i in range(len(batch)):
            try:
                yield batch.slice(i, 1).to_pylist()[0], None
            except UnicodeDecodeError as error:
                yield None, f"not UTF-8: {error}"


def _jsonl_rows(path: Path, expected: Sequence[str]) -> Iterator[RawRow]:
    """Reads line by line with the json module.

    pyarrow's reader refuses a whole file for one bad line, or for one answer of another type.
    """
    with path.open("rb") as file:
        if file.read(len(_PARQUET)) == _PARQUET:
            raise DataError(f"{path}: this is a parquet file: name it .parquet")
        file.seek(0)
        for row, line in enumerate(_lines(file), 1):
            if line is None:
                yield RawRow(str(path), row, None, f"more than {ROW_BYTES} bytes")
            elif line.strip():
                yield _jsonl_row(str(path), row, line, expected)


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yields one line after another; None for a line beyond ROW_BYTES, which is never in memory as a whole."""
    while line := file.readline(ROW_BYTES + 1):
        if len(line) <= ROW_BYTES:
            yield line
            continue
        yield None
        while line and not line.endswith(b"\n"):
            line = file.readline(ROW_BYTES)


def _jsonl_row(file: str, row: int, line: bytes, expected: Sequence[str]) -> RawRow:
    try:
        value = parse_json(line, strict=False, once=True)
    except TwiceNamed as error:
        return RawRow(file, row, None, str(error))
    except ValueError as error:  # not JSON, or not UTF-8
        return RawRow(file, row, None, f"not JSON: {error}")
    if not isinstance(value, dict):
        return RawRow(file, row, None, f"a JSON {type(value).__name__} where an object is expected")
    return RawRow(file, row, value, missing_columns(list(value), expected))


class BadRow(Exception):
    """A row that cannot become a prompt; the message says why.

    `alike`: what all rows with the same fault have in common, where the message quotes a value of the row.
    """

    def __init__(self, message: str, alike: str = ""):
        super().__init__(message)
        self.alike = alike


def parse_row(
    raw: RawRow, prompt_key: str, source_key: str = "data_source", image_key: str = ""
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the messages of a row, and the prompt's other fields. Raises BadRow.

    Where images are read, from the column `image_key`, a message's content may be a list of parts, which is not looked
    into.

    Values that JSON does not have (dates, decimals) become text: a truth of a column of decimals as 42, not 42.00.
    """
    if raw.problem:
        raise BadRow(raw.problem)
    row = raw.value
    if seen := next((name for name in OTHER_THAN_TEXT if name != image_key and has_some(row.get(name))), None):
        raise BadRow(f"{seen} is not empty: {_wanted(seen, image_key)}, or leave such rows out")
    if not isinstance(row[source_key], str):
        raise BadRow(f"{source_key} is {_kind(row[source_key])}, expected a string", source_key)
    reward_model = row["reward_model"]
    if not isinstance(reward_model, dict | None):
        raise BadRow(f"reward_model is {_kind(reward_model)}, expected a mapping with ground_truth", "reward_model")
    truth = (reward_model or {}).get("ground_truth")
    if truth is None or truth != truth:  # tables have NaN where a value is missing
        raise BadRow("reward_model.ground_truth is missing")
    if isinstance(truth, bytes):
        raise BadRow("reward_model.ground_truth is bytes, expected text or a number", "ground_truth bytes")
    if isinstance(truth, Decimal) and truth.is_finite():
        truth = plain_number(truth)
    extra_info = row.get("extra_info")
    if not isinstance(extra_info, dict | None):
        raise BadRow(f"extra_info is {_kind(extra_info)}, expected a mapping", "extra_info")
    rest = {"data_source": row[source_key], "ground_truth": truth, "extra_info": extra_info or {}}
    messages = _messages(row[prompt_key], prompt_key, bool(image_key))
    if raw.file.endswith(PARQUET):
        messages = _written(messages)
    return messages, rest


def _written(value: Any) -> Any:
    """Returns a message of a parquet file without null fields, at any depth: of a call's arguments, too.

    Parquet gives every message all fields of the struct, and those of other messages are null.
    """
    if isinstance(value, dict):
        return {key: _written(field) for key, field in value.items() if field is not None}
    if isinstance(value, list):
        return [_written(each) for each in value]
    return value


def _wanted(column: str, image_key: str) -> str:
    if column != _IMAGES:
        return "videos are not read: give single images of them"
    if image_key:
        return f"data.image_key names the column {image_key}, and images of one column are read: name this one"
    return "set model.vision: frozen, for a model that reads images"


def images_of(raw: RawRow, image_key: str) -> list[Any]:
    """Returns the images of a row, as its column has them. Raises BadRow for a column of another type."""
    found = raw.value.get(image_key)
    if not has_some(found):
        return []
    if not isinstance(found, list):
        raise BadRow(f"{image_key} is {type(found).__name__}, expected a list", "images")
    return found


def _messages(prompt: Any, key: str, reads_images: bool) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        # a list of messages as JSON or Python prints it; CSV makes that of a column of lists
        if _MESSAGES.match(prompt) is not None and prompt.rstrip().endswith("]"):
            raise BadRow(f"{key} is a list of messages written as text; store the list itself, {{role, content}} each")
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise BadRow(
            f"{key} is {_kind(prompt)}, expected a string or a list of {{role, content}}",
            f"{key} {type(prompt).__name__}",
        )
    for message in prompt:
        if not reads_images and (kind := _other_kind(message)):
            raise BadRow(
                f"{key} holds a part of the type {kind[:40]!r}: only prompts of text are read without model.vision"
            )
        role = message.get("role") if isinstance(message, dict) else None
        if isinstance(role, str) and role not in ROLES:
            raise BadRow(f"{key} has a message of the role {role[:40]!r}: roles are {', '.join(ROLES)}", f"{key} role")
        if reads_images and _has_parts(message):
            continue
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            wanted = f"{key} holds a message that is not {{role: text, content: text}}"
            raise BadRow(f"{wanted}: {str(message)[:200]}", wanted)
    return [{k: v for k, v in message.items() if v is not None} for message in prompt]


def with_read_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with the arguments of calls as mappings, where they are JSON as in OpenAI's format.

    Chat templates expect mappings, and write a text once more as JSON, or refuse it. Rows keep the text: in parquet it
    is the form in which calls of different functions share a column.
    """
    return [
        message | {"tool_calls": _read_calls(message["tool_calls"])} if "tool_calls" in message else message
        for message in messages
    ]


def _read_calls(calls: Any) -> Any:
    if isinstance(calls, list):
        return [_read_calls(call) for call in calls]
    if not isinstance(calls, dict):
        return calls
    if isinstance(calls.get("function"), dict):
        return calls | {"function": _read_calls(calls["function"])}
    read: Any = None
    if isinstance(calls.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            read = parse_json(calls["arguments"] or "{}", strict=False)
    return calls | {"arguments": _ReadArguments(read, calls["arguments"])} if isinstance(read, dict) else calls


class _ReadArguments(dict[str, Any]):
    """Arguments of a call that stand in a row as JSON. A template that prints them prints that text."""

    def __init__(self, read: dict[str, Any], text: str):
        super().__init__(read)
        self._text = text

    def __str__(self) -> str:
        return self._text


def has_some(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _has_parts(message: Any) -> bool:
    """Tells whether a message's content is a list of parts, as in chat APIs."""
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), list)
    )


def _other_kind(message: Any) -> str:
    """Returns the type of a message's first part that is not text, such as image_url; empty where there is none."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return ""
    kinds = (str(part.get("type")) for part in message["content"] if isinstance(part, dict))
    return next((kind for kind in kinds if kind != "text"), "")


def _kind(value: Any) -> str:
    if value in (None, [], ""):
        return "empty"
    return f"{type(value).__name__} {str(value)[:60]!r}"
