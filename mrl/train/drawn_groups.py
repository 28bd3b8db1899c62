"""Dynamic sampling (DAPO, algorithm.filter_groups): groups that teach nothing are dropped and further prompts
generated.

Prompts are drawn data.gen_batch_size at a time, in the order of the data. The next ones are drawn as soon as those
under way cannot fill the step, while the rewards of the others are still to come (mrl/schedule/draws.py), and generated
beside them. The step trains on the first data.train_batch_size groups whose responses differ; what is more than that is
dropped too. The place in the data moves past every prompt that was generated, so that a resumed run repeats nothing and
misses nothing.

Where generation runs ahead of training the same rule holds at max_staleness 0 (mrl/schedule/staleness.py, `unit`).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from mrl.cluster.request_streams import Arrived
from mrl.cluster.stored_samples import StoredSamples
from mrl.config.schema import RunConfig
from mrl.data.batch import Prompt
from mrl.data.order import DataCursor, PromptStream
from mrl.errors import DataError
from mrl.record.metrics import PhaseTimer
from mrl.reward.items import RewardResult, check_failures, failure_counts
from mrl.schedule.draws import Draws
from mrl.train.numbered_prompts import with_first_index
from mrl.train.rollouts import (
    TRAIN,
    TRAIN_RESPONSES,
    JudgedGroup,
    Responder,
    Rollouts,
    as_groups,
    check_finite,
    group_metrics,
    question,
    renumbered,
    rollouts_of,
    sample_seed,
    with_failures_scored,
)
from mrl.vllm.requests import Request, training_sampling

REWARD_WAIT_S = 0.02


def draw_rollouts(
    config: RunConfig, responder: Responder, prompts: PromptStream, cursor: DataCursor, step: int, timer: PhaseTimer
) -> Rollouts:
    """Generates and scores until the batch of `step` is full, or as far as algorithm.filter_groups allows.

    Phases "gen", while engines have requests, and "reward". Raises DataError when too many rewards fail, or when the
    batches of prompts are used up and `on_exhausted` says to stop, or leaves nothing to train on.
    """
    drawing = DrawnGroups(config, responder, prompts, cursor)
    while not drawing.draws.is_over:
        drawing.draw()
        with timer("gen" if drawing.generates else "reward"):
            drawing.take()
    groups, made = drawing.judged(), drawing.draws.made
    chosen = choose(config, groups, f"step {step}: after {made} batches of prompts")
    said = up_to(groups, chosen[-1]) if len(chosen) == config.data.train_batch_size else groups
    uniform = 1.0 - sum(group.differs for group in said) / len(said)
    results_said = [result for group in said for result in group.results]
    metrics = group_metrics(float(made), uniform, len(chosen), results_said)
    samples, results = renumbered(chosen)
    judged = with_failures_scored(config.reward, results)
    return rollouts_of(config, samples, judged, drawing.cursor, metrics)


def up_to(groups: list[JudgedGroup], last: JudgedGroup) -> list[JudgedGroup]:
    """Those that the last one that is trained on was found among: how many of them were alike is what metrics tell."""
    return groups[: next(i for i, group in enumerate(groups) if group is last) + 1]


@dataclass
class _UnderWay:
    """A group whose responses or rewards are awaited, by the index of each response."""

    prompt: Prompt
    parts: dict[int, StoredSamples] = field(default_factory=dict)
    results: dict[int, RewardResult] = field(default_factory=dict)


class DrawnGroups:
    """Groups of one step, by their place in the order of the data; responses are numbered on over all of them."""

    def __init__(self, config: RunConfig, responder: Responder, prompts: PromptStream, cursor: DataCursor):
        filtering = config.algorithm.filter_groups
        self.draws = Draws(config.data.train_batch_size, filtering.max_num_gen_batches or float("inf"))
        self.cursor = cursor
        self._config, self._responder, self._prompts = config, responder, prompts
        self._answers = responder.engines.answers(training_sampling(config))
        self._under_way: dict[int, _UnderWay] = {}
        self._groups: dict[int, JudgedGroup] = {}
        self._asked = self._arrived = self._failed = 0

    @property
    def generates(self) -> bool:
        """Whether engines have requests."""
        return self._answers.unanswered > 0

    def judged(self) -> list[JudgedGroup]:
        """In the order of the data."""
        return [self._groups[number] for number in sorted(self._groups)]

    def draw(self) -> None:
        """Asks for as many batches of prompts as are lacking now."""
        while self.draws.lacks_groups:
            number = self._prompts.batch_number(self.cursor)
            drawn, self.cursor = self._prompts.next_batch(self.cursor)
            requests = list(self._requests(drawn, number))
            self._asked += len(requests)
            self._answers.ask(requests)
            self.draws.drawn(len(drawn))

    def _requests(self, drawn: list[Prompt], batch: int) -> Iterator[Request]:
        """Seeds are those of the batch's number, as of a step that trains on all of it."""
        n, run_seed = self._config.rollout.n, self._config.trainer.seed
        for prompt, first in with_first_index(drawn):
            group = len(self._groups) + len(self._under_way)
            self._under_way[group] = _UnderWay(prompt)
            for k in range(n):
                seed = sample_seed(run_seed, TRAIN, batch + 1, prompt.prompt_id, first + k)
                yield Request(group * n + k, prompt.token_ids, seed, prompt.prompt_id, group)

    def take(self) -> None:
        """Waits a moment for responses, or for rewards where there are no more;
        judges the groups that have all of both.
        """
        arrived = self._answers.take() if self.generates else []
        for part in arrived:
            self._take_in(part)
        scored = self._responder.rewards.collect(at_once=not self.generates)
        if not self.generates and not scored:
            self._responder.poll()
            time.sleep(REWARD_WAIT_S)
        touched = {self._take_result(result) for result in scored}
        for number in sorted(touched):
            self._judge(number)

    def _take_in(self, arrived: Arrived) -> None:
        part, questions = arrived.samples, []
        check_finite(part.rows)
        self._arrived += len(part)
        self._responder.display.progress(TRAIN_RESPONSES, self._arrived, self._asked)
        for row, sample_id in enumerate(part.rows.sample_id.tolist()):
            number, index = divmod(sample_id, self._config.rollout.n)
            group = self._under_way[number]
            group.parts[index] = part.take(np.array([row]))
            questions.append(question(sample_id, group.prompt))
        self._responder.rewards.submit(part, questions, arrived.engine, arrived.held_s)

    def _take_result(self, result: RewardResult) -> int:
        """The number of its group. Raises DataError once more of the step's rewards failed than may."""
        number, index = divmod(result.sample_id, self._config.rollout.n)
        self._under_way[number].results[index] = result
        self._failed += sum(failure_counts([result]).values())
        if self._failed > int(self._config.reward.max_failure_share * self._asked):
            check_failures(self._all_results(), self._config.reward.max_failure_share)
        return number

    def _all_results(self) -> list[RewardResult]:
        judged = [result for group in self._groups.values() for result in group.results]
        return judged + [result for group in self._under_way.values() for result in group.results.values()]

    def _judge(self, number: int) -> None:
        """Whether the responses differ, failed rewards at the bottom of the group; nothing while some are awaited."""
        n, waiting = self._config.rollout.n, self._under_way[number]
        if len(waiting.results) < n:
            return
        results = [waiting.results[k] for k in range(n)]
        samples = StoredSamples.joined([waiting.parts[k] for k in range(n)])
        (group,) = as_groups(self._config, samples, with_failures_scored(self._config.reward, results))
        self._groups[number] = replace(group, results=tuple(results))
        del self._under_way[number]
        self.draws.judged(group.differs)
        kept = without_dropped_tokens(self._config, self.judged())
        self._groups = dict(zip(sorted(self._groups), kept, strict=True))
        wanted = self.draws.wanted
        progress = f"groups for the step, batch {self.draws.made}"
        self._responder.display.progress(progress, min(self.draws.trainable, wanted), wanted)


