"""Files of `samples/`: a step's responses as they travel through a run, in columns, with their rewards.

`step-N.parquet` has a row a response: its ids and seed, `prompt_ids` and `response_ids` (lists of int32),
`rollout_log_probs` (list of float32), `stop_reason`, `weight_version` (list of `first_token`, `version`: one item unless
weights changed meanwhile), `score`, `reason`, and `reward` (JSON: the parts that the reward function gave). Older runs
have `step-N.jsonl`, which `read_samples` reads alike.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mrl.data.samples import STOP_REASONS, Samples, packed
from mrl.record.run_dir import json_line

RewardParts = Mapping[str, Any]  # `score`, `reason` and whatever else the reward function returned
OWN_COLUMNS = ("score", "reason")  # parts that every reward has
ROWS_AT_ONCE = 64  # of a row group: what a reader has to decompress for one response


def write_samples(folder: Path, step: int, pieces: Iterable[Samples], rewards: Sequence[RewardParts]) -> Path:
    """Writes `folder/step-N.parquet`, which appears whole or not at all; `rewards` are of all rows of all pieces, in order.

    Routes are left out: they are hundreds of bytes a token, and an engine of that weight version would give them again.
    """
    path = folder / f"step-{step}.parquet"
    work = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    done = 0
    with pq.ParquetWriter(work, _table(packed([]), []).schema, compression="zstd") as file:
        for piece in pieces:
            file.write_table(_table(piece, rewards[done : done + len(piece)]), row_group_size=ROWS_AT_ONCE)
            done += len(piece)
    with work.open("rb+") as file:
        os.fsync(file.fileno())
    work.replace(path)
    return path


def read_samples(folder: Path, step: int) -> list[dict[str, Any]]:
    """The responses of a step in order, each with the names above and `reward` as a dictionary with score and reason among its parts.

    `weight_version` is the one that a response was begun with. Raises FileNotFoundError.
    """
    path = folder / f"step-{step}.parquet"
    if not path.exists():
        return [json.loads(line) for line in path.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()]
    return [_row(row) for row in pq.read_table(path).to_pylist()]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    own = {name: row.pop(name) for name in OWN_COLUMNS}
    first = row["weight_version"][0]["version"]
    return row | {"weight_version": first, "reward": json.loads(row["reward"]) | {k: v for k, v in own.items() if v is not None}}


def _table(samples: Samples, rewards: Sequence[RewardParts]) -> pa.Table:
    """Lists are the flat columns and where rows end: no number is copied one by one."""
    of_prompts = np.repeat(np.tile([True, False], len(samples)), _alternating(samples.prompt_lengths, samples.response_lengths))
    own = [json_line({k: v for k, v in parts.items() if k not in OWN_COLUMNS}).rstrip() for parts in rewards]
    spans = pa.StructArray.from_arrays([samples.span_starts, samples.span_versions], ["first_token", "version"])
    return pa.table(
        {
            **{f.name: getattr(samples, f.name) for f in fields(Samples) if f.name in ("prompt_id", "group_id", "sample_id", "seed")},
            "prompt_ids": _lists(pa.array(samples.token_ids[of_prompts]), samples.prompt_lengths),
            "response_ids": _lists(pa.array(samples.token_ids[~of_prompts]), samples.response_lengths),
            "rollout_log_probs": _lists(pa.array(samples.rollout_log_probs), samples.response_lengths),
            "stop_reason": pa.DictionaryArray.from_arrays(pa.array(samples.stop_reason, pa.int8()), list(STOP_REASONS)).dictionary_decode(),
            "weight_version": _lists(spans, samples.span_counts),
            **{name: pa.array([parts.get(name) for parts in rewards], kind) for name, kind in zip(OWN_COLUMNS, _KINDS, strict=True)},
            "reward": pa.array(own, pa.string()),
        }
    )


_KINDS = (pa.float64(), pa.string())


def _alternating(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.stack([one, other], axis=1).ravel()


def _lists(values: pa.Array, counts: np.ndarray) -> pa.Array:
    return pa.LargeListArray.from_arrays(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), values)
