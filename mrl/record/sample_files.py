"""Files of `samples/`: a step's responses in columns, as they travel through a run, with their rewards.

`step-N.parquet` has a row for each response: its ids and seed, `engine` (the number of that which made its first token;
null where a checkpoint or a restart brought the response; it depends on the machine and not on the seed, as seconds do:
mrl.tools.compare_runs.of_run), `prompt_ids` and `response_ids` (lists of int32),
`rollout_log_probs` (list of float32), `stop_reason`, `weight_version` (list of `first_token`, `version`; one item
unless weights changed meanwhile), `score`, `reason`, and `reward` (JSON of the parts from the reward function, and the
row's `ground_truth`).

Responses of several turns add three columns. `sampled` (list of bool) is false for context, whose log-probs have no
meaning. `turns` is a list of `first_token`, `stop_reason`, `calls`, `seconds`, `reward` (mrl.data.samples.Turn).
`calls` is a list of `name`, `reason`, `seconds` over all turns (mrl.data.samples.TurnCall). Responses of several
branches add `branches`, a list of `first_token`, `prompt_tokens`. Runs with images add `images`, a list of `name` (of a
file in the run directory's `images/`), `first_token`, `tokens`, `grid` (mrl.data.samples.RowImage).
"""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mrl.data.routes import missing_in
from mrl.data.samples import (
    CALL_REASONS,
    NO_ENGINE,
    STOP_REASONS,
    UNJUDGED,
    Samples,
    packed,
    with_branches,
    with_images,
    with_turns,
)
from mrl.errors import DataError, MrlError
from mrl.plain_files import parse_json
from mrl.record.run_dir import json_line, step_of
from mrl.whole_file import appears_whole

# what reading a damaged file raises
DAMAGED = (OSError, pa.ArrowException, ValueError, LookupError, TypeError, AttributeError, OverflowError)
RewardParts = Mapping[str, Any]  # `score`, `reason` and anything else that the reward function returned
OWN_COLUMNS = {"score": pa.float64(), "reason": pa.string()}  # parts of rewards in columns of their own
GROUND_TRUTH = "ground_truth"  # among the parts of rewards: the row's, unless the reward function returns one
DIFFERENCES = ".log_probs.parquet"
ROUTES = ".routes.parquet"
_IMAGES = "images"
ROWS_AT_ONCE = 64  # of a row group, which a reader decompresses for one response


def write_samples(
    folder: Path,
    step: int,
    pieces: Iterable[Samples],
    rewards: Sequence[RewardParts],
    turns: bool = False,
    branches: bool = False,
    images: bool = False,
) -> Path:
    """Writes `folder/step-N.parquet`, which appears completely or not at all.

    `rewards` belong to all rows of all pieces, in order. `turns`, `branches` and `images` add their columns;
    branches need turns.
    Routes have a file of their own (`write_routes`): they take hundreds of bytes a token.
    """
    table = _table
    if turns:
        table = _table_of_branches if branches else _table_of_turns
    if images:
        table = partial(_with_images, table)
    schema = table(packed([]), []).schema
    return _write_whole(folder / f"step-{step}.parquet", schema, _tables(pieces, rewards, table))


def _tables(
    pieces: Iterable[Samples], rewards: Sequence[RewardParts], table: Callable[..., pa.Table]
) -> Iterator[pa.Table]:
    done = 0
    for piece in pieces:
        yield table(piece, rewards[done : done + len(piece)])
        done += len(piece)


def _write_whole(path: Path, schema: pa.Schema, tables: Iterable[pa.Table], rows: int = ROWS_AT_ONCE) -> Path:
    """Returns the path once the whole file is on disk. A failed write leaves no file. `rows`: of a row group."""
    with appears_whole(path) as work, pq.ParquetWriter(work, schema, compression="zstd") as file:
        for table in tables:
            file.write_table(table, row_group_size=rows)
    return path


def write_differences(
    folder: Path, step: int, sample_id: np.ndarray, lengths: np.ndarray, differences: np.ndarray
) -> Path:
    """Writes `folder/step-N.log_probs.parquet`: the trainer's log-probs of tokens minus those of generation, as
    float16.

    `sample_id`, `lengths`: [rows]; `differences`: [response tokens], rows end to end.
    """
    halves = pa.array(differences.astype(np.float16))
    table = pa.table({"sample_id": sample_id, "difference": _lists(halves, lengths)})
    return _write_whole(folder / f"step-{step}{DIFFERENCES}", table.schema, [table])


