"""What ranks are given of a step, made anew from its stored samples."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mrl.config.schema import RunConfig
from mrl.data.order import DataCursor
from mrl.data.samples import RowImage, Sample, packed
from mrl.errors import ConfigError
from mrl.generate.rollouts import Judge, Rollouts
from mrl.record.sample_files import GROUND_TRUTH, StepFile, read_samples, readable
from mrl.reward.items import RewardResult
from mrl.store.response_store import ResponseBlock, ResponseStore


class StoredResponses(ResponseStore):
    """Responses in this process's memory, in place of an object store."""

    @staticmethod
    def _get(references: Sequence[Any]) -> list[Any]:
        return list(references)


def stored_rollouts(config: RunConfig, folder: Path, step: int) -> Rollouts:
    """Returns samples, results and rewards of a step as the run had them. `folder`: the run's samples.

    Raises ConfigError for a step without a file or without its routes, and DataError for a damaged one.
    """
    try:
        with readable(folder, step):
            check_routes_kept(config, folder, step)
            rows = read_samples(folder, step)
            routes = StepFile(folder, step).routes([row["sample_id"] for row in rows])
            samples = packed([_sample(row, own) for row, own in zip(rows, routes, strict=True)])
    except FileNotFoundError:
        raise ConfigError(
            f"{folder}: has no samples of step {step}, which has to be computed again; record.samples: all keeps them, "
            "within record.samples_max_gib"
        ) from None
    store = StoredResponses.of(samples.numbers, ResponseBlock(replace(samples, routes=None), samples.routes))
    judge = Judge(config.algorithm, config.reward, config.data.max_response_length)
    return judge.rollouts(store, [_result(row) for row in rows], DataCursor(), {})


def check_routes_kept(config: RunConfig, folder: Path, step: int) -> None:
    """Raises ConfigError for a step of R3 whose routes were not kept: ranks would route by themselves.

    `folder`: the run's samples. Raises FileNotFoundError for a step without a file.
    """
    if config.actor.router_replay != "R3":
        return
    file = StepFile(folder, step)
    if lacking := file.without_routes:
        raise ConfigError(
            f"{folder}: step {step} trained on the engines' routes (actor.router_replay: R3), and those of "
            f"{lacking} of {len(file.scores)} responses were not kept: record.routes was off, or writing them failed"
        )


def _sample(row: dict[str, Any], routes: np.ndarray | None) -> Sample:
    return Sample(
        prompt_id=row["prompt_id"],
        group_id=row["group_id"],
        sample_id=row["sample_id"],
        seed=row["seed"],
        prompt_ids=np.array(row["prompt_ids"], np.int32),
        response_ids=np.array(row["response_ids"], np.int32),
        rollout_log_probs=np.array(row["rollout_log_probs"], np.float32),
        stop_reason=row["stop_reason"],
        weight_version=row["weight_version"],
        routes=routes,
        images=tuple(_image(image) for image in row.get("images") or ()),
    )


def _image(image: dict[str, Any]) -> RowImage:
    return RowImage(image["name"], image["first_token"], image["tokens"], tuple(image["grid"]))


def _result(row: dict[str, Any]) -> RewardResult:
    parts = {name: part for name, part in row["reward"].items() if name not in ("score", "reason", GROUND_TRUTH)}
    return RewardResult(row["sample_id"], float(row["reward"]["score"]), parts, row["reward"].get("reason", "ok"))
