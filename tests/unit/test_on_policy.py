"""algorithm.anchor on_policy: a ratio of 1 with its gradient, metrics without the pass they came from,
what is planned and refused.
"""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from replicas import scored_step, stored
from small_model import SIZES as TINY_SIZES
from test_routing import Router
from test_step_batch import PROMPTS, SIZES, Noisy, rollouts_of, samples

from mrl.algo.aggregate import to_floats
from mrl.algo.losses import TOKEN_LOSSES, LossInputs, policy_loss
from mrl.algo.plain import Denominators, PolicyLossParameters
from mrl.algo.selection import SELECTIONS
from mrl.algo.spec import LOSSES, ON_POLICY
from mrl.config.load import load_config
from mrl.config.rules import notes, violations
from mrl.data.batch import TrainBatch
from mrl.data.samples import packed
from mrl.errors import NumericAbort
from mrl.model import model_spec, planning_model_spec
from mrl.plan.devices import find_device
from mrl.plan.memory import memory_section
from mrl.plan.memory_phases import (
    ActorBytes,
    EngineBytes,
    ScoringBytes,
    actor_phases,
    colocated_phases,
    with_optimizer_early,
)
from mrl.plan.plan_inputs import PlanInputs, batch_plan, engine_of
from mrl.plan.times import phase_seconds, step_flops
from mrl.rank.packing import Shape, micro_batch
from mrl.rank.routing import Routing
from mrl.record.metrics import reduce_parts

TINY = "parallel_configs/tiny-moe/cpu.yaml"
ANCHOR = f"algorithm.anchor={ON_POLICY}"
ONE_UPDATE = (*SIZES, f"actor.ppo_mini_batch_size={PROMPTS}")
LOSS = "algorithm.policy_loss."
TINY_MODEL = model_spec(TINY_SIZES)

# --- the loss ---------------------------------------------------------------------------------------------------------

LENGTHS, ADVANTAGE = (4, 2), (1.5, -0.5)
MASK = torch.arange(4)[None] < torch.tensor(LENGTHS)[:, None]


def loss_inputs(old) -> LossInputs:
    log_probs = torch.tensor(
        [[-0.5, -1.0, -0.2, -3.0], [-0.7, -0.1, math.nan, math.nan]], dtype=torch.float64, requires_grad=True
    )
    advantages = torch.tensor(ADVANTAGE, dtype=torch.float64)[:, None].expand(2, 4)
    return LossInputs(log_probs, old and old(log_probs), advantages, MASK, selected=torch.zeros_like(MASK))


def worked(loss_mode: str, old=None) -> tuple[float, torch.Tensor, dict]:
    parameters, inputs = PolicyLossParameters(loss_mode, clip_ratio_low=0.2, clip_ratio_high=0.3), loss_inputs(old)
    output = policy_loss(parameters, inputs, Denominators(sum(LENGTHS), 2))
    (gradient,) = torch.autograd.grad(output.loss, inputs.log_probs)
    return output.loss.item(), gradient, reduce_parts([to_floats(output.metrics)])


@pytest.mark.parametrize("loss_mode", TOKEN_LOSSES)
def test_a_loss_without_old_log_probs_has_the_gradient_of_reinforce(loss_mode):
    """d loss / d log p = -A / (sequences x L) by hand: at a ratio of 1 every loss here is its policy gradient,
    nothing clipped.
    """
    _, gradient, metrics = worked(loss_mode)
    by_hand = torch.tensor(
        [[-a / (2 * length)] * 4 for a, length in zip(ADVANTAGE, LENGTHS, strict=True)], dtype=torch.float64
    )
    torch.testing.assert_close(gradient, torch.where(MASK, by_hand, 0.0), rtol=1e-12, atol=0)
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == metrics["actor/log_seq_ratio_std"] == 0.0


@pytest.mark.parametrize("loss_mode", TOKEN_LOSSES)
def test_it_is_the_loss_of_old_log_probs_with_the_same_bits(loss_mode):
    loss, gradient, metrics = worked(loss_mode)
    given_loss, given_gradient, given_metrics = worked(
        loss_mode, lambda log_probs: torch.tensor(log_probs.tolist(), dtype=torch.float64)
    )
    assert (loss, metrics) == (given_loss, given_metrics) and torch.equal(gradient, given_gradient)


# --- micro-batches and routes -----------------------------------------------------------------------------------------


def test_rejected_tokens_have_log_probs_where_no_pass_gave_them_and_count_in_no_loss():
    batch = TrainBatch.of(packed(samples()[:3]), 1.0)
    keep = np.repeat([True, False, True], batch.response_lengths)
    with_pass = micro_batch(replace(batch, keep=keep, old_log_probs=batch.rollout_log_probs), np.arange(3), Shape(True))
    on_policy = micro_batch(replace(batch, keep=keep), np.arange(3), Shape(True))
    assert (
        np.array_equal(with_pass.response_mask, on_policy.response_mask)
        and with_pass.has_log_probs is with_pass.response_mask
    )
    assert len(with_pass.targets) == with_pass.has_log_probs.sum() == keep.sum()
    assert len(on_policy.targets) == on_policy.has_log_probs.sum() == len(keep)
    assert not micro_batch(replace(batch, keep=keep), np.arange(3), Shape(True), is_filler=True).has_log_probs.any()


