"""A step on one rank, in its order: rows fetched, scored by the policies, weighed, and trained on.

    score    rows fetched; what second models computed of them is taken over (second_rows.py)
             old log-probs      --> gaps to generation's, of all rows: metrics, and whether they are numbers
             reference's        --> KL in the reward or in the loss
             corrections        --> trained tokens of all rows: masks, weights, penalties, KL to a teacher
             advantages         <-- scores of all rows: baselines of groups, whitening; by a critic's values, too
             selection          --> tokens that a loss treats apart
    shown    log-probs of single rows, for people
    update   mini-batches, optimizer steps

Any replica may have any row, and the formulas of mrl.algo look at one row at a time. Where a number of all rows is
needed, ranks exchange numbers a row (exchange.py), so each of them comes to the same sums, bit by bit. Until `update`
nothing is changed that lasts, and a rank that is asked to stop does so, with all others, at the next exchange.

If a step is one update, algorithm.anchor on_policy omits the first pass: the update's own log-probs are the old ones.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mrl.algo.advantages import (
    WHITENED,
    AdvantageInputs,
    TokenAdvantages,
    load_custom_advantage,
    response_advantages,
    whitened,
)
from mrl.algo.correction import correction_metrics, mismatch_metrics
from mrl.algo.distillation import distillation_metrics
from mrl.algo.gae import ERRORS, RETURNS, VALUES
from mrl.algo.plain import Denominators, FloatParts
from mrl.algo.rows import RowValues, second_moment, total
from mrl.algo.selection import SELECTIONS, least_chosen, means_of
from mrl.algo.turn_credit import TurnNumbers
from mrl.config.schema import AlgorithmConfig
from mrl.crash_points import crash_point
from mrl.errors import NumericAbort
from mrl.rank.cut import ReplicaCut
from mrl.rank.exchange import ROWS, Exchange
from mrl.rank.handed_rows import HandedRows
from mrl.rank.rank_batch import RankBatch
from mrl.rank.row_results import RowResult
from mrl.record.metrics import advantage_metrics, distribution, token_metrics
from mrl.store.response_store import ResponseStore
from mrl.store.routes import Readers

if TYPE_CHECKING:
    from mrl.rank.actor import MegatronActor  # the driver imports this module, and must not load Megatron

EXPLAINED_EPS = 1e-5  # verl's, added to a variance of returns
TEACHER = "teacher"  # second models, as MegatronActor has them
CRITIC = "critic"
FETCHING = "fetching samples"
LOG_PROBS = "log_probs"
REFERENCE = "ref_log_probs"
WEIGHING = "weighing rows"
PHASES = (FETCHING, LOG_PROBS, REFERENCE, WEIGHING)
_SENT_GAPS = ("log_gap", "bad_rollout", "bad_actor")
_MOMENTS = ("count", "sum", "m2", "low", "high")


@dataclass(frozen=True)
class StepRows:
    """Numbers of all rows of a step, in its order, which every rank gets once; and what is wanted of them."""

    group_id: np.ndarray  # int64 [rows]
    sampled_lengths: np.ndarray  # int64 [rows]
    overlong: np.ndarray  # bool [rows]
    rewards: np.ndarray  # float64 [rows]: scores after penalties
    counted: np.ndarray  # bool [rows]: rows that take part, see mrl.generate.rollouts.compared
    parts: Mapping[str, np.ndarray]  # float64 [rows]: the reward's parts under algorithm.gdpo_reward_keys
    mini_batches: tuple[np.ndarray, ...]  # int64: rows of each mini-batch of the actor, in all epochs
    critic_mini_batches: tuple[np.ndarray, ...] = ()  # and of the critic
    by_reference: bool = False  # the reference scores the rows, too
    kl_coef: float = 0.0  # weight of a KL in the reward
    turns: TurnNumbers | None = None  # of all rows, where an estimator credits turns
    only_gaps: bool = False  # old log-probs alone are wanted; then the rows are dropped

    def __len__(self) -> int:
        return len(self.group_id)


@dataclass(frozen=True)
class ReplicaRows:
    """The rows of a step that a replica needs, and how they are cut."""

    numbers: np.ndarray  # int64 [needed rows], ascending: their numbers in the step
    own: np.ndarray  # bool [needed rows]: the replica trains on them; the others are there for fillers
    cut: ReplicaCut  # of these rows, counted from 0
    readers: Readers = field(default_factory=dict)  # of routes


@dataclass(frozen=True)
class Scored:
    """What a rank tells of `score`. All ranks come to the same metrics, and the first one tells them."""

    seconds: Mapping[str, float]  # by phase
    metrics: Mapping[str, float] = field(default_factory=dict)
    gaps: RowValues | None = None  # some of `mismatch_of_rows`, of all rows; None on policy, and from other ranks


class RankStep:
    """One rank's part of the newest step. `score`, `update` and `update_critic` are collective."""

    def __init__(self, actor: "MegatronActor", rows: StepRows, stops: Callable[[], bool] = lambda: False) -> None:
        """`stops` tells whether the rank was asked to stop scoring."""
        self._actor = actor
        self._rows = rows
        self._exchange = Exchange(actor.gather_bytes, actor.rank, len(rows), stops)
        self._tokens: RankBatch | None = None
        self._numbers = np.zeros(0, np.int64)  # of the replica's rows in the step
        self._trained = np.zeros(len(rows), np.int64)  # trained tokens of every row
        self._seconds: dict[str, float] = {}
        self.phase = ("", 0.0)  # what it is at, and since when by time.monotonic
        self.gaps: RowValues | None = None  # of all rows, `mismatch_of_rows`; known where old log-probs were computed

    def score(
        self, own: ReplicaRows, samples: ResponseStore, handed: Sequence[HandedRows] = ()
    ) -> tuple[Scored, HandedRows | None]:
        """Computes everything that an update needs, and keeps it here.

        `samples` are the rows of `own`, and `handed` is what second models computed of them. Returns what the driver is
        told, and on one rank of each replica what a critic is trained on. Raises NumericAbort for numbers that must not
        reach the optimizer, and where nothing is left to train on. Raises Interrupted where a rank was asked to stop.
        """
        rows = self._rows
        algorithm = self._actor.config.algorithm
        metrics: dict[str, float] = {}
        gaps = None
        with self._at(FETCHING), self._exchange.joined():
            self._numbers = own.numbers
            self._tokens = RankBatch.fetched(self._actor, samples, own.own, own.cut, own.readers)
            if self._actor.on_last_stage:
                self._tokens.take(own.numbers, handed)
            self._exchange.parts()  # before ranks meet in a pass, all of them have their rows
        if rows.only_gaps or not algorithm.on_policy:
            with self._at(LOG_PROBS):
                gaps, entropy = self._gaps(self._tokens.score())
                self.gaps = gaps
                if not rows.only_gaps:
                    metrics = _gap_metrics(gaps, entropy)
        if rows.only_gaps:
            self._tokens = None
            return self._scored(metrics, gaps), None
        if rows.by_reference:
            with self._at(REFERENCE):
                self._tokens.score_by_reference()
        with self._at(WEIGHING), self._exchange.joined():
            corrected = self._corrected(metrics)
            returns = self._set_advantages(corrected, metrics)
            self._exchange.parts()
        return self._scored(metrics, gaps), returns

    def _scored(self, metrics: dict[str, float], gaps: RowValues | None) -> Scored:
        self.phase = ("", 0.0)
        if self._actor.rank:
            return Scored(self._seconds)
        return Scored(self._seconds, metrics, gaps and {name: gaps[name] for name in _SENT_GAPS})

    @contextmanager
    def _at(self, phase: str) -> Iterator[None]:
        """Times a phase of the step, of which the driver asks what a rank is at."""
        crash_point("rank", self._actor.rank, phase)
        began = time.monotonic()
        self.phase = (phase, began)
        yield
        self._seconds[phase] = time.monotonic() - began

    def _gaps(self, result: RowResult | None) -> tuple[RowValues, float]:
        """Keeps the trainer's log-probs. Returns how far generation's are from them, of all rows, and their mean
        entropy in nats.
        """
        given = None
        with self._exchange.joined():
            if result is not None:
                of_rows = self._tokens.keep(result)
                if self._actor.holds_result:
                    given = {ROWS: self._own_numbers, "entropy": np.array(result.entropy), **of_rows}
            parts = self._exchange.parts(given)
        entropies = [part["entropy"].tolist() for part in parts]
        of_rows = self._exchange.in_order([{k: v for k, v in part.items() if k != "entropy"} for part in parts])
        return of_rows, sum(value for value, _ in entropies) / sum(weight for _, weight in entropies)

    @property
    def _own_numbers(self) -> np.ndarray:
        """The numbers of the rows that the replica trains on, int64, ascending."""
        return self._numbers[self._tokens.own]

    def _of_all(self, compute: Callable[..., RowValues], *arguments: Any) -> RowValues:
        """Computes numbers of this replica's rows where their tokens are. Returns those of all rows."""
        own = None
        if self._actor.on_last_stage:
            own = compute(*arguments)
        return self._exchange.rows(self._own_numbers, own if self._actor.holds_result else None)

    def _corrected(self, metrics: dict[str, float]) -> RowValues:
        """Removes the tokens that the overlong filter and the rollout correction reject, as RankBatch.correct.

        Returns numbers a row, such as `trained` tokens and `penalties`, and adds metrics. Raises NumericAbort if
        nothing is left to train on, or for a KL in the reward that is not finite.
        """
        algorithm = self._actor.config.algorithm
        of_rows = self._of_all(self._tokens.correct, self._rows.counted[self._numbers], self._rows.kl_coef)
        if algorithm.use_kl_in_reward:
            penalty = total(of_rows["penalties"]) / len(self._rows)
            metrics |= {"actor/reward_kl_penalty": penalty, "actor/kl_coef": self._rows.kl_coef}
            metrics["actor/reward_kl"] = total(of_rows["kl"]) / len(self._rows)
            rewards = (self._rows.rewards - of_rows["penalties"])[self._rows.counted]
            metrics |= distribution("critic/rewards", rewards)  # in place of the driver's, which lack the KL
            _check_kl(of_rows["kl"])
        if algorithm.overlong_filter:
            metrics["train/overlong_filtered_share"] = float(self._rows.overlong.mean())
        if algorithm.rollout_correction.level is not None:
            metrics |= correction_metrics(of_rows)
        _check_something_left(algorithm, of_rows.get("taken", of_rows["trained"]), metrics, self._rows.counted)
        if "not_finite" in of_rows:
            _check_teacher(of_rows)
            metrics |= distillation_metrics(of_rows)
        self._trained = of_rows["trained"]
        return of_rows

    def _set_advantages(self, corrected: RowValues, metrics: dict[str, float]) -> HandedRows | None:
        """Sets every response's advantage on its trained tokens, and marks the tokens that the loss treats separately.

        Penalties in `corrected` are subtracted from the rewards. Adds metrics. Returns what a critic is trained on.
        """
        algorithm = self._actor.config.algorithm
        of_responses, whitens = self._of_responses(corrected.get("penalties"))
        of_values = {}
        if algorithm.needs_critic:
            of_values = self._estimated()
        if whitens:
            moments = self._moments(of_responses)
            of_responses = whitened(of_responses, moments)
            if not (algorithm.needs_group or algorithm.needs_critic):  # the rewards to come, before they are whitened
                of_values = token_metrics("critic/returns", moments)
        of_rows = self._of_all(self._tokens.set_advantages, of_responses.rows(self._numbers))
        if algorithm.policy_loss.loss_mode in SELECTIONS:
            self._select(of_rows["sum"], corrected["anchor"])
        metrics |= advantage_metrics(of_rows) | of_values
        if algorithm.needs_critic and self._actor.on_last_stage:
            returns = self._tokens.returns(self._numbers)
            if self._actor.holds_result:
                return returns
        return None

    def _of_responses(self, penalties: np.ndarray | None) -> tuple[TokenAdvantages, bool]:
        """Returns the advantage of every response, and whether they are whitened."""
        algorithm = self._actor.config.algorithm
        rows = self._rows
        counted = rows.counted
        custom = algorithm.custom_advantage
        inputs = AdvantageInputs(
            scores=rows.rewards[counted],
            group_ids=rows.group_id[counted],
            lengths=rows.sampled_lengths[counted],
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            penalties=None if penalties is None else penalties[counted],
            parts={key: values[counted] for key, values in rows.parts.items()},
            part_weights=dict(zip(algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, strict=False)),
            custom=custom.parameters if custom else {},
            turns=None if rows.turns is None else rows.turns.keep(counted),
            gamma=algorithm.gamma,
            step_advantage_weight=algorithm.step_advantage_weight,
            branch_rewards=algorithm.branch_rewards,
        )
        if custom is None:
            of_counted = response_advantages(algorithm.adv_estimator, inputs)
            return of_counted.among(counted, rows.turns), algorithm.adv_estimator in WHITENED
        given = None
        if self._actor.rank == 0:  # a user's function may draw numbers, or keep some
            load_custom_advantage(custom.path, algorithm.adv_estimator)
            values = response_advantages(algorithm.adv_estimator, inputs).per_response
            given = {"values": values, "whitened": np.array([algorithm.adv_estimator in WHITENED])}
        (answer,) = self._exchange.parts(given)
        return TokenAdvantages(answer["values"]).among(counted), bool(answer["whitened"][0])

    def _estimated(self) -> dict[str, float]:
        """Estimates tokens' advantages from a critic's values. Returns metrics of values and returns.

        Raises NumericAbort for values that are not finite. Whitening would spread one of them to all advantages.
        """
        rewards = np.where(self._rows.counted, self._rows.rewards, 0.0)
        of_rows = self._of_all(self._tokens.estimate, rewards[self._numbers])
        # returns also depend on values of tokens that a correction rejected
        if not all(np.isfinite(of_rows[f"{name}.sum"]).all() for name in (VALUES, RETURNS)):
            raise NumericAbort(
                "values of the critic are not finite, so nothing of the step can be trained on; resume from a "
                "checkpoint before with a smaller critic.optim.lr"
            )
        return value_metrics(of_rows)

    def _moments(self, of_responses: TokenAdvantages) -> RowValues:
        """Returns moments of each response's advantages.

        They are equal on all its tokens, unless turns, penalties or a critic make them differ.
        """
        if of_responses.differ or self._actor.config.algorithm.needs_critic:
            return self._of_all(self._tokens.moments, of_responses.rows(self._numbers))
        values = of_responses.per_response
        some = self._trained > 0
        low = np.where(some, values, np.inf)
        high = np.where(some, values, -np.inf)
        sums = self._trained * values
        return {"count": self._trained, "sum": sums, "m2": np.zeros(len(values)), "low": low, "high": high}

    def _select(self, advantages: np.ndarray, anchors: np.ndarray) -> None:
        """Selects tokens by `advantages` and the anchor's log-probs, [rows], which are sums over trained tokens."""
        parameters = self._actor.loss_parameters
        columns = [self._by_mini_batch(values) for values in (advantages, anchors, self._trained)]
        means = [means_of(total(a), total(p), int(count.sum())) for a, p, count in zip(*columns, strict=True)]
        given = None
        if self._actor.on_last_stage:
            found = {str(number): values for number, values in enumerate(self._tokens.find(means))}
            given = found if self._actor.holds_result else None
        parts = self._exchange.parts(given)
        if self._actor.on_last_stage:
            least = [
                least_chosen(parameters, [part[str(number)] for part in parts], mean)
                for number, mean in enumerate(means)
            ]
            self._tokens.select(least)

    def _by_mini_batch(self, values: np.ndarray) -> list[np.ndarray]:
        return [values[rows] for rows in self._rows.mini_batches]

    def shown(self, numbers: np.ndarray, less_rollout: bool) -> np.ndarray | None:
        """Returns `RankBatch.shown` of those of the step's rows `numbers` that this replica trains on, in order.

        One rank of each replica returns them, the others None.
        """
        if not self._actor.holds_result:
            return None
        return self._tokens.shown(np.flatnonzero(self._tokens.own & np.isin(self._numbers, numbers)), less_rollout)

    def critic_counts(self) -> list[Denominators]:
        """Returns the denominators of each mini-batch of the critic."""
        return [Denominators.counted(self._trained[rows]) for rows in self._rows.critic_mini_batches]

    def update(self) -> tuple[list[FloatParts], dict[str, float]]:
        """Updates the actor. Returns this rank's sums of metrics and, on policy, metrics of `score` for old log-probs.

        Drops the rows, so that their memory is free while the next ones are generated. On policy it raises NumericAbort
        for log-probs that are not finite, before any change.
        """
        counts = [Denominators.counted(trained) for trained in self._by_mini_batch(self._trained)]
        result = self._tokens.update(counts)
        metrics = {}
        if self._actor.config.algorithm.on_policy:
            metrics = _gap_metrics(*self._gaps(result.old))
        self._tokens = None
        return [*result.parts, result.spent], metrics


