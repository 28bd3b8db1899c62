"""Holds a replica's rows of a step on a rank, fetched once, and computes what the step needs of each token.

    log-probs     of the trained policy, and their gaps to generation's; of the reference; a teacher's and a critic's
                  values come from those models
    corrected     mask, weights, anchor, penalties, KL to the teacher
    estimated     advantages and returns by a critic, or advantages from numbers of each response
    selected      tokens that a loss treats apart

A method that computes a number for each row returns those of the replica's own rows. Formulas stand in mrl.algo and
look at one row at a time, so any replica may have any row. rank_step.py calls these methods in their order, and
computes over all rows. Only the model's passes talk to other ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mrl.algo.advantages import TokenAdvantages
from mrl.algo.correction import CorrectionParameters, correct, mismatch_of_rows, without_truncated
from mrl.algo.distillation import distilled_of_rows, gaps_of_rows, mass_of_rows
from mrl.algo.gae import estimate, token_rewards, value_moments
from mrl.algo.plain import Denominators
from mrl.algo.rows import RowValues, in_chunks, moments, row_sums
from mrl.algo.selection import Candidates, Means, candidates, chosen, largest
from mrl.data.batch import TrainBatch
from mrl.data.routes import RoutesHere
from mrl.data.samples import Samples
from mrl.rank.cut import ReplicaCut, RowLengths
from mrl.rank.handed_rows import HandedRows, as_counted, with_handed
from mrl.rank.row_results import RowResult, UpdateResult
from mrl.store.response_store import ResponseStore
from mrl.store.routes import Readers, read_routes

if TYPE_CHECKING:
    from mrl.rank.actor import MegatronActor  # the driver imports rank_step.py, and must not load Megatron


class RankBatch:
    """Rows of the newest step. `batch` collects what is computed. Arrays by token are flat, rows end to end.

    Ranks before the last pipeline stage have no log-probs and compute nothing by token: they run the model's passes
    alone.
    """

    def __init__(
        self,
        actor: "MegatronActor",
        samples: Samples,
        own: np.ndarray,
        cut: ReplicaCut,
        routes: RoutesHere | None = None,
    ):
        """`own`, bool [rows], marks rows that the replica trains on. Fillers repeat the others (cut.py: MicroRows)."""
        self._actor = actor
        self._algorithm = actor.config.algorithm
        self._distillation = actor.config.distillation
        self._cut = cut
        self._overlong = samples.overlong
        self.own = own
        self.batch = TrainBatch.of(samples, actor.config.rollout.temperature, routes)
        if samples.image_counts is not None:
            self.batch = actor.prepared(self.batch)
        self.log_probs: np.ndarray | None = None  # float32 [response tokens]: the trainer's, whatever the anchor is
        self._penalties: np.ndarray | None = None  # float64 [response tokens]: KL in the reward
        self._distilled: np.ndarray | None = None  # float64 [response tokens]: a teacher's KL in the advantages
        self._estimates: np.ndarray | None = None  # float64 [response tokens]: advantages by a critic's values
        self._candidates: list[tuple[np.ndarray, Candidates]] = []  # rows and their candidates, one entry a mini-batch

    @classmethod
    def fetched(
        cls, actor: "MegatronActor", stored: ResponseStore, own: np.ndarray, cut: ReplicaCut, readers: Readers
    ) -> "RankBatch":
        """Fetches the rows, and this rank's part of their routes. `readers` are those of routes, by node."""
        blocks = stored.fetched([block.samples for block in stored.blocks])
        samples = stored.assembled(blocks)
        samples = as_counted(stored, samples)
        routes = None
        if actor.config.actor.router_replay == "R3" and actor.routing is not None:
            needed = actor.computed_tokens(cut, RowLengths.of(samples))
            routes = read_routes(stored, blocks, needed, actor.routing.layers, readers)
        return cls(actor, samples, own, cut, routes)

    def take(self, numbers: np.ndarray, parts: Sequence[HandedRows]) -> None:
        """Takes over what a second model computed. `numbers` [rows] are the rows' numbers in the step, ascending."""
        self.batch = with_handed(self.batch, numbers, parts)

    def score(self) -> RowResult | None:
        """Computes the old policy's log-probs."""
        return self._actor.policy_log_probs(self.batch, self._cut.log_probs)

    def score_by_reference(self) -> None:
        """Computes the reference model's log-probs and keeps them here."""
        result = self._actor.reference_log_probs(self.batch, self._cut.reference)
        if result is not None:
            self.batch = replace(self.batch, ref_log_probs=self._of_all_rows(result))

    def keep(self, result: RowResult) -> RowValues:
        """Keeps the trainer's log-probs. Returns their gap to generation's, as `mismatch_of_rows`."""
        self.log_probs = self._of_all_rows(result)
        self.batch = replace(self.batch, old_log_probs=self.log_probs)
        # in chunks, because mismatch takes dozens of float64 a token
        sampled = self.batch.is_sampled
        both = self.batch.rollout_log_probs[sampled], self.log_probs[sampled]
        return self._of_own(in_chunks(mismatch_of_rows, both, row_sums(sampled, self._lengths)))

    def shown(self, rows: np.ndarray, less_rollout: bool) -> np.ndarray:
        """Returns the trainer's log-probs of tokens of `rows`, float32 [their response tokens], 0 for context.

        With `less_rollout` generation's are taken off, and what is left is float16.
        """
        indices = self.batch.token_indices(rows)
        if not less_rollout:
            return self.log_probs[indices]
        differences = self.log_probs[indices] - self.batch.rollout_log_probs[indices]
        return np.where(self.batch.is_sampled[indices], differences, 0.0).astype(np.float16)

    def correct(self, counted: np.ndarray | None = None, kl_coef: float = 0.0) -> RowValues:
        """Masks what the overlong filter and the rollout correction reject, weights the rest, and chooses the anchor.

        `kl_coef` is the weight of a KL in the reward. `counted`, bool [rows], marks rows that take part; None means
        all. Other rows are masked completely and do not count in the mean of their group. Tokens that are rejected here
        leave only the loss. Their score stays in the mean and standard deviation of their group, as in DAPO, whose
        filter masks the loss. On policy no log-probs are known yet, so only the filter has an effect.

        Returns `trained` tokens, `penalties` and the mean `kl` of a token where KL is in the reward, and what
        `_take_anchor` returns. With a correction it also returns the inputs of `correction_metrics`.
        """
        algorithm = self._algorithm
        batch = self.batch
        lengths = self._lengths
        of_rows: RowValues = {}
        if algorithm.use_kl_in_reward:
            from mrl.algo.losses import kl_in_reward  # loads torch, which the driver must not load

            kl = kl_in_reward(batch.old_log_probs, batch.ref_log_probs, algorithm.kl_penalty)
            kl = np.where(batch.is_sampled, kl, 0.0)
            self._penalties = kl_coef * kl
            of_rows["penalties"] = row_sums(self._penalties, lengths)
            of_rows["kl"] = row_sums(kl, lengths) / np.maximum(row_sums(batch.is_sampled, lengths), 1)
        mask = batch.is_sampled if counted is None else batch.is_sampled & np.repeat(counted, lengths)
        weights = None
        correction = algorithm.rollout_correction
        if algorithm.overlong_filter:
            mask = without_truncated(mask, self._overlong, lengths)
        if correction.level is not None:
            parameters = CorrectionParameters(**correction.model_dump())
            result = correct(parameters, batch.old_log_probs, batch.rollout_log_probs, mask, lengths)
            mask = result.keep
            weights = result.weights
            of_rows |= result.of_rows
        if batch.teacher_log_probs is not None:
            of_rows |= self._compare_with_teacher(mask)
        self.batch = replace(self.batch, keep=mask, loss_weights=weights)
        return self._of_own(of_rows | {"trained": row_sums(mask, lengths)} | self._take_anchor())

    def _compare_with_teacher(self, mask: np.ndarray) -> RowValues:
        """Measures the distance of policy and teacher on the tokens of `mask`, by row. Keeps what goes into advantages.

        On policy it returns only `not_finite`, because the policy's log-probs are not known yet.
        """
        batch = self.batch
        lengths = self._lengths
        is_number = np.isfinite(batch.teacher_log_probs)
        of_rows = {}
        if self._distillation.over_top_k:
            is_number &= np.isfinite(batch.teacher_top_log_probs).all(-1)
            of_rows = mass_of_rows(batch.teacher_top_log_probs, mask, lengths)
            self.batch = replace(batch, teacher_log_probs=None)
        of_rows["not_finite"] = row_sums(mask & ~is_number, lengths)
        if self._algorithm.on_policy:
            return of_rows
        of_rows |= gaps_of_rows(batch.old_log_probs, batch.teacher_log_probs, mask, lengths)
        if not self._distillation.in_advantages:
            return of_rows
        from mrl.algo.losses import distilled  # loads torch, which the driver must not load

        loss = self._distillation.distillation_loss
        values = distilled(batch.old_log_probs, batch.teacher_log_probs, loss.loss_mode, loss.loss_max_clamp)
        self._distilled = np.where(batch.is_sampled, values, 0.0)
        self.batch = replace(batch, teacher_log_probs=None)
        return of_rows | distilled_of_rows(self._distilled, mask, lengths)

    def _take_anchor(self) -> RowValues:
        """Chooses the anchor's log-probs. Returns `anchor`, their sums over trained tokens; nothing on policy."""
        if self._algorithm.on_policy:
            return {}
        if self._algorithm.anchor == "rollout":
            self.batch = replace(self.batch, old_log_probs=self.batch.rollout_log_probs)
        trained = np.where(self.batch.loss_mask, self.batch.old_log_probs, 0.0)
        return {"anchor": row_sums(trained.astype(np.float64), self._lengths)}

    def estimate(self, scores: np.ndarray) -> RowValues:
        """Computes advantages and returns of tokens from the critic's values, and keeps them here.

        `scores` [rows] have no penalties in them; these are subtracted here. Returns `value_moments` of the trained
        tokens.
        """
        batch = self.batch
        algorithm = self._algorithm
        rewards = token_rewards(scores, self._penalties, batch.is_sampled, self._lengths)
        made = estimate(rewards, batch.critic_values, batch.is_sampled, self._lengths, algorithm.gamma, algorithm.lam)
        self._estimates = made.advantages
        self.batch = replace(batch, returns=made.returns.astype(np.float32))
        return self._of_own(value_moments(made.returns, batch.critic_values, batch.loss_mask, self._lengths))

    def moments(self, advantages: TokenAdvantages) -> RowValues:
        """Returns `mrl.algo.rows.moments` of the values to be whitened, over trained tokens."""
        values = advantages.values(self._lengths, self._penalties, self._estimates)
        return self._of_own(moments(values, self.batch.loss_mask, self._lengths))

    def set_advantages(self, advantages: TokenAdvantages) -> RowValues:
        """Sets the tokens' advantages. Returns their moments over trained tokens."""
        values = advantages.of_tokens(self._lengths, self.batch.loss_mask, self._penalties, self._estimates)
        if self._distillation.enabled:
            values = self._with_teacher(values)
        self.batch = replace(self.batch, advantages=values)
        return self._of_own(moments(values.astype(np.float64), self.batch.loss_mask, self._lengths))

    def _with_teacher(self, values: np.ndarray) -> np.ndarray:
        """Returns weighted advantages from rewards, less the teacher's KL where it is used there; float32 [tokens]."""
        loss = self._distillation.distillation_loss
        weighted = loss.reward_weight * values.astype(np.float64)
        if self._distilled is not None:
            weighted -= np.where(self.batch.loss_mask, loss.distillation_loss_coef * self._distilled, 0.0)
        return weighted.astype(np.float32)

    def find(self, means: list[Means]) -> list[np.ndarray]:
        """Finds the tokens of this replica's rows that the loss may select, one mini-batch after the other.

        `means` are over all replicas. Returns the largest numbers of tokens that may be selected.
        """
        parameters = self._actor.loss_parameters
        self._candidates = []
        for rows, mean in zip(self._cut.trained_rows(), means, strict=True):
            part = self.batch.rows(rows)
            selectable = candidates(
                parameters, part.advantages, part.old_log_probs, part.loss_mask, part.response_lengths, mean
            )
            self._candidates.append((rows, selectable))
        return [
            largest(parameters, selectable, mean) for (_, selectable), mean in zip(self._candidates, means, strict=True)
        ]

    def select(self, least: list[float | int | None]) -> None:
        """Selects, in each mini-batch, the tokens whose numbers are at least those in `least`."""
        selected = np.zeros(len(self.batch.rollout_log_probs), bool)
        for (rows, found), bound in zip(self._candidates, least, strict=True):
            selected[self.batch.token_indices(rows)] = chosen(found, bound)
        self.batch = replace(self.batch, selected=selected)

    def returns(self, numbers: np.ndarray) -> HandedRows:
        """Hands out what the critic is trained on, and drops its columns.

        These are the returns of this replica's rows, and which of their tokens count. `numbers`: as in `take`.
        """
        batch = self.batch
        rows = np.flatnonzero(self.own)
        indices = batch.sampled_indices(rows)
        columns = {"returns": batch.returns[indices], "keep": batch.loss_mask[indices]}
        self.batch = replace(batch, critic_values=None, returns=None)
        return HandedRows(numbers[rows], row_sums(batch.is_sampled, self._lengths)[rows].astype(np.int64), columns)

    def update(self, counts: list[Denominators]) -> UpdateResult:
        """Updates the weights with the step's rows, on every rank at once. `counts` are those of mini-batches."""
        self.log_probs = None  # shown by now
        return self._actor.update_replica(self.batch, self._cut.mini_batches, counts)

    @property
    def _lengths(self) -> np.ndarray:
        return self.batch.response_lengths

    def _of_all_rows(self, result: RowResult) -> np.ndarray:
        return self._on_sampled(result.rows, result.log_probs)

    def _on_sampled(self, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Returns `values` at the sampled tokens of `rows` and 0 elsewhere; float32 [response tokens]."""
        flat = np.zeros(len(self.batch.rollout_log_probs), np.float32)
        flat[self.batch.sampled_indices(rows)] = values
        return flat

    def _of_own(self, of_rows: RowValues) -> RowValues:
        return {name: values[self.own] for name, values in of_rows.items()}
