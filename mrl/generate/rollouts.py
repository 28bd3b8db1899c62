"""Makes responses and their rewards: prompts go to the engines, responses to the reward pool, and penalties are
subtracted.

    prompts --Responder.respond--> samples --Responder.collect_rewards--> results         validation, `mrl eval`
    prompts --Generation (generation.py)--> groups of responses and results --> Rollouts  training

A group is the responses to one prompt. A group of equal values has advantage 0 and teaches nothing. With dynamic
sampling (DAPO, algorithm.filter_groups) such groups are dropped and further prompts generated, in the order of the
data: mrl/schedule/buffer.py.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mrl.algo.advantages import soft_overlong_penalty
from mrl.cluster.request_streams import FinishedResponses, RequestStreams
from mrl.cluster.rollout_group import RolloutGroup
from mrl.cluster.scoring import ScorerGroup
from mrl.config.schema import AlgorithmConfig, RewardConfig
from mrl.data.batch import Prompt
from mrl.data.order import DataCursor
from mrl.data.samples import SampleRows
from mrl.engine.requests import Request, Sampling
from mrl.errors import DataError, Interrupted, NumericAbort
from mrl.generate.numbered_prompts import NumberedPrompts, with_first_index
from mrl.reward.items import (
    LEFT_OUT,
    NOT_FINITE,
    OK,
    REWARD,
    SCORE,
    UNJUDGED,
    Question,
    RewardResult,
    check_failures,
    failure_counts,
    failures_at_the_bottom,
    part_of,
)
from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.dispatch import Assignment, Dispatcher
from mrl.schedule.staleness import Schedule
from mrl.store.response_store import ResponseStore

TRAIN = "train"
TRAIN_RESPONSES = f"{TRAIN} responses"  # the phase that counts them in its progress
WAIT_S = 0.5  # wait for responses, before signals are checked again
JOINED_AT = 64  # number of parts: columns of one row take kilobytes, columns of many rows a hundred bytes per row


class Progress(Protocol):
    """Shows the progress of a phase."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Shows that `done` of `total` parts of `phase` are done."""


@dataclass(frozen=True)
class Responder:
    """Answers prompts and scores the answers, for training, validation and `mrl eval`."""

    engines: RolloutGroup
    rewards: ScorerGroup
    reward_config: RewardConfig
    display: Progress
    poll: Callable[[], None]  # raises Interrupted when the run must stop
    mend: Callable[[], None] = lambda: None  # brings lost engines back while ranks are idle

    def respond(
        self, prompts: list[Prompt], n: int, sampling: Sampling, seed: Callable[[Prompt, int], int], label: str
    ) -> ResponseStore:
        """Returns `n` responses for each prompt, ordered by prompt. Each goes to a scorer when it arrives.

        `seed(prompt, k)` is the seed of the prompt's k-th response. `label` names the phase for the progress.
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

        samples = generate(self.engines, groups, sampling, score, self.look_after)
        return samples

    def look_after(self) -> None:
        """Raises Interrupted if the run must stop, and brings lost engines back. Call it while engines answer."""
        self.poll()
        self.mend()

    def collect_rewards(self, samples: ResponseStore) -> list[RewardResult]:
        """Returns results in the order of `samples`.

        Without reward.failure_score, failed ones get the lowest score of their data source. Raises the error of
        check_failures if too many failed.
        """
        share = self.reward_config.max_failure_share
        results = self.rewards.drain(self.poll, int(share * len(samples)))
        check_failures(results, share)
        by_id = {result.sample_id: result for result in with_failures_scored(self.reward_config, results)}
        return [by_id[sample_id] for sample_id in samples.rows.sample_id.tolist()]


def _request(sample_id: int, group: int, prompt: Prompt, seed: int) -> Request:
    return Request(
        sample_id, prompt.token_ids, seed, prompt.prompt_id, group, row=prompt.acting_row, images=prompt.images
    )


def generate(
    engines: RolloutGroup,
    groups: Sequence[Sequence[Request]],
    sampling: Sampling,
    on_arrival: Callable[[list[FinishedResponses]], None] = lambda arrived: None,
    poll: Callable[[], None] = lambda: None,
) -> ResponseStore:
    """Returns all responses, ordered by `sample_id`. `groups`: the requests of each prompt, equally many.

    `on_arrival` gets the responses since the last call. `poll` may raise, which ends the wait. Raises Interrupted if an
    indispensable engine is lost, or no engine is left for some requests.
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
    """Returns the requests of engines that were lost since the last call. They must be made again."""
    change = streams.follow()
    again = [sent for engine in change.gone for sent in dispatcher.lose(engine)]
    for engine in change.back:
        dispatcher.join(engine)
    return again


def by_engine(sent: Iterable[Assignment]) -> dict[str, list[Assignment]]:
    """Groups assignments by their engine, in order."""
    found: dict[str, list[Assignment]] = {}
    for each in sent:
        found.setdefault(each.engine, []).append(each)
    return found


def with_failures_scored(reward: RewardConfig, results: list[RewardResult]) -> list[RewardResult]:
    """Returns the results with scores for failed ones: reward.failure_score, or the lowest score if that is not set."""
    if reward.failure_score is None:
        return failures_at_the_bottom(results)
    return results


