"""Generation and rewards: prompts to the engines, responses to the reward pool, groups until a step's batch is full.

    prompts --Responder.respond--> samples --Responder.collect_rewards--> results --groups--> Rollouts

A group is the responses to one prompt. One whose responses all have the same value has advantage 0 and teaches nothing.
With dynamic sampling (DAPO, algorithm.filter_groups) such groups are dropped and further prompts generated, in the
order of the data: drawn_groups.py.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mrl.algo.advantages import soft_overlong_penalty
from mrl.cluster.request_streams import Arrived
from mrl.cluster.rollout_group import RolloutGroup
from mrl.cluster.scoring import ScorerGroup
from mrl.cluster.stored_samples import StoredSamples
from mrl.config.schema import RewardConfig, RunConfig
from mrl.data.batch import Prompt
from mrl.data.order import DataCursor, PromptStream
from mrl.data.samples import SampleRows
from mrl.errors import DataError, NumericAbort
from mrl.record.metrics import PhaseTimer
from mrl.reward.items import OK, Question, RewardResult, check_failures, failure_counts, failures_at_the_bottom
from mrl.train.numbered_prompts import with_first_index
from mrl.vllm.requests import Request, Sampling, training_sampling

TRAIN = "train"
TRAIN_RESPONSES = f"{TRAIN} responses"  # the phase whose progress counts them
SCORE, REWARD = "score", "reward"


class Progress(Protocol):
    """Shows how far a phase is."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """`done` of `total` parts of `phase`."""


@dataclass(frozen=True)
class Responder:
    """Answers prompts and scores the answers: what training, validation and `mrl eval` share."""

    engines: RolloutGroup
    rewards: ScorerGroup
    reward_config: RewardConfig
    display: Progress
    poll: Callable[[], None]  # raises Interrupted once the run is to stop

    def respond(
        self, prompts: list[Prompt], n: int, sampling: Sampling, seed: Callable[[Prompt, int], int], label: str
    ) -> StoredSamples:
        """`n` responses a prompt, ordered by prompt; each goes to a scorer as it arrives.

        `seed(prompt, k)` is the seed of the prompt's k-th response; `label` names the phase where progress is shown.
        Raises NumericAbort for log-probs that are not finite, in validation as in training.
        """
        indexed = enumerate(with_first_index(prompts))
        planned = [(group, prompt, k) for group, (prompt, first) in indexed for k in range(first, first + n)]
        requests = [Request(i, p.token_ids, seed(p, k), p.prompt_id, group) for i, (group, p, k) in enumerate(planned)]
        arrived = 0

        def score(parts: list[Arrived]) -> None:
            nonlocal arrived
            for part in parts:
                arrived += len(part.samples)
                self.display.progress(f"{label} responses", arrived, len(requests))
                numbers = part.samples.rows.sample_id.tolist()
                questions = [question(number, planned[number][1]) for number in numbers]
                self.rewards.submit(part.samples, questions, part.engine, part.held_s)
            self.rewards.forward()

        samples = self.engines.generate(requests, sampling, score)
        check_finite(samples.rows)
        return samples

    def collect_rewards(self, samples: StoredSamples) -> list[RewardResult]:
        """Results in the order of `samples`, failed ones at the bottom of their data source where reward.failure_score
        is not set.

        Raises DataError when too many failed.
        """
        share = self.reward_config.max_failure_share
        results = self.rewards.drain(self.poll, int(share * len(samples)))
        check_failures(results, share)
        by_id = {result.sample_id: result for result in with_failures_scored(self.reward_config, results)}
        return [by_id[sample_id] for sample_id in samples.rows.sample_id.tolist()]


def with_failures_scored(reward: RewardConfig, results: list[RewardResult]) -> list[RewardResult]:
    """The results as they count: failed ones have reward.failure_score, or go to the bottom where there is none."""
    return failures_at_the_bottom(results) if reward.failure_score is None else results


def question(sample_id: int, prompt: Prompt) -> Question:
    """What a response to the prompt is judged by; the result bears `sample_id`."""
    return Question(sample_id, prompt.data_source, prompt.ground_truth, prompt.extra_info)


def check_finite(rows: SampleRows) -> None:
    """Raises NumericAbort when an engine sampled from what is no distribution.

    Nothing in vLLM does: weights that are not numbers give tokens and a stop reason like any others.
    """
    bad = np.flatnonzero(~rows.finite)
    if len(bad):
        raise NumericAbort(
            f"{len(bad)} of {len(rows)} responses have log-probs that are not finite, the first is sample "
            f"{rows.sample_id[bad[0]]} under weight version {rows.weight_version[bad[0]]}: the engines computed with "
            "weights that are not numbers"
        )


def check_not_all_empty(rows: SampleRows) -> None:
    """Raises DataError when no response has a token. Some may be empty: they have their rewards, and no gradient."""
    if rows.response_lengths.any():
        return
    raise DataError(
        f"all {len(rows)} responses of the step are empty, and there is nothing to train on: the engines ended every "
        "request before its first token. See logs/engine-N.log in the run directory for why, cure it, and pass --resume"
    )


def sample_seed(run_seed: int, purpose: str, step: int, prompt_id: int, index: int) -> int:
    """Seed of response `index` of a prompt in a step; 48 bits, which every engine and platform accepts.

    A pure function of what it is for, so that nothing depends on order or on what ran before.
    """
    text = f"{run_seed}/{purpose}/{step}/{prompt_id}/{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


@dataclass(frozen=True)
class JudgedGroup:
    """The responses to one prompt, with their rewards.

    `differs`: they do not all have the same value. A dropped one has no samples.
    """

    samples: StoredSamples | None
    results: tuple[RewardResult, ...]
    differs: bool


@dataclass(frozen=True)
class Rollouts:
    """What a step trains on, ordered by (group_id, sample_id),
    and the place in the data after all that was generated for it.
    """

    samples: StoredSamples
    results: list[RewardResult]
    rewards: np.ndarray  # float64 [samples]: scores after penalties
    cursor: DataCursor
    metrics: dict[str, float]


def gather_rollouts(
    config: RunConfig, responder: Responder, prompts: PromptStream, cursor: DataCursor, step: int, timer: PhaseTimer
) -> Rollouts:
    """Generates and scores the batch of `step`; phases "gen" and "reward". Raises DataError when too many rewards fail.

    With dynamic sampling see drawn_groups.py.
    """
    with timer("gen"):
        batch_prompts, cursor = prompts.next_batch(cursor)
        samples = generate(config, responder, batch_prompts, step)  # scored in the background as they arrive
    with timer("reward"):
        results = responder.collect_rewards(samples)
    groups = as_groups(config, samples, results)
    uniform = 1.0 - sum(group.differs for group in groups) / len(groups)
    samples, results = renumbered(groups)
    return rollouts_of(config, samples, results, cursor, group_metrics(1.0, uniform, len(groups), results))


def rollouts_of(
    config: RunConfig,
    samples: StoredSamples,
    results: list[RewardResult],
    cursor: DataCursor,
    metrics: dict[str, float],
) -> Rollouts:
    """What a step trains on, from the samples and results that were chosen for it; `metrics`: of their generation.

    Raises DataError where every response is empty.
    """
    check_not_all_empty(samples.rows)
    rewards = rewards_after_penalties(config, samples.rows, results)
    if config.algorithm.overlong_buffer.enable:
        metrics = metrics | {
            "train/overlong_penalty_mean": float((rewards - [result.score for result in results]).mean())
        }
    return Rollouts(samples, results, rewards, cursor, metrics)


def generate(config: RunConfig, responder: Responder, prompts: list[Prompt], step: int) -> StoredSamples:
    """`rollout.n` responses a prompt, ordered by prompt."""
    n, run_seed = config.rollout.n, config.trainer.seed

    def seed(prompt: Prompt, k: int) -> int:
        return sample_seed(run_seed, TRAIN, step, prompt.prompt_id, k)

    return responder.respond(prompts, n, training_sampling(config), seed, TRAIN)


def as_groups(config: RunConfig, samples: StoredSamples, results: list[RewardResult]) -> list[JudgedGroup]:
    """The responses to one batch of prompts by group, in order."""
    values, groups = compared_values(config, samples.rows, results), []
    for group_id in np.unique(samples.rows.group_id):
        rows = np.flatnonzero(samples.rows.group_id == group_id)
        groups.append(JudgedGroup(samples.take(rows), tuple(results[i] for i in rows), differ(values[rows])))
    return groups


def compared_values(config: RunConfig, rows: SampleRows, results: list[RewardResult]) -> np.ndarray:
    """float64 [batch]: what responses to a prompt differ in, or do not; see metric_values."""
    filtering = config.algorithm.filter_groups
    metric = filtering.metric if filtering.enable else SCORE
    return metric_values(metric, results, rewards_after_penalties(config, rows, results))


def differ(values: np.ndarray) -> bool:
    """Whether a group's values, one at least, are not all the same."""
    return bool(values.min() < values.max())


