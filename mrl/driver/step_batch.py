"""Handles a step's rows on the ranks from the driver: which replica has which, calls on all ranks, numbers a row.

    driver                                     ranks (rank_batch.py)
    lengths --step_cut--> rows of replicas --> fetch their rows, once, from where they are
    numbers a row                          <-- log-probs, corrections: tokens stay
    numbers a response                     --> advantages of tokens
    counts of mini-batches                 --> updates

Tokens and their numbers stay on the ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mrl.algo.advantages import TokenAdvantages
from mrl.algo.plain import Denominators, FloatParts
from mrl.algo.rows import RowValues
from mrl.algo.selection import Means
from mrl.config.schema import RunConfig
from mrl.config.teacher_model import TeacherModel
from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout
from mrl.rank.batching import RowLengths, UpdateResult
from mrl.rank.cut import StepCut, step_cut
from mrl.rank.handed_rows import answers_of, needed_by
from mrl.rank.rank_batch import Scored
from mrl.rank.teacher_rows import deal
from mrl.store.response_store import ResponseStore
from mrl.store.routes import Readers


class AllRanks(Protocol):
    """The part of all actor ranks that a step needs. `ActorGroup` of cluster/actor_group.py implements it."""

    config: RunConfig
    model: ModelSpec
    layout: TrainLayout
    route_readers: Readers
    teacher: TeacherModel | None
    critic_layout: TrainLayout | None

    def each(
        self, method: str, arguments: Sequence[Sequence[Any]], phase: str, interruptible: bool = False
    ) -> list[Any]:
        """Calls a method on all ranks, each with its own arguments. Returns answers in rank order."""

    def refs_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Calls like `each` without waiting. Returns references to the answers, by rank."""


@dataclass(frozen=True)
class Mismatch:
    """The gap between generation and training: `of_rows` by row, `entropy` as mean over sampled tokens in nats."""

    of_rows: RowValues
    entropy: float


