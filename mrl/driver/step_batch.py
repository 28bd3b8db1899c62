"""Handles a step on the ranks from the driver: which replica has which rows, and what is asked of all ranks.

    driver                                        ranks (rank/rank_step.py)
    lengths --step_cut--> rows of replicas
    rows of a second model                    --> score_by: what it says of them
    rows, and numbers of all rows             --> score: what is needed for an update
    metrics, gaps a row, seconds              <--
    numbers of some rows                      --> shown: their log-probs
                                              --> update_critic, update
    metrics                                   <--

Tokens and their numbers stay on the ranks. What one model computes for another travels by reference (handed_rows.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from mrl.algo.plain import FloatParts
from mrl.algo.turn_credit import TurnNumbers, turn_numbers
from mrl.config.schema import ActorConfig, RunConfig
from mrl.config.teacher_model import TeacherModel
from mrl.data.samples import SampleRows
from mrl.errors import EnvironmentFault
from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout
from mrl.rank.cut import MiniBatchLoad, RowLengths, StepCut, step_cut, teacher_cut
from mrl.rank.handed_rows import answers_of, needed_by
from mrl.rank.rank_step import CRITIC, TEACHER, ReplicaRows, Scored, StepRows
from mrl.record.metrics import reduce_parts, seqlen_metrics
from mrl.store.response_store import ResponseStore
from mrl.store.routes import Readers

_ASKING = {TEACHER: "asking the teacher", CRITIC: "values"}  # names of calls in errors


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

    def each_keeping(self, method: str, arguments: Sequence[Sequence[Any]], phase: str) -> tuple[list[Any], list[Any]]:
        """Calls like `each` a method that returns two values. Returns the first, and references to the second."""

    def score(self, arguments: Sequence[Sequence[Any]]) -> tuple[list[Scored], list[Any]]:
        """Calls `score` on all ranks, like `each_keeping`."""

    def refs_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Calls like `each` without waiting. Returns references to the answers, by rank."""


