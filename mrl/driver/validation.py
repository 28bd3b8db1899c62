"""Answers and scores validation prompts: metrics, a file with every response, and a few responses for people to see."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config.schema import DataConfig, RolloutConfig
from mrl.data.batch import Prompt
from mrl.data.dataset import PromptDataset
from mrl.data.samples import SampleRows
from mrl.driver.reporting import AdvisedRecord
from mrl.engine.requests import Sampling, validation_sampling
from mrl.errors import EnvironmentFault
from mrl.generate.rollouts import Responder, sample_seed
from mrl.record.run_dir import RunDir
from mrl.record.validation_metrics import ACC, PRED, REWARD, Answers, evenly_spread, validation_metrics
from mrl.reward.items import LEFT_OUT, NOT_FINITE, OK, UNJUDGED, RewardResult, failure_counts
from mrl.store.response_store import ResponseStore

VALIDATION = "validation"


@dataclass(frozen=True)
class ValidationSettings:
    """The settings for answers to validation prompts."""

    responses: int  # for each prompt
    sampling: Sampling
    seed: int  # of the run: seeds of responses follow from it, equal at every validation

    @classmethod
    def of(cls, rollout: RolloutConfig, data: DataConfig, model_path: str, seed: int) -> "ValidationSettings":
        """Returns the settings of `rollout.val_kwargs`."""
        return cls(rollout.val_kwargs.n, validation_sampling(rollout, data, model_path), seed)


@dataclass(frozen=True)
class Validation:
    """One validation: metrics, and responses in the order of prompts, which stay in the object stores."""

    metrics: dict[str, float]
    prompts: list[Prompt]
    samples: ResponseStore
    results: list[RewardResult]

    @property
    def sources(self) -> list[str]:
        """Returns the data source of each response."""
        return [self.prompts[group].data_source for group in self.samples.rows.group_id.tolist()]

    def write(self, responder: Responder, path: Path, shown: int = 0) -> list[dict[str, Any]]:
        """Writes every response as a line of the file `path`.

        Returns the rows of `shown` responses, evenly spread, for people to look at.
        """
        numbers = []
        if shown:
            numbers = evenly_spread(len(self.samples), shown)
        return responder.rewards.write_generations(path, self.prompts, self.samples, self.results, numbers)


def record_validation(
    validation: Validation, responder: Responder, step: int, run_dir: RunDir, limit: int, record: AdvisedRecord
) -> None:
    """Writes every response into `validation/step-N.jsonl`, and passes `limit` of them to the loggers.

    `step`: the step whose weights generated them. A full disk costs the file, and the loggers' rows, not the run.
    Raises LostLock.
    """
    run_dir.check_lock()
    try:
        run_dir.validation.mkdir(parents=True, exist_ok=True)
        shown = validation.write(responder, run_dir.validation / f"step-{step}.jsonl", limit)
    except (OSError, EnvironmentFault) as fault:
        print(f"error: validation responses of step {step} are not kept: {fault}. Training goes on", flush=True)
        return
    if limit:
        record.generations(step, shown)


def answer_and_score(settings: ValidationSettings, responder: Responder, dataset: PromptDataset) -> Validation:
    """Returns judged responses to all validation prompts with the engines' weights.

    Raises DataError if too many rewards failed, EnvironmentFault if too many environments did.
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
    """Returns the answers of each prompt, from its results. Prompts with a response that is not judged are left out.

    The measured numbers are decided by data source, so a prompt counts even if all its responses failed.
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
    """Returns what a data source's responses have in common: names of further numbers, a failed one's accuracy, and
    answers.

    The names are those of numbers that all responses have beside the score. The last value tells whether all have an
    answer. A failed response has an empty answer, and no number except an accuracy: the lowest of its data source and
    at most 0. A function that returns only a number may give less. If one response failed, other numbers are left out.
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
    """Returns names of the parts of a reward that are numbers."""
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