def write_routes(folder: Path, step: int, pieces: Iterable[Samples]) -> None:
    """Writes `folder/step-N.routes.parquet`: `sample_id`, and `routes`, a flat list of [tokens, MoE layers, topk] as in
    mrl.data.routes. The file's metadata have `layers` and `topk`.

    Routes of pieces without any are missing throughout, so that a response that has no row was not kept. Without any
    piece with routes there is no file. All have routes of one dtype.
    """
    of_pieces = ((piece.sample_id, piece.lengths, piece.routes) for piece in pieces)
    first = []  # up to the piece that says the shape
    for piece in of_pieces:
        first.append(piece)
        if piece[-1] is not None:
            break
    else:
        return
    like = first[-1][-1][:0]
    _, layers, topk = like.shape
    schema = _table_of_routes(*first[-1], like).schema.with_metadata({"layers": str(layers), "topk": str(topk)})
    tables = (_table_of_routes(*piece, like).cast(schema) for piece in chain(first, of_pieces))
    _write_whole(folder / f"step-{step}{ROUTES}", schema, tables, rows=1)  # a response's are up to megabytes


def _table_of_routes(
    sample_id: np.ndarray, lengths: np.ndarray, routes: np.ndarray | None, like: np.ndarray
) -> pa.Table:
    if routes is None:
        routes = np.full((int(lengths.sum()), *like.shape[1:]), missing_in(like.dtype), like.dtype)
    counts = lengths * (like.shape[1] * like.shape[2])
    return pa.table({"sample_id": sample_id, "routes": _lists(pa.array(routes.ravel()), counts)})


def steps_with_responses(folder: Path) -> list[int]:
    """Returns the steps with a file of responses, ascending.

    A step may have its file of log-probs alone, because the other one failed or is not written yet.
    """
    names = (re.fullmatch(r"step-(\d+)\.parquet", file.name) for file in folder.glob("step-*.*"))
    return sorted({int(name[1]) for name in names if name})


def images_of_step(folder: Path, step: int) -> frozenset[str]:
    """Returns the names of the images that a step's responses have. Raises one of DAMAGED."""
    path = folder / f"step-{step}.parquet"
    if _IMAGES not in pq.read_schema(path).names:
        return frozenset()
    column = pq.read_table(path, columns=[_IMAGES])[_IMAGES].combine_chunks()
    return frozenset(column.flatten().field("name").to_pylist())


def keep_within(folder: Path, max_bytes: float, beside: Mapping[int, int] = MappingProxyType({})) -> list[int]:
    """Removes files of the oldest steps until at most `max_bytes` remain, but never the newest step. Returns removed
    steps.

    `beside`: bytes elsewhere that go with a step.
    """
    sizes: dict[int, int] = {}
    for file in folder.glob("step-*.*"):
        step = step_of(file)
        sizes[step] = sizes.get(step, beside.get(step, 0)) + file.stat().st_size
    removed = []
    for step in sorted(sizes)[:-1]:
        if sum(sizes.values()) <= max_bytes:
            break
        for file in folder.glob(f"step-{step}.*"):
            file.unlink()
        del sizes[step]
        removed.append(step)
    return removed


def read_samples(folder: Path, step: int) -> list[dict[str, Any]]:
    """Returns the responses of a step in order, each with the columns above. `reward` is a dictionary with all its
    parts.

    `weight_version` is the one with which a response began. Raises FileNotFoundError.
    """
    file = StepFile(folder, step)
    return file.read(np.arange(len(file.scores)))


@contextmanager
def readable(folder: Path, step: int) -> Iterator[None]:
    """Turns any error in the samples of a step into one DataError.

    A step without samples stays FileNotFoundError.
    """
    try:
        yield
    except (FileNotFoundError, MrlError):
        raise
    except DAMAGED as error:
        problem = f"{type(error).__name__}: {error}"
        raise DataError(f"{folder}: the samples of step {step} cannot be read ({problem})") from error