class StepBatch:
    """The driver's handle of a step on all ranks, where RankStep is what computes."""

    def __init__(self, actor: AllRanks, samples: ResponseStore, step: int):
        """Divides the rows of a step among replicas. `step` is its number.

        Raises DataError for a row above the limit of a micro-batch.
        """
        layout = actor.layout
        self._actor = actor
        self._samples = samples
        self.rows = samples.rows
        config = actor.config
        self._lengths = RowLengths.of(samples.rows)
        self._step = step
        self.cut = step_cut(config, layout, actor.model, self._lengths, step=step)
        self._replica_of = [layout.dense_coords(rank).dp for rank in range(layout.world_size)]
        self._needed = [self.cut.needed_rows(replica) for replica in range(layout.data)]
        self._own = [self.cut.own_rows(replica) for replica in range(layout.data)]
        self.critic_cut = self._cut_for_critic()
        self._handed: list[tuple[np.ndarray, Any]] = []  # rows, and a reference to what a second model computed of them
        self._returns: list[Any] = []  # references to what a critic is trained on, by rank

    def _cut_for_critic(self) -> StepCut | None:
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
        return step_cut(config, layout, self._actor.model, self._lengths, own, step=self._step)

    def score_by(self, model: str) -> None:
        """Lets ranks score the step with a second model, TEACHER or CRITIC. What it says stays there, for `score`.

        Raises DataError for a row above the limit of the model's micro-batches.
        """
        layout, shares = self._of_teacher() if model == TEACHER else self._of_critic()
        asked = [(model, share, self._samples.take(share.numbers)) for share in shares]
        _, refs = self._actor.each_keeping("score_by", _by_rank(layout, asked), _ASKING[model])
        self._handed += answers_of(layout, [share.numbers for share in shares], refs)

    def _of_teacher(self) -> tuple[TrainLayout, list[ReplicaRows]]:
        """Returns the teacher's layout, and the rows of each of its replicas."""
        actor = self._actor
        given = actor.config.distillation.teacher_model
        cuts = teacher_cut(actor.config.actor, given, actor.teacher, self._lengths, self._own)
        return actor.teacher.layout, [ReplicaRows(rows, np.ones(len(rows), bool), cut) for rows, cut in cuts]

    def _of_critic(self) -> tuple[TrainLayout, list[ReplicaRows]]:
        cut = self.critic_cut
        layout = self._actor.critic_layout
        needed = [cut.needed_rows(replica) for replica in range(layout.data)]
        return layout, [
            ReplicaRows(rows, np.isin(rows, cut.own_rows(replica)), cut.of(replica).renumbered(rows))
            for replica, rows in enumerate(needed)
        ]

    def score(
        self,
        rewards: np.ndarray,
        counted: np.ndarray,
        parts: Mapping[str, np.ndarray] | None = None,
        by_reference: bool = False,
        kl_coef: float | None = None,
    ) -> Scored:
        """Lets ranks compute everything that an update needs, where it stays.

        `rewards`, `counted` and `parts` are those of StepRows. `kl_coef` is the weight of a KL in the reward; None:
        that of the configuration. Raises what RankStep.score raises.
        """
        rows = self._step_rows(rewards, counted, parts or {}, by_reference)
        if kl_coef is None:
            kl_coef = self._actor.config.algorithm.kl_ctrl.kl_coef
        return self._score(replace(rows, kl_coef=kl_coef))

    def gaps(self) -> Scored:
        """Lets ranks compute old log-probs, and nothing else of a step. They drop the rows."""
        nothing = np.zeros(len(self.rows))
        return self._score(replace(self._step_rows(nothing, nothing == 0, {}, False), only_gaps=True))

    def _step_rows(
        self, rewards: np.ndarray, counted: np.ndarray, parts: Mapping[str, np.ndarray], by_reference: bool
    ) -> StepRows:
        rows = self.rows
        return StepRows(
            group_id=rows.group_id,
            sampled_lengths=rows.sampled_lengths,
            overlong=rows.overlong,
            rewards=rewards,
            counted=counted,
            parts=parts,
            mini_batches=self.cut.rows,
            critic_mini_batches=self.critic_cut.rows if self.critic_cut else (),
            by_reference=by_reference,
            turns=_turns(rows) if self._actor.config.algorithm.by_turn else None,
        )

    def _score(self, rows: StepRows) -> Scored:
        actor = self._actor
        parts = [
            (
                rows,
                ReplicaRows(needed, np.isin(needed, own), self.cut.of(replica).renumbered(needed), actor.route_readers),
                self._samples.take(needed),
            )
            for replica, (needed, own) in enumerate(zip(self._needed, self._own, strict=True))
        ]
        handed = [needed_by(needed, self._handed) for needed in self._needed]
        last = actor.layout.pipeline - 1
        asked = [
            (*parts[replica], *(handed[replica] if actor.layout.dense_coords(rank).pp == last else ()))
            for rank, replica in enumerate(self._replica_of)
        ]
        answers, self._returns = actor.score(asked)
        self._handed = []
        seconds: dict[str, float] = {}
        for answer in answers:
            for phase, spent in answer.seconds.items():
                seconds[phase] = max(spent, seconds.get(phase, 0.0))
        return replace(answers[0], seconds=seconds)

    def log_probs_of(self, rows: Sequence[int]) -> dict[int, np.ndarray]:
        """Returns the trainer's log-probs of the given rows' tokens, by row, after `score`."""
        wanted = np.array(rows, np.int64)
        answers = self._actor.each("shown", [(wanted, False)] * len(self._replica_of), "showing rows")
        by_row: dict[int, np.ndarray] = {}
        for replica, answer in zip(self._replica_of, answers, strict=True):
            if answer is not None:
                numbers = self._own_among(wanted, replica)
                ends = np.cumsum(self.rows.response_lengths[numbers])
                by_row |= dict(zip(numbers.tolist(), np.split(answer, ends)[:-1], strict=True))
        return by_row

    def differences(self, rows: np.ndarray) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[Any]]:
        """Lets each rank compute what log-probs of its replica's rows among `rows` are off generation's, after `score`.

        Returns ids and response lengths of those rows for each rank, and a reference to each rank's answer. It does not
        wait: whoever gets the references fetches the answers.
        """
        own = [self._own_among(rows, replica) for replica in self._replica_of]
        refs = self._actor.refs_each("shown", [(rows, True)] * len(own))
        return [(self.rows.sample_id[each], self.rows.response_lengths[each]) for each in own], list(refs.values())

    def _own_among(self, rows: np.ndarray, replica: int) -> np.ndarray:
        """Returns which of `rows` a replica trains on; int64, ascending."""
        return self._own[replica][np.isin(self._own[replica], rows)]

    def update_critic(self) -> dict[str, float]:
        """Makes all optimizer steps of the critic, which is before the actor's. Returns reduced metrics.

        Raises NumericAbort as `update` does.
        """
        actor = self._actor
        returns = answers_of(actor.layout, self._own, self._returns)
        self._returns = []
        layout, shares = self._of_critic()
        asked = [needed_by(share.numbers, returns) for share in shares]
        answers = actor.each("update_critic", _by_rank(layout, asked), "update_critic")
        return reduce_parts([part for parts in answers if parts is not None for part in parts])

    def update(
        self, watch: Callable[[list[float], list[np.ndarray]], None] = lambda norms, sample_ids: None
    ) -> dict[str, float]:
        """Makes all optimizer steps. Returns reduced metrics and, on policy, those of `score` for log-probs.

        `watch` gets each update's gradient norm, and the ids of its samples. Raises NumericAbort if too many updates in
        a row could not be applied. On policy it also raises it for log-probs that are not finite, before any change.
        """
        answers = self._actor.each("update", [()] * len(self._replica_of), "update")
        parts = [part for of_rank, _ in answers for part in of_rank]
        metrics = answers[0][1] | reduce_parts(parts)
        loads = self.cut.loads
        watch(gradient_norms(parts), [self.rows.sample_id[rows] for rows in self.cut.rows])
        applied = len(loads) - metrics["actor/skipped_updates"]
        return metrics | {"actor/updates": applied} | load_metrics(self.rows.lengths, loads, self.cut.epochs)

    def leave_actor(self) -> dict[str, float]:
        """Ends a step that trains only the critic: ranks drop their rows. Returns metrics of an unchanged actor."""
        self._actor.each("update", [(False,)] * len(self._replica_of), "forget")
        return {"actor/updates": 0.0, "actor/skipped_updates": 0.0}


