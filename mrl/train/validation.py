"""Held-out prompts answered and scored: the numbers, every response in a file, a few for people to look at."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.cluster.stored_samples import StoredSamples
from mrl.config.schema import RunConfig
from mrl.data.batch import Prompt
from mrl.data.dataset import PromptDataset
from mrl.data.samples import SampleRows
from mrl.record.validation_metrics import ACC, PRED, REWARD, Answers, evenly_spread, validation_metrics
from mrl.reward.items import OK, RewardResult, failure_counts
from mrl.train.reporting import AdvisedRecord
from mrl.train.rollouts import Responder, sample_seed
from mrl.vllm.requests import validation_sampling

VALIDATION = "validation"


@dataclass(frozen=True)
class Validation:
    """One validation: metrics, and its responses in the order of prompts, which stay where they are."""

    metrics: dict[str, float]
    prompts: list[Prompt]
    samples: StoredSamples
    results: list[RewardResult]

    @property
    def sources(self) -> list[str]:
        """Data source of each response."""
        return [self.prompts[group].data_source for group in self.samples.rows.group_id.tolist()]

    def write(self, responder: Responder, path: Path, shown: int = 0) -> list[dict[str, Any]]:
        """Every response as a line of the file `path`; the rows of some of them, evenly spread,
        for people to look at.
        """
        numbers = evenly_spread(len(self.samples), shown) if shown else []
        return responder.rewards.write_generations(path, self.prompts, self.samples, self.results, numbers)


def validate(
    config: RunConfig, responder: Responder, prompts: PromptDataset, step: int, folder: Path, record: AdvisedRecord
) -> dict[str, float]:
    """Metrics of all held-out sets under the weights that the engines hold after `step`.

    Every response stands in `folder/step-N.jsonl`; `trainer.log_val_generations` of them go to the loggers.
    """
    validation, limit = answer_and_score(config, responder, prompts), config.trainer.log_val_generations
    folder.mkdir(parents=True, exist_ok=True)
    shown = validation.write(responder, folder / f"step-{step}.jsonl", limit)
    if limit:
        record.generations(step, shown)
    return validation.metrics


def answer_and_score(config: RunConfig, responder: Responder, dataset: PromptDataset) -> Validation:
    """`rollout.val_kwargs.n` responses a prompt under the sampling of validation; seeds are the same at every
    validation.

    Raises DataError when too many rewards failed.
    """
    n, run_seed, prompts = config.rollout.val_kwargs.n, config.trainer.seed, list(dataset)

    def seed(prompt: Prompt, k: int) -> int:
        return sample_seed(run_seed, VALIDATION, 0, prompt.prompt_id, k)

    samples = responder.respond(prompts, n, validation_sampling(config), seed, VALIDATION)
    results = responder.collect_rewards(samples)
    answers = _answers(prompts, [results[g * n : (g + 1) * n] for g in range(len(prompts))])
    failed = sum(failure_counts(results).values())
    metrics = validation_metrics(answers) | {"val-aux/reward_failed": float(failed)} | _lengths(samples.rows)
    return Validation(metrics, prompts, samples, results)


def _answers(prompts: Sequence[Prompt], results: Sequence[Sequence[RewardResult]]) -> list[Answers]:
    """One a prompt, from its results.

    What is measured is decided by data source: a prompt whose responses all failed takes part too.
    """
    by_source: dict[str, list[RewardResult]] = defaultdict(list)
    for prompt, scored in zip(prompts, results, strict=True):
        by_source[prompt.data_source].extend(scored)
    measured = {source: _measured(scored) for source, scored in by_source.items()}
    return [
        _prompt_answers(prompt, scored, *measured[prompt.data_source])
        for prompt, scored in zip(prompts, results, strict=True)
    ]


def _measured(results: Sequence[RewardResult]) -> tuple[set[str], float, bool]:
    """Numbers that all responses of a data source have beside the score; a failed one's accuracy; whether each says its
    answer.

    A failed response has the lowest accuracy of its data source and at most 0 (a function that gives a number alone may
    go below), an empty answer, and no other number: where one failed, those are left out.
    """
    scored = [r for r in results if r.reason == OK]
    if not scored:
        return set(), 0.0, False
    names = set.intersection(*({k for k, v in r.parts.items() if isinstance(v, float | int)} for r in scored))
    wrong = min(0.0, *(r.parts[ACC] for r in scored)) if ACC in names else 0.0
    return names if len(scored) == len(results) else names & {ACC}, wrong, all(PRED in r.parts for r in scored)


def _prompt_answers(
    prompt: Prompt, results: Sequence[RewardResult], names: set[str], wrong: float, voting: bool
) -> Answers:
    values = {name: [r.parts.get(name, wrong) for r in results] for name in names}
    preds = [str(r.parts.get(PRED, "")) for r in results] if voting else None
    return Answers(prompt.data_source, {REWARD: [r.score for r in results]} | values, preds)


def _lengths(rows: SampleRows) -> dict[str, float]:
    return {
        "val-aux/response_length/mean": int(rows.response_lengths.sum()) / len(rows),
        "val-aux/response_length/clip_ratio": int(rows.truncated.sum()) / len(rows),
    }