def rewards_after_penalties(config: RunConfig, rows: SampleRows, results: list[RewardResult]) -> np.ndarray:
    """float64 [batch]: scores, less the soft overlong penalty where it is on."""
    scores, buffer = np.array([result.score for result in results], dtype=np.float64), config.algorithm.overlong_buffer
    if not buffer.enable:
        return scores
    return scores + soft_overlong_penalty(
        rows.response_lengths, config.data.max_response_length, buffer.len, buffer.penalty_factor
    )


def metric_values(metric: str, results: list[RewardResult], rewards: np.ndarray) -> np.ndarray:
    """float64 [batch]: `score`, `reward` (after penalties), or the reward's part of that name; of a failed reward
    always its score.

    Raises DataError when the reward function gives no such part, or no number under that name.
    """
    if metric == REWARD:
        return rewards
    values = [r.score if metric == SCORE or r.reason != OK else _part(r, metric) for r in results]
    return np.array(values, dtype=np.float64)


def _part(result: RewardResult, name: str) -> float:
    value = result.parts.get(name)
    if isinstance(value, bool | int | float):
        return float(value)
    known = ", ".join([SCORE, REWARD, *sorted(result.parts)])
    raise DataError(
        f"the reward of sample {result.sample_id} has no number under {name!r} (algorithm.filter_groups.metric, "
        f"gdpo_reward_keys); allowed: {known}"
    )


def renumbered(groups: list[JudgedGroup]) -> tuple[StoredSamples, list[RewardResult]]:
    """Samples and results with group and sample ids counted from 0, as every later part expects them within a step."""
    samples = StoredSamples.joined([group.samples for group in groups])
    numbers = np.repeat(np.arange(len(groups)), [len(group.results) for group in groups])
    results = [result for group in groups for result in group.results]
    return samples.renumbered(numbers, np.arange(len(samples))), [
        replace(result, sample_id=i) for i, result in enumerate(results)
    ]


def group_metrics(batches: float, uniform_share: float, trained: int, made: list[RewardResult]) -> dict[str, float]:
    """Of the groups that were generated for a step. `made`: all their rewards."""
    failed = sum(failure_counts(made).values())
    return {
        "train/num_gen_batches": batches,
        "train/uniform_group_share": uniform_share,
        "train/trained_groups": float(trained),
        "reward/failed": float(failed),
        "reward/failure_share": failed / len(made),
    }
