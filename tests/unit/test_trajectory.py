"""Context between what was sampled counts nowhere: what stands at its places changes no bit, and without it all numbers
are the same.

Every metric that a run may write is measured here, or stands below with the reason why context cannot touch it: a
metric that is added later has to be put into one of the two.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from replicas import ReplicaActor, Replicas, scored_step, stored
from small_model import SIZES as MODEL
from test_step_batch import CASES, SIZES, TINY, noise, rollouts_of
from trajectories import cut_out, filled, trajectories, with_one_let_in

from mrl.algo.advantages import AdvantageInputs, response_advantages
from mrl.algo.aggregate import merge, to_floats
from mrl.algo.losses import LossInputs, policy_loss
from mrl.algo.spec import AGGREGATIONS, BY_TURN, LOSSES
from mrl.config.load import load_config
from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.data.samples import Sample, SampleRows, Sequences, packed
from mrl.driver.reporting import mfu_metrics
from mrl.driver.validation import _lengths
from mrl.generate.group_metrics import version_metrics
from mrl.generate.rollouts import Judge, Rollouts, compared
from mrl.model import model_spec
from mrl.rank.packing import Shape, micro_batch
from mrl.rank.row_results import UpdateResult
from mrl.record.metrics import length_metrics, reward_metrics, speed_metrics, turn_metrics
from mrl.record.spec import all_metrics
from mrl.reward.items import LEFT_OUT, NOT_FINITE, OK, RewardResult

# what the model computes, or memory holds, is of all tokens: context is among them
COMPUTED = {
    "perf/total_num_tokens": "prompts count too",
    "perf/throughput": "prompts count too",
    "perf/mfu/*": "FLOPs of what is computed",
    "timing_per_token_ms/[!g]*": "phases that compute all tokens",
    "global_seqlen/*": "loads of ranks, all tokens",
    "actor/padding_share": "of computed tokens",
    "actor/dp_imbalance": "of computed tokens",
    "actor/token_budget_share": "of computed tokens",
    "actor/packed_sequences": "of rows, and how they lie in packs",
    "turns/context_tokens": "it is what it counts",
    "turns/mean": "of rows",
    "turns/max": "of rows",
    "turns/ended/*": "of rows",
    "turns/calls": "of rows",
    "turns/unread_calls": "of rows",
    "turns/fell": "of rows",
    "response_length/clip_ratio": "the limit is of the whole response",
    "val-aux/response_length/clip_ratio": "the limit is of the whole response",
}
# no number of response tokens is in it
ELSEWHERE = {
    "training/(global_step|epoch|failed_.*)": "the run's own counts",
    "train/(num_gen_batches|uniform_group_share|trained_groups)": "groups",
    "reward/.*": "rewards",
    "drafts/.*": "what engines drafted",
    "actor/mtp_.*": "of sampled tokens alone, tests/real/test_predicting.py",
    "actor/replica_grad_norm/.*": "each replica's, tests/real/test_overlap.py",
    "actor/(grad_norm|lr|updates|skipped_updates)": "the gradient, which is compared below and on Megatron",
    "actor/log_seq_ratio_square_mean": "becomes actor/log_seq_ratio_std",
    "critic/(grad_norm|lr|skipped_updates)": "the gradient of a critic",
    "critic/(values/.*|vf_.*|vpred_mean)": "of sampled tokens alone, tests/unit/test_gae.py",
    "offload/.*": "bytes",
    "timing_s/.*": "seconds",
    "perf/(max|cpu|checkpoint|update|kv|preemptions).*": "memory and seconds",
    "(rollout|reshard|switch)/.*": "weights, engines, devices",
    "endpoint/.*": "what agents asked for",
    "fleet/.*|trainer/(restarts|replayed_responses)": "engines and ranks that are lost",
    "router/.*": "all tokens that routers see, of prompts and of context too",
    "async/(recomputed_tokens|window|requeued_groups|groups_ahead|dropped_groups)": "engines and groups",
    "async/(dropped|kept)_response_length.*": "what the dispatcher counts: tokens that engines hold",
    "val-core/.*": "rewards",
    "val-aux/(\\*|\\*/.*|reward_failed|environment_failed|not_finite)": "rewards",
    "tools/.*": "calls",
    "distillation/.*": "with context in test_distillation.py",
    "turns/left_out|train/not_finite_share": "of rows",
}


class Trained(ReplicaActor):
    """Its update is the loss of the product on micro-batches of the product, in float64, whose gradient it keeps.

    Current log-probs are above the old ones by something of each token's own; whatever stands at context, log-probs,
    advantages, weights and all, is `context` times a random number.
    """

    context = 0.0

    def update_replica(self, batch, mini_batches, counts):
        self.gradients = np.zeros(len(batch.rollout_log_probs))
        old = self.policy_log_probs(batch) if batch.old_log_probs is None else None
        parts = []
        for micros, count in zip(mini_batches, counts, strict=True):
            found = [self._loss(batch, micro.rows, count) for micro in micros if not micro.is_filler]
            parts.append(merge(found) | {"actor/skipped_updates": (0.0, 1.0)})
        return UpdateResult(parts, [], old)

    def _loss(self, batch: TrainBatch, rows: np.ndarray, count) -> dict:
        laid_out = micro_batch(self._spoilt(batch), rows, Shape(packed=True))
        places = batch.sampled_indices(rows)
        there = np.zeros(laid_out.response_mask.shape, bool)
        width = there.shape[1]
        own = batch.rows(rows)
        at = np.arange(width)[None] < own.response_lengths[:, None]
        there[at] = own.is_sampled
        assert len(laid_out.targets) == int(laid_out.has_log_probs.sum())
        assert not (laid_out.has_log_probs & ~there).any()
        current = np.full(there.shape, self.context * math.pi)
        base = batch.rollout_log_probs if batch.old_log_probs is None else batch.old_log_probs
        current[there] = (base + noise(base, 300))[places]
        log_probs = torch.tensor(current, dtype=torch.float64, requires_grad=True)
        output = policy_loss(self.loss_parameters, self._inputs(laid_out, log_probs), count)
        (gradient,) = torch.autograd.grad(output.loss, log_probs)
        assert not gradient[torch.from_numpy(~there)].any()
        self.gradients[places] = gradient.numpy()[there]
        return to_floats(output.metrics)

    def _inputs(self, laid_out, log_probs: torch.Tensor) -> LossInputs:
        def tensor(values):
            if values is None:
                return None
            made = torch.from_numpy(np.ascontiguousarray(values))
            return made if made.dtype == torch.bool else made.double()

        return LossInputs(
            log_probs, tensor(laid_out.old_log_probs), tensor(laid_out.advantages), tensor(laid_out.response_mask),
            -log_probs, tensor(laid_out.ref_log_probs), tensor(laid_out.loss_weights), tensor(laid_out.selected),
        )  # fmt: skip

    def _spoilt(self, batch: TrainBatch) -> TrainBatch:
        rng = np.random.default_rng(4 if self.context else 3)
        values = {}
        for name, column in batch.token_values.items():
            if column is None:
                continue
            other = self.context * rng.random(len(column)) if column.dtype != bool else rng.random(len(column)) < 0.5
            values[name] = np.where(batch.is_sampled, column, other).astype(column.dtype)
        return replace(batch, **values)


@cache
def configured(*overrides: str) -> RunConfig:
    return load_config(TINY, None, [*SIZES, *overrides]).config


def measured(
    samples: list[Sample],
    overrides: list[str],
    replicas: int = 2,
    context: float = 0.0,
    change: Callable[[Rollouts], Rollouts] = lambda rollouts: rollouts,
) -> tuple[dict, dict]:
    """Every metric of a step; the gradient of what was sampled of each response, by the bytes of its log-probs."""
    config = configured(*overrides)
    actor, rollouts = Replicas(config, replicas), change(rollouts_of(stored(samples)))
    gaps = (lambda own: noise(own, 1000)), (lambda own: noise(own, 2000))
    actor.actors = [Trained(config, number, *gaps) for number in range(replicas)]
    for each in actor.actors:
        each.context = context
    rows, algorithm = rollouts.samples.rows, config.algorithm
    judge = Judge(algorithm, config.reward, config.data.max_response_length)
    rewards = judge.rewards(rows, rollouts.results)
    rollouts = replace(rollouts, rewards=rewards)
    step, scored = scored_step(actor, rollouts, compared(rows.group_id, rollouts.results))
    held = [batch.batch for batch in actor.batches]
    own = [np.flatnonzero(batch.own) for batch in actor.batches]
    metrics = scored.metrics | step.update()
    metrics |= _of_rows(config, rows, rollouts)
    metrics["train/overlong_penalty_mean"] = float((rewards - _scores(rollouts)).mean())
    if scored.gaps is not None:
        gaps = scored.gaps["log_gap"] / np.maximum(rows.sampled_lengths, 1)
        metrics |= {f"gap {i}": gap for i, gap in enumerate(gaps.tolist())}
    gradients = {}
    for one, batch, mine in zip(actor.actors, held, own, strict=True):
        for row in mine.tolist():
            places = batch.sampled_indices(np.array([row]))
            gradients[batch.rollout_log_probs[places].tobytes()] = one.gradients[places]
    return metrics, gradients


def _scores(rollouts) -> np.ndarray:
    return np.array([result.score for result in rollouts.results])


def _of_rows(config: RunConfig, rows: SampleRows, rollouts) -> dict[str, float]:
    """Metrics that the driver reads off rows."""
    seconds = {"step": 9.0, "gen": 3.0, "update": 2.0, "old_log_prob": 1.0, "update_actor": 2.0, "ref": 1.0, "adv": 1.0}
    peak = SimpleNamespace(actor=1e12, run=2e12)
    return {
        **length_metrics(rows, config.data.max_prompt_length, config.data.max_response_length),
        **speed_metrics(rows, seconds, 2),
        **reward_metrics(_scores(rollouts), rollouts.rewards),
        **version_metrics(3, rows),
        **turn_metrics(rows),
        **mfu_metrics(config.algorithm, model_spec(MODEL), rows, peak, seconds),
        **_lengths(rows),
    }


def matches(name: str, patterns) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def glob(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", ".+").replace(r"\[!g\]", "[^g]")


def free_of_context(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not matches(name, map(glob, COMPUTED))}


OVERLONG = [
    "algorithm.overlong_buffer.enable=true", "algorithm.overlong_buffer.len=40",
    "algorithm.overlong_buffer.penalty_factor=1.0",
]  # fmt: skip
KL_LOSS = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1", "algorithm.entropy_coeff=0.05"]
STEPS = [
    *CASES,
    [*KL_LOSS, *OVERLONG],
    ["algorithm.anchor=on_policy", f"actor.ppo_mini_batch_size={6}"],
    ["algorithm.anchor=on_policy", f"actor.ppo_mini_batch_size={6}", "algorithm.overlong_filter=true"],
]
BY_NAME = pytest.mark.parametrize("overrides", STEPS, ids=lambda case: case[0].rpartition(".")[2])


@cache
def undisturbed(*overrides: str) -> tuple[dict, dict]:
    """`measured` of the trajectories as they are."""
    return measured(trajectories(), list(overrides))


@cache
def beside_failures(*overrides: str) -> dict:
    """Gradients of the trajectories where some environments failed."""
    return measured(trajectories(), list(overrides), change=with_failures(0.0))[1]


@BY_NAME
@pytest.mark.parametrize("value", [None, math.nan], ids=["noise", "nan"])
def test_what_stands_at_context_changes_no_bit_of_gradients_and_metrics(overrides, value):
    metrics, gradients = undisturbed(*overrides)
    context = 7.0 if value is None else value
    spoilt, others = measured(filled(trajectories(), value), overrides, context=context)
    assert spoilt == metrics and all(math.isfinite(v) for v in metrics.values())
    assert others.keys() == gradients.keys() and len(gradients) == 24
    for key, gradient in gradients.items():
        np.testing.assert_array_equal(others[key], gradient)


@BY_NAME
def test_without_the_context_all_numbers_of_tokens_are_the_same(overrides):
    """So no denominator counts it; the over-long penalty does, as the limit does. A token's lot in clip_cov is drawn by
    its place, which context shifts. What credits turns differs, since without context a response is one.
    """
    overrides = [each for each in overrides if "overlong_buffer" not in each]
    if any("clip_cov" in each and "loss_mode" in each for each in overrides):
        pytest.skip("places differ")
    if any(each.removeprefix("algorithm.adv_estimator=") in BY_TURN for each in overrides):
        pytest.skip("turns differ")
    metrics, gradients = undisturbed(*overrides)
    alone, others = measured(cut_out(trajectories()), overrides)
    assert free_of_context(alone).keys() == free_of_context(metrics).keys()
    assert free_of_context(alone) == pytest.approx(free_of_context(metrics), rel=1e-9, abs=1e-12)
    for key, gradient in gradients.items():
        np.testing.assert_allclose(others[key], gradient, rtol=1e-9, atol=1e-15)


def everything() -> dict[str, float]:
    """Metrics of steps that have all of them together."""
    found: dict[str, float] = {}
    for overrides in STEPS:
        found |= undisturbed(*overrides)[0]
    return found


def test_every_metric_is_measured_here_or_has_no_number_of_response_tokens_in_it():
    names = everything()
    unknown = []
    for spec in all_metrics():
        pattern = re.escape(spec.name).replace(r"\*", ".+")
        seen = any(re.fullmatch(pattern, name) for name in names)
        if not seen and not matches(spec.name, ELSEWHERE) and not matches(spec.name, map(glob, COMPUTED)):
            unknown.append(spec.name)
    assert not unknown, "measure these in this file, or say above why context cannot be in them"


EXTREMES = ".*/(max|min|clip_ratio)|.*_(max|min)|gap .*"
OF_ROWS = "critic/(score|rewards)/.*|training/off_policy/.*|async/.*|prompt.*"
# not of tokens: the mock's entropy is a constant; the driver computes these shares and seconds of whole responses
MASKED = "train/overlong_.*|actor/(skipped_updates|updates|kl_coef|entropy|pg_clipfrac_lower)|perf/time_per_step"


@pytest.mark.parametrize("overrides", [STEPS[0], [*KL_LOSS, *OVERLONG]], ids=["advantages", "losses"])
def test_one_context_token_that_is_let_in_is_seen_by_every_mean(overrides):
    """What the tests above compare is not blind."""
    metrics, _ = measured(filled(trajectories(), -0.7), overrides)
    other, _ = measured(with_one_let_in(filled(trajectories(), -0.7)), overrides)
    kept = [name for name, value in free_of_context(metrics).items() if other[name] == value]
    assert [name for name in kept if not matches(name, (EXTREMES, OF_ROWS, MASKED))] == []


MUTATIONS: dict[str, tuple[type, str, Callable]] = {
    "everything is trained on": (TrainBatch, "loss_mask", lambda batch: np.ones(len(batch.rollout_log_probs), bool)),
    "all is sampled": (Sequences, "is_sampled", lambda batch: np.ones(len(batch.rollout_log_probs), bool)),
    "responses are as long as they are": (SampleRows, "sampled_lengths", lambda rows: rows.response_lengths),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mask_that_lets_context_in_is_caught(name, monkeypatch):
    owner, attribute, wrong = MUTATIONS[name]
    overrides = [*KL_LOSS, *OVERLONG]
    alone = free_of_context(measured(cut_out(trajectories()), overrides)[0])
    monkeypatch.setattr(owner, attribute, property(wrong))
    try:
        found = free_of_context(measured(trajectories(), overrides)[0])
    except (AssertionError, ValueError):
        return
    assert found != pytest.approx(alone, rel=1e-9, abs=1e-12)


# --- a model of torch, its weights after an update --------------------------------------------------------------------


class Small(torch.nn.Module):
    """Words, a causal mean of them, words again: each token's log-prob depends on all tokens before it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.between = torch.nn.Embedding(128, 16), torch.nn.Linear(16, 16)
        self.out = torch.nn.Linear(16, 128)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids).cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
        return torch.log_softmax(self.out(torch.tanh(self.between(hidden))), -1)


