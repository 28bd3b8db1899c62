"""The data that goes to the scoring workers and comes back.

This package imports the standard library only, so that a worker starts in milliseconds.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mrl.errors import DataError, EnvironmentFault, NumericAbort

# outcomes of scoring one response
OK = "ok"
RAISED = "raised"
TIMEOUT = "timeout"
DIED = "died"
OUT_OF_MEMORY = "out_of_memory"
NOT_A_NUMBER = "not_a_number"
WRONG_TYPE = "wrong_type"
LEFT_OUT = "environment"  # not scored: the environment of the response failed, so it gets no reward
NOT_FINITE = "not_finite"  # not scored: the response has log-probs that are not finite
UNJUDGED = (LEFT_OUT, NOT_FINITE)
FELL = "fell"  # last word of `detail`: the environment's process was ended because of another response
ANSWER_BYTES = 2**20  # limit for one answer of a scoring process, as JSON
SCORE = "score"  # what a function returned
REWARD = "reward"  # the score after penalties
ACC = "acc"  # the part that tells how right an answer is; equals the number of a function that returns only a number


# extra_info that a function gets for a response of one turn, in runs whose responses may have several turns; see
# mrl.cluster.scoring.outcomes
ONE_TURN = {
    "num_turns": 1,
    "turns": [{"calls": 0, "reward": 0.0}],
    "outcome": {"stop_reason": "stop", "reward": 0.0, "parts": {}},
}


@dataclass(frozen=True)
class RewardSpec:
    """The function that scores: a built-in by name, `auto` (by each row's data_source), or `name` in the user's file
    `path`.
    """

    function: str = "auto"
    path: str | None = None
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # added to every call of the user's function
    data_sources: tuple[str, ...] = ()  # of the data, so that `auto` can load what it needs before the first sample
    bonus_rules: Mapping[str, float] = field(default_factory=dict)  # built-in rules whose weighted scores are added
    environment: tuple[str, ...] = ()  # variables that a scoring process gets in addition to the usual ones
    network: bool = False  # whether it may use the network
    folders: tuple[str, ...] = ()  # that it may write into, in addition to temporary ones
    max_memory_gib: float | None = None  # limit of a scoring process's address space; None: unlimited

    @property
    def answer_bytes(self) -> int:
        """Limit of one answer as JSON."""
        return ANSWER_BYTES


@dataclass(frozen=True)
class RewardItem:
    """One response to score. `ground_truth` and `extra_info` come from the data row, as JSON has them."""

    sample_id: int
    data_source: str
    response_text: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """What a response is judged by, before its text is known. `sample_id` identifies its result."""

    sample_id: int
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    def answered(self, text: str) -> RewardItem:
        """Returns the item with the response's text."""
        return RewardItem(self.sample_id, self.data_source, text, self.ground_truth, self.extra_info)


@dataclass(frozen=True)
class RewardResult:
    """The score of one response. `reason` is one of the constants above.

    If it is not `ok`, `score` is the pool's failure_score and `detail` explains it.
    """

    sample_id: int
    score: float
    parts: dict[str, float | str]
    reason: str
    detail: str = ""
    data_source: str = ""
    texts: Any = None  # of `parts`, where they stayed with the scorer; see mrl.store.reward_texts


def part_of(result: RewardResult, name: str) -> float:
    """Returns the number that a reward has under `name`. Raises DataError where it has none."""
    value = result.parts.get(name)
    if isinstance(value, bool | int | float):
        return float(value)
    known = ", ".join([SCORE, REWARD, *sorted(result.parts)])
    raise DataError(
        f"the reward of sample {result.sample_id} has no number under {name!r} (algorithm.filter_groups.metric, "
        f"gdpo_reward_keys); allowed: {known}. What an environment gives with some replies only, its class has to "
        "declare in `parts`"
    )


def failure_counts(results: Iterable[RewardResult]) -> dict[str, int]:
    """Returns failures by reason, most frequent first."""
    return dict(Counter(r.reason for r in results if is_failure(r)).most_common())


def is_failure(result: RewardResult) -> bool:
    """Tells whether scoring failed."""
    return result.reason not in (OK, *UNJUDGED)


def is_environment_failure(result: RewardResult) -> bool:
    """Tells whether the response's own environment failed. A failure caused by another response's process does not
    count.
    """
    return result.reason == LEFT_OUT and not result.detail.endswith(f": {FELL}")


def most_failures(results: Collection[RewardResult]) -> int:
    """Returns the largest number of failures of one kind: of rewards, of environments, of log-probs."""
    rewards = sum(map(is_failure, results))
    environments = sum(map(is_environment_failure, results))
    return max(rewards, environments, sum(result.reason == NOT_FINITE for result in results))


def failures_at_the_bottom(results: list[RewardResult]) -> list[RewardResult]:
    """Returns the results, with failed ones scored as the lowest of their data source, at most 0.

    If the source has no other results, the lowest of all counts. A fixed score would exceed the wrong answers of some
    rule: 0 exceeds the -1 of math_dapo, so hanging would be learned. The lowest of another source may be out of scale:
    in a group of 0 and 1, a -100 would dominate learning.
    """
    lowest: dict[str, float] = {}
    for r in results:
        if r.reason == OK:
            lowest[r.data_source] = min(lowest.get(r.data_source, 0.0), r.score)
    of_all = min(lowest.values(), default=0.0)
    return [replace(r, score=lowest.get(r.data_source, of_all)) if is_failure(r) else r for r in results]


def check_failures(results: list[RewardResult], max_failure_share: float) -> None:
    """Raises an error when more than this share of the results are failures. It has counts by reason and one detail of
    each.

    DataError for rewards, EnvironmentFault for environments, NumericAbort for log-probs that are not finite.
    """
    check_numbers(results, max_failure_share)
    check_environments(results, max_failure_share)
    counts = failure_counts(results)
    failed = sum(counts.values())
    if failed <= max_failure_share * len(results):
        return
    lines = []
    for reason, count in counts.items():
        detail = next(result.detail for result in results if result.reason == reason)
        lines.append(f"  {count} {reason}: {detail}")
    head = (
        f"the reward failed on {failed} of {len(results)} responses, more than reward.max_failure_share "
        f"({max_failure_share:g}) allows:"
    )
    raise DataError("\n".join([head, *lines]))


def check_numbers(results: list[RewardResult], max_failure_share: float) -> None:
    """Raises NumericAbort when more than this share of the responses have log-probs that are not finite.

    vLLM itself raises nothing: weights that are NaN give tokens and a stop reason as usual.
    """
    bad = [result for result in results if result.reason == NOT_FINITE]
    if len(bad) > max_failure_share * len(results):
        raise NumericAbort(
            f"{len(bad)} of {len(results)} responses have log-probs that are not finite, more than "
            f"reward.max_failure_share ({max_failure_share:g}) allows, the first is {bad[0].detail}: the engines "
            "computed with weights that are not numbers"
        )


def check_environments(results: list[RewardResult], max_failure_share: float) -> None:
    """Raises EnvironmentFault when the environments of more than this share of the responses failed."""
    failed = list(filter(is_environment_failure, results))
    if len(failed) <= max_failure_share * len(results):
        return
    counts = Counter(r.detail for r in failed).most_common()
    lines = [f"  {n} {detail}" for detail, n in counts]
    head = (
        f"the environment failed in {len(failed)} of {len(results)} responses, more than reward.max_failure_share "
        f"({max_failure_share:g}) allows; logs/engine-N.tools.log in the run directory has what it said:"
    )
    raise EnvironmentFault("\n".join([head, *lines]))
