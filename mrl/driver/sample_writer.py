"""Writes files of samples in a separate process, from where the responses are stored."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from mrl.cluster.calls import gather_all
from mrl.config.schema import RecordConfig
from mrl.data.routes import recoded
from mrl.data.samples import Samples
from mrl.driver.step_batch import StepBatch
from mrl.driver.turn_images import TurnImages
from mrl.errors import EnvironmentFault
from mrl.process.ray_nodes import on_node
from mrl.record.sample_files import (
    DAMAGED,
    GROUND_TRUTH,
    ROWS_AT_ONCE,
    RewardParts,
    keep_within,
    write_differences,
    write_routes,
    write_samples,
)
from mrl.reward.items import RewardResult
from mrl.store.response_store import ResponseStore
from mrl.store.reward_texts import with_texts
from mrl.units import GIB

LONGEST_TRUTH = 2000  # characters


class _Writer:
    """The process that writes. It holds few responses at a time."""

    def __init__(
        self,
        folder: Path,
        max_bytes: float,
        images: bool = False,
        routes: bool = False,
        of_turns: TurnImages | None = None,
    ):
        self._folder = folder
        self._max_bytes = max_bytes
        self._routes = routes
        self._images = images
        self._of_turns = of_turns

    def write(
        self, step: int, samples: ResponseStore, results: Sequence[RewardResult], truths: Mapping[int, Any]
    ) -> None:
        turns = samples.rows.turn_counts is not None
        branches = samples.rows.branch_counts is not None
        rewards = reward_parts(results)
        if truths:
            ids = samples.rows.prompt_id.tolist()
            rewards = [{GROUND_TRUTH: truths.get(id)} | dict(own) for id, own in zip(ids, rewards, strict=True)]
        write_samples(self._folder, step, _pieces(samples), rewards, turns, branches, self._images)
        if self._routes:
            write_routes(self._folder, step, _with_routes(samples))
        self._keep_within()

    def write_differences(
        self, step: int, rows: Sequence[tuple[np.ndarray, np.ndarray]], *parts: np.ndarray | None
    ) -> None:
        """`rows` are ids and response lengths of each rank's rows. `parts` are None for ranks that return nothing."""
        known = [(*own, part) for own, part in zip(rows, parts, strict=True) if part is not None]
        write_differences(self._folder, step, *(np.concatenate(column) for column in zip(*known, strict=True)))
        self._keep_within()

    def _keep_within(self) -> None:
        beside: Mapping[int, int] = {}
        if self._of_turns is not None and math.isfinite(self._max_bytes):
            with suppress(*DAMAGED):  # an older step; its responses are not needed
                beside = self._of_turns.bytes_of_steps()
        keep_within(self._folder, self._max_bytes, beside)

    def remove_unused_images(self) -> None:
        """Is called after `write`, if that is called."""
        self._of_turns.remove_unused()


def _pieces(samples: ResponseStore) -> Iterator[Samples]:
    return (part.read() for part in _parts(samples))


def _with_routes(samples: ResponseStore) -> Iterator[Samples]:
    """Yields pieces with their routes, in one dtype: a checkpoint may bring some in a wider one."""
    dtype = None
    for part in _parts(samples):
        piece = part.read(with_routes=True)
        if piece.routes is not None:
            dtype = dtype or piece.routes.dtype
            piece = replace(piece, routes=recoded(piece.routes, dtype))
        yield piece


def _parts(samples: ResponseStore) -> Iterator[ResponseStore]:
    for first in range(0, len(samples), ROWS_AT_ONCE):
        yield samples.take(np.arange(first, min(first + ROWS_AT_ONCE, len(samples))))


def reward_parts(results: Sequence[RewardResult]) -> list[RewardParts]:
    """Returns what is written of the rewards of samples."""
    return [{**each.parts, "score": each.score, "reason": each.reason} for each in with_texts(results)]


class SampleWriter:
    """Writes `folder/step-N.parquet` beside training, on this process's node, one step at a time.

    A full disk costs samples, not the run: `failed` counts the files that are missing.
    """

    def __init__(
        self,
        folder: Path,
        timeout_s: float,
        record: RecordConfig,
        images: bool = False,
        of_turns: TurnImages | None = None,
    ):
        """`images`: the run has some. `of_turns`: those of tools and agents, if it may have any."""
        self._timeout_s = timeout_s
        self._kept = record.samples
        self._under_way = {}
        self.failed = 0
        max_bytes = float("inf") if record.samples_max_gib is None else record.samples_max_gib * GIB
        kind = ray.remote(_Writer).options(**on_node())
        self._writer = None
        if record.samples != "none" or of_turns is not None:
            self._writer = kind.remote(folder, max_bytes, images, record.routes, of_turns)
        self._has_images_of_turns = of_turns is not None

    def write(
        self,
        step: int,
        samples: ResponseStore,
        results: Sequence[RewardResult],
        truth_of: Callable[[int], Any] | None = None,
    ) -> None:
        """Starts to write the step's file once the one before is written. Raises what `finish` raises.

        `truth_of` returns the ground truth of a prompt by its id; it is written among the parts of its rewards.
        """
        self.finish()
        if self._kept != "none":
            rows = kept_rows(len(samples), self._kept)
            chosen = samples.take(rows), [results[row] for row in rows.tolist()]
            ids = np.unique(samples.rows.prompt_id[rows]).tolist()
            truths = {} if truth_of is None else {id: _shown(truth_of(id)) for id in ids}
            self._under_way = {f"samples of step {step}": self._writer.write.remote(step, *chosen, truths)}
        if self._has_images_of_turns:
            self._under_way[f"images of step {step}"] = self._writer.remove_unused_images.remote()

    def write_differences(self, step: int, trained: StepBatch) -> None:
        """Starts to write differences of log-probs for the rows in the step's file.

        They go from the ranks to the writer directly.
        """
        if self._kept != "none":
            rows, parts = trained.differences(kept_rows(len(trained.rows), self._kept))
            under_way = self._writer.write_differences.remote(step, rows, *parts)
            self._under_way[f"log-probs of step {step}"] = under_way

    def finish(self) -> None:
        """Waits for the files under way. Raises Interrupted when they take too long or responses are lost."""
        under_way = self._under_way
        self._under_way = {}
        for name, ref in under_way.items():
            try:
                gather_all({"the writer of samples": ref}, self._timeout_s, f"writing {name}")
            except EnvironmentFault as fault:
                self.failed += 1
                print(f"error: {name} are not kept: {fault}. Training goes on", flush=True)

    def close(self) -> None:
        """Waits for the files under way and ends the process."""
        try:
            self.finish()
        finally:
            if self._writer is not None:
                ray.kill(self._writer)


def _shown(truth: Any) -> Any:
    """Returns a ground truth as it is written with each response: of a long one, such as test cases, the beginning."""
    text = truth if isinstance(truth, str) else json.dumps(truth, default=str)
    return truth if len(text) <= LONGEST_TRUTH else f"{text[:LONGEST_TRUTH]}..."


def kept_rows(rows: int, kept: int | str) -> np.ndarray:
    """Returns the rows of a step that `record.samples` keeps, int64, ascending."""
    if kept == "all" or kept >= rows:
        return np.arange(rows)
    return np.arange(kept) * rows // kept