def responses_log_probs(model: Small, batch: TrainBatch) -> torch.Tensor:
    """[rows, response_length], of context too."""
    width, found, ends = int(batch.response_lengths.max()), [], np.cumsum(batch.lengths)
    for end, prompt, response in zip(ends, batch.prompt_lengths, batch.response_lengths, strict=True):
        ids = torch.from_numpy(batch.token_ids[end - prompt - response : end].astype(np.int64))
        own = model(ids)[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0]
        found.append(torch.nn.functional.pad(own, (0, width - len(own))))
    return torch.stack(found)


def trained_weights(loss_mode: str, aggregation: str, context: float) -> list[torch.Tensor]:
    """After one step of SGD on trajectories with `context` at context in all columns of the batch."""
    actor = Trained(configured())
    actor.context = context
    actor.loss_parameters = replace(
        actor.loss_parameters, loss_mode=loss_mode, loss_agg_mode=aggregation, loss_scale_factor=50.0,
        entropy_coeff=0.1, kl_loss_coef=0.1, clip_ratio_low=0.2, clip_ratio_high=0.3,
    )  # fmt: skip
    model = Small()
    plain = TrainBatch.of(packed(trajectories()), 1.0)
    rng = np.random.default_rng(1)
    with torch.no_grad():
        mask = torch.arange(int(plain.response_lengths.max()))[None] < torch.from_numpy(plain.response_lengths)[:, None]
        start = responses_log_probs(model, plain)[mask].numpy()
    near = {name: start + 0.3 * rng.normal(size=len(start)) for name in ("old_log_probs", "ref_log_probs")}
    values = {name: column.astype(np.float32) for name, column in near.items()}
    values["advantages"] = rng.normal(size=len(start)).astype(np.float32)
    values["loss_weights"] = (0.5 + rng.random(len(start))).astype(np.float32)
    values["selected"] = rng.random(len(start)) < 0.3
    batch = replace(plain, **values)
    laid_out = micro_batch(actor._spoilt(batch), np.arange(len(batch)), Shape(packed=True))
    inputs = actor._inputs(laid_out, responses_log_probs(model, batch).double())
    counted = SimpleNamespace(of=lambda mode: 100, tokens=100)
    policy_loss(actor.loss_parameters, inputs, counted).loss.backward()
    torch.optim.SGD(model.parameters(), 0.5).step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("loss_mode", LOSSES)