def _gap_metrics(gaps: RowValues, entropy: float) -> dict[str, float]:
    """Raises NumericAbort for log-probs that are not finite."""
    return {"actor/entropy": entropy} | mismatch_metrics(gaps)


def _check_teacher(of_rows: RowValues) -> None:
    """Raises NumericAbort for a teacher's log-probs that are not finite."""
    if lost := int(of_rows["not_finite"].sum()):
        raise NumericAbort(
            f"the teacher's log-probs of {lost} of {int(of_rows['trained'].sum())} tokens are no finite numbers: look "
            "at the weights in distillation.teacher_model.model_path, or set model.dtype: float32"
        )


def _check_kl(kl: np.ndarray) -> None:
    """Raises NumericAbort for a KL to the reference model that is not finite. `kl` [rows] is the mean of a token.

    It would spread over all rewards of its group, and an adaptive weight would be no number from then on.
    """
    if lost := int((~np.isfinite(kl)).sum()):
        raise NumericAbort(
            f"the KL to the reference model is no finite number in {lost} of {len(kl)} responses: look at the weights "
            "in ref.path (model.path where it is left out), or set model.dtype: float32"
        )


def _check_something_left(
    algorithm: AlgorithmConfig, weighted: np.ndarray, metrics: Mapping[str, float], counted: np.ndarray
) -> None:
    """Raises NumericAbort where no row has a token left. `weighted` [rows] are its tokens of a weight above 0."""
    if weighted.any():
        return
    dropped = []
    cures = []
    if not counted.all():
        dropped.append(
            f"{1 - counted.mean():.0%} of the responses are left out, because environments failed or log-probs are not "
            "finite"
        )
        cures.append("look at logs/engine-N.tools.log and logs/engine-N.log in the run directory")
    if algorithm.overlong_filter:
        dropped.append(
            f"algorithm.overlong_filter dropped {metrics['train/overlong_filtered_share']:.0%} of the responses"
        )
        cures.append("raise data.max_response_length, or look at why no response ends")
    if algorithm.rollout_correction.level is not None:
        dropped.append("algorithm.rollout_correction rejected every token" + " of the rest" * bool(dropped))
        cures.append(
            "widen the band of the correction, or look at rollout_corr/k3_kl: generation and training may "
            "not hold the same weights"
        )
    raise NumericAbort(
        f"nothing of the step is left to train on: {' and '.join(dropped)}. To fix it: {'; '.join(cures)}"
    )