@pytest.mark.parametrize("passes", [("recording", "comparing"), ("comparing",)])
def test_how_far_the_engines_routes_are_from_the_trainers_is_counted_once_with_and_without_a_pass(passes):
    model = torch.nn.Sequential(Router())
    model.config = SimpleNamespace(sequence_parallel=False)
    routing = Routing([model], SimpleNamespace(num_experts=4, moe_layers=(0,)), "R3")
    routing.begin_step()
    real, routes = (
        torch.tensor([[True, True, True, False]]),
        torch.tensor([[[[3, 2]], [[0, 1]], [[-1, -1]], [[-1, -1]]]], dtype=torch.int8),
    )
    inputs = SimpleNamespace(content=b"a", real=real, predicting=real, routes=routes)
    scores = torch.arange(16.0).view(4, 4)  # of itself the router takes experts 3 and 2
    for name in passes:
        with getattr(routing, name)(model, inputs):
            next(routing._all()).router_replay.get_replay_topk(scores, 2, None, None, lambda s, k, *_: s.topk(k))
    counts = routing._counts
    assert (int(counts.disagreeing), int(counts.supplied), int(counts.missing), int(counts.routed)) == (1, 2, 1, 3)


# --- a step -----------------------------------------------------------------------------------------------------------


def step_of(replicas: int, *overrides, many=None) -> dict[str, float]:
    """Metrics of a step whose updates do nothing."""
    config = load_config(TINY, None, [*ONE_UPDATE, *overrides]).config
    parts = [{"actor/skipped_updates": (0.0, 1.0)}]
    actor, rollouts = (
        Noisy(config, replicas, lambda counts, replica: parts),
        rollouts_of(stored(many or samples())),
    )
    step, scored = scored_step(actor, rollouts)
    assert ("actor/entropy" in scored.metrics) is (scored.gaps is not None) is not config.algorithm.on_policy
    assert (actor.batches[0].batch.old_log_probs is None) is config.algorithm.on_policy
    return scored.metrics | step.update()


@pytest.mark.parametrize(
    "overrides", [(), ("algorithm.overlong_filter=true", "algorithm.adv_estimator=reinforce_plus_plus")]
)
@pytest.mark.parametrize("replicas", [1, 3])
def test_metrics_of_the_pass_come_from_the_update_to_the_bit_rejected_rows_among_them(replicas, overrides):
    expected, found = step_of(replicas, *overrides), step_of(replicas, ANCHOR, *overrides)
    assert (
        found == expected and {"actor/entropy", "rollout_corr/k3_kl", "training/rollout_probs_diff_std"} <= found.keys()
    )


def test_log_probs_that_are_not_finite_end_the_step_with_the_same_words_as_after_a_pass():
    many = samples()
    row = next(i for i, s in enumerate(many) if len(s.response_ids) > 3)
    many[row] = replace(
        many[row], rollout_log_probs=(*many[row].rollout_log_probs[:2], math.nan, *many[row].rollout_log_probs[3:])
    )
    said = []
    for overrides in ((), (ANCHOR,)):
        with pytest.raises(NumericAbort) as raised:
            step_of(3, *overrides, many=many)
        said.append(str(raised.value))
    assert said[0] == said[1] and f"row {row + 1}, token 2" in said[0]


# --- plan -------------------------------------------------------------------------------------------------------------

DEVICE = find_device("h100-80g")
ACTOR = ActorBytes(
    parameters=10,
    gradients=20,
    optimizer=30,
    activations=40,
    temporaries=5,
    log_prob=7,
    sync_staging=3,
    scores_old=False,
)
ENGINE = EngineBytes(weights=100, working_set=11, cache=200, sync_staging=4, asleep=2)


def totals(phases) -> dict[str, int]:
    return {phase.name: phase.total for phase in phases}


def test_a_device_has_no_phase_of_log_probs_but_the_reference_models():
    with_reference = replace(ACTOR, reference=10)
    assert totals(actor_phases(ACTOR, DEVICE)) == {"train": 105, "sync": 63}
    assert totals(actor_phases(with_reference, DEVICE)) == {"train": 115, "sync": 73, "ref": 60 + 10 + 7}
    shared = colocated_phases(ACTOR, ENGINE, DEVICE)
    assert totals(shared) == {"train": 107, "train_to_sync": 169, "sync_to_rollout": 371, "rollout": 371}
    assert with_optimizer_early([shared], [ACTOR]) == [shared]
    assert totals(colocated_phases(with_reference, ENGINE, DEVICE))["rollout_to_log_prob"] == 70 + 2 + 7
    of_its_own = replace(with_reference, reference_pass=ScoringBytes(log_prob=50, batch=1))
    assert totals(colocated_phases(of_its_own, ENGINE, DEVICE))["rollout_to_log_prob"] == 70 + 2 + 50 + 1


