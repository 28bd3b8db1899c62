"""Held-out prompts answered and scored: the numbers, every response in a file, a few for people to look at."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config.schema import DataConfig, RolloutConfig
from mrl.data.batch import Prompt
from mrl.data.dataset import PromptDataset
from mrl.data.samples import SampleRows
from mrl.flow.response_store import ResponseStore
from mrl.record.run_dir import RunDir
from mrl.record.validation_metrics import ACC, PRED, REWARD, Answers, evenly_spread, validation_metrics
from mrl.reward.items import LEFT_OUT, NOT_FINITE, OK, UNJUDGED, RewardResult, failure_counts
from mrl.train.reporting import AdvisedRecord
from mrl.train.rollouts import Responder, sample_seed
from mrl.vllm.requests import Sampling, validation_sampling

VALIDATION = "validation"


@dataclass(frozen=True)
class ValidationSettings:
    """How held-out prompts are answered."""

    responses: int  # a prompt
    sampling: Sampling
    seed: int  # of the run: those of responses follow from it, the same at every validation

    @classmethod
    def of(cls, rollout: RolloutConfig, data: DataConfig, model_path: str, seed: int) -> "ValidationSettings":
        """Settings as `rollout.val_kwargs` has them."""
        return cls(rollout.val_kwargs.n, validation_sampling(rollout, data, model_path), seed)


@dataclass(frozen=True)
class Validation:
    """One validation: metrics, and its responses in the order of prompts, which stay where they are."""

    metrics: dict[str, float]
    prompts: list[Prompt]
    samples: ResponseStore
    results: list[RewardResult]

    @property
    def sources(self) -> list[str]:
        """Data source of each response."""
        return [self.prompts[group].data_source for group in self.samples.rows.group_id.tolist()]

    def write(self, responder: Responder, path: Path, shown: int = 0) -> list[dict[str, Any]]:
        """Every response as a line of the file `path`; the rows of some of them, evenly spread,
        for people to look at.
        """
        numbers = []
        if shown:
            numbers = evenly_spread(len(self.samples), shown)
        return responder.rewards.write_generations(path, self.prompts, self.samples, self.results, numbers)


def record_validation(
    validation: Validation, responder: Responder, step: int, run_dir: RunDir, limit: int, record: AdvisedRecord
) -> None:
    """Writes every response into `validation/step-N.jsonl`, and hands `limit` of them to the loggers.

    `step`: the one under whose weights they were made. Raises LostLock.
    """
    run_dir.check_lock()
    run_dir.validation.mkdir(parents=True, exist_ok=True)
    shown = validation.write(responder, run_dir.validation / f"step-{step}.jsonl", limit)
    if limit:
        record.generations(step, shown)


def answer_and_score(settings: ValidationSettings, responder: Responder, dataset: PromptDataset) -> Validation:
    """The responses to all held-out prompts under the weights that the engines hold, judged.

    Raises DataError when too many rewards failed, EnvironmentFault when too many environments did.
    """
    n = settings.responses
    prompts = list(dataset)

    def seed(prompt: Prompt, k: int) -> int:
        return sample_seed(settings.seed, VALIDATION, 0, prompt.prompt_id, k)

    samples = responder.respond(prompts, n, settings.sampling, seed, VALIDATION)
    results = responder.collect_rewards(samples)
    answers = _answers(prompts, [results[g * n : (g + 1) * n] for g in range(len(prompts))])
    failed = sum(failure_counts(results).values())
    metrics = validation_metrics(answers) | {"val-aux/reward_failed": float(failed)} | _lengths(samples.rows)
    for reason, name in (LEFT_OUT, "environment_failed"), (NOT_FINITE, "not_finite"):
        if count := sum(result.reason == reason for result in results):
            metrics[f"val-aux/{name}"] = float(count)
    return Validation(metrics, prompts, samples, results)


def _answers(prompts: Sequence[Prompt], results: Sequence[Sequence[RewardResult]]) -> list[Answers]:
    """One a prompt, from its results; none of a prompt with a response that nobody judged.

    What is measured is decided by data source: a prompt whose responses all failed takes part too.
    """
    by_source: dict[str, list[RewardResult]] = defaultdict(list)
    judged = [pair for pair in zip(prompts, results, strict=True) if not _any_unjudged(pair[1])]
    for prompt, scored in judged:
        by_source[prompt.data_source].extend(scored)
    measured = {source: _measured(scored) for source, scored in by_source.items()}
    return [_prompt_answers(prompt, scored, *measured[prompt.data_source]) for prompt, scored in judged]


def _any_unjudged(results: Sequence[RewardResult]) -> bool:
    return any(result.reason in UNJUDGED for result in results)


def _measured(results: Sequence[RewardResult]) -> tuple[set[str], float, bool]:
    """Names of numbers that all responses of a data source have beside the score, a failed one's accuracy, and whether
    all say their answer.

    A failed response has an empty answer, and no number but an accuracy: the lowest of its data source and at most 0. A
    function that gives a number alone may go below. Where one failed, other numbers are left out.
    """
    scored = [r for r in results if r.reason == OK]
    if not scored:
        return set(), 0.0, False
    names = set.intersection(*(_numbers(result) for result in scored))
    wrong = 0.0
    if ACC in names:
        wrong = min(0.0, *(r.parts[ACC] for r in scored))
    return names if len(scored) == len(results) else names & {ACC}, wrong, all(PRED in r.parts for r in scored)


def _numbers(result: RewardResult) -> set[str]:
    """Names of the parts of a reward that are numbers."""
    return {name for name, part in result.parts.items() if isinstance(part, float | int)}


def _prompt_answers(
    prompt: Prompt, results: Sequence[RewardResult], names: set[str], wrong: float, voting: bool
) -> Answers:
    values = {name: [r.parts.get(name, wrong) for r in results] for name in names}
    preds = None
    if voting:
        preds = [str(r.parts.get(PRED, "")) for r in results]
    return Answers(prompt.data_source, {REWARD: [r.score for r in results]} | values, preds)


def _lengths(rows: SampleRows) -> dict[str, float]:
    return {
        "val-aux/response_length/mean": int(rows.sampled_lengths.sum()) / len(rows),
        "val-aux/response_length/clip_ratio": int(rows.truncated.sum()) / len(rows),
    }
