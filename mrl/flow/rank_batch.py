"""What a rank holds of a step: its replica's rows, fetched once, and what is computed of each of their tokens.

    log-probs --> mismatch of rows;  reference's and teacher's --> ;  corrected: mask, weights, anchor, penalties, KL to
    the teacher --> numbers a row
    critic's values --> ;  estimated: advantages and returns of tokens from numbers a response --> numbers a row
    advantages: from numbers a response --> numbers a row;  selected: tokens that a loss treats apart

Every formula is mrl.algo's and looks at one row at a time, so rows lie where they like. What takes all rows, a mean or
a count, the driver makes of numbers a row (mrl/train/update.py). Only the model's passes talk to other ranks.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from mrl.algo.advantages import TokenAdvantages
from mrl.algo.correction import CorrectionParameters, correct, mismatch_of_rows, without_truncated
from mrl.algo.distillation import distilled_of_rows, gaps_of_rows, mass_of_rows
from mrl.algo.gae import estimate, token_rewards, value_moments
from mrl.algo.plain import Denominators, FloatParts
from mrl.algo.rows import RowValues, in_chunks, moments, row_sums
from mrl.algo.selection import Candidates, Means, candidates, chosen, largest
from mrl.data.batch import TrainBatch
from mrl.data.routes import RoutesHere
from mrl.data.samples import Samples
from mrl.exercised import exercised
from mrl.flow.handed_rows import HandedRows, taken
from mrl.flow.response_store import ResponseStore
from mrl.flow.routes import Readers, read_routes
from mrl.flow.teacher_rows import as_counted
from mrl.megatron.batching import RowLengths, RowResult
from mrl.megatron.cut import ReplicaCut

if TYPE_CHECKING:
    from mrl.megatron.actor import MegatronActor  # the driver imports this module, and has no use for Megatron

# how far generation's log-probs are from the rows'; sum and count of their entropies
Scored = tuple[RowValues, tuple[float, float]]

ALL = "all ranks"
LAST_STAGE = "ranks of the last pipeline stage"
RESULT = "the rank of the replica that hands out its results"

VERBS: Mapping[str, str] = MappingProxyType(  # what the driver may ask, and which ranks compute it
    {
        "log_probs": ALL,
        "ref_log_probs": ALL,
        "update": ALL,
        "take": LAST_STAGE,
        "forget": ALL,
        "correct": LAST_STAGE,
        "moments": LAST_STAGE,
        "estimate": LAST_STAGE,
        "returns": LAST_STAGE,
        "set_advantages": LAST_STAGE,
        "find": LAST_STAGE,
        "select": LAST_STAGE,
        "old_log_probs_of": RESULT,
        "differences": RESULT,
    }
)


class RankBatch:
    """Rows of the newest step; `batch` gains what is computed. Arrays a token are flat, rows end to end.

    Ranks before the last pipeline stage have no log-probs, and compute nothing of tokens.
    """

    def __init__(
        self,
        actor: "MegatronActor",
        samples: Samples,
        own: np.ndarray,
        cut: ReplicaCut,
        routes: RoutesHere | None = None,
    ):
        """`own`, bool [rows]: which rows the replica trains on; the others are there for fillers."""
        self._actor = actor
        self._algorithm = actor.config.algorithm
        self._distillation = actor.config.distillation
        self._cut = cut
        self._overlong = samples.overlong
        self.own = own
        self.batch = TrainBatch.of(samples, actor.config.rollout.temperature, routes)
        self._penalties: np.ndarray | None = None  # float64 [response tokens]: KL in the reward
        self._distilled: np.ndarray | None = None  # float64 [response tokens]: a teacher's KL in the advantages
        self._estimates: np.ndarray | None = None  # float64 [response tokens]: advantages by a critic's values
        self._candidates: list[tuple[np.ndarray, Candidates]] = []  # rows and what is found of them, a mini-batch each

    @classmethod
    def fetched(
        cls, actor: "MegatronActor", stored: ResponseStore, own: np.ndarray, cut: ReplicaCut, readers: Readers
    ) -> "RankBatch":
        """Fetches the rows, and of their routes this rank's part. `readers`: of routes, by node."""
        blocks = stored.fetched([block.samples for block in stored.blocks])
        samples = stored.assembled(blocks)
        samples = as_counted(stored, samples)
        routes = None
        if actor.config.actor.router_replay == "R3" and actor.routing is not None:
            needed = actor.computed_tokens(cut, RowLengths.of(samples))
            routes = read_routes(stored, blocks, needed, actor.routing.layers, readers)
        return cls(actor, samples, own, cut, routes)

    def do(self, verb: str, *arguments: Any) -> Any:
        """Answers one of VERBS. None on ranks that do not compute it, and on those whose peer hands out the same.

        Raises ValueError for another name.
        """
        if verb not in VERBS:
            raise ValueError(f"a rank was asked to {verb}, which is none of {', '.join(VERBS)}")
        computes = {ALL: True, LAST_STAGE: self._actor.on_last_stage, RESULT: self._actor.holds_result}
        if not computes[VERBS[verb]]:
            return None
        answer = getattr(self, verb)(*arguments)
        if self._actor.holds_result or verb == "update":
            return answer
        return None

    def log_probs(self) -> Scored | None:
        """Computes the old policy's log-probs, which stay here."""
        return self._scored(self._actor.policy_log_probs(self.batch, self._cut.log_probs))

    def ref_log_probs(self) -> None:
        """Computes the reference model's log-probs, which stay here."""
        result = self._actor.reference_log_probs(self.batch, self._cut.reference)
        if result is not None:
            self.batch = replace(self.batch, ref_log_probs=self._of_all_rows(result))

    def take(self, numbers: np.ndarray, *parts: HandedRows) -> None:
        """Takes over what the teacher or the critic computed, which stays here. `numbers` [rows], ascending: of the
        rows in the step.
        """
        self.batch = taken(self.batch, numbers, parts)

    def old_log_probs_of(self, rows: np.ndarray) -> list[np.ndarray]:
        """The old log-probs of each given row of this replica, one a token; 0 for context."""
        return [self.batch.old_log_probs[self.batch.places_of(np.array([row]))] for row in rows]

    def differences(self, rows: np.ndarray) -> np.ndarray:
        """float16 [response tokens] of the given rows of this replica: the trainer's log-prob less generation's.

        0 of context.
        """
        places = self.batch.places_of(rows)
        differences = self.batch.old_log_probs[places] - self.batch.rollout_log_probs[places]
        return np.where(self.batch.is_sampled[places], differences, 0.0).astype(np.float16)

    def correct(self, counted: np.ndarray | None = None) -> RowValues:
        """Takes out what the over-long filter and the rollout correction reject, weighs the rest, chooses the anchor.

        `counted`, bool [rows]: the others are taken out whole, and are in no group's mean either; None: all.

        What is rejected is out of the loss alone. Its score stays in its group's mean and standard deviation, as in
        DAPO, whose filter masks the loss. Returns `trained` tokens, `penalties` where KL is in the reward, what
        `correction_metrics` takes where there is a correction, and what `_take_anchor` does. On policy no log-probs are
        known yet, and only the filter has something to do.
        """
        algorithm = self._algorithm
        batch = self.batch
        lengths = self._lengths
        of_rows: RowValues = {}
        if algorithm.use_kl_in_reward:
            from mrl.algo.losses import kl_in_reward  # brings torch, which the driver has no use for

            control = algorithm.kl_ctrl.kl_coef
            penalties = kl_in_reward(batch.old_log_probs, batch.ref_log_probs, algorithm.kl_penalty, control)
            self._penalties = np.where(batch.is_sampled, penalties, 0.0)
            of_rows["penalties"] = row_sums(self._penalties, lengths)
        mask = batch.is_sampled if counted is None else batch.is_sampled & np.repeat(counted, lengths)
        weights = None
        correction = algorithm.rollout_correction
        if algorithm.overlong_filter:
            mask = without_truncated(mask, self._overlong, lengths)
        if correction.level is not None:
            parameters = CorrectionParameters(correction.level, correction.mode, correction.low, correction.high)
            result = correct(parameters, batch.old_log_probs, batch.rollout_log_probs, mask, lengths)
            mask = result.keep
            weights = result.weights
            of_rows |= result.of_rows
        if batch.teacher_log_probs is not None:
            of_rows |= self._compare_with_teacher(mask)
        self.batch = replace(self.batch, keep=mask, loss_weights=weights)
        return self._of_own(of_rows | {"trained": row_sums(mask, lengths)} | self._take_anchor())

    def _compare_with_teacher(self, mask: np.ndarray) -> RowValues:
        """How far the policy is from the teacher on the tokens of `mask`, by row; keeps what goes into advantages.

        Nothing but `not_finite` on policy, where the policy's log-probs are not known yet.
        """
        batch = self.batch
        lengths = self._lengths
        is_number = np.isfinite(batch.teacher_log_probs)
        of_rows = {}
        if self._distillation.over_words:
            is_number &= np.isfinite(batch.of_teacher_words).all(-1)
            of_rows = mass_of_rows(batch.of_teacher_words, mask, lengths)
            self.batch = replace(batch, teacher_log_probs=None)
        of_rows["not_finite"] = row_sums(mask & ~is_number, lengths)
        if self._algorithm.on_policy:
            return of_rows
        of_rows |= gaps_of_rows(batch.old_log_probs, batch.teacher_log_probs, mask, lengths)
        if not self._distillation.in_advantages:
            return of_rows
        from mrl.algo.losses import distilled  # brings torch, which the driver has no use for

        loss = self._distillation.distillation_loss
        values = distilled(batch.old_log_probs, batch.teacher_log_probs, loss.loss_mode, loss.loss_max_clamp)
        self._distilled = np.where(batch.is_sampled, values, 0.0)
        self.batch = replace(batch, teacher_log_probs=None)
        return of_rows | distilled_of_rows(self._distilled, mask, lengths)

    def _take_anchor(self) -> RowValues:
        """Returns `anchor`: sums over the trained tokens; nothing on policy."""
        if self._algorithm.on_policy:
            return {}
        if self._algorithm.anchor == "rollout":
            self.batch = replace(self.batch, old_log_probs=self.batch.rollout_log_probs)
            exercised("algorithm.anchor=rollout")
        trained = np.where(self.batch.loss_mask, self.batch.old_log_probs, 0.0)
        return {"anchor": row_sums(trained.astype(np.float64), self._lengths)}

    def estimate(self, scores: np.ndarray) -> RowValues:
        """Advantages and returns of tokens from the critic's values and `scores` [rows], penalties taken off.

        They stay here; returns `value_moments` of the trained tokens.
        """
        batch = self.batch
        algorithm = self._algorithm
        rewards = token_rewards(scores, self._penalties, batch.is_sampled, self._lengths)
        made = estimate(rewards, batch.critic_values, batch.is_sampled, self._lengths, algorithm.gamma, algorithm.lam)
        self._estimates = made.advantages
        self.batch = replace(batch, returns=made.returns.astype(np.float32))
        return self._of_own(value_moments(made.returns, batch.critic_values, batch.loss_mask, self._lengths))

    def moments(self, advantages: TokenAdvantages) -> RowValues:
        """`mrl.algo.rows.moments` over trained tokens of what is to be whitened."""
        values = advantages.values(self._lengths, self._penalties, self._estimates)
        return self._of_own(moments(values, self.batch.loss_mask, self._lengths))

    def set_advantages(self, advantages: TokenAdvantages) -> RowValues:
        """Advantages of tokens; returns their moments over trained tokens."""
        values = advantages.of_tokens(self._lengths, self.batch.loss_mask, self._penalties, self._estimates)
        if self._distillation.enabled:
            values = self._with_teacher(values)
        self.batch = replace(self.batch, advantages=values)
        return self._of_own(moments(values.astype(np.float64), self.batch.loss_mask, self._lengths))

    def _with_teacher(self, values: np.ndarray) -> np.ndarray:
        """float32 [tokens]: advantages from rewards under their weight, less the teacher's KL where it goes there."""
        loss = self._distillation.distillation_loss
        weighted = loss.reward_weight * values.astype(np.float64)
        if self._distilled is not None:
            weighted -= np.where(self.batch.loss_mask, loss.distillation_loss_coef * self._distilled, 0.0)
        return weighted.astype(np.float32)

    def find(self, means: list[Means]) -> list[np.ndarray]:
        """Finds the tokens of this replica's rows that the loss may select, mini-batch by mini-batch.

        Returns the largest numbers of tokens that may be selected. `means`: over all replicas.
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
        """Selects the tokens from `least` of each mini-batch on."""
        selected = np.zeros(len(self.batch.rollout_log_probs), bool)
        for (rows, found), bound in zip(self._candidates, least, strict=True):
            selected[self.batch.places_of(rows)] = chosen(found, bound)
        self.batch = replace(self.batch, selected=selected)

    def returns(self, numbers: np.ndarray) -> HandedRows:
        """Hands out, for the critic, returns of this replica's rows and which of their tokens are trained on; lets go
        of its columns. `numbers`: as in `take`.
        """
        batch = self.batch
        rows = np.flatnonzero(self.own)
        places = batch.sampled_places_of(rows)
        columns = {"returns": batch.returns[places], "keep": batch.loss_mask[places]}
        self.batch = replace(batch, critic_values=None, returns=None)
        return HandedRows(numbers[rows], row_sums(batch.is_sampled, self._lengths)[rows].astype(np.int64), columns)

    def forget(self) -> None:
        """Lets go of the rows."""
        self.batch = self._penalties = self._distilled = self._estimates = None
        self._candidates = []

    def update(self, counts: list[Denominators]) -> tuple[list[FloatParts], Scored | None]:
        """Updates the weights with the step's rows, every rank at once, and returns its sums of metrics.

        On policy it also returns log-probs of the weights before the update. The rows are gone afterwards: memory is
        free while the next ones are generated.
        """
        result = self._actor.update_replica(self.batch, self._cut.mini_batches, counts)
        scored = self._scored(result.old)
        self.forget()
        return [*result.parts, result.spent], scored if self._actor.holds_result else None

    @property
    def _lengths(self) -> np.ndarray:
        return self.batch.response_lengths

    def _scored(self, result: RowResult | None) -> Scored | None:
        """Takes over log-probs of the same weights under the trainer's numerics; how far generation's are from them."""
        if result is None:
            return None
        log_probs = self._of_all_rows(result)
        self.batch = replace(self.batch, old_log_probs=log_probs)
        # of dozens of float64 a token
        lengths = self._lengths
        sampled = self.batch.is_sampled
        both = self.batch.rollout_log_probs[sampled], log_probs[sampled]
        mismatch = in_chunks(mismatch_of_rows, both, row_sums(sampled, lengths))
        return self._of_own(mismatch), result.entropy

    def _of_all_rows(self, result: RowResult) -> np.ndarray:
        return self._on_sampled(result.rows, result.log_probs)

    def _on_sampled(self, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """float32 [response tokens]: `values` of the sampled tokens of `rows`, 0 of context."""
        flat = np.zeros(len(self.batch.rollout_log_probs), np.float32)
        flat[self.batch.sampled_places_of(rows)] = values
        return flat

    def _of_own(self, of_rows: RowValues) -> RowValues:
        return {name: values[self.own] for name, values in of_rows.items()}
