"""Advantages: one number a response, made of scores; the advantages of tokens; and the penalty of over-long responses.

numpy only. The driver sends scores. Every rank computes the advantages of all responses, and those of the tokens of its
own rows (`TokenAdvantages`).

Every estimator treats small groups in the same way:

* A group of one has baseline 0, as in verl, so its advantage is its score. Under grpo_passk it is 0.
* A group whose scores are all equal has advantage 0 exactly, free of rounding.
* A group with missing responses is a smaller group.
* Whitening a single value, or equal ones, gives 0.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from mrl.algo.own_functions import bind_own, has_run, load_registered, unload
from mrl.algo.rows import RowValues, on_tokens, second_moment, total
from mrl.algo.spec import ADVANTAGES, BY_TURN
from mrl.algo.turn_credit import SESSION, TurnAdvantages, TurnNumbers, compared, paired, turn_returns
from mrl.errors import ConfigError, DataError

CUSTOM_ADVANTAGE_KEY = "algorithm.custom_advantage.path"
_DECORATOR = "register_advantage"  # of a user's file
STD_EPS = 1e-6
WHITEN_EPS = 1e-8


@dataclass(frozen=True)
class AdvantageInputs:
    """The responses of one step in any order, as numbers a response.

    The length and the sum of penalties of a response count all tokens that were generated. So rejected tokens do not
    shift the baseline of a group.
    """

    scores: np.ndarray  # [batch], after penalties
    group_ids: np.ndarray  # [batch]; responses to one prompt share a group
    lengths: np.ndarray  # int [batch]: generated tokens
    norm_adv_by_std_in_grpo: bool = True
    penalties: np.ndarray | None = None  # [batch]: sum over its tokens of the KL that is taken off the reward
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)  # gdpo: the reward's parts by name, [batch] each
    # gdpo: weight of each part; a part without one weighs 1
    part_weights: Mapping[str, float] = field(default_factory=dict)
    custom: Mapping[str, float] = field(default_factory=dict)  # constants of a user's advantage
    # estimators by turn: the turns of all responses, and how they are credited
    turns: TurnNumbers | None = None
    gamma: float = 1.0
    step_advantage_weight: float = 1.0
    branch_rewards: str = SESSION

    @property
    def of_turns(self) -> TurnNumbers:
        """The turns of all responses. Where none are given, each response is one."""
        if self.turns is not None:
            return self.turns
        count = len(self.scores)
        nothing = np.zeros(count, np.int64)
        return TurnNumbers(nothing + 1, nothing, np.zeros(count), nothing.astype(np.uint64), nothing - 1)

    @property
    def totals(self) -> np.ndarray:
        """Scores less the penalties of all generated tokens, float64 [batch]."""
        scores = np.asarray(self.scores, dtype=np.float64)
        if self.penalties is None:
            return scores
        return scores - self.penalties


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages of tokens: (advantage of the response - penalties still to come - shift) / scale."""

    per_response: np.ndarray  # float64 [rows]
    to_come: bool = False  # the penalties of a token and of all later ones are taken off
    shift: float = 0.0
    scale: float = 1.0
    per_turn: TurnAdvantages | None = None  # instead of `per_response`, which is then 0

    @property
    def differ(self) -> bool:
        """Whether tokens of one response may have different advantages."""
        return self.to_come or self.per_turn is not None

    def rows(self, index: np.ndarray) -> "TokenAdvantages":
        """Keeps the advantages of the given responses only."""
        of_turns = None if self.per_turn is None else self.per_turn.keep(index)
        return replace(self, per_response=self.per_response[index], per_turn=of_turns)

    def among(self, counted: np.ndarray, turns: TurnNumbers | None = None) -> "TokenAdvantages":
        """Spreads these advantages over all responses. `per_response` has one number for each `counted` response;
        others get 0. `turns` are those of all responses, where advantages differ by turn.
        """
        every = np.zeros(len(counted))
        every[counted] = self.per_response
        of_turns = None
        if self.per_turn is not None:
            every_turn = turns or AdvantageInputs(every, every, every).of_turns
            of_turns = self.per_turn.among(counted, every_turn)
        return replace(self, per_response=every, per_turn=of_turns)

    def values(
        self, lengths: np.ndarray, penalties: np.ndarray | None, estimates: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the advantages before shift and scale, float64 [tokens].

        `penalties` [tokens] are needed where `to_come` is set. `estimates` [tokens] come from a critic and are added.
        """
        values = on_tokens(self.per_response, lengths)
        if self.per_turn is not None:
            values = self.per_turn.on_tokens(lengths)
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
        """Returns the advantage of each token, float32 [tokens]; 0 outside the mask. The arguments are those of
        `values`.
        """
        values = self.values(lengths, penalties, estimates)
        return np.where(mask, (values - self.shift) / self.scale, 0.0).astype(np.float32)


AdvantageFunction = Callable[[AdvantageInputs], np.ndarray]  # -> float64 [batch]
ADVANTAGE_FUNCTIONS: dict[str, AdvantageFunction] = {}
WHITENED: set[str] = set()  # estimators whose advantages are whitened over the batch's trained tokens
PENALTIES_TO_COME: set[str] = set()  # estimators that take off a token's own and later penalties, not earlier ones


@dataclass(frozen=True)
class Groups:
    """The groups of a batch. `index` [batch] is the group of each response, counted from 0; `size` [groups] counts
    responses.
    """

    index: np.ndarray
    size: np.ndarray

    @classmethod
    def of(cls, group_ids: np.ndarray) -> "Groups":
        """Makes groups from the group id of each response, [batch]."""
        _, index, size = np.unique(np.asarray(group_ids), return_inverse=True, return_counts=True)
        return cls(index, size)

    def mean(self, values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Returns the weighted mean of each group, [groups]; the plain mean where all weights of a group are 0."""
        plain = np.bincount(self.index, values, len(self.size)) / self.size
        if weights is None:
            return plain
        weight = np.bincount(self.index, weights, len(self.size))
        weighted = np.bincount(self.index, values * weights, len(self.size)) / np.where(weight > 0, weight, 1.0)
        return np.where(weight > 0, weighted, plain)

    def std(self, centred: np.ndarray) -> np.ndarray:
        """Returns the standard deviation of each group over n - 1, [groups]; 1 for a group of one.

        `centred` [batch] are values less the mean of their group.
        """
        variance = np.bincount(self.index, centred**2, len(self.size)) / np.maximum(self.size - 1, 1)
        return np.where(self.size > 1, np.sqrt(variance), 1.0)

    def equal(self, scores: np.ndarray) -> np.ndarray:
        """Returns bool [groups]: true where a group has several scores and all are the same."""
        low = np.full(len(self.size), np.inf)
        high = np.full(len(self.size), -np.inf)
        np.minimum.at(low, self.index, scores)
        np.maximum.at(high, self.index, scores)
        return (low == high) & (self.size > 1)

    def centred(self, scores: np.ndarray, baseline: np.ndarray) -> np.ndarray:
        """Returns scores less the baseline of their group, [batch]. A group of one has baseline 0.

        The result is exactly 0 where all scores of a group are equal.
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
    """Registers a user's `function(inputs) -> float64 [batch]` under `name`. It gets the responses of one step.

    With `whitened` its values are then whitened over the trained tokens. Raises ConfigError for a name that is taken.
    """

    def bind(function: AdvantageFunction) -> AdvantageFunction:
        if bind_own(ADVANTAGE_FUNCTIONS, name, function, _DECORATOR):
            (WHITENED.add if whitened else WHITENED.discard)(name)  # a file that ran before may have said otherwise
        return function

    return bind


def load_custom_advantage(path: str, adv_estimator: str) -> None:
    """Runs the file at `path` once in this process. It must bind a function to `adv_estimator` with
    @register_advantage.

    Raises ConfigError where it does not, or cannot be loaded.
    """
    load_registered(path, CUSTOM_ADVANTAGE_KEY, _DECORATOR, adv_estimator, ADVANTAGE_FUNCTIONS)


@contextmanager
def tried_advantage(path: str, adv_estimator: str) -> Iterator[None]:
    """Loads a user's advantage for the block alone. The next load runs its file anew."""
    stays = has_run(path)
    load_custom_advantage(path, adv_estimator)
    try:
        yield
    finally:
        if not stays:
            unload(path)


@_advantage("grpo")
def grpo(inputs: AdvantageInputs) -> np.ndarray:
    """Returns (score - group mean) / (group std + 1e-6), with the std over n - 1 (arXiv:2402.03300).

    Without the std it is Dr.GRPO (arXiv:2503.20783). A group of one has mean 0 and std 1, as in verl: its advantage is
    its score.
    """
    return _grpo(inputs.totals, Groups.of(inputs.group_ids), inputs.norm_adv_by_std_in_grpo)


def _grpo(scores: np.ndarray, groups: Groups, by_std: bool) -> np.ndarray:
    centred = groups.centred(scores, groups.mean(scores))
    if by_std:
        return centred / (groups.std(centred)[groups.index] + STD_EPS)
    return centred


@_advantage("rloo")
def rloo(inputs: AdvantageInputs) -> np.ndarray:
    """Returns the score less the mean of the group's other scores (arXiv:2402.14740).

    With G responses in a group this is G / (G - 1) (score - group mean).
    """
    scores = inputs.totals
    groups = Groups.of(inputs.group_ids)
    others = np.where(groups.size > 1, groups.size / np.maximum(groups.size - 1, 1), 1.0)
    return groups.centred(scores, groups.mean(scores)) * others[groups.index]


@_advantage("maxrl")
def maxrl(inputs: AdvantageInputs) -> np.ndarray:
    """Returns (score - group mean) / group mean (MaxRL, arXiv:2602.02710, algorithm 1); 0 in a group without success.

    With scores of 0 and 1, N responses of a prompt give the gradient of sum(pass@k / k) for k below N, which tends to
    that of the log of the success probability. A group of one keeps its score: k = 1 alone. Raises DataError for a
    score below 0, of which no mean is a success probability.
    """
    scores = inputs.totals
    if (scores < 0).any():
        raise DataError(
            f"algorithm.adv_estimator maxrl divides by the mean score of a group, and a score is {scores.min():g}: it "
            "needs rewards that are at least 0, such as 0 and 1; grpo takes any"
        )
    groups = Groups.of(inputs.group_ids)
    mean = groups.mean(scores)
    divisor = np.where((groups.size > 1) & (mean > 0), mean, 1.0)
    return groups.centred(scores, mean) / divisor[groups.index]


@_advantage("opo")
def opo(inputs: AdvantageInputs) -> np.ndarray:
    """Returns score - sum(length x score) / sum(length), summed over the group (arXiv:2505.23585).

    This baseline has the least variance when the squared gradient of a response grows with its length. A group of one
    has baseline 0.
    """
    scores = inputs.totals
    groups = Groups.of(inputs.group_ids)
    return groups.centred(scores, groups.mean(scores, inputs.lengths.astype(np.float64)))


@_advantage("grpo_passk")
def grpo_passk(inputs: AdvantageInputs) -> np.ndarray:
    """Gives the best response of a group (best - second best) / (group std + 1e-6), all others 0 (arXiv:2503.19595).

    A tie for the best, and a group of one, gives 0. `norm_adv_by_std_in_grpo` False drops the std.
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
    """Returns the scores. Each token gets the reward still to come, undiscounted, then whitened (arXiv:2501.03262).

    The score counts at the last token. With KL in the reward each token has its own penalty, so tokens differ.
    """
    return np.asarray(inputs.scores, dtype=np.float64)


@_advantage("reinforce_plus_plus_baseline", whitened=True)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> np.ndarray:
    """Returns score - group mean for every token, then whitened over the tokens of the batch (arXiv:2501.03262)."""
    scores = inputs.totals
    groups = Groups.of(inputs.group_ids)
    return groups.centred(scores, groups.mean(scores))


@_advantage("gdpo", whitened=True)
def gdpo(inputs: AdvantageInputs) -> np.ndarray:
    """Returns the sum of weight x grpo(part) over the parts of the reward, then whitened (arXiv:2601.05242).

    Parts are normalised one by one, so responses with equal sums but different parts differ. Raises DataError without
    parts.
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
    """Returns zeros: ranks estimate the advantage of each token from a critic's values (mrl.algo.gae)."""
    return np.zeros(len(inputs.scores))


@_advantage("grpo_turn")
def grpo_turn(inputs: AdvantageInputs) -> np.ndarray:
    """Compares the return of a turn with those of the group's responses at the same turn, float64 [turns].

    A_(i,t) = (R_(i,t) - mean_j R_(j,t)) / (std_j R_(j,t) + 1e-6), over the responses j of the group that have a turn t:
    GRPO (arXiv:2402.03300) on returns to go, turn by turn (as in arXiv:2505.11821, of rewards of turns).
    """
    turns = inputs.of_turns
    same_turn = paired(np.asarray(inputs.group_ids)[turns.rows], turns.positions)
    return compared(_returns(inputs), same_turn, inputs.norm_adv_by_std_in_grpo)


@_advantage("gigpo")
def gigpo(inputs: AdvantageInputs) -> np.ndarray:
    """Returns GiGPO's advantage of each turn, float64 [turns] (arXiv:2505.10978, eq. 3, 6 and 8).

    A(t) = A_E + step_advantage_weight A_S(t). A_E compares the response's score with its group's, each response once.
    A_S compares the turn's return with those of all turns of the group that were taken in the same anchor state:
    behind the same text, which the environment replied.
    """
    turns = inputs.of_turns
    group_ids = np.asarray(inputs.group_ids)
    by_std = inputs.norm_adv_by_std_in_grpo
    of_episodes = _grpo(inputs.totals, Groups.of(group_ids), by_std)[turns.rows]
    same_state = paired(group_ids[turns.rows], turns.states)
    of_steps = compared(_returns(inputs), same_state, by_std)
    return of_episodes + inputs.step_advantage_weight * of_steps


@_advantage("turn_return", whitened=True)
def turn_return(inputs: AdvantageInputs) -> np.ndarray:
    """Returns the discounted return to go of each turn, whitened over the tokens of the batch, float64 [turns].

    REINFORCE (Williams, 1992) with rewards to go (Sutton and Barto, 2018, 13.3); a turn is a step of the episode.
    """
    return _returns(inputs)


def _returns(inputs: AdvantageInputs) -> np.ndarray:
    return turn_returns(inputs.of_turns, inputs.totals, inputs.gamma, inputs.branch_rewards)


def whitened(advantages: TokenAdvantages, of_rows: RowValues) -> TokenAdvantages:
    """Sets shift and scale so that values become (values - mean) / sqrt(variance + 1e-8).

    Mean and variance (over n - 1) are those of the trained tokens of all rows. `of_rows` holds the `moments` of
    `values` on these tokens. Equal values, or fewer than two, become exactly 0.
    """
    count = int(of_rows["count"].sum())
    if count == 0:
        return replace(advantages, per_response=np.zeros_like(advantages.per_response), per_turn=None)
    low = float(of_rows["low"].min())
    if count < 2 or low == of_rows["high"].max():
        return replace(advantages, shift=low)
    variance = second_moment(of_rows["m2"], of_rows["sum"], of_rows["sum"], of_rows["count"]) / (count - 1)
    return replace(advantages, shift=total(of_rows["sum"]) / count, scale=math.sqrt(variance + WHITEN_EPS))


def sums_to_come(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns [tokens]: the value of each token plus those of all later tokens of its row."""
    ends = np.cumsum(lengths)
    sums = np.zeros(len(values))
    for start, end in zip(ends - lengths, ends, strict=True):
        sums[start:end] = values[start:end][::-1].cumsum()[::-1]
    return sums


def response_advantages(adv_estimator: str, inputs: AdvantageInputs) -> TokenAdvantages:
    """Returns the advantage of each response. Estimators in WHITENED are not whitened here.

    Raises ConfigError for an unknown estimator, or for one that does not return one number a response.
    """
    values = numbers_of(adv_estimator, inputs)
    if adv_estimator in BY_TURN:
        turns = inputs.of_turns
        of_turns = TurnAdvantages(turns.counts, turns.starts, values)
        return TokenAdvantages(np.zeros(len(turns.counts)), per_turn=of_turns)
    to_come = adv_estimator in PENALTIES_TO_COME and inputs.penalties is not None
    return TokenAdvantages(values, to_come)


def numbers_of(adv_estimator: str, inputs: AdvantageInputs) -> np.ndarray:
    """float64 [batch], by turn [turns]: what the estimator's function gives.

    Raises ConfigError as `response_advantages`.
    """
    function = ADVANTAGE_FUNCTIONS.get(adv_estimator)
    if function is None:
        raise ConfigError(f"algorithm.adv_estimator: {adv_estimator!r} is unknown; allowed: {', '.join(ADVANTAGES)}")
    values = np.asarray(function(inputs), dtype=np.float64)
    if adv_estimator in BY_TURN:
        return values
    if values.shape != np.shape(inputs.scores):
        raise ConfigError(
            f"algorithm.adv_estimator {adv_estimator}: gives an array of shape {values.shape}, and there are "
            f"{np.size(inputs.scores)} responses"
        )
    return values


def soft_overlong_penalty(
    response_lengths: np.ndarray, max_response_length: int, buffer_length: int, factor: float
) -> np.ndarray:
    """Returns DAPO's soft punishment (arXiv:2503.14476) times `factor`, float64 [batch], to be added to the scores.

    It is 0 up to max_response_length - buffer_length tokens. From there it falls linearly to -factor at
    max_response_length, and stays -factor beyond.
    """
    into_buffer = np.asarray(response_lengths, np.float64) - (max_response_length - buffer_length)
    return -factor * np.clip(into_buffer / buffer_length, 0.0, 1.0)