def question(sample_id: int, prompt: Prompt) -> Question:
    """Returns the data by which a response to the prompt is judged. Its result has `sample_id`."""
    return Question(sample_id, prompt.data_source, prompt.ground_truth, prompt.extra_info)


def compared(group_ids: np.ndarray, results: Sequence[RewardResult], by_group: bool = True) -> np.ndarray:
    """Returns which responses count in their group, bool [responses].

    A response without a judgement does not count. With an advantage `by_group` a single remaining response does not
    either, because nothing can be compared with it. Other advantages judge each response by itself.
    """
    judged = np.array([result.reason not in UNJUDGED for result in results], bool)
    if judged.all() or not by_group:
        return judged
    _, group, size = np.unique(group_ids, return_inverse=True, return_counts=True)
    left = np.bincount(group, judged, len(size))
    is_alone = (left == 1) & (size > 1)
    return judged & ~is_alone[group]


def check_not_all_empty(rows: SampleRows) -> None:
    """Raises DataError if no response has a token. Some may be empty: they have rewards, and no gradient."""
    if rows.sampled_lengths.any():
        return
    raise DataError(
        f"all {len(rows)} responses of the step are empty, and there is nothing to train on: the engines ended every "
        "request before its first token. See logs/engine-N.log in the run directory, fix the cause, and pass --resume"
    )


def check_any_number(rows: SampleRows) -> None:
    """Raises NumericAbort if no response is left that has a token and finite log-probs."""
    if rows.sampled_lengths.any():
        return
    raise NumericAbort(
        f"nothing of the step is left to train on: of {len(rows)} responses all that have a token have log-probs that "
        "are not finite. The engines computed with weights that are not numbers; see logs/engine-N.log in the run "
        "directory, and resume from an earlier checkpoint with a smaller actor.optim.lr"
    )


def sample_seed(run_seed: int, purpose: str, step: int, prompt_id: int, index: int) -> int:
    """Returns the seed of response `index` to a prompt in a step: 48 bits, which every engine and platform accepts.

    It is a pure function of its arguments, so it does not depend on order or earlier work.
    """
    text = f"{run_seed}/{purpose}/{step}/{prompt_id}/{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def prompt_seed(run_seed: int, prompts: NumberedPrompts, number: int, index: int) -> int:
    """Returns the seed of a response to a numbered prompt, as in a step that trains on its whole draw."""
    prompt, first = prompts[number]
    return sample_seed(run_seed, TRAIN, prompts.draw_of(number) + 1, prompt.prompt_id, first + index)


@dataclass(frozen=True)
class Rollouts:
    """The data of a step, ordered by (group_id, sample_id), and the place in the data after its prompts."""

    samples: ResponseStore
    results: list[RewardResult]
    rewards: np.ndarray  # float64 [samples]: scores minus penalties
    cursor: DataCursor
    metrics: dict[str, float]
    generated: SampleRows | None = None  # `samples.rows` as engines made them; None: unchanged

    @property
    def made(self) -> SampleRows:
        """Returns the rows as engines made them, including all sampled rows with log-probs that are not finite."""
        if self.generated is None:
            return self.samples.rows
        return self.generated


@dataclass(frozen=True)
class Judge:
    """Judges responses: scores of the reward function, minus penalties."""

    algorithm: AlgorithmConfig
    reward: RewardConfig
    max_response_length: int

    def scored(self, results: list[RewardResult]) -> list[RewardResult]:
        """Returns the results with scores for failed ones, as `with_failures_scored`."""
        return with_failures_scored(self.reward, results)

    def rewards(self, rows: SampleRows, results: list[RewardResult]) -> np.ndarray:
        """Returns scores plus the soft overlong penalty, which is not positive, if that is on. float64 [batch]."""
        scores = np.array([result.score for result in results], dtype=np.float64)
        buffer = self.algorithm.overlong_buffer
        if not buffer.enable:
            return scores
        return scores + soft_overlong_penalty(
            rows.longest_responses, self.max_response_length, buffer.len, buffer.penalty_factor
        )

    def values(self, rows: SampleRows, results: list[RewardResult]) -> np.ndarray:
        """Returns the values in which responses to a prompt may differ, float64 [batch]; as metric_values."""
        filtering = self.algorithm.filter_groups
        metric = filtering.metric if filtering.enable else SCORE
        return metric_values(metric, results, self.rewards(rows, results))

    def rollouts(
        self, samples: ResponseStore, results: list[RewardResult], cursor: DataCursor, metrics: dict[str, float]
    ) -> Rollouts:
        """Returns the data of a step, from its samples and results. `metrics`: of their generation.

        Raises DataError if every response is empty, NumericAbort if none has finite log-probs.
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
    """Returns `score`, `reward` (after penalties), or the reward's part of that name, float64 [batch].

    A failed reward always gives its score. Raises DataError if the reward function gives no such part, or none that is
    a number.
    """
    if metric == REWARD:
        return rewards
    values = [r.score if metric == SCORE or r.reason != OK else part_of(r, metric) for r in results]
    return np.array(values, dtype=np.float64)


def group_metrics(batches: float, uniform_share: float, trained: int, made: list[RewardResult]) -> dict[str, float]:
    """Returns metrics of the groups generated for a step. `made`: all their rewards, including those of filtered
    groups.
    """
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
