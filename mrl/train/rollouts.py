"""Responses and what they are worth: prompts to the engines, responses to the reward pool, rewards after penalties.

    prompts --Responder.respond--> samples --Responder.collect_rewards--> results         validation, `mrl eval`
    prompts --Generation (generation.py)--> groups of responses and results --> Rollouts  training

A group is the responses to one prompt. One whose responses all have the same value has advantage 0 and teaches nothing.
With dynamic sampling (DAPO, algorithm.filter_groups) such groups are dropped and further prompts generated, in the
order of the data: mrl/schedule/buffer.py.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mrl.algo.advantages import soft_overlong_penalty
from mrl.cluster.rollout_group import RolloutGroup
from mrl.config.schema import AlgorithmConfig, RewardConfig
from mrl.data.batch import Prompt
from mrl.data.order import DataCursor
from mrl.data.samples import SampleRows
from mrl.errors import DataError, Interrupted, NumericAbort
from mrl.flow.request_streams import FinishedResponses, RequestStreams
from mrl.flow.response_store import ResponseStore
from mrl.flow.scoring import ScorerGroup
from mrl.reward.items import (
    LEFT_OUT,
    NOT_FINITE,
    OK,
    UNJUDGED,
    Question,
    RewardResult,
    check_failures,
    failure_counts,
    failures_at_the_bottom,
)
from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.dispatch import Assignment, Dispatcher
from mrl.schedule.staleness import Schedule
from mrl.train.numbered_prompts import NumberedPrompts, with_first_index
from mrl.vllm.requests import Request, Sampling

TRAIN = "train"
TRAIN_RESPONSES = f"{TRAIN} responses"  # the phase whose progress counts them
SCORE = "score"
REWARD = "reward"
WAIT_S = 0.5  # for responses, before a signal is looked for again
JOINED_AT = 64  # parts: columns of a row each are kilobytes, of many rows a hundred bytes a row


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
    mend: Callable[[], None] = lambda: None  # brings engines back that were lost, while ranks are idle

    def respond(
        self, prompts: list[Prompt], n: int, sampling: Sampling, seed: Callable[[Prompt, int], int], label: str
    ) -> ResponseStore:
        """`n` responses a prompt, ordered by prompt; each goes to a scorer as it arrives.

        `seed(prompt, k)` is the seed of the prompt's k-th response; `label` names the phase where progress is shown.
        """
        groups = []
        for number, (prompt, first) in enumerate(with_first_index(prompts)):
            seeds = [seed(prompt, first + index) for index in range(n)]
            groups.append([_request(number * n + k, number, prompt, own) for k, own in enumerate(seeds)])
        asked = len(groups) * n
        arrived = 0

        def score(parts: list[FinishedResponses]) -> None:
            nonlocal arrived
            for part in parts:
                arrived += len(part.samples)
                self.display.progress(f"{label} responses", arrived, asked)
                numbers = part.samples.rows.sample_id.tolist()
                questions = [question(number, prompts[number // n]) for number in numbers]
                self.rewards.submit(part.samples, questions, part.engine, part.held_s)
            self.rewards.forward()

        samples = generate(self.engines, groups, sampling, score, self._look_after)
        return samples

    def _look_after(self) -> None:
        self.poll()
        self.mend()

    def collect_rewards(self, samples: ResponseStore) -> list[RewardResult]:
        """Results in the order of `samples`, failed ones at the bottom of their data source where reward.failure_score
        is not set.

        Raises what check_failures does when too many failed.
        """
        share = self.reward_config.max_failure_share
        results = self.rewards.drain(self.poll, int(share * len(samples)))
        check_failures(results, share)
        by_id = {result.sample_id: result for result in with_failures_scored(self.reward_config, results)}
        return [by_id[sample_id] for sample_id in samples.rows.sample_id.tolist()]


def _request(sample_id: int, group: int, prompt: Prompt, seed: int) -> Request:
    return Request(sample_id, prompt.token_ids, seed, prompt.prompt_id, group, row=prompt.acting_row)


def generate(
    engines: RolloutGroup,
    groups: Sequence[Sequence[Request]],
    sampling: Sampling,
    on_arrival: Callable[[list[FinishedResponses]], None] = lambda arrived: None,
    poll: Callable[[], None] = lambda: None,
) -> ResponseStore:
    """All responses, ordered by `sample_id`. `groups`: the requests of each prompt, equally many.

    `on_arrival` is told of what came since. `poll` may raise, which ends the wait.
    Raises Interrupted when an engine is lost that the run cannot do without, or requests are with nobody any more.
    """
    schedule = Schedule(len(groups), len(groups[0]), sampling.max_tokens)
    streams = engines.streams()
    dispatcher = Dispatcher(GroupBuffer(schedule), streams.names, engines.max_requests)
    for group, own in zip(dispatcher.buffer.reserve(), groups, strict=True):
        group.prompt_tokens = len(own[0].prompt_ids)
        dispatcher.admit(group)
    sent_as: dict[int, int] = {}  # sample_id -> number of its request
    unanswered = schedule.batch * schedule.responses
    done: list[ResponseStore] = []
    while unanswered:
        engines.fleet.count("requests_again", len(_follow(streams, dispatcher)))
        for engine, sent in by_engine(dispatcher.assignments()).items():
            requests = [groups[each.number][each.index] for each in sent]
            sent_as |= {request.sample_id: each.request for request, each in zip(requests, sent, strict=True)}
            streams.send(engine, requests, sampling)
        poll()
        if streams.names and not streams.waiting_for:
            raise Interrupted(f"generation: {unanswered} requests are unanswered, and no engine has them")
        if not streams.names:
            time.sleep(WAIT_S)
            continue
        arrived = streams.take(WAIT_S)
        for part in arrived:
            rows = part.samples.rows
            for sample_id, length in zip(rows.sample_id.tolist(), rows.response_lengths.tolist(), strict=True):
                dispatcher.answered(sent_as.pop(sample_id), length, stopped=True)
            unanswered -= len(rows)
            done.append(part.samples)
        if len(done) >= JOINED_AT:
            done = [ResponseStore.joined(done)]
        on_arrival(arrived)
    samples = ResponseStore.joined(done)
    return samples.take(np.argsort(samples.rows.sample_id))


def _follow(streams: RequestStreams, dispatcher: Dispatcher) -> list[Assignment]:
    """Requests of engines that were lost since, which are to be made again."""
    change = streams.follow()
    again = [sent for engine in change.gone for sent in dispatcher.lose(engine)]
    for engine in change.back:
        dispatcher.join(engine)
    return again


def by_engine(sent: Iterable[Assignment]) -> dict[str, list[Assignment]]:
    """Sorts assignments by the engine that gets them, in their order."""
    found: dict[str, list[Assignment]] = {}
    for each in sent:
        found.setdefault(each.engine, []).append(each)
    return found


def with_failures_scored(reward: RewardConfig, results: list[RewardResult]) -> list[RewardResult]:
    """The results as they count: failed ones have reward.failure_score, or go to the bottom where there is none."""
    if reward.failure_score is None:
        return failures_at_the_bottom(results)
    return results


def question(sample_id: int, prompt: Prompt) -> Question:
    """What a response to the prompt is judged by; the result bears `sample_id`."""
    return Question(sample_id, prompt.data_source, prompt.ground_truth, prompt.extra_info)


def compared(group_ids: np.ndarray, results: Sequence[RewardResult], by_critic: bool = False) -> np.ndarray:
    """bool [responses]: those that count in their group.

    A response that nobody judged does not count. Neither does one that is alone since the others failed: there is
    nothing that it could be compared with. It does count `by_critic`, whose values each response is compared with.
    """
    judged = np.array([result.reason not in UNJUDGED for result in results], bool)
    if judged.all() or by_critic:
        return judged
    _, group, size = np.unique(group_ids, return_inverse=True, return_counts=True)
    left = np.bincount(group, judged, len(size))
    is_alone = (left == 1) & (size > 1)
    return judged & ~is_alone[group]


def check_not_all_empty(rows: SampleRows) -> None:
    """Raises DataError when no response has a token. Some may be empty: they have their rewards, and no gradient."""
    if rows.sampled_lengths.any():
        return
    raise DataError(
        f"all {len(rows)} responses of the step are empty, and there is nothing to train on: the engines ended every "
        "request before its first token. See logs/engine-N.log in the run directory for why, cure it, and pass --resume"
    )


def check_any_number(rows: SampleRows) -> None:
    """Raises NumericAbort when no response is left that has a token and log-probs that are numbers."""
    if rows.sampled_lengths.any():
        return
    raise NumericAbort(
        f"nothing of the step is left to train on: of {len(rows)} responses all that have a token have log-probs that "
        "are not finite. The engines computed with weights that are not numbers; see logs/engine-N.log in the run "
        "directory, and resume from an earlier checkpoint with a smaller actor.optim.lr"
    )


def sample_seed(run_seed: int, purpose: str, step: int, prompt_id: int, index: int) -> int:
    """Seed of response `index` of a prompt in a step; 48 bits, which every engine and platform accepts.

    A pure function of what it is for, so that nothing depends on order or on what ran before.
    """
    text = f"{run_seed}/{purpose}/{step}/{prompt_id}/{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def prompt_seed(run_seed: int, prompts: NumberedPrompts, number: int, index: int) -> int:
    """Seed of a response to the prompt of this number: that of its draw, as of a step that trains on all of it."""
    prompt, first = prompts[number]
    return sample_seed(run_seed, TRAIN, prompts.draw_of(number) + 1, prompt.prompt_id, first + index)


@dataclass(frozen=True)
class Rollouts:
    """What a step trains on, ordered by (group_id, sample_id),
    and the place in the data after all that was generated for it.
    """

    samples: ResponseStore
    results: list[RewardResult]
    rewards: np.ndarray  # float64 [samples]: scores after penalties
    cursor: DataCursor
    metrics: dict[str, float]
    generated: SampleRows | None = None  # `samples.rows` as engines made them; None: as they are

    @property
    def made(self) -> SampleRows:
        """The rows as engines made them, those of log-probs without numbers with all that was sampled."""
        if self.generated is None:
            return self.samples.rows
        return self.generated


@dataclass(frozen=True)
class Judge:
    """What responses are worth: the scores of the reward function, less penalties."""

    algorithm: AlgorithmConfig
    reward: RewardConfig
    max_response_length: int

    def scored(self, results: list[RewardResult]) -> list[RewardResult]:
        """The results as they count: failed ones have reward.failure_score, or go to the bottom where there is none."""
        return with_failures_scored(self.reward, results)

    def rewards(self, rows: SampleRows, results: list[RewardResult]) -> np.ndarray:
        """float64 [batch]: scores, less the soft overlong penalty where it is on."""
        scores = np.array([result.score for result in results], dtype=np.float64)
        buffer = self.algorithm.overlong_buffer
        if not buffer.enable:
            return scores
        return scores + soft_overlong_penalty(
            rows.longest_responses, self.max_response_length, buffer.len, buffer.penalty_factor
        )

    def values(self, rows: SampleRows, results: list[RewardResult]) -> np.ndarray:
        """float64 [batch]: what responses to a prompt differ in, or do not; see metric_values."""
        filtering = self.algorithm.filter_groups
        metric = filtering.metric if filtering.enable else SCORE
        return metric_values(metric, results, self.rewards(rows, results))

    def rollouts(
        self, samples: ResponseStore, results: list[RewardResult], cursor: DataCursor, metrics: dict[str, float]
    ) -> Rollouts:
        """What a step trains on, from the samples and results that were chosen for it; `metrics`: of their generation.

        Raises DataError where every response is empty, NumericAbort where none has log-probs that are numbers.
        """
        check_not_all_empty(samples.rows)
        generated = samples.rows
        not_finite = np.array([result.reason == NOT_FINITE for result in results], bool)
        if not_finite.any():
            samples = samples.as_context(not_finite)
            check_any_number(samples.rows)
        rewards = self.rewards(generated, results)
        judged = np.array([result.reason not in UNJUDGED for result in results], bool)
        if self.algorithm.overlong_buffer.enable and judged.any():
            penalties = rewards - [result.score for result in results]
            metrics = metrics | {"train/overlong_penalty_mean": float(penalties[judged].mean())}
        return Rollouts(samples, results, rewards, cursor, metrics, generated)


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
        f"gdpo_reward_keys); allowed: {known}. What an environment gives with some replies only, its class has to "
        "declare in `parts`"
    )


def group_metrics(batches: float, uniform_share: float, trained: int, made: list[RewardResult]) -> dict[str, float]:
    """Metrics of the groups that were generated for a step. `made`: all their rewards, those of filtered ones too."""
    failed = sum(failure_counts(made).values())
    unjudged = {}
    for reason, name in (LEFT_OUT, "turns/left_out"), (NOT_FINITE, "train/not_finite_share"):
        if count := sum(result.reason == reason for result in made):
            unjudged[name] = count / len(made)
    return unjudged | {
        "train/num_gen_batches": batches,
        "train/uniform_group_share": uniform_share,
        "train/trained_groups": float(trained),
        "reward/failed": float(failed),
        "reward/failure_share": failed / len(made),
    }
