"""Files of `samples/`: a step's responses as they travel through a run, in columns, with their rewards.

`step-N.parquet` has a row a response: its ids and seed, `prompt_ids` and `response_ids` (lists of int32),
`rollout_log_probs` (list of float32), `stop_reason`, `weight_version` (list of `first_token`, `version`: one item
unless weights changed meanwhile), `score`, `reason`, and `reward` (JSON: the parts that the reward function gave).
Where responses have several turns there are `sampled` (list of bool: false of context, whose log-probs mean nothing)
`turns` (list of `first_token`, `stop_reason`, `calls`, `seconds`, `reward`; see mrl.data.samples.Turn), and `calls`, of
all turns one after another (list of `name`, `reason`, `seconds`; see mrl.data.samples.TurnCall). Where a response has
several branches there is `branches` (list of `first_token`, `prompt_tokens`; see mrl.data.samples).
Older runs have `step-N.jsonl`, which `read_samples` reads alike.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mrl.data.samples import CALL_REASONS, STOP_REASONS, UNJUDGED, Samples, packed, with_branches, with_turns
from mrl.errors import DataError, MrlError
from mrl.plain_files import LINES_BYTES, parse_json, read_text
from mrl.record.run_dir import json_line, step_of
from mrl.whole_file import appears_whole

# what reading a file raises that is not what it should be
DAMAGED = (OSError, pa.ArrowException, ValueError, LookupError, TypeError, AttributeError, OverflowError)
RewardParts = Mapping[str, Any]  # `score`, `reason` and whatever else the reward function returned
OWN_COLUMNS = ("score", "reason")  # parts that every reward has
DIFFERENCES = ".log_probs.parquet"
ROWS_AT_ONCE = 64  # of a row group: what a reader has to decompress for one response


def write_samples(
    folder: Path,
    step: int,
    pieces: Iterable[Samples],
    rewards: Sequence[RewardParts],
    turns: bool = False,
    branches: bool = False,
) -> Path:
    """Writes `folder/step-N.parquet`, which appears whole or not at all; `rewards` are of all rows of all pieces, in
    order. `turns`, `branches`: with their columns; those of branches go with those of turns.

    Routes are left out: they are hundreds of bytes a token, and an engine of that weight version would give them again.
    """
    table = _table
    if turns:
        table = _table_of_branches if branches else _table_of_turns
    schema = table(packed([]), []).schema
    return _write_whole(folder / f"step-{step}.parquet", schema, _tables(pieces, rewards, table))


def _tables(
    pieces: Iterable[Samples], rewards: Sequence[RewardParts], table: Callable[..., pa.Table]
) -> Iterator[pa.Table]:
    done = 0
    for piece in pieces:
        yield table(piece, rewards[done : done + len(piece)])
        done += len(piece)


def _write_whole(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> Path:
    """The file, once all of it is on the disk; nothing of one that fails stays."""
    with appears_whole(path) as work, pq.ParquetWriter(work, schema, compression="zstd") as file:
        for table in tables:
            file.write_table(table, row_group_size=ROWS_AT_ONCE)
    return path


def write_differences(
    folder: Path, step: int, sample_id: np.ndarray, lengths: np.ndarray, differences: np.ndarray
) -> Path:
    """Writes `folder/step-N.log_probs.parquet`: by response, how far the trainer's log-prob of each token is from
    generation's, float16.

    `sample_id`, `lengths`: [rows]; `differences`: [response tokens], rows end to end.
    """
    halves = pa.array(differences.astype(np.float16))
    table = pa.table({"sample_id": sample_id, "difference": _lists(halves, lengths)})
    return _write_whole(folder / f"step-{step}{DIFFERENCES}", table.schema, [table])


def steps_with_responses(folder: Path) -> list[int]:
    """Steps that have a file of responses, ascending. One may have that of its log-probs alone: its other file failed,
    or is not there yet.
    """
    names = (re.fullmatch(r"step-(\d+)\.(parquet|jsonl)", file.name) for file in folder.glob("step-*.*"))
    return sorted({int(name[1]) for name in names if name})


def keep_within(folder: Path, max_bytes: float) -> list[int]:
    """Removes files of the oldest steps, never of the newest, until those left have `max_bytes` at most;
    their steps.
    """
    sizes: dict[int, int] = {}
    for file in folder.glob("step-*.*"):
        step = step_of(file)
        sizes[step] = sizes.get(step, 0) + file.stat().st_size
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
    """The responses of a step in order, each with the names above and `reward` as a dictionary with score and reason
    among its parts.

    `weight_version` is the one that a response was begun with. Raises FileNotFoundError.
    """
    file = StepFile(folder, step)
    return file.read(np.arange(len(file.scores)))


@contextmanager
def readable(folder: Path, step: int) -> Iterator[None]:
    """Turns whatever is wrong with the samples of a step into one DataError.

    A step without samples stays FileNotFoundError.
    """
    try:
        yield
    except (FileNotFoundError, MrlError):
        raise
    except DAMAGED as error:
        said = f"{type(error).__name__}: {error}"
        raise DataError(f"{folder}: the samples of step {step} cannot be read ({said})") from error


class StepFile:
    """The responses of a step on the disk; only what is asked for is read of a file of columns."""

    def __init__(self, folder: Path, step: int):
        """Raises FileNotFoundError where the step has no file."""
        self.step = step
        self._path = folder / f"step-{step}.parquet"
        self._differences = folder / f"step-{step}{DIFFERENCES}"
        self._lines: list[dict[str, Any]] | None = None
        if not self._path.exists():
            lines = read_text(self._path.with_suffix(".jsonl"), LINES_BYTES).splitlines()
            self._lines = [parse_json(line) for line in lines]

    @cached_property
    def scores(self) -> np.ndarray:
        """float64 [rows]."""
        if self._lines is not None:
            return np.array([float(line["reward"]["score"]) for line in self._lines])
        return self._numbers["score"].to_numpy()

    @cached_property
    def prompt_ids(self) -> np.ndarray:
        """int64 [rows]: the prompt that each response answers."""
        if self._lines is not None:
            return np.array([line["prompt_id"] for line in self._lines], np.int64)
        return self._numbers["prompt_id"].to_numpy()

    @cached_property
    def _numbers(self) -> pa.Table:
        return pq.read_table(self._path, columns=["score", "prompt_id", "reason"])

    @cached_property
    def _is_judged(self) -> np.ndarray:
        """bool [rows]: false where the environment failed, and the score is none."""
        if self._lines is not None:
            return np.array([line["reward"].get("reason") not in UNJUDGED for line in self._lines], bool)
        return np.array([reason not in UNJUDGED for reason in self._numbers["reason"].to_pylist()], bool)

    def worst(self, count: int) -> np.ndarray:
        """int64: judged rows with the lowest scores, lowest first, in the order of the file where they are alike."""
        order = np.argsort(self.scores, kind="stable")
        return order[self._is_judged[order]][:count]

    def read(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """The given rows, in that order; see read_samples."""
        if self._lines is not None:
            return [self._lines[row] for row in rows.tolist()]
        return [_row(row) for row in rows_of(self._path, rows)]

    def differences(self, sample_ids: Sequence[int]) -> list[list[float] | None]:
        """How far the trainer's log-prob of each token of these responses is from generation's; None: not kept."""
        if not self._differences.exists():
            return [None] * len(sample_ids)
        kept = pq.read_table(self._differences, columns=["sample_id"])["sample_id"].to_numpy()
        place = {number: row for row, number in enumerate(kept.tolist())}
        there = [number for number in sample_ids if number in place]
        found = rows_of(self._differences, np.array([place[number] for number in there], np.int64))
        by_id = {number: row["difference"] for number, row in zip(there, found, strict=True)}
        return [by_id.get(number) for number in sample_ids]


def rows_of(path: Path, rows: np.ndarray) -> list[dict[str, Any]]:
    """Rows of a file of columns, in the given order, read from the groups of rows that they are in; `rows`: int64."""
    if not len(rows):
        return []
    with pq.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        starts = np.cumsum([0, *sizes])
        group_of = np.searchsorted(starts, rows, side="right") - 1
        found: dict[int, dict[str, Any]] = {}
        for group in np.unique(group_of):
            own = rows[group_of == group]
            table = file.read_row_group(int(group)).take(pa.array(own - starts[group]))
            found |= dict(zip(own.tolist(), table.to_pylist(), strict=True))
    return [found[row] for row in rows.tolist()]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    own = {name: row.pop(name, None) for name in OWN_COLUMNS}  # an older file lacks a newer column
    first = row["weight_version"][0]["version"]
    return row | {
        "weight_version": first,
        "reward": parse_json(row["reward"]) | {k: v for k, v in own.items() if v is not None},
    }


def _table(samples: Samples, rewards: Sequence[RewardParts]) -> pa.Table:
    """Lists are the flat columns and where rows end: no number is copied one by one."""
    of_prompts = np.repeat(
        np.tile([True, False], len(samples)), _alternating(samples.prompt_lengths, samples.response_lengths)
    )
    own_columns = {}
    for name, kind in zip(OWN_COLUMNS, _KINDS, strict=True):
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
            "prompt_ids": _lists(pa.array(samples.token_ids[of_prompts]), samples.prompt_lengths),
            "response_ids": _lists(pa.array(samples.token_ids[~of_prompts]), samples.response_lengths),
            "rollout_log_probs": _lists(pa.array(samples.rollout_log_probs), samples.response_lengths),
            "stop_reason": _in_words(samples.stop_reason),
            "weight_version": _lists(spans, samples.span_counts),
            **own_columns,
            "reward": pa.array(others, pa.string()),
        }
    )


def _without_own_columns(parts: RewardParts) -> str:
    """The parts of a reward that have no column of their own, as a line of JSON."""
    return json_line({name: part for name, part in parts.items() if name not in OWN_COLUMNS}).rstrip()


_KINDS = (pa.float64(), pa.string())


def _table_of_turns(samples: Samples, rewards: Sequence[RewardParts]) -> pa.Table:
    samples = with_turns(samples)
    turns = {
        "first_token": pa.array(samples.turn_starts),
        "stop_reason": _in_words(samples.turn_stops),
        "calls": pa.array(samples.turn_calls),
        "seconds": pa.array(samples.turn_seconds),
        "reward": pa.array(samples.turn_rewards),
    }
    calls = {
        "name": pa.array([name.decode() for name in samples.call_names.tolist()], pa.string()),
        "reason": _in_words(samples.call_reasons, CALL_REASONS),
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


def _structs(columns: Mapping[str, pa.Array], counts: np.ndarray) -> pa.Array:
    return _lists(pa.StructArray.from_arrays(list(columns.values()), list(columns)), counts)


def _in_words(reasons: np.ndarray, words: Sequence[str] = STOP_REASONS) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(reasons, pa.int8()), list(words)).dictionary_decode()


def _alternating(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.stack([one, other], axis=1).ravel()


def _lists(values: pa.Array, counts: np.ndarray) -> pa.Array:
    return pa.LargeListArray.from_arrays(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), values)