def test_weights_after_an_update_have_the_same_bits_whatever_stands_at_context(loss_mode):
    for aggregation in AGGREGATIONS:
        one = trained_weights(loss_mode, aggregation, 0.0)
        assert not all(torch.equal(a, b) for a, b in zip(one, Small().parameters(), strict=True))
        for context in (5.0, math.nan, -math.inf):
            other = trained_weights(loss_mode, aggregation, context)
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), (aggregation, context)


FAILED = (1, 5, 6, 7)  # one response of the first group, and all but one of the second


def with_failures(score: float):
    """Rewards of the responses whose environment failed are `score`, which nobody gave."""

    def change(rollouts):
        results = list(rollouts.results)
        for row in FAILED:
            results[row] = replace(results[row], score=score, reason=LEFT_OUT, parts={"acc": score, "form": score})
        rewards = np.array([result.score for result in results])
        return replace(rollouts, results=results, rewards=rewards)

    return change


@BY_NAME
def test_a_response_whose_environment_failed_is_in_nobodys_number(overrides):
    """No bit of gradients and of what follows from them depends on its reward; it has no gradient itself, and neither
    has who is alone in a group that had more.
    """
    metrics, gradients = measured(trajectories(), overrides, change=with_failures(0.0))
    others, again = measured(trajectories(), overrides, change=with_failures(-3.0))
    assert all(np.array_equal(gradients[key], again[key]) for key in gradients)
    # the run's own report takes rewards of those that are judged alone; a penalty is a reward less its score, rounded
    rewards = ("critic/score/*", "critic/rewards/*", "train/overlong_penalty_mean")
    moved = {name for name in metrics if metrics[name] != others[name]}
    assert all(matches(name, map(glob, rewards)) for name in moved), moved
    log_probs = [np.array(sample.rollout_log_probs)[sample.sampled] for sample in trajectories()]
    of_row = [gradients[each.astype(np.float32).tobytes()] for each in log_probs]
    for row in (*FAILED, 4):
        assert not of_row[row].any()
    if "algorithm.adv_estimator=grpo_passk" not in overrides:  # whose advantages are all above 0, and clipped here
        assert any(of_row[row].any() for row in range(8, 24))