def planned(anchor: str) -> PlanInputs:
    overrides = ["data.train_batch_size=64", "actor.ppo_mini_batch_size=64", f"algorithm.anchor={anchor}"]
    run = load_config("parallel_configs/qwen3-30b-a3b/h100-4x8.yaml", overrides=overrides).config
    return PlanInputs.of(run, planning_model_spec(run.model.path)[0], DEVICE)


def test_a_plan_has_neither_seconds_nor_memory_of_the_pass():
    given, found = planned("recompute"), planned(ON_POLICY)
    for part in (step_flops, partial(phase_seconds, engine=engine_of(given))):
        before, after = (
            part(given, batch_plan(given.config, given.train)),
            part(found, batch_plan(found.config, found.train)),
        )
        assert before.pop("log_prob") > 0 and after == before
    phases, fewer = (memory_section(inputs)["phases"] for inputs in (given, found))
    assert phases.keys() - fewer.keys() == {"log_prob", "rollout_to_log_prob"} and fewer.keys() < phases.keys()
    # what a pass records of routers
    assert "routes" in phases["train"]["terms"] and "routes" not in fewer["train"]["terms"]


KL = ("algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1")
TEACHER = ("distillation.enabled=true", "distillation.teacher_model.model_path=Qwen/Qwen3-30B-A3B")


@pytest.mark.parametrize("anchor", ["recompute", ON_POLICY])
@pytest.mark.parametrize(
    "others", [(), KL, (*KL, "actor.lora.rank=8"), TEACHER], ids=["", "KL", "adapters off", "teacher"]
)
def test_a_run_that_scores_before_its_update_has_a_plan_for_that(anchor, others):
    run = ["data.train_batch_size=64", "actor.ppo_mini_batch_size=64", f"algorithm.anchor={anchor}", *others]
    config = load_config("parallel_configs/qwen3-30b-a3b/h100-4x8.yaml", overrides=run).config
    phases = memory_section(PlanInputs.of(config, planning_model_spec(config.model.path)[0], DEVICE))["phases"]
    assert ("rollout_to_log_prob" in phases) == config.scores_before_update


# --- what is refused --------------------------------------------------------------------------------------------------


def broken(*overrides, updates=1) -> dict:
    batch = ("data.train_batch_size=64", f"actor.ppo_mini_batch_size={64 // updates}")
    return {v.field: v for v in violations(load_config(TINY, overrides=[*batch, ANCHOR, *overrides]), TINY_MODEL)}


REFUSED = [
    ((), 4, "actor.ppo_mini_batch_size", (64,)),
    (("algorithm.rollout_correction={level: token, high: 2}",), 1, "algorithm.rollout_correction.level", (None,)),
    (("algorithm.rollout_correction={level: token, mode: mask, low: 0.5, high: 2}",), 1,
        "algorithm.rollout_correction.level", (None,)),
    (("algorithm.use_kl_in_reward=true",), 1, "algorithm.use_kl_in_reward", (False,)),
    (("record.trainer_log_probs=true",), 1, "record.trainer_log_probs", (False,)),
    *(((f"{LOSS}loss_mode={name}", f"{LOSS}loss_agg_mode=token-mean", f"{LOSS}clip_ratio_high=0.2",
                f"{LOSS}clip_ratio_low=0.2"), 1,
       f"{LOSS}loss_mode", None) for name in SELECTIONS),
    (("actor.router_replay=R2",), 1, "actor.router_replay", ("disabled", "R3")),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "updates", "field", "allowed"), REFUSED)
def test_what_reads_old_log_probs_before_the_one_update_is_refused_by_its_key(overrides, updates, field, allowed):
    (violation,) = broken(*overrides, updates=updates).values()
    assert violation.field == field and ANCHOR.replace("=", ": ") in violation.rule and violation.why
    assert allowed is None or violation.allowed == allowed


def test_the_table_of_losses_says_which_select_tokens():
    assert {name for name, spec in LOSSES.items() if spec.selects_tokens} == set(SELECTIONS)


def test_what_needs_no_old_log_probs_goes_with_it():
    kl = ("algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1")
    assert broken() == broken(*kl, "algorithm.overlong_filter=true", "algorithm.filter_groups.enable=true") == {}
    for anchor, said in (("recompute", True), (ON_POLICY, False)):
        resolved = load_config(TINY, overrides=["actor.ppo_mini_batch_size=64", f"algorithm.anchor={anchor}"])
        assert any("without the pass" in note for note in notes(resolved, TINY_MODEL)) is said
