"""Credit by turn: returns of the turns of a response, and advantages that differ between its turns. numpy only.

A turn has the reward that its environment, or its agent, gave for it. What a response's score has beside these rewards,
such as that of a reward function, stands at its last turn. So the rewards of a response's turns add up to its score.

    r_t    reward of turn t
    R_t  = r_t + gamma R_(t+1)          its discounted return to go

An example with gamma 0.5: rewards 0, 1 and 0, and a score of 3, are r = 0 1 2 and R = 1 2 2.

A response of an agent may have several branches. Each has the rewards of its own answers; with `session` every branch
ends with the reward of the response's last turn too, with `own` the last branch alone does. Behind a turn that branches
share stands the mean of what they return: each is one sample of what comes after it. A sum would make a turn worth more
for having been gone back to.

A turn that is compared with no other one has advantage 0 in that comparison, so a long response is not judged where the
others have ended.
"""

from dataclasses import dataclass

import numpy as np

STD_EPS = 1e-6
SESSION = "session"
BRANCH_REWARDS = (SESSION, "own")


@dataclass(frozen=True)
class TurnNumbers:
    """The turns of all responses, one after another."""

    counts: np.ndarray  # int64 [rows]: turns of each response, at least 1
    starts: np.ndarray  # int64 [turns]: first response token
    rewards: np.ndarray  # float64 [turns]
    states: np.ndarray  # uint64 [turns]: equal where the same was read before the turn
    parents: np.ndarray  # int64 [turns]: the turn of its response that it follows, by its number there; -1: none

    def __post_init__(self) -> None:
        if not (self.counts >= 1).all():
            raise ValueError("a response without a turn")

    @property
    def rows(self) -> np.ndarray:
        """The response of each turn, int64 [turns]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def positions(self) -> np.ndarray:
        """The number of each turn in its response, counted from 0, int64 [turns]."""
        return np.arange(len(self.rewards)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)

    @property
    def last(self) -> np.ndarray:
        """The last turn of each response, int64 [rows]."""
        return np.cumsum(self.counts) - 1

    def keep(self, rows: np.ndarray) -> "TurnNumbers":
        """Keeps the given responses: bool [rows], or their numbers."""
        rows = np.arange(len(self.counts))[rows]
        turns = turns_of(self.counts, rows)
        columns = {name: getattr(self, name)[turns] for name in ("starts", "rewards", "states", "parents")}
        return TurnNumbers(self.counts[rows], **columns)


def turns_of(counts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns where the turns of `rows` stand among all, int64 [their turns]."""
    first = np.cumsum(counts) - counts
    picked = counts[rows]
    begins = np.cumsum(picked) - picked
    return np.repeat(first[rows] - begins, picked) + np.arange(int(picked.sum()))


def turn_numbers(
    counts: np.ndarray,
    starts: np.ndarray,
    rewards: np.ndarray,
    states: np.ndarray,
    branch_counts: np.ndarray | None = None,
    branch_starts: np.ndarray | None = None,
    parents: np.ndarray | None = None,
) -> TurnNumbers:
    """Makes the turns of columns of `mrl.data.samples.SampleRows`. Without columns of branches each row is one, and
    without parents no branch shares a turn.
    """
    counts = counts.astype(np.int64)
    starts = starts.astype(np.int64)
    rows = np.repeat(np.arange(len(counts)), counts)
    if parents is None:
        branch = np.zeros(len(starts), np.int64)
        if branch_counts is not None:
            # response tokens are counted from 0 in each row; far apart, all rows have one order
            apart = int(max(starts.max(initial=0), branch_starts.max(initial=0))) + 1
            of_branches = np.repeat(np.arange(len(counts)), branch_counts) * apart + branch_starts
            branch = np.searchsorted(of_branches, rows * apart + starts, side="right")
        is_first = np.append(True, (rows[1:] != rows[:-1]) | (branch[1:] != branch[:-1]))[: len(rows)]
        positions = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        parents = np.where(is_first, -1, positions - 1)
    return TurnNumbers(counts, starts, rewards.astype(np.float64), states, parents.astype(np.int64))


def turn_returns(turns: TurnNumbers, scores: np.ndarray, gamma: float, branch_rewards: str) -> np.ndarray:
    """Returns the discounted return to go of each turn, float64 [turns] (Sutton and Barto, 2018, eq. 3.8).

    `scores` [rows] are what the rewards of a response's turns add up to; what they lack is added at its last turn.
    """
    rewards = turns.rewards.copy()
    rewards[turns.last] += scores - np.bincount(turns.rows, turns.rewards, len(turns.counts))
    first = np.cumsum(turns.counts) - turns.counts
    parents = np.where(turns.parents < 0, -1, turns.parents + first[turns.rows])
    followers = np.bincount(parents[parents >= 0], minlength=len(rewards))
    if branch_rewards == SESSION:
        is_end = followers == 0
        is_end[turns.last] = False  # it has the reward already
        rewards = np.where(is_end, rewards + rewards[turns.last][turns.rows], rewards)
    returns = rewards.tolist()
    for turn, parent in reversed(list(enumerate(parents.tolist()))):  # a turn stands behind the one that it follows
        if parent >= 0:
            returns[parent] += gamma * returns[turn] / followers[parent]
    return np.array(returns)


def compared(values: np.ndarray, groups: np.ndarray, by_std: bool) -> np.ndarray:
    """Returns (value - mean of its group) / (std of its group + 1e-6), with the std over n - 1, float64 [values].

    Without `by_std` the std is left out. A value that is alone in its group, or whose group is all equal, gets 0.
    """
    _, index, size = np.unique(groups, return_inverse=True, return_counts=True)
    mean = np.bincount(index, values, len(size)) / size
    low = np.full(len(size), np.inf)
    high = np.full(len(size), -np.inf)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    centred = np.where((low == high)[index], 0.0, values - mean[index])
    if not by_std:
        return centred
    std = np.sqrt(np.bincount(index, centred**2, len(size)) / np.maximum(size - 1, 1))
    return centred / (std[index] + STD_EPS)


def paired(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Numbers pairs of values: equal pairs have equal numbers, int64 [pairs]."""
    _, one = np.unique(first, return_inverse=True)
    _, other = np.unique(second, return_inverse=True)
    return one.astype(np.int64) * (int(other.max(initial=0)) + 1) + other


@dataclass(frozen=True)
class TurnAdvantages:
    """An advantage of each turn, for the tokens of all responses."""

    counts: np.ndarray  # as in TurnNumbers
    starts: np.ndarray
    values: np.ndarray  # float64 [turns]

    def keep(self, rows: np.ndarray) -> "TurnAdvantages":
        """Keeps the given responses, by their numbers."""
        turns = turns_of(self.counts, rows)
        return TurnAdvantages(self.counts[rows], self.starts[turns], self.values[turns])

    def among(self, counted: np.ndarray, every: TurnNumbers) -> "TurnAdvantages":
        """Spreads these over the turns of all responses. These are the `counted`, bool [rows]; others get 0."""
        values = np.zeros(len(every.rewards))
        values[counted[every.rows]] = self.values
        return TurnAdvantages(every.counts, every.starts, values)

    def on_tokens(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the advantage of each response token, float64 [tokens]. `lengths` [rows] count all of them.

        Context behind a turn has the turn's, and is never trained on.
        """
        first = np.cumsum(self.counts) - self.counts
        starts = self.starts.copy()
        starts[first] = 0
        ends = np.append(starts[1:], 0)
        ends[first + self.counts - 1] = lengths
        return np.repeat(self.values, ends - starts)