def check_routed(actor: ActorConfig, rows: SampleRows) -> None:
    """Raises EnvironmentFault with R3 if a larger share of the samples than allowed, or all, have no route.

    Routes of single tokens may be missing, as those of cached prompts are. The update counts these.
    """
    if actor.router_replay != "R3":
        return
    most = actor.max_unrouted_share
    without = int((~rows.routed).sum())
    if without <= most * len(rows) and without < len(rows):
        return
    found = f"no route for any of {len(rows)} samples"
    if without < len(rows):
        found = f"no route for {without} of {len(rows)} samples, more than actor.max_unrouted_share ({most:g}) allows"
    raise EnvironmentFault(
        f"actor.router_replay: R3, and the vLLM engines (rollout) returned {found}; see logs/engine-N.log in the run "
        "directory, or set actor.router_replay: R2 or disabled, which need none"
    )


def gradient_norms(parts: Sequence[FloatParts]) -> list[float]:
    """Returns the norms of all updates in order, before clipping; NaN for a skipped one.

    One rank returns the norm, which is equal on all ranks, and with it `actor/skipped_updates` for every update.
    """
    return [part.get("actor/grad_norm", (math.nan, 1.0))[0] for part in parts if "actor/skipped_updates" in part]


def load_metrics(lengths: np.ndarray, loads: Sequence[MiniBatchLoad], epochs: int = 1) -> dict[str, float]:
    """Returns how evenly an update is spread over the data-parallel ranks, and its share of padding.

    Metrics are means over its mini-batches. `lengths` [batch] are tokens of each sequence. `loads` come from the ranks,
    one for each mini-batch of all `epochs`. Each epoch trains a rank on the same rows.
    """
    tokens_of_loads = [load.tokens for load in loads]
    trained_tokens = [sum(of_rank) // epochs for of_rank in zip(*tokens_of_loads, strict=True)]
    packed = [load.packed_sequences for load in loads if load.packed_sequences is not None]
    budgets = [load.budget_share for load in loads if load.budget_share is not None]
    return seqlen_metrics(lengths, trained_tokens) | {
        "actor/padding_share": float(np.mean([load.padding_share for load in loads])),
        "actor/dp_imbalance": float(np.mean([load.imbalance for load in loads])),
        **({"actor/packed_sequences": float(np.mean(packed))} if packed else {}),
        **({"actor/token_budget_share": max(budgets)} if budgets else {}),
    }


def _turns(rows: SampleRows) -> TurnNumbers | None:
    """Returns the turns of all rows; None where each is one turn."""
    if rows.turn_starts is None:
        return None
    return turn_numbers(
        rows.turn_counts,
        rows.turn_starts,
        rows.turn_rewards,
        rows.turn_states,
        rows.branch_counts,
        rows.branch_starts,
        rows.turn_parents,
    )


def _by_rank(layout: TrainLayout, of_replicas: Sequence[Any]) -> list[Any]:
    """What each rank of a layout is asked, from what each replica is."""
    return [of_replicas[layout.dense_coords(rank).dp] for rank in range(layout.world_size)]