def value_metrics(of_rows: RowValues) -> dict[str, float]:
    """Returns `critic/values/*`, `critic/returns/*` and the share of the returns' variance that values explain, as in
    verl.

    `of_rows`: `mrl.algo.gae.value_moments`.
    """
    moments = {name: {key: of_rows[f"{name}.{key}"] for key in _MOMENTS} for name in (VALUES, RETURNS, ERRORS)}
    count = int(moments[VALUES]["count"].sum())
    if not count:
        return {}
    metrics = {}
    for name in (VALUES, RETURNS):
        metrics[f"critic/{name}/mean"] = total(moments[name]["sum"]) / count
        metrics[f"critic/{name}/max"] = float(moments[name]["high"].max())
        metrics[f"critic/{name}/min"] = float(moments[name]["low"].min())
    missed = _variance(moments[ERRORS])
    return metrics | {"critic/vf_explained_var": 1.0 - missed / (_variance(moments[RETURNS]) + EXPLAINED_EPS)}


def _variance(of_rows: RowValues) -> float:
    """Returns the variance over n - 1; 0 for a single token."""
    count = int(of_rows["count"].sum())
    squares = second_moment(of_rows["m2"], of_rows["sum"], of_rows["sum"], of_rows["count"])
    return squares / max(count - 1, 1)