class StepBatch:
    """The driver's handle of a step on all ranks. RankBatch holds a replica's rows."""

    def __init__(self, actor: AllRanks, samples: ResponseStore):
        """Divides the rows among replicas. Every rank fetches its own.

        Raises DataError for a row above the limit of a micro-batch.
        """
        layout = actor.layout
        self._actor = actor
        self.rows = samples.rows
        # [rows]: mean |log p_actor - log p_rollout| over sampled tokens, once it is known
        self.log_gaps: np.ndarray | None = None
        config = actor.config
        lengths = RowLengths.of(samples.rows)
        self.cut = step_cut(config, layout, actor.model, lengths)
        self._replica_of = [layout.dense_coords(rank).dp for rank in range(layout.world_size)]
        self._needed = [self.cut.needed_rows(replica) for replica in range(layout.data)]
        self._own = [self.cut.own_rows(replica) for replica in range(layout.data)]
        self.critic_cut = self._cut_for_critic(lengths)
        parts = [
            (samples.take(needed), np.isin(needed, own), self.cut.of(replica).renumbered(needed), actor.route_readers)
            for replica, (needed, own) in enumerate(zip(self._needed, self._own, strict=True))
        ]
        actor.each(
            "begin_step", [parts[replica] for replica in self._replica_of], "fetching samples", interruptible=True
        )

    def _cut_for_critic(self, lengths: RowLengths) -> StepCut | None:
        """The critic's cut, or None without a critic.

        As many replicas as the actor has keep its rows where all then train equally many of each mini-batch.
        """
        given = self._actor.config
        config = given.of_critic
        if config is None:
            return None
        layout = self._actor.critic_layout
        own = None
        if layout.data == self._actor.layout.data and given.critic.keeps_rows_of(given.actor):
            own = self._own
        return step_cut(config, layout, self._actor.model, lengths, own)

    def log_probs(self) -> Mismatch:
        """Lets ranks compute the old policy's log-probs, and returns their gap to generation's."""
        mismatch = self._mismatch(self._call("log_probs", interruptible=True))
        self.log_gaps = mismatch.of_rows["log_gap"] / np.maximum(self.rows.sampled_lengths, 1)
        return mismatch

    def old_log_probs_of(self, rows: Sequence[int]) -> dict[int, np.ndarray]:
        """Returns the trainer's log-probs of the given rows' tokens, by row.

        Call it after `log_probs` and before `correct`, which may change them.
        """
        wanted = self._own_among(rows)
        by_row: dict[int, np.ndarray] = {}
        for replica, answer in zip(self._replica_of, self._call_each("old_log_probs_of", wanted), strict=True):
            if answer is not None:
                numbers = self._needed[replica][wanted[replica]].tolist()
                by_row |= dict(zip(numbers, answer, strict=True))
        return by_row

    def differences(self, rows: np.ndarray) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[Any]]:
        """Lets each rank compute `RankBatch.differences` for its replica's rows among `rows`, after `log_probs`.

        Returns ids and response lengths of those rows for each rank, and a reference to each rank's answer. It does not
        wait: whoever gets the references fetches the answers.
        """
        wanted = self._own_among(rows)
        own = [self._needed[replica][wanted[replica]] for replica in self._replica_of]
        refs = self._actor.refs_each("do", [("differences", wanted[replica]) for replica in self._replica_of])
        return [(self.rows.sample_id[each], self.rows.response_lengths[each]) for each in own], list(refs.values())

    def ref_log_probs(self) -> None:
        """Lets ranks compute the reference model's log-probs, which stay there."""
        self._call("ref_log_probs", interruptible=True)

    def teacher_log_probs(self, samples: ResponseStore) -> None:
        """Lets ranks compute the teacher's log-probs of the step's `samples`, which stay there (teacher_rows.py).

        Raises DataError for a row above the limit of the teacher's micro-batches.
        """
        actor = self._actor
        layout = actor.teacher.layout
        given = actor.config.distillation.teacher_model
        shares = deal(actor.config.actor, given, actor.teacher, RowLengths.of(samples.rows), self._own)
        asked = [(samples.take(share.rows), share.rows, share.micros) for share in shares]
        actor.each("ask_teacher", _by_rank(layout, asked), "asking the teacher", interruptible=True)
        self._take(layout, [share.rows for share in shares], "take_teacher")

    def values(self, samples: ResponseStore) -> None:
        """Lets ranks compute the critic's values of the step's `samples`, which stay there (critic_rows.py)."""
        actor = self._actor
        cut = self.critic_cut
        needed = self._needed_of_critic()
        asked = [(samples.take(rows), rows, cut.of(replica).renumbered(rows)) for replica, rows in enumerate(needed)]
        layout = actor.critic_layout
        actor.each("ask_critic", _by_rank(layout, asked), "values", interruptible=True)
        self._take(layout, needed, "take_values")

    def _needed_of_critic(self) -> list[np.ndarray]:
        """Returns the rows that each replica of the critic has; int64, ascending."""
        return [self.critic_cut.needed_rows(replica) for replica in range(self._actor.critic_layout.data)]

    def _take(self, layout: TrainLayout, rows: Sequence[np.ndarray], phase: str) -> None:
        """Lets the actor's replicas take over what a model of another layout computed.

        `rows`: those of each replica of that model.
        """
        actor = self._actor
        refs = actor.refs_each("hand_out", [()] * layout.world_size)
        answers = answers_of(layout, rows, list(refs.values()))
        taken = [("take", needed, *needed_by(needed, answers)) for needed in self._needed]
        actor.each("do", [taken[replica] for replica in self._replica_of], phase, interruptible=True)

    def estimate(self, scores: np.ndarray) -> RowValues:
        """Lets ranks estimate tokens' advantages and returns from the critic's values.

        `scores` [rows] are rewards of whole responses. Returns `mrl.algo.gae.value_moments` of trained tokens, by row.
        """
        return self._of_rows(self._call_each("estimate", [scores[needed] for needed in self._needed]))

    def correct(self, counted: np.ndarray | None = None) -> RowValues:
        """Lets ranks mask what filters and corrections reject, and rows that are not `counted`, bool [rows].

        Returns the numbers a row of `RankBatch.correct`.
        """
        if counted is None or counted.all():
            return self._of_rows(self._call("correct"))
        parts = [counted[needed] for needed in self._needed]
        return self._of_rows(self._call_each("correct", parts))

    def moments(self, advantages: TokenAdvantages) -> RowValues:
        """Returns moments by row, over trained tokens, of the values to be whitened."""
        return self._of_rows(self._call_each("moments", self._parts_of(advantages)))

    def set_advantages(self, advantages: TokenAdvantages) -> RowValues:
        """Sets tokens' advantages. Returns their moments by row, over trained tokens."""
        return self._of_rows(self._call_each("set_advantages", self._parts_of(advantages)))

    def find(self, means: list[Means]) -> list[list[np.ndarray]]:
        """Returns the largest numbers of tokens that may be selected, by mini-batch and replica."""
        answers = [answer for answer in self._call("find", means) if answer is not None]
        return [list(of_mini_batch) for of_mini_batch in zip(*answers, strict=True)]

    def select(self, least: list[float | int | None]) -> None:
        """Selects, in each mini-batch, the tokens whose numbers are at least those in `least`."""
        self._call("select", least)

    def update_critic(self, trained: np.ndarray) -> list[FloatParts]:
        """Makes all optimizer steps of the critic. `trained` [rows] counts trained tokens.

        It runs before the actor's steps.
        """
        actor = self._actor
        counts = [Denominators.counted(trained[rows]) for rows in self.critic_cut.slices]
        refs = actor.refs_each("do", [("returns", self._needed[replica]) for replica in self._replica_of])
        returns = answers_of(actor.layout, self._own, list(refs.values()))
        asked = [(counts, *needed_by(rows, returns)) for rows in self._needed_of_critic()]
        answers = actor.each("update_critic", _by_rank(actor.critic_layout, asked), "update_critic")
        return [part for parts in answers if parts is not None for part in parts]

    def forget(self) -> None:
        """Lets ranks drop their rows where the actor is not updated with them."""
        self._call("forget")

    def update(self, counts: list[Denominators]) -> tuple[UpdateResult, Mismatch | None]:
        """Makes all optimizer steps. `counts` are the trained tokens and sequences of each mini-batch.

        On policy it also returns the gap that `log_probs` returns otherwise.
        """
        answers = self._call("update", counts)
        result = UpdateResult([part for parts, _ in answers for part in parts], list(self.cut.loads))
        scored = [scored for _, scored in answers]
        if all(each is None for each in scored):
            return result, None
        return result, self._mismatch(scored)

    def _own_among(self, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Returns, for each replica, which of the rows it holds are in `rows` and trained there; int64."""
        return [
            np.flatnonzero(np.isin(needed, own) & np.isin(needed, rows))
            for needed, own in zip(self._needed, self._own, strict=True)
        ]

    def _mismatch(self, answers: Sequence[Scored | None]) -> Mismatch:
        entropies = [answer[1] for answer in answers if answer is not None]
        of_rows = self._of_rows(None if answer is None else answer[0] for answer in answers)
        return Mismatch(of_rows, sum(value for value, _ in entropies) / sum(weight for _, weight in entropies))

    def by_mini_batch(self, values: np.ndarray) -> list[np.ndarray]:
        """Divides `values` [rows] by mini-batch."""
        return [values[rows] for rows in self.cut.slices]

    def _call(self, verb: str, *arguments: Any, interruptible: bool = False) -> list[Any]:
        """Calls all ranks with the same arguments."""
        return self._actor.each("do", [(verb, *arguments)] * len(self._replica_of), verb, interruptible)

    def _call_each(self, verb: str, parts: Sequence[Any]) -> list[Any]:
        """Calls all ranks, each with its replica's part."""
        return self._actor.each("do", [(verb, parts[replica]) for replica in self._replica_of], verb)

    def _parts_of(self, advantages: TokenAdvantages) -> list[TokenAdvantages]:
        return [advantages.rows(needed) for needed in self._needed]

    def _of_rows(self, answers: Iterable[RowValues | None]) -> RowValues:
        """Puts the replicas' numbers into the order of the step's rows."""
        of_rows: RowValues = {}
        filled = np.zeros(len(self.rows), bool)
        for replica, answer in zip(self._replica_of, answers, strict=True):
            if answer is None:
                continue
            filled[self._own[replica]] = True
            for name, values in answer.items():
                of_rows.setdefault(name, np.zeros(len(filled), values.dtype))[self._own[replica]] = values
        if not filled.all():
            raise RuntimeError(f"no rank answered for rows {np.flatnonzero(~filled)[:8].tolist()}")
        return of_rows


def _by_rank(layout: TrainLayout, of_replicas: Sequence[Any]) -> list[Any]:
    """What each rank of a layout is asked, from what each replica is."""
    return [of_replicas[layout.dense_coords(rank).dp] for rank in range(layout.world_size)]


def counts_of(parts: list[np.ndarray]) -> list[Denominators]:
    """Returns the denominators of each mini-batch, from trained tokens by row."""
    return [Denominators.counted(trained) for trained in parts]
