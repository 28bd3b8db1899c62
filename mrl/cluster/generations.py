"""Writes validation responses as lines of JSON for readers and audits, in a process that has a tokenizer."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mrl.data.batch import Prompt
from mrl.data.samples import STOP_REASONS
from mrl.record.run_dir import json_line
from mrl.reward.items import RewardResult
from mrl.store.response_store import ResponseStore
from mrl.store.reward_texts import with_texts
from mrl.whole_file import appears_whole

ROWS_AT_ONCE = 64  # held in memory


def write_generations(
    path: Path,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    stored: ResponseStore,
    results: Sequence[RewardResult],
    shown: Sequence[int],
) -> list[dict[str, Any]]:
    """Writes one line a response. The file appears complete or not at all.

    `prompts` are by group, `results` by row. Returns the rows with the numbers `shown`, in that order.
    """
    kept: dict[int, dict[str, Any]] = {}
    wanted = set(shown)
    with appears_whole(path) as work, work.open("w", encoding="utf-8") as file:
        for number, row in enumerate(_rows(tokenizer, prompts, stored, results)):
            file.write(json_line(row))
            if number in wanted:
                kept[number] = row
    return [kept[number] for number in shown]


def _rows(
    tokenizer: Any, prompts: Sequence[Prompt], stored: ResponseStore, results: Sequence[RewardResult]
) -> Iterator[dict[str, Any]]:
    for first in range(0, len(stored), ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, len(stored))
        own = with_texts(results[first:last])
        yield from _some_rows(tokenizer, prompts, stored.take(np.arange(first, last)), own)


def _some_rows(
    tokenizer: Any, prompts: Sequence[Prompt], stored: ResponseStore, results: Sequence[RewardResult]
) -> Iterator[dict[str, Any]]:
    """Yields rows as plain data.

    `input` and `output` belong to the turn that was sampled last, and keep special tokens. `gts` is the ground truth,
    under verl's name.
    """
    samples = stored.read()
    columns = (samples.group_id, samples.seed, samples.stop_reason, samples.weight_version)
    numbers = zip(*(column.tolist() for column in columns), strict=True)
    parts = zip(numbers, samples.spoken_last(), results, strict=True)
    for (group, seed, reason, version), (prompt, response), result in parts:
        yield {
            "data_source": prompts[group].data_source,
            "prompt_id": prompts[group].prompt_id,
            "sample_id": result.sample_id,
            "seed": seed,
            "input": tokenizer.decode(prompt.tolist()),
            "output": tokenizer.decode(response.tolist()),
            "gts": prompts[group].ground_truth,
            "score": result.score,
            "reason": result.reason,
            "detail": result.detail,
            "reward": dict(result.parts),
            "response_length": len(response),
            "stop_reason": STOP_REASONS[reason],
            "weight_version": version,
        }