@BY_NAME
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_response_with_log_probs_that_are_no_numbers_is_in_nobodys_number(overrides, bad):
    """The others have the gradients that they have beside responses of failed environments, and metrics are numbers."""
    expected = beside_failures(*overrides)
    samples = trajectories()
    for row in FAILED:
        log_probs = np.array(samples[row].rollout_log_probs)
        log_probs[np.flatnonzero(samples[row].sampled)[0]] = bad
        samples[row] = replace(samples[row], rollout_log_probs=log_probs)

    def change(rollouts):
        results = [replace(r, reason=NOT_FINITE) if row in FAILED else r for row, r in enumerate(rollouts.results)]
        left_out = np.isin(np.arange(len(results)), FAILED)
        return replace(rollouts, results=results, samples=rollouts.samples.as_context(left_out))

    metrics, gradients = measured(samples, overrides, change=change)
    assert all(map(math.isfinite, metrics.values()))
    gradients.pop(b"")  # of those four
    assert len(gradients) == 20 and all(np.array_equal(expected[key], gradients[key]) for key in gradients)


def test_advantages_are_those_of_the_smaller_group():
    """By hand: scores 1, 0 and 4 of a group that lost one have mean 5/3; without it they would have another."""
    results = [RewardResult(i, s, {}, OK) for i, s in enumerate((1.0, 9.0, 0.0, 4.0, 2.0, 9.0))]
    results[1] = replace(results[1], reason=LEFT_OUT)
    results[5] = replace(results[5], reason=LEFT_OUT)
    groups = np.array([0, 0, 0, 0, 1, 1])
    counted = compared(groups, results)
    assert counted.tolist() == [True, False, True, True, False, False]
    scores = np.array([result.score for result in results])
    inputs = AdvantageInputs(scores[counted], groups[counted], np.ones(3, int), norm_adv_by_std_in_grpo=False)
    found = response_advantages("grpo", inputs).among(counted).per_response
    np.testing.assert_allclose(found, [1 - 5 / 3, 0, -5 / 3, 4 - 5 / 3, 0, 0], atol=1e-12)


def test_a_group_of_one_by_its_own_choice_counts():
    results = [RewardResult(0, 1.0, {}, OK), RewardResult(1, 0.0, {}, LEFT_OUT)]
    assert compared(np.array([0, 1]), results).tolist() == [True, False]