class StepFile:
    """The responses of a step on disk. Only the requested part is read."""

    def __init__(self, folder: Path, step: int):
        """Raises FileNotFoundError if the step has no file."""
        self.step = step
        self._path = folder / f"step-{step}.parquet"
        self._differences = folder / f"step-{step}{DIFFERENCES}"
        self._routes = folder / f"step-{step}{ROUTES}"
        if not self._path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))

    @cached_property
    def scores(self) -> np.ndarray:
        """Score of each response, float64 [rows]."""
        return self._numbers["score"].to_numpy()

    @cached_property
    def prompt_ids(self) -> np.ndarray:
        """Prompt of each response, int64 [rows]."""
        return self._numbers["prompt_id"].to_numpy()

    @cached_property
    def _numbers(self) -> pa.Table:
        return pq.read_table(self._path, columns=["score", "prompt_id", "reason"])

    @cached_property
    def _is_judged(self) -> np.ndarray:
        """Tells which rows have a score, bool [rows]. False where the environment failed."""
        return np.array([reason not in UNJUDGED for reason in self._numbers["reason"].to_pylist()], bool)

    def worst(self, count: int) -> np.ndarray:
        """Returns the rows with the lowest scores, lowest first, int64. Equal scores keep the order of the file."""
        order = np.argsort(self.scores, kind="stable")
        return order[self._is_judged[order]][:count]

    def read(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """Returns the given rows, in that order and in the form of `read_samples`."""
        return [_row(row) for row in rows_of(self._path, rows)]

    def differences(self, sample_ids: Sequence[int]) -> list[list[float] | None]:
        """Returns the trainer's log-prob minus generation's for each token of these responses; None where it was not
        kept.
        """
        row_of = _row_of(self._differences)
        there = [number for number in sample_ids if number in row_of]
        rows = rows_of(self._differences, np.array([row_of[number] for number in there], np.int64))
        found = dict(zip(there, rows, strict=True))
        return [found[number]["difference"] if number in found else None for number in sample_ids]

    @property
    def without_routes(self) -> int:
        """Number of responses whose routes were not kept."""
        ids = pq.read_table(self._path, columns=["sample_id"])["sample_id"].to_numpy()
        return int((~np.isin(ids, _ids(self._routes))).sum())

    def routes(self, sample_ids: Sequence[int]) -> list[np.ndarray | None]:
        """Returns the experts that engines chose for prompt and response of these responses, [tokens, MoE layers, topk]
        as in mrl.data.routes: missing throughout where the engine returned none. None where they were not kept.
        """
        row_of = _row_of(self._routes)
        rows = np.array([row_of[number] for number in sample_ids if number in row_of], np.int64)
        if not len(rows):
            return [None] * len(sample_ids)
        found = {}
        with pq.ParquetFile(self._routes) as file:
            metadata = file.schema_arrow.metadata
            shape = (-1, int(metadata[b"layers"]), int(metadata[b"topk"]))
            for group, own, within in _of_row_groups(file, rows):
                column = file.read_row_group(group, columns=["routes"])["routes"].combine_chunks()
                # no number becomes an object of Python: a step has gigabytes of them
                ends, values = column.offsets.to_numpy(), column.values.to_numpy()
                found |= {row: values[ends[at] : ends[at + 1]] for row, at in zip(own, within.tolist(), strict=True)}
        return [found[row_of[number]].reshape(shape) if number in row_of else None for number in sample_ids]


def _row_of(path: Path) -> dict[int, int]:
    """Returns the rows of a file beside responses by their ids; none without the file."""
    return {number: row for row, number in enumerate(_ids(path).tolist())}


def _ids(path: Path) -> np.ndarray:
    """Returns the ids of the responses in a file beside them, int64 [rows]; none without the file."""
    if not path.exists():
        return np.zeros(0, np.int64)
    return pq.read_table(path, columns=["sample_id"])["sample_id"].to_numpy()


def rows_of(path: Path, rows: np.ndarray) -> list[dict[str, Any]]:
    """Returns rows of a file of columns in the given order, reading only their row groups. `rows`: int64."""
    if not len(rows):
        return []
    found: dict[int, dict[str, Any]] = {}
    with pq.ParquetFile(path) as file:
        for group, own, within in _of_row_groups(file, rows):
            found |= zip(own, file.read_row_group(group).take(pa.array(within)).to_pylist(), strict=True)
    return [found[row] for row in rows.tolist()]


def _of_row_groups(file: pq.ParquetFile, rows: np.ndarray) -> Iterator[tuple[int, list[int], np.ndarray]]:
    """Yields the row groups that have some of these rows: number, the rows, and where they are in it, int64."""
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    starts = np.cumsum([0, *sizes])
    group_of = np.searchsorted(starts, rows, side="right") - 1
    for group in np.unique(group_of):
        own = rows[group_of == group]
        yield int(group), own.tolist(), own - starts[group]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    own = {name: row.pop(name, None) for name in OWN_COLUMNS}  # an older file may lack a column
    first = row["weight_version"][0]["version"]
    return row | {
        "weight_version": first,
        "reward": parse_json(row["reward"]) | {k: v for k, v in own.items() if v is not None},
    }


def _table(samples: Samples, rewards: Sequence[RewardParts]) -> pa.Table:
    """Builds lists from the flat columns and the ends of rows. No number is copied by itself."""
    alternating = np.stack([samples.prompt_lengths, samples.response_lengths], axis=1).ravel()
    of_prompts = np.repeat(np.tile([True, False], len(samples)), alternating)
    own_columns = {}
    for name, kind in OWN_COLUMNS.items():
        own_columns[name] = pa.array([parts.get(name) for parts in rewards], kind)
    others = [_without_own_columns(parts) for parts in rewards]
    spans = pa.StructArray.from_arrays([samples.span_starts, samples.span_versions], ["first_token", "version"])
    return pa.table(
        {
            **{
                f.name: getattr(samples, f.name)
                for f in fields(Samples)
                if f.name in ("prompt_id", "group_id", "sample_id", "seed")
            },
            "engine": pa.array(samples.engine, mask=samples.engine == NO_ENGINE),
            "prompt_ids": _lists(pa.array(samples.token_ids[of_prompts]), samples.prompt_lengths),
            "response_ids": _lists(pa.array(samples.token_ids[~of_prompts]), samples.response_lengths),
            "rollout_log_probs": _lists(pa.array(samples.rollout_log_probs), samples.response_lengths),
            "stop_reason": _as_labels(samples.stop_reason),
            "weight_version": _lists(spans, samples.span_counts),
            **own_columns,
            "reward": pa.array(others, pa.string()),
        }
    )


def _without_own_columns(parts: RewardParts) -> str:
    """Returns the parts of a reward without a column of their own, as a line of JSON."""
    return json_line({name: part for name, part in parts.items() if name not in OWN_COLUMNS}).rstrip()


def _table_of_turns(samples: Samples, rewards: Sequence[RewardParts]) -> pa.Table:
    samples = with_turns(samples)
    turns = {
        "first_token": pa.array(samples.turn_starts),
        "stop_reason": _as_labels(samples.turn_stops),
        "calls": pa.array(samples.turn_calls),
        "seconds": pa.array(samples.turn_seconds),
        "reward": pa.array(samples.turn_rewards),
    }
    calls = {
        "name": pa.array([name.decode() for name in samples.call_names.tolist()], pa.string()),
        "reason": _as_labels(samples.call_reasons, CALL_REASONS),
        "seconds": pa.array(samples.call_seconds),
    }
    table = _table(samples, rewards)
    table = table.append_column("sampled", _lists(pa.array(samples.sampled), samples.response_lengths))
    table = table.append_column("turns", _structs(turns, samples.turn_counts))
    return table.append_column("calls", _structs(calls, samples.call_counts))


def _table_of_branches(samples: Samples, rewards: Sequence[RewardParts]) -> pa.Table:
    samples = with_branches(samples)
    branches = {"first_token": pa.array(samples.branch_starts), "prompt_tokens": pa.array(samples.branch_prompts)}
    table = _table_of_turns(samples, rewards)
    return table.append_column("branches", _structs(branches, samples.branch_counts))


def _with_images(table: Callable[..., pa.Table], samples: Samples, rewards: Sequence[RewardParts]) -> pa.Table:
    samples = with_images(samples)
    grids = pa.array(samples.image_grids.astype(np.int32).ravel())
    images = {
        "name": pa.array([name.decode() for name in samples.image_names.tolist()], pa.string()),
        "first_token": pa.array(samples.image_starts, pa.int32()),
        "tokens": pa.array(samples.image_tokens, pa.int32()),
        "grid": _lists(grids, np.full(len(samples.image_names), 3)),
    }
    return table(samples, rewards).append_column("images", _structs(images, samples.image_counts))


def _structs(columns: Mapping[str, pa.Array], counts: np.ndarray) -> pa.Array:
    return _lists(pa.StructArray.from_arrays(list(columns.values()), list(columns)), counts)


def _as_labels(reasons: np.ndarray, labels: Sequence[str] = STOP_REASONS) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(reasons, pa.int8()), list(labels)).dictionary_decode()


def _lists(values: pa.Array, counts: np.ndarray) -> pa.Array:
    return pa.LargeListArray.from_arrays(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), values)
