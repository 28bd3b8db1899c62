"""Holds responses and rewards of live groups, by number, until a step takes them or they are dropped.

responses --ask--> reward pool --take_result--> a group with all its rewards: is_judged, differs --> take
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from mrl.cluster.scoring import ScorerGroup
from mrl.data.batch import Prompt
from mrl.errors import DataError
from mrl.generate.group_writer import GroupParts
from mrl.generate.kept_groups import Filtered, KeptGroups
from mrl.generate.rollouts import Judge, compared, question
from mrl.reward.items import OK, RewardResult, check_failures, most_failures
from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.groups import Group
from mrl.store.response_store import ResponseStore


class JudgedGroups:
    """The responses and rewards of each group. The machines of mrl.schedule know only numbers and lengths."""

    def __init__(self, judge: Judge, rewards: ScorerGroup, responses: int, kept: KeptGroups | None):
        """`responses`: number in a group. `kept`: groups from a checkpoint."""
        self.made: dict[int, GroupParts] = copies(kept.groups) if kept else {}  # by number
        self.filtered: list[Filtered] = list(kept.filtered) if kept else []  # dropped, and reported by no step
        self._judge = judge
        self._rewards = rewards
        self._responses = responses
        self._pending: dict[int, set[int]] = {}  # by number: indices of responses whose rewards are awaited
        self._any_failed = self._knows_failures()

    @property
    def awaits_rewards(self) -> bool:
        """Tells whether a reward is awaited."""
        return bool(self._pending)

    def add(self, group: Group, index: int, response: ResponseStore) -> None:
        """Sets the present state of a response of one row, replacing its earlier state."""
        parts = self.made.setdefault(group.number, GroupParts(group.number, group.attempts, {}, {}))
        parts.responses[index] = response

    def take_over(self, group: Group, parts: GroupParts) -> None:
        """Replaces unfinished responses by those of an earlier start, and takes all its rewards.

        Rewards may be newer than the checkpoint that has their responses.
        """
        own = self.made.setdefault(group.number, GroupParts(group.number, group.attempts, {}, {}))
        for index, response in parts.responses.items():
            if index in parts.results:
                own.results[index] = parts.results[index]
            if index not in own.responses or not group.ended[index]:
                own.responses[index] = response
        self._any_failed |= any(result.reason != OK for result in own.results.values())

    def ask(self, number: int, index: int, prompt: Prompt, engine: str, held_s: float = 0.0) -> None:
        """Asks for the reward of a response that has ended."""
        self._pending.setdefault(number, set()).add(index)
        asked = question(number * self._responses + index, prompt)
        self._rewards.submit(self.made[number].responses[index], [asked], engine, held_s)

    def unasked(self, number: int, ended: list[bool]) -> list[int]:
        """Returns indices of ended responses that have no reward and none requested."""
        parts = self.made[number]
        known = {*parts.results, *self._pending.get(number, ())}
        return [index for index in parts.responses if ended[index] and index not in known]

    def collect(self, at_once: bool) -> list[RewardResult]:
        """Returns rewards that have arrived, each once, as ScorerGroup does."""
        if self._pending:
            return self._rewards.collect(at_once)
        return []

    def wait(self, seconds: float) -> None:
        """Waits for a reward, at most `seconds`."""
        self._rewards.wait(seconds)

    def take_result(self, result: RewardResult) -> int | None:
        """Stores a reward. Returns the number of its group; None if the reward is no longer awaited."""
        number, index = divmod(result.sample_id, self._responses)
        awaited = self._pending.get(number, set())
        if index not in awaited:
            return None
        awaited.discard(index)
        if not awaited:
            del self._pending[number]
        self._any_failed |= result.reason != OK
        self.made[number].results[index] = result
        return number

    def is_judged(self, number: int) -> bool:
        """Tells whether all rewards of the group have arrived."""
        return len(self.made[number].results) == self._responses

    def differs(self, number: int) -> bool:
        """Tells whether the responses of a judged group have different values."""
        parts = self.made[number]
        rows = parts.joined.rows
        results = [parts.results[index] for index in range(self._responses)]
        values = self._judge.values(rows, self._judge.scored(results))
        return _differ(values[compared(np.zeros(len(values)), results)])

    def results_of(self, number: int) -> list[RewardResult]:
        """Returns the group's rewards that have arrived, in the order of its responses."""
        if number not in self.made:
            return []
        results = self.made[number].results
        return [results[index] for index in sorted(results)]

    def filter(self, number: int) -> None:
        """Drops a group because of its rewards. Its step still reports it."""
        self.filtered.append((number, self.results_of(number)))

    def forget(self, numbers: Iterable[int]) -> None:
        """Drops the responses of these groups, and no longer waits for their rewards."""
        for number in numbers:
            self.made.pop(number, None)
            awaited = self._pending.pop(number, ())
            if awaited:
                self._rewards.withdraw([number * self._responses + index for index in awaited])

    def withdraw_all(self) -> None:
        """Withdraws all questions, because nobody waits for rewards any more."""
        self._rewards.withdraw_all()

    def take(self, numbers: Iterable[int]) -> tuple[ResponseStore, list[RewardResult]]:
        """Removes judged groups in this order. Returns their responses and results, with ids counted from 0."""
        parts = [self.made.pop(number) for number in numbers]
        every = range(self._responses)
        samples = ResponseStore.joined([each.responses[index] for each in parts for index in every])
        results = [each.results[index] for each in parts for index in every]
        groups = np.repeat(np.arange(len(parts)), self._responses)
        judged = [replace(result, sample_id=i) for i, result in enumerate(self._judge.scored(results))]
        return samples.renumbered(groups, np.arange(len(samples))), judged

    def uniform(self, samples: ResponseStore, results: list[RewardResult]) -> int:
        """Returns the number of groups of `take` whose responses all have the same value."""
        values = self._judge.values(samples.rows, results)
        groups = np.repeat(np.arange(len(values) // self._responses), self._responses)
        counted = compared(groups, results)
        return sum(not _differ(values[counted & (groups == group)]) for group in range(groups[-1] + 1))

    def check_failures(self, numbers: Iterable[int], filtered: Iterable[Filtered], wanted: int) -> None:
        """Raises the error of mrl.reward.items.check_failures if too many rewards of a step failed.

        It counts those of `wanted` groups: `numbers` and the groups filtered for the step.
        """
        if not self._any_failed:
            return
        made = [result for _, results in filtered for result in results]
        for number in numbers:
            made += self.results_of(number)
        share = self._judge.reward.max_failure_share
        if most_failures(made) > int(share * wanted * self._responses):
            check_failures(made, share)

    def check_all(self, made: list[RewardResult]) -> None:
        """Raises the error of check_failures if too many of all rewards of a step failed."""
        check_failures(made, self._judge.reward.max_failure_share)

    def too_many_filtered(self, step: int, count: int) -> DataError:
        """Returns the error for a step with so many filtered groups."""
        return DataError(
            f"step {step}: {count} groups have responses that do not differ in {self._metric}: the prompts are too "
            "easy or too hard for the model as it is. Raise algorithm.filter_groups.max_num_gen_batches or rollout.n, "
            "or give other prompts"
        )

    def exhausted(self, buffer: GroupBuffer) -> DataError:
        """Returns the error for a step that has used up its draws and has too few groups."""
        schedule = buffer.schedule
        others = "partial or unfiltered"
        if schedule.on_exhausted == "partial":
            others = "unfiltered"
        return DataError(
            f"step {buffer.step + 1}: after {schedule.most_draws} batches of prompts, {len(buffer.groups)} of the "
            f"{schedule.batch} groups of a step have responses that differ in {self._metric}; "
            f"{len(buffer.groups) + len(self.filtered)} were generated: the prompts are too easy or too hard for the "
            "model as it is. Raise algorithm.filter_groups.max_num_gen_batches or rollout.n, give other prompts, or "
            f"set on_exhausted to {others}"
        )

    @property
    def _metric(self) -> str:
        return self._judge.algorithm.filter_groups.metric

    def look_again(self) -> None:
        """Determines anew whether a reward of the remaining groups has failed."""
        self._any_failed = self._knows_failures()

    def _knows_failures(self) -> bool:
        judged = [parts.results.values() for parts in self.made.values()]
        filtered = [results for _, results in self.filtered]
        return any(result.reason != OK for results in [*judged, *filtered] for result in results)


def _differ(values: np.ndarray) -> bool:
    return len(values) > 0 and bool(values.min() < values.max())


def copies(groups: Mapping[int, GroupParts]) -> dict[int, GroupParts]:
    """Copies groups, in the order of numbers, so that later changes do not affect them."""
    return {
        number: replace(groups[number], responses=dict(groups[number].responses), results=dict(groups[number].results))
        for number in sorted(groups)
    }
