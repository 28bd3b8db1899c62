"""One response through everything that a run kept of it, and the same prompt in its other steps."""

from typing import Any

import numpy as np

from mrl.algo.advantages import AdvantageInputs, response_advantages
from mrl.algo.spec import BY_TURN
from mrl.config.load import load_config
from mrl.config.schema import RunConfig
from mrl.data.routes import is_missing
from mrl.errors import ConfigError, MrlError
from mrl.record.run_dir import RunDir
from mrl.record.sample_files import DAMAGED, StepFile, steps_with_responses
from mrl.reward.items import UNJUDGED

_NO_NUMBER = ("gae", "gdpo")  # estimators that need values, or parts of rewards


def story_of(run: RunDir, file: StepFile, sample_id: int) -> dict[str, Any]:
    """Returns the response's row, with `trainer_less_rollout`, `group`, `advantage`, `ratio`, `routes`, `dropped` and
    `other_steps`.

    Raises ConfigError if the step has no such response.
    """
    rows = file.read(np.arange(len(file.scores)))
    found = [number for number, row in enumerate(rows) if row["sample_id"] == sample_id]
    if not found:
        ids = sorted(row["sample_id"] for row in rows)
        raise ConfigError(f"--id {sample_id}: step {file.step} has no such response; it has {ids[0]} to {ids[-1]}")
    row = rows[found[0]]
    (gap,) = file.differences([sample_id])
    group = [each for each in rows if each["group_id"] == row["group_id"]]
    config = _config(run)
    return row | {
        "trainer_less_rollout": gap,
        "ratio": None if gap is None else float(np.exp(np.sum(gap, dtype=np.float64))),
        "group": [
            {"sample_id": each["sample_id"], "score": each["reward"]["score"], "tokens": len(each["response_ids"])}
            for each in group
        ],
        "routes": _routes(file, row, group),
        "advantage": None if config is None else _advantage(config, group, sample_id),
        "dropped": _dropped(config, row),
        "other_steps": _other_steps(run, file.step, row["prompt_id"]),
    }


def _routes(file: StepFile, row: dict[str, Any], group: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the experts that the engine chose, `chosen` [tokens, MoE layers, topk]; the pairs of token and layer
    without a known choice, `missing`, of `pairs`; and `elsewhere`, the prompt's pairs that another response of the same
    weights has otherwise, by its id. None where routes were not kept.

    A prompt's tokens are computed from the same weights for each response, so they differ by rounding alone.
    """
    alike = [each for each in group if each["weight_version"] == row["weight_version"]]
    found = dict(zip((each["sample_id"] for each in alike), file.routes([e["sample_id"] for e in alike]), strict=True))
    own = found.pop(row["sample_id"])
    if own is None:
        return None
    prompt = slice(0, len(row["prompt_ids"]))
    elsewhere = {}
    for number, others in found.items():
        if others is not None:
            differs = (np.sort(own[prompt]) != np.sort(others[prompt])).any(-1)
            known = ~(is_missing(own[prompt]) | is_missing(others[prompt]))
            elsewhere[number] = int((differs & known).sum())
    missing = is_missing(own)
    return {"chosen": own.tolist(), "missing": int(missing.sum()), "pairs": missing.size, "elsewhere": elsewhere}


def _config(run: RunDir) -> RunConfig | None:
    """Returns the configuration; None if it is missing or of another version."""
    try:
        return load_config(run.config).config
    except MrlError:
        return None


def _advantage(config: RunConfig, group: list[dict[str, Any]], sample_id: int) -> float | None:
    """Returns the response's advantage, before any whitening. None where scores alone do not give it."""
    algorithm = config.algorithm
    own = algorithm.custom_advantage is not None or algorithm.use_kl_in_reward or algorithm.overlong_buffer.enable
    if own or algorithm.adv_estimator in (*_NO_NUMBER, *BY_TURN):
        return None
    judged = [each for each in group if each["reward"].get("reason") not in UNJUDGED]
    ids = [each["sample_id"] for each in judged]
    if sample_id not in ids:
        return None
    inputs = AdvantageInputs(
        scores=np.array([float(each["reward"]["score"]) for each in judged]),
        group_ids=np.zeros(len(judged), np.int64),
        lengths=np.array([sum(each.get("sampled") or [True] * len(each["response_ids"])) for each in judged]),
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
    )
    return float(response_advantages(algorithm.adv_estimator, inputs).per_response[ids.index(sample_id)])


def _dropped(config: RunConfig | None, row: dict[str, Any]) -> str:
    """Says why the response did not train; empty if nothing that is kept says so."""
    if (reason := row["reward"].get("reason")) in UNJUDGED:
        return f"not judged: {reason}"
    if config is not None and config.algorithm.overlong_filter and row["stop_reason"] == "length":
        return "cut off at data.max_response_length, and algorithm.overlong_filter leaves such responses out"
    return ""


def _other_steps(run: RunDir, step: int, prompt_id: int) -> dict[int, list[float]]:
    """Returns the scores of the same prompt's responses in the other steps that have some. Damaged steps have none."""
    found = {}
    for other in steps_with_responses(run.samples):
        if other == step:
            continue
        try:
            file = StepFile(run.samples, other)
            scores = file.scores[file.prompt_ids == prompt_id].tolist()
        except DAMAGED:
            continue
        if scores:
            found[other] = scores
    return found