def without_dropped_tokens(config: RunConfig, groups: list[JudgedGroup]) -> list[JudgedGroup]:
    """The groups, without the samples of those that nothing can bring back: of many batches they fill object stores.

    Results stay, for the metrics. `on_exhausted: unfiltered` may bring back as many of the first as a batch holds.
    """
    kept = []
    spare = config.data.train_batch_size if config.algorithm.filter_groups.on_exhausted == "unfiltered" else 0
    for group in groups:
        kept.append(group if group.differs or spare else replace(group, samples=None))
        spare -= not group.differs and spare > 0
    return kept


def choose(config: RunConfig, groups: list[JudgedGroup], when: str) -> list[JudgedGroup]:
    """The first data.train_batch_size groups that differ; what on_exhausted says where there are fewer.

    Raises DataError.
    """
    wanted, filtering = config.data.train_batch_size, config.algorithm.filter_groups
    differing = [group for group in groups if group.differs]
    if len(differing) >= wanted:
        return differing[:wanted]
    if filtering.on_exhausted == "unfiltered":
        return (differing + [group for group in groups if not group.differs])[:wanted]
    if filtering.on_exhausted == "partial" and differing:
        return differing
    raise DataError(
        f"{when}, {len(differing)} of the {wanted} groups of a step have responses that differ in {filtering.metric} "
        f"({len(groups)} generated): the prompts are too easy or too hard for the model as it is. Raise "
        "algorithm.filter_groups.max_num_gen_batches or rollout.n, give other prompts, or set on_exhausted to "
        + ("unfiltered" if filtering.on_exhausted == "partial" else "partial or unfiltered")
    )
