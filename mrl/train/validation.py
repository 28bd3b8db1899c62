"""Held-out prompts answered and scored: the numbers, every response in a file, a few for people to look at."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config.schema import RunConfig
from mrl.data.batch import Prompt
from mrl.data.dataset import PromptDataset
from mrl.data.samples import STOP_REASONS, Samples
from mrl.record.run_dir import json_line, write_text
from mrl.record.validation_metrics import ACC, PRED, REWARD, Answers, evenly_spread, validation_metrics
from mrl.reward.items import OK, RewardResult, failure_counts
from mrl.train.reporting import AdvisedRecord
from mrl.train.rollouts import Responder, sample_seed
from mrl.vllm.requests import validation_sampling

VALIDATION = "validation"


@dataclass(frozen=True)
class Validation:
    """One validation: metrics, and a row a response in the order of prompts."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]


def validate(
    config: RunConfig, responder: Responder, prompts: PromptDataset, step: int, folder: Path, record: AdvisedRecord
) -> dict[str, float]:
    """Metrics of all held-out sets under the weights that the engines hold after `step`.

    Every response stands in `folder/step-N.jsonl`; `trainer.log_val_generations` of them go to the loggers.
    """
    validation = answer_and_score(config, responder, prompts)
    write_generations(folder / f"step-{step}.jsonl", validation.rows)
    limit = config.trainer.log_val_generations
    if limit:
        record.generations(step, [validation.rows[i] for i in evenly_spread(len(validation.rows), limit)])
    return validation.metrics


def answer_and_score(config: RunConfig, responder: Responder, dataset: PromptDataset) -> Validation:
    """`rollout.val_kwargs.n` responses a prompt under the sampling of validation; seeds are the same at every validation.

    Raises DataError when too many rewards failed.
    """
    n, run_seed, prompts = config.rollout.val_kwargs.n, config.trainer.seed, list(dataset)

    def seed(prompt: Prompt, k: int) -> int:
        return sample_seed(run_seed, VALIDATION, 0, prompt.prompt_id, k)

    samples = responder.respond(prompts, n, validation_sampling(config), seed, VALIDATION)
    results, samples = responder.collect_rewards(samples), samples.read()
    answers = _answers(prompts, [results[g * n : (g + 1) * n] for g in range(len(prompts))])
    failed = sum(failure_counts(results).values())
    metrics = validation_metrics(answers) | {"val-aux/reward_failed": float(failed)} | _lengths(samples)
    return Validation(metrics, _rows(responder.tokenizer, prompts, samples, results))


def _answers(prompts: Sequence[Prompt], results: Sequence[Sequence[RewardResult]]) -> list[Answers]:
    """One a prompt, from its results. What is measured is decided by data source: a prompt whose responses all failed takes part too."""
    by_source: dict[str, list[RewardResult]] = defaultdict(list)
    for prompt, scored in zip(prompts, results, strict=True):
        by_source[prompt.data_source].extend(scored)
    measured = {source: _measured(scored) for source, scored in by_source.items()}
    return [_prompt_answers(prompt, scored, *measured[prompt.data_source]) for prompt, scored in zip(prompts, results, strict=True)]


def _measured(results: Sequence[RewardResult]) -> tuple[set[str], float, bool]:
    """Numbers that all responses of a data source have beside the score; a failed one's accuracy; whether each says its answer.

    A failed response has the lowest accuracy of its data source and at most 0 (a function that gives a number alone may
    go below), an empty answer, and no other number: where one failed, those are left out.
    """
    scored = [r for r in results if r.reason == OK]
    if not scored:
        return set(), 0.0, False
    names = set.intersection(*({k for k, v in r.parts.items() if isinstance(v, float | int)} for r in scored))
    wrong = min(0.0, *(r.parts[ACC] for r in scored)) if ACC in names else 0.0
    return names if len(scored) == len(results) else names & {ACC}, wrong, all(PRED in r.parts for r in scored)


def _prompt_answers(prompt: Prompt, results: Sequence[RewardResult], names: set[str], wrong: float, voting: bool) -> Answers:
    values = {name: [r.parts.get(name, wrong) for r in results] for name in names}
    preds = [str(r.parts.get(PRED, "")) for r in results] if voting else None
    return Answers(prompt.data_source, {REWARD: [r.score for r in results]} | values, preds)


def _lengths(samples: Samples) -> dict[str, float]:
    return {
        "val-aux/response_length/mean": int(samples.response_lengths.sum()) / len(samples),
        "val-aux/response_length/clip_ratio": int(samples.truncated.sum()) / len(samples),
    }


def _rows(tokenizer: Any, prompts: Sequence[Prompt], samples: Samples, results: Sequence[RewardResult]) -> list[dict[str, Any]]:
    """Each response for people and for audits; `input` and `output` keep special tokens, `gts` is the truth, as verl names it."""
    numbers = zip(*(c.tolist() for c in (samples.group_id, samples.seed, samples.stop_reason, samples.weight_version)), strict=True)
    return [
        {
            "data_source": prompts[group].data_source, "prompt_id": prompts[group].prompt_id, "sample_id": result.sample_id, "seed": seed,
            "input": tokenizer.decode(prompt.tolist()), "output": tokenizer.decode(response.tolist()), "gts": prompts[group].ground_truth,
            "score": result.score, "reason": result.reason, "detail": result.detail, "reward": dict(result.parts),
            "response_length": len(response), "stop_reason": STOP_REASONS[reason], "weight_version": version,
        }
        for (group, seed, reason, version), prompt, response, result in zip(
            numbers, samples.prompts(), samples.responses(), results, strict=True
        )
    ]  # fmt: skip


def write_generations(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A line a response; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(map(json_line, rows)))
