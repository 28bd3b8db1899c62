"""What a data-parallel replica computes of each token of its rows beside the model: corrections, penalties, advantages.

    log-probs --> mismatch of rows;  reference's --> ;  corrected: mask, weights, anchor, penalties --> numbers a row
    advantages: from numbers a response --> numbers a row;  selected: tokens that a loss treats apart

Every formula is mrl.algo's and looks at one row at a time, so rows lie where they like. What takes all rows, a mean or
a count, the driver makes of numbers a row (mrl/train/update.py); nothing here talks to another rank.
"""

from dataclasses import replace

import numpy as np

from mrl.algo.advantages import TokenAdvantages
from mrl.algo.correction import CorrectionParameters, correct, mismatch_of_rows, without_truncated
from mrl.algo.losses import PolicyLossParameters, kl_in_reward
from mrl.algo.rows import RowValues, in_chunks, moments, row_sums
from mrl.algo.selection import Candidates, Means, candidates, chosen, largest
from mrl.config.schema import AlgorithmConfig
from mrl.data.batch import TrainBatch
from mrl.data.routes import RoutesHere
from mrl.data.samples import Samples

# how far generation's log-probs are from the rows'; sum and count of their entropies
Scored = tuple[RowValues, tuple[float, float]]


class ReplicaRows:
    """The rows that a replica holds; `batch` gains what is computed. Arrays a token are flat, rows end to end."""

    def __init__(
        self, algorithm: AlgorithmConfig, samples: Samples, temperature: float, routes: RoutesHere | None = None
    ):
        self._algorithm, self._truncated = algorithm, samples.truncated
        self.batch = TrainBatch.of(samples, temperature, routes)
        self._penalties: np.ndarray | None = None  # float64 [response tokens]: KL in the reward
        self._candidates: list[tuple[np.ndarray, Candidates]] = []  # rows and what is found of them, a mini-batch each

    @property
    def _lengths(self) -> np.ndarray:
        return self.batch.response_lengths

    def set_old(self, log_probs: np.ndarray) -> RowValues:
        """Log-probs [response tokens] of the same weights under the trainer's numerics;
        how far generation's are from them.
        """
        self.batch = replace(self.batch, old_log_probs=log_probs)
        # of dozens of float64 a token
        return in_chunks(mismatch_of_rows, (self.batch.rollout_log_probs, log_probs), self._lengths)

    def old_log_probs_of(self, rows: np.ndarray) -> list[np.ndarray]:
        """Of the given rows of this replica, each row's tokens."""
        return [self.batch.old_log_probs[self.batch.places_of(np.array([row]))] for row in rows]

    def differences(self, rows: np.ndarray) -> np.ndarray:
        """float16 [response tokens] of the given rows of this replica: the trainer's log-prob less generation's."""
        places = self.batch.places_of(rows)
        return (self.batch.old_log_probs[places] - self.batch.rollout_log_probs[places]).astype(np.float16)

    def set_reference(self, log_probs: np.ndarray) -> None:
        """Log-probs [response tokens] under the reference model."""
        self.batch = replace(self.batch, ref_log_probs=log_probs)

    def correct(self) -> RowValues:
        """Takes out what the over-long filter and the rollout correction reject, weighs the rest, chooses the anchor.

        What is rejected is out of the loss alone: its score stays in its group's mean and standard deviation, as in
        DAPO, whose filter masks the loss. Returns `trained` tokens, `penalties` where KL is in the reward, what
        `correction_metrics` takes where there is a correction, and what `_take_anchor` does. On policy no log-probs are
        known yet, and only the filter has something to do.
        """
        algorithm, batch, lengths = self._algorithm, self.batch, self._lengths
        of_rows: RowValues = {}
        if algorithm.use_kl_in_reward:
            control = algorithm.kl_ctrl.kl_coef
            self._penalties = kl_in_reward(batch.old_log_probs, batch.ref_log_probs, algorithm.kl_penalty, control)
            of_rows["penalties"] = row_sums(self._penalties, lengths)
        mask, weights, correction = np.ones(len(batch.rollout_log_probs), bool), None, algorithm.rollout_correction
        if algorithm.overlong_filter:
            mask = without_truncated(mask, self._truncated, lengths)
        if correction.level is not None:
            parameters = CorrectionParameters(correction.level, correction.mode, correction.low, correction.high)
            result = correct(parameters, batch.old_log_probs, batch.rollout_log_probs, mask, lengths)
            mask, weights = result.keep, result.weights
            of_rows |= result.of_rows
        self.batch = replace(batch, keep=mask, loss_weights=weights)
        return of_rows | {"trained": row_sums(mask, lengths)} | self._take_anchor()

    def _take_anchor(self) -> RowValues:
        """`anchor`: sums over the trained tokens, nothing on policy.

        `from_rollout`: 1 of a trained row that has generation's own.
        """
        batch, lengths, of_rows = self.batch, self._lengths, {}
        if self._algorithm.on_policy:
            return of_rows
        if self._algorithm.anchor == "rollout":
            batch = self.batch = replace(batch, old_log_probs=batch.rollout_log_probs)
            of_rows["from_rollout"] = (row_sums(batch.loss_mask, lengths) > 0).astype(np.int64)
        return of_rows | {
            "anchor": row_sums(np.where(batch.loss_mask, batch.old_log_probs, 0.0).astype(np.float64), lengths)
        }

    def moments(self, advantages: TokenAdvantages) -> RowValues:
        """`mrl.algo.rows.moments` over trained tokens of what is to be whitened."""
        return moments(advantages.values(self._lengths, self._penalties), self.batch.loss_mask, self._lengths)

    def set_advantages(self, advantages: TokenAdvantages) -> RowValues:
        """Advantages of tokens; returns their moments over trained tokens."""
        values = advantages.of_tokens(self._lengths, self.batch.loss_mask, self._penalties)
        self.batch = replace(self.batch, advantages=values)
        return moments(values.astype(np.float64), self.batch.loss_mask, self._lengths)

    def find(
        self, parameters: PolicyLossParameters, mini_batches: list[np.ndarray], means: list[Means]
    ) -> list[np.ndarray]:
        """Of each mini-batch, rows of this replica and means of all,
        the largest numbers of tokens that may be selected.
        """
        self._candidates = []
        for rows, mean in zip(mini_batches, means, strict=True):
            part = self.batch.rows(rows)
            selectable = candidates(
                parameters, part.advantages, part.old_log_probs, part.loss_mask, part.response_lengths, mean
            )
            self._candidates.append((rows, selectable))
        return [
            largest(parameters, selectable, mean) for (_, selectable), mean in zip(self._candidates, means, strict=True)
        ]

    def select(self, least: list[float | int | None]) -> None:
        """Selects the tokens from `least` of each mini-batch on."""
        selected = np.zeros(len(self.batch.rollout_log_probs), bool)
        for (rows, found), bound in zip(self._candidates, least, strict=True):
            selected[self.batch.places_of(rows)] = chosen(found, bound)
        self.batch = replace(self.batch, selected=selected)
