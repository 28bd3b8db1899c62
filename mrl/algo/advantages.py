"""Advantages from scores, one number a response, how tokens have theirs from them, and the penalty of over-long
responses.

numpy: the driver holds scores and nothing else, and ranks compute what differs by token (`TokenAdvantages`).

What every estimator does where it has little to go on: a group of one has baseline 0, as in verl, so its advantage is
its score (under grpo_passk, which is about a lead over others, 0). A group whose scores are all equal has advantage 0
exactly, free of rounding. A group with missing responses is a smaller group. Whitening one value, or equal ones, gives
0.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from mrl.algo.own_functions import load_registered
from mrl.algo.rows import RowValues, on_tokens, second_moment, total
from mrl.algo.spec import ADVANTAGES
from mrl.errors import ConfigError, DataError
from mrl.exercised import exercised

CUSTOM_ADVANTAGE_KEY = "algorithm.custom_advantage.path"
STD_EPS = 1e-6
WHITEN_EPS = 1e-8


@dataclass(frozen=True)
class AdvantageInputs:
    """One step's responses, in any order: numbers a response.

    A response's length and the sum of its penalties are taken over all its tokens, as it was generated. So a rejection
    shifts no group's baseline.
    """

    scores: np.ndarray  # [batch], after penalties
    group_ids: np.ndarray  # [batch]; responses to one prompt share a group
    lengths: np.ndarray  # int [batch]: generated tokens
    norm_adv_by_std_in_grpo: bool = True
    penalties: np.ndarray | None = None  # [batch]: sum of what is taken off the reward of each token: KL in the reward
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)  # gdpo: the reward's parts by name, [batch] each
    # gdpo: weight of each part; a part without one weighs 1
    part_weights: Mapping[str, float] = field(default_factory=dict)
    custom: Mapping[str, float] = field(default_factory=dict)  # constants of a user's advantage

    @property
    def totals(self) -> np.ndarray:
        """float64 [batch]: scores less the penalties of all generated tokens."""
        scores = np.asarray(self.scores, dtype=np.float64)
        if self.penalties is None:
            return scores
        return scores - self.penalties


@dataclass(frozen=True)
class TokenAdvantages:
    """How tokens' advantages follow from those of their responses:
    (response's - penalties still to come - shift) / scale.
    """

    per_response: np.ndarray  # float64 [rows]
    to_come: bool = False  # penalties of the token and of those after it are taken off
    shift: float = 0.0
    scale: float = 1.0

    def rows(self, index: np.ndarray) -> "TokenAdvantages":
        """Keeps the advantages of the given responses alone."""
        return replace(self, per_response=self.per_response[index])

    def among(self, counted: np.ndarray) -> "TokenAdvantages":
        """Spreads these advantages, which are of the `counted` responses, over all responses; the others get 0."""
        every = np.zeros(len(counted))
        every[counted] = self.per_response
        return replace(self, per_response=every)

    def values(
        self, lengths: np.ndarray, penalties: np.ndarray | None, estimates: np.ndarray | None = None
    ) -> np.ndarray:
        """float64 [tokens] before shift and scale; `penalties` [tokens] where there are any.

        `estimates` [tokens]: what a critic makes of each token, beside what its response has.
        """
        values = on_tokens(self.per_response, lengths)
        if estimates is not None:
            values = values + estimates
        if self.to_come:
            return values - sums_to_come(penalties, lengths)
        return values

    def of_tokens(
        self,
        lengths: np.ndarray,
        mask: np.ndarray,
        penalties: np.ndarray | None,
        estimates: np.ndarray | None = None,
    ) -> np.ndarray:
        """float32 [tokens]: the advantage of each token, 0 outside the mask; see `values`."""
        values = self.values(lengths, penalties, estimates)
        return np.where(mask, (values - self.shift) / self.scale, 0.0).astype(np.float32)


AdvantageFunction = Callable[[AdvantageInputs], np.ndarray]  # -> float64 [batch]
ADVANTAGE_FUNCTIONS: dict[str, AdvantageFunction] = {}
WHITENED: set[str] = set()  # estimators whose advantages are then whitened over the batch's trained tokens
PENALTIES_TO_COME: set[str] = set()  # those where a token's own penalty and later ones count, not those before it


@dataclass(frozen=True)
class Groups:
    """`index` [batch]: which group a response is in, counted from 0; `size` [groups]."""

    index: np.ndarray
    size: np.ndarray

    @classmethod
    def of(cls, group_ids: np.ndarray) -> "Groups":
        """The groups of responses with these ids, [batch]."""
        _, index, size = np.unique(np.asarray(group_ids), return_inverse=True, return_counts=True)
        return cls(index, size)

    def mean(self, values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """[groups], weighted; the plain mean of a group whose weights are all 0."""
        plain = np.bincount(self.index, values, len(self.size)) / self.size
        if weights is None:
            return plain
        weight = np.bincount(self.index, weights, len(self.size))
        weighted = np.bincount(self.index, values * weights, len(self.size)) / np.where(weight > 0, weight, 1.0)
        return np.where(weight > 0, weighted, plain)

    def std(self, centred: np.ndarray) -> np.ndarray:
        """[groups] over n - 1, of values whose group means are 0; 1 for a group of one."""
        variance = np.bincount(self.index, centred**2, len(self.size)) / np.maximum(self.size - 1, 1)
        return np.where(self.size > 1, np.sqrt(variance), 1.0)

    def equal(self, scores: np.ndarray) -> np.ndarray:
        """[groups] bool: more than one score and all the same."""
        low = np.full(len(self.size), np.inf)
        high = np.full(len(self.size), -np.inf)
        np.minimum.at(low, self.index, scores)
        np.maximum.at(high, self.index, scores)
        return (low == high) & (self.size > 1)

    def centred(self, scores: np.ndarray, baseline: np.ndarray) -> np.ndarray:
        """[batch]: scores less their group's baseline, which is 0 for a group of one;
        exactly 0 where a group's scores are all equal.
        """
        baseline = np.where(self.size > 1, baseline, 0.0)
        return np.where(self.equal(scores)[self.index], 0.0, scores - baseline[self.index])


def _advantage(
    name: str, whitened: bool = False, to_come: bool = False
) -> Callable[[AdvantageFunction], AdvantageFunction]:
    def bind(function: AdvantageFunction) -> AdvantageFunction:
        ADVANTAGE_FUNCTIONS[ADVANTAGES[name].name] = function
        WHITENED.update({name} if whitened else ())
        PENALTIES_TO_COME.update({name} if to_come else ())
        return function

    return bind


def register_advantage(name: str, whitened: bool = False) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Makes a user's `function(inputs) -> float64 [batch]`, of one step's responses, known under `name`.

    `whitened`: its values are then whitened over the trained tokens. Raises ConfigError for a name that is taken.
    """

    def bind(function: AdvantageFunction) -> AdvantageFunction:
        if name in ADVANTAGE_FUNCTIONS:
            taken = ", ".join(ADVANTAGE_FUNCTIONS)
            raise ConfigError(f"register_advantage: the name {name!r} is taken; taken: {taken}")
        ADVANTAGE_FUNCTIONS[name] = function
        WHITENED.update({name} if whitened else ())
        return function

    return bind


def load_custom_advantage(path: str, adv_estimator: str) -> None:
    """Runs the file at `path`, once a process, which must bind a function to `adv_estimator` with @register_advantage.

    Raises ConfigError.
    """
    load_registered(path, CUSTOM_ADVANTAGE_KEY, "register_advantage", adv_estimator, ADVANTAGE_FUNCTIONS)


@_advantage("grpo")
def grpo(inputs: AdvantageInputs) -> np.ndarray:
    """(score - group mean) / (group std + 1e-6), std over n - 1 (arXiv:2402.03300); without the std it is Dr.GRPO
    (arXiv:2503.20783).

    A group of one has mean 0 and std 1, as in verl: its advantage is its score.
    """
    return _grpo(inputs.totals, Groups.of(inputs.group_ids), inputs.norm_adv_by_std_in_grpo)


def _grpo(scores: np.ndarray, groups: Groups, by_std: bool) -> np.ndarray:
    centred = groups.centred(scores, groups.mean(scores))
    if by_std:
        return centred / (groups.std(centred)[groups.index] + STD_EPS)
    return centred


@_advantage("rloo")
def rloo(inputs: AdvantageInputs) -> np.ndarray:
    """score - mean of the other scores of the group = G / (G - 1) (score - group mean) (arXiv:2402.14740)."""
    scores = inputs.totals
    groups = Groups.of(inputs.group_ids)
    others = np.where(groups.size > 1, groups.size / np.maximum(groups.size - 1, 1), 1.0)
    return groups.centred(scores, groups.mean(scores)) * others[groups.index]


@_advantage("opo")
def opo(inputs: AdvantageInputs) -> np.ndarray:
    """score - sum(length x score) / sum(length) over the group (arXiv:2505.23585). The baseline has the least variance
    when the squared gradient of a response grows with its length. A group of one has baseline 0.
    """
    scores = inputs.totals
    groups = Groups.of(inputs.group_ids)
    return groups.centred(scores, groups.mean(scores, inputs.lengths.astype(np.float64)))


@_advantage("grpo_passk")
def grpo_passk(inputs: AdvantageInputs) -> np.ndarray:
    """The best response of a group has (best - second best) / (group std + 1e-6), all others 0 (arXiv:2503.19595).

    Ties for the best, and a group of one, leave nothing: 0. `norm_adv_by_std_in_grpo` False drops the std.
    """
    scores = inputs.totals
    groups = Groups.of(inputs.group_ids)
    order = np.lexsort((scores, groups.index))  # by group, then rising score
    last = np.cumsum(groups.size) - 1
    best = order[last]
    second = order[np.maximum(last - 1, 0)]
    advantages = np.zeros(len(scores))
    advantages[best] = np.where(groups.size > 1, scores[best] - scores[second], 0.0)
    if not inputs.norm_adv_by_std_in_grpo:
        return advantages
    return advantages / (groups.std(groups.centred(scores, groups.mean(scores)))[groups.index] + STD_EPS)


@_advantage("reinforce_plus_plus", whitened=True, to_come=True)
def reinforce_plus_plus(inputs: AdvantageInputs) -> np.ndarray:
    """Reward still to come at each token, undiscounted, whitened over the batch's tokens (arXiv:2501.03262).

    The score stands at the last token. With KL in the reward each token has its own penalty, and what is to come
    differs by token.
    """
    return np.asarray(inputs.scores, dtype=np.float64)


@_advantage("reinforce_plus_plus_baseline", whitened=True)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> np.ndarray:
    """score - group mean on every token, whitened over the batch's tokens (arXiv:2501.03262)."""
    scores = inputs.totals
    groups = Groups.of(inputs.group_ids)
    return groups.centred(scores, groups.mean(scores))


@_advantage("gdpo", whitened=True)
def gdpo(inputs: AdvantageInputs) -> np.ndarray:
    """Sum of weight x grpo(part) over the reward's parts, whitened over the batch's tokens (arXiv:2601.05242).

    Normalising each part by itself keeps apart what a sum of parts would make equal. Raises DataError when no part is
    given.
    """
    if not inputs.parts:
        raise DataError("adv_estimator gdpo needs the parts of the reward: name them under algorithm.gdpo_reward_keys")
    groups = Groups.of(inputs.group_ids)
    by_std = inputs.norm_adv_by_std_in_grpo
    return sum(
        inputs.part_weights.get(name, 1.0) * _grpo(np.asarray(part, dtype=np.float64), groups, by_std)
        for name, part in inputs.parts.items()
    )


@_advantage("gae", whitened=True)
def gae(inputs: AdvantageInputs) -> np.ndarray:
    """Zeros: no number of a response is left over, ranks estimate each token's advantage (mrl.algo.gae)."""
    return np.zeros(len(inputs.scores))


def whitened(advantages: TokenAdvantages, of_rows: RowValues) -> TokenAdvantages:
    """(values - mean) / sqrt(variance + 1e-8), both over the trained tokens of all rows, variance over n - 1.

    `of_rows`: `moments` of `values` on the trained tokens. Equal values, and one or none, become exactly 0.
    """
    count = int(of_rows["count"].sum())
    if count == 0:
        return TokenAdvantages(np.zeros_like(advantages.per_response))
    low = float(of_rows["low"].min())
    if count < 2 or low == of_rows["high"].max():
        return replace(advantages, shift=low)
    variance = second_moment(of_rows["m2"], of_rows["sum"], of_rows["sum"], of_rows["count"]) / (count - 1)
    return replace(advantages, shift=total(of_rows["sum"]) / count, scale=math.sqrt(variance + WHITEN_EPS))


def sums_to_come(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[tokens]: the sum of each token's value and of those after it in its row."""
    ends = np.cumsum(lengths)
    sums = np.zeros(len(values))
    for start, end in zip(ends - lengths, ends, strict=True):
        sums[start:end] = values[start:end][::-1].cumsum()[::-1]
    return sums


def response_advantages(adv_estimator: str, inputs: AdvantageInputs) -> TokenAdvantages:
    """Each response's advantage, not yet whitened where the estimator is one of WHITENED.

    Raises ConfigError for an unknown estimator, and for one that does not give a number a response.
    """
    values = numbers_of(adv_estimator, inputs)
    exercised(f"algorithm.adv_estimator={adv_estimator}")
    to_come = adv_estimator in PENALTIES_TO_COME and inputs.penalties is not None
    return TokenAdvantages(values, to_come)


def numbers_of(adv_estimator: str, inputs: AdvantageInputs) -> np.ndarray:
    """float64 [batch]: what the estimator's function gives. Raises ConfigError as `response_advantages`."""
    function = ADVANTAGE_FUNCTIONS.get(adv_estimator)
    if function is None:
        raise ConfigError(f"algorithm.adv_estimator: {adv_estimator!r} is unknown; allowed: {', '.join(ADVANTAGES)}")
    values = np.asarray(function(inputs), dtype=np.float64)
    if values.shape != np.shape(inputs.scores):
        raise ConfigError(
            f"algorithm.adv_estimator {adv_estimator}: gives an array of shape {values.shape}, and there are "
            f"{np.size(inputs.scores)} responses"
        )
    return values


def soft_overlong_penalty(
    response_lengths: np.ndarray, max_response_length: int, buffer_length: int, factor: float
) -> np.ndarray:
    """float64 [batch], to be added to the scores: DAPO's soft punishment (arXiv:2503.14476), times `factor`.

    0 up to max_response_length - buffer_length tokens, from there linearly down to -factor at max_response_length, and
    -factor beyond.
    """
    into_buffer = np.asarray(response_lengths, np.float64) - (max_response_length - buffer_length)
    return -factor * np.clip(into_buffer / buffer_length, 0.0, 1.0)
