"""On-policy distillation: what a teacher's log-probs do to advantages and to the loss, how they come to the ranks that
train, which teachers are refused, what a plan counts, and verl's keys.
"""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import random as generators
from replicas import Replicas, scored_step, stored
from small_model import SIZES, write_model
from test_config_rules import TINY_MODEL
from test_losses import make
from test_step_batch import SIZES as STEP
from test_step_batch import rollouts_of, samples

from mrl.algo.aggregate import count, to_floats
from mrl.algo.distillation import distillation_metrics, distilled_of_rows, gaps_of_rows, mass_of_rows
from mrl.algo.losses import distilled, forward_kl_over_top_k, kl_over_top_k, kl_to_teacher, policy_loss
from mrl.algo.plain import Denominators, PolicyLossParameters
from mrl.cli.plan import plan_lines
from mrl.config.describe import describe_loss
from mrl.config.load import load_config
from mrl.config.model_folders import folders_of_weights
from mrl.config.rules import notes, violations
from mrl.config.schema import with_values
from mrl.data.samples import packed
from mrl.driver.preflight import _without_teacher
from mrl.errors import ConfigError, NumericAbort
from mrl.generate.rollouts import compared
from mrl.model import model_spec, parameter_count, planning_model_spec
from mrl.model.layout import TrainLayout
from mrl.plan.devices import default_device
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import PlanInputs, batch_plan, device_for, engine_of
from mrl.plan.run_plan import make_plan
from mrl.plan.times import phase_seconds, step_flops
from mrl.platforms.versions import MEGATRON
from mrl.rank import parallel
from mrl.rank.cut import RowLengths, teacher_cut
from mrl.rank.handed_rows import HandedRows
from mrl.rank.loss_parameters import loss_parameters
from mrl.rank.teacher import Teacher
from mrl.record.metrics import reduce_parts
from mrl.reward.items import LEFT_OUT, OK, RewardResult
from mrl.tools import run_search
from mrl.tools.import_verl.report import KINDS
from mrl.tools.import_verl.translate import import_overrides
from mrl.tools.rehearse.compose import WorkFolder, compose
from mrl.tools.search import search
from mrl.tools.search_report import search_problem

TINY = "parallel_configs/tiny-moe/cpu.yaml"
TEACHER = "distillation.teacher_model."
LOSS = "distillation.distillation_loss."
DENSE = {key: value for key, value in SIZES.items() if "expert" not in key and key != "moe_intermediate_size"} | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 96,
}  # fmt: skip


# ---------------------------------------------------------------- formulas


def test_the_policy_gradient_of_k1_is_the_gradient_of_the_reverse_kl():
    """Over all words of one place, each as often as the student samples it, against autograd of the KL itself."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - teacher)).sum()
    expected = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    old = log_p.detach()
    taken_off = torch.from_numpy(distilled(old.numpy(), teacher.numpy(), "k1", None))
    inputs = make(log_p[:, None], old[:, None], -taken_off[:, None], weights=old.exp()[:, None])
    parameters = PolicyLossParameters("vanilla", "token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2)
    found = torch.autograd.grad(policy_loss(parameters, inputs, Denominators(1, 1)).loss, logits)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_k2_as_a_loss_has_the_gradient_of_the_reverse_kl_too():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - teacher)).sum()
    expected = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    sampled = (log_p.detach().exp() * kl_to_teacher(log_p, teacher, "k2")).sum()
    torch.testing.assert_close(torch.autograd.grad(sampled, logits)[0], expected, rtol=1e-12, atol=1e-12)


def top_k_of(seed, words=9, places=4):
    """Log-probs of two distributions at each place, and what both give to all words but the first three."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, 2, places, words, generator=generator, dtype=torch.float64).log_softmax(-1)
    return *both, *(1 - each[..., :3].exp().sum(-1) for each in both)


def test_the_kl_over_words_has_all_others_as_one_word():
    """Value and gradient against the formula of two distributions written anew."""
    student, teacher, left, kept = top_k_of(2)
    among = student[..., :3].clone().requires_grad_()
    found = kl_over_top_k(among, teacher[..., :3])
    expected = left * torch.log(left / kept)
    for word in range(3):
        expected = expected + student[..., word].exp() * (student[..., word] - teacher[..., word])
    torch.testing.assert_close(found.detach(), expected)
    whole = (student.exp() * (student - teacher)).sum(-1)
    assert (found > 0).all() and (found < whole).all()
    gradient = torch.autograd.grad(found.sum(), among)[0]
    p = student[..., :3].exp()
    apart = student[..., :3] - teacher[..., :3] + 1 - (torch.log(left / kept) + 1)[..., None]
    torch.testing.assert_close(gradient, p * apart)
    torch.testing.assert_close(kl_over_top_k(student, teacher), whole, rtol=0, atol=3e-5)  # of all words
    assert kl_over_top_k(student[..., :3], student[..., :3]).abs().max() < 1e-12


def test_the_forward_kl_over_words_is_the_teachers_and_leaves_the_others_out():
    student, teacher, _, _ = top_k_of(2)
    found = forward_kl_over_top_k(student[..., :3], teacher[..., :3])
    expected = sum(teacher[..., word].exp() * (teacher[..., word] - student[..., word]) for word in range(3))
    torch.testing.assert_close(found, expected.clamp(min=0.0))
    assert (expected > 0).all()
    assert forward_kl_over_top_k(torch.tensor([[-0.1]]), torch.tensor([[-2.0]])).tolist() == [0.0]  # e^-2 x -1.9
    whole = (teacher.exp() * (teacher - student)).sum(-1)
    torch.testing.assert_close(forward_kl_over_top_k(student, teacher), whole)
    far = torch.tensor([-20.0, -1.0], dtype=torch.float64, requires_grad=True)
    held = forward_kl_over_top_k(far, torch.tensor([-0.5, -2.0], dtype=torch.float64), least=-10.0)
    assert held.item() == pytest.approx(math.exp(-0.5) * 9.5 + math.exp(-2.0) * -1.0)
    (gradient,) = torch.autograd.grad(held, far)
    assert gradient.tolist() == pytest.approx([0.0, -math.exp(-2.0)])


def test_a_loss_over_words_has_its_gradient_through_each_words_log_prob():
    student, teacher, _, _ = top_k_of(3)
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    words = student[..., :3].clone().requires_grad_()
    inputs = make(
        student[..., 0],
        student[..., 0],
        0.0,
        mask,
        top_log_probs=torch.where(mask[..., None], words, torch.nan),
        teacher_top_log_probs=teacher[..., :3],
    )
    parameters = PolicyLossParameters(
        "vanilla", "token-mean", distillation_coef=0.4, distillation_mode="reverse_kl_topk"
    )
    output = policy_loss(parameters, inputs, count(mask))
    leaf = student[..., :3].clone().requires_grad_()
    expected = 0.4 * (kl_over_top_k(leaf, teacher[..., :3]) * mask).sum() / 4
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(torch.autograd.grad(output.loss, words)[0], torch.autograd.grad(expected, leaf)[0])
    assert reduce_parts([to_floats(output.metrics)])["distillation/loss"] == pytest.approx(expected.item() / 0.4)


@pytest.mark.parametrize(
    ("mode", "formula"),
    [
        ("k2", lambda d: 0.5 * d**2),
        ("k3", lambda d: torch.exp(-d) - 1 + d),
        ("low_var_kl", lambda d: torch.exp(-d) - 1 + d),
        ("mse", lambda d: 0.5 * d**2),
    ],
)
def test_the_teachers_term_stands_in_the_loss_under_its_weight_and_bound(mode, formula):
    """Value and gradient against the formula written anew, with a token beyond the bound, which has no gradient."""
    log_probs = torch.tensor([[-1.0, -0.3, -2.0], [-0.5, -1.5, 7.0]], dtype=torch.float64)
    teacher = torch.tensor([[-1.2, -3.0, -1.9], [-0.5, -9.0, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    inputs = make(log_probs, log_probs, 0.7, mask, teacher_log_probs=teacher)
    parameters = PolicyLossParameters(
        "vanilla", "token-mean", distillation_coef=0.3, distillation_mode=mode, distillation_clamp=4.0
    )
    output = policy_loss(parameters, inputs, count(mask))
    leaf = log_probs.clone().requires_grad_()
    value = torch.where(mask, formula(leaf - torch.where(mask, teacher, 0.0)), 0.0)
    assert value[1, 1] > 4.0
    term = torch.where(value > 4.0, 4.0, value).sum() / 5
    expected = (-0.7 * torch.exp(leaf - log_probs) * mask).sum() / 5 + 0.3 * term
    torch.testing.assert_close(output.loss, expected)
    own = torch.autograd.grad(output.loss, inputs.log_probs)[0]
    torch.testing.assert_close(own, torch.autograd.grad(expected, leaf)[0])
    assert reduce_parts([to_floats(output.metrics)])["distillation/loss"] == pytest.approx(term.item())


def test_a_term_of_the_loss_is_bounded_on_both_sides():
    """By hand, as verl clamps a loss of distillation: k1 of -8, 0.5 and 7 within 4; beyond there is no gradient."""
    log_probs = torch.tensor([[-9.0, -0.5, -1.0]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    inputs = make(log_probs, log_probs, 0.0, mask, teacher_log_probs=torch.tensor([[-1.0, -1.0, -8.0]]).double())
    parameters = PolicyLossParameters(
        "vanilla", "token-mean", distillation_coef=0.3, distillation_mode="k1", distillation_clamp=4.0
    )
    output = policy_loss(parameters, inputs, count(mask))
    assert output.loss.item() == pytest.approx(0.3 * (-4.0 + 0.5 + 4.0) / 3)
    gradient = torch.autograd.grad(output.loss, inputs.log_probs)[0]
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.1, 0.0]]).double())


def test_a_weight_without_the_teachers_log_probs_is_an_error_and_no_loss_without_it():
    with pytest.raises(ConfigError, match="teacher_log_probs"):
        policy_loss(PolicyLossParameters(distillation_coef=1.0), make([[0.0]]), Denominators(1, 1))


def test_the_loss_has_the_term_only_where_it_is_asked_for():
    config = load_config(TINY, None, ["distillation.enabled=true", f"{LOSS}use_policy_gradient=false",
        f"{LOSS}loss_mode=k3", f"{LOSS}distillation_loss_coef=0.5", f"{LOSS}loss_max_clamp=9"]).config  # fmt: skip
    given = loss_parameters(config.algorithm, config.distillation)
    assert (given.distillation_coef, given.distillation_mode, given.distillation_clamp) == (0.5, "k3", 9.0)
    for change in ({"enabled": False}, {"distillation_loss": config.distillation.distillation_loss.model_copy(
            update={"use_policy_gradient": True})}):  # fmt: skip
        other = config.distillation.model_copy(update=change)
        assert loss_parameters(config.algorithm, other).distillation_coef == 0.0


# ---------------------------------------------------------------- a step on replicas


def opinion(token_ids: np.ndarray) -> np.ndarray:
    """A teacher that likes some words more than others, wherever they stand."""
    return (-0.1 - (token_ids % 17) / 5).astype(np.float32)


class Opinionated:
    """Stands in for a rank's Teacher: scores words by `opinion`, on the rank that hands out its replica's."""

    def __init__(self, layout: TrainLayout, rank: int, asked: list, words: int = 0):
        self.words = words
        place = layout.dense_coords(rank)
        self.holds_result = place.tp == place.cp == 0 and place.pp == layout.pipeline - 1
        self.asked = asked

    def prepared(self, batch):
        return batch

    def columns(self, batch, micros):
        rows = np.concatenate([np.zeros(0, np.int64), *(m.rows for m in micros if not m.is_filler)])
        if not self.holds_result:
            return None
        self.asked.append(len(rows))
        ends = np.cumsum(batch.lengths)
        words = [batch.token_ids[ends[r] - batch.response_lengths[r] : ends[r]] for r in rows]
        kept = [batch.is_sampled[batch.token_indices(np.array([r]))] for r in rows]
        parts = [opinion(word)[own] for word, own in zip(words, kept, strict=True)]
        chosen = np.concatenate(parts)
        if not self.words:
            return rows, {"teacher_log_probs": chosen}
        numbers = np.arange(self.words)
        ids = (np.rint(chosen * -50).astype(np.int32)[:, None] + numbers).astype(np.int32)
        top_log_probs = (chosen[:, None] - 2 - numbers).astype(np.float32)
        return rows, {"teacher_log_probs": chosen, "teacher_top_ids": ids, "teacher_top_log_probs": top_log_probs}


class Taught(Replicas):
    """Ranks that are replicas of the actor, with a teacher that lies on them in another way."""

    def __init__(self, config, data, degrees=None, **gaps):
        super().__init__(config, data, **gaps)
        model = model_spec(DENSE)
        layout = TrainLayout.build({"world_size": data} | (degrees or {}), model)
        self.teacher = SimpleNamespace(model=model, layout=layout)
        self.asked: list[int] = []
        for rank, actor in enumerate(self.actors):
            words = config.distillation.distillation_loss.topk * config.distillation.over_top_k
            actor.teacher = Opinionated(layout, rank, self.asked, words)


def taught(data, degrees=None, *overrides, given=None):
    """Metrics, and columns of the step's tokens, after everything up to the update."""
    config = load_config(TINY, None, [*STEP, "distillation.enabled=true", *overrides]).config
    actor = Taught(config, data, degrees)
    rollouts = rollouts_of(stored(given or samples()))
    step, scored = scored_step(actor, rollouts)
    held = [step.cut.needed_rows(replica) for replica in range(data)]
    names = ("old_log_probs", "advantages", "teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs")
    columns = {name: actor.of_tokens(name, held) for name in names if getattr(actor.batches[0].batch, name) is not None}
    return scored.metrics, columns, actor


LAYOUTS = [(1, {}), (2, {}), (4, {}), (4, {"tensor_model_parallel_size": 2}), (2, {"pipeline_model_parallel_size": 2}),
    (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}), (3, {})]  # fmt: skip


@pytest.mark.parametrize(("data", "degrees"), LAYOUTS)
def test_every_token_has_the_teachers_word_wherever_the_teacher_lies(data, degrees):
    _, columns, actor = taught(data, degrees, f"{LOSS}use_policy_gradient=false", f"{LOSS}loss_mode=k2")
    whole = packed(samples())
    ends = np.cumsum(whole.lengths)
    words = [whole.token_ids[end - n : end] for end, n in zip(ends, whole.response_lengths, strict=True)]
    np.testing.assert_array_equal(columns["teacher_log_probs"], opinion(np.concatenate(words)))
    assert sum(actor.asked) == len(whole)  # every row is scored once
    assert len(actor.asked) == actor.teacher.layout.data


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [(False, (0.0, 1.0)), (True, (1.0, 1.0)), (True, (0.5, 2.0))],
)
def test_advantages_are_those_of_rewards_less_the_kl_each_under_its_weight(rewards, weights):
    own, teacher = weights
    _, without, _ = taught(2, {}, f"{LOSS}use_policy_gradient=false", f"{LOSS}loss_mode=k2")
    settings = [f"{LOSS}use_task_rewards={str(rewards).lower()}", f"{LOSS}distillation_loss_coef={teacher}"]
    settings += [f"{LOSS}task_rewards_coef={own}"] * rewards
    metrics, columns, _ = taught(2, {}, *settings)
    gaps = without["old_log_probs"].astype(np.float64) - without["teacher_log_probs"]
    expected = own * without["advantages"].astype(np.float64) - teacher * gaps
    np.testing.assert_allclose(columns["advantages"], expected, rtol=1e-5, atol=1e-6)
    assert "teacher_log_probs" not in columns  # nothing of it goes to the update
    assert metrics["distillation/reverse_kl"] == pytest.approx(gaps.mean())
    assert metrics["distillation/loss"] == pytest.approx(gaps.mean())
    assert metrics["distillation/abs_loss"] == pytest.approx(np.abs(gaps).mean())
    assert metrics["distillation/loss_min"] == pytest.approx(gaps.min())
    assert metrics["distillation/loss_max"] == pytest.approx(gaps.max())


def test_tokens_have_the_same_bits_wherever_rows_lie():
    one = taught(1)[:2]
    for data, degrees in LAYOUTS[1:]:
        metrics, columns, _ = taught(data, degrees)
        assert metrics == one[0]
        for name, values in one[1].items():
            np.testing.assert_array_equal(columns[name], values, err_msg=name)


def test_the_bound_holds_on_both_sides():
    metrics, columns, _ = taught(2, {}, f"{LOSS}loss_max_clamp=0.25", f"{LOSS}use_task_rewards=false")
    assert np.abs(columns["advantages"]).max() == np.float32(0.25)
    assert (metrics["distillation/loss_min"], metrics["distillation/loss_max"]) == (-0.25, 0.25)
    free = taught(2)[0]
    assert metrics["distillation/reverse_kl"] == free["distillation/reverse_kl"] != metrics["distillation/loss"]


def test_context_between_turns_is_not_asked_about_and_has_no_advantage():
    rows = []
    for number, sample in enumerate(samples()):
        sampled = np.arange(len(sample.response_ids)) % 3 != number % 3
        rows.append(replace(sample, sampled=tuple(sampled.tolist())) if sampled.any() else sample)
    whole = packed(rows)
    assert not whole.is_sampled.all()
    metrics, columns, _ = taught(2, {}, f"{LOSS}use_task_rewards=false", given=rows)
    assert not columns["advantages"][~whole.is_sampled].any()
    ends = np.cumsum(whole.lengths)
    words = np.concatenate(
        [whole.token_ids[end - n : end] for end, n in zip(ends, whole.response_lengths, strict=True)]
    )
    gaps = (columns["old_log_probs"].astype(np.float64) - opinion(words))[whole.is_sampled]
    assert metrics["distillation/reverse_kl"] == pytest.approx(gaps.mean())
    np.testing.assert_allclose(columns["advantages"][whole.is_sampled], -gaps, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("data", "degrees"), LAYOUTS)
def test_the_teachers_likeliest_words_come_to_each_token_too(data, degrees):
    loss = [f"{LOSS}use_policy_gradient=false", f"{LOSS}loss_mode=reverse_kl_topk", f"{LOSS}topk=3"]
    metrics, columns, _ = taught(data, degrees, *loss)
    whole = packed(samples())
    ends = np.cumsum(whole.lengths)
    words = np.concatenate(
        [whole.token_ids[end - n : end] for end, n in zip(ends, whole.response_lengths, strict=True)]
    )
    first = np.rint(opinion(words) * -50).astype(np.int32)
    np.testing.assert_array_equal(columns["teacher_top_ids"], first[:, None] + np.arange(3))
    expected = opinion(words)[:, None] - np.float32(2) - np.arange(3)
    np.testing.assert_allclose(columns["teacher_top_log_probs"], expected, rtol=1e-6)
    assert columns["teacher_top_log_probs"].dtype == np.float32
    assert "teacher_log_probs" not in columns
    assert metrics["distillation/teacher_mass"] == pytest.approx(np.exp(expected).sum(-1).mean())
    gaps = columns["old_log_probs"] - opinion(words)
    assert metrics["distillation/reverse_kl"] == pytest.approx(gaps.mean(), rel=1e-5)


def test_words_that_a_teacher_cannot_score_end_the_run(monkeypatch):
    monkeypatch.setattr("test_distillation.opinion", lambda ids: np.full(len(ids), np.nan, np.float32))
    with pytest.raises(NumericAbort, match=r"teacher's log-probs of .* are no finite numbers"):
        taught(2)


@pytest.mark.parametrize("data", [1, 2, 4])
def test_a_teacher_of_as_many_replicas_scores_its_actors_own_rows(data):
    """So no score has to travel. With another number each row is scored by one replica."""
    config = load_config(TINY, None, [*STEP, "distillation.enabled=true"]).config
    lengths = RowLengths.of(packed(samples()))
    rows = np.random.default_rng(0).permutation(len(samples()))
    own = [np.sort(part) for part in np.array_split(rows, data)]
    for replicas in (data, 3):
        layout = TrainLayout.build({"world_size": replicas}, model_spec(DENSE))
        teacher = SimpleNamespace(model=model_spec(DENSE), layout=layout)
        shares = teacher_cut(config.actor, config.distillation.teacher_model, teacher, lengths, own)
        scored = [numbers.tolist() for numbers, _ in shares]
        assert sorted(row for rows_of in scored for row in rows_of) == list(range(len(rows)))
        if replicas == data:
            assert scored == [part.tolist() for part in own]
        for numbers, cut in shares:
            real = [micro.rows for micro in cut.log_probs if not micro.is_filler]
            assert sorted(np.concatenate(real).tolist()) == list(range(len(numbers)))  # indices into its rows


def test_what_is_reported_of_a_teacher_is_of_trained_tokens_alone():
    """By hand: two rows of 3 and 2 tokens, of which the second and the last are context."""
    mask = np.array([True, False, True, True, False])
    lengths = np.array([3, 2])
    own, teacher = np.array([-1.0, -9.0, -2.0, -3.0, -9.0]), np.array([-2.0, -1.0, -0.5, -3.5, -1.0])
    of_rows = gaps_of_rows(own.astype(np.float32), teacher.astype(np.float32), mask, lengths)
    assert of_rows["reverse_kl"].tolist() == [1.0 - 1.5, 0.5]
    words = np.log(np.array([[0.5, 0.25], [0.1, 0.1], [0.5, 0.5], [0.25, 0.25], [0.1, 0.1]]))
    of_rows |= mass_of_rows(words, mask, lengths)
    np.testing.assert_allclose(of_rows["teacher_mass"], [1.75, 0.5])
    of_rows |= distilled_of_rows(np.array([1.0, 7.0, -2.0, 0.5, -7.0]), mask, lengths)
    metrics = distillation_metrics(of_rows | {"trained": np.array([2, 1])})
    assert metrics == {
        "distillation/reverse_kl": 0.0, "distillation/teacher_mass": pytest.approx(0.75),
        "distillation/loss": pytest.approx(-0.5 / 3), "distillation/abs_loss": pytest.approx(3.5 / 3),
        "distillation/loss_min": -2.0, "distillation/loss_max": 1.0,
    }  # fmt: skip


def test_scores_of_some_rows_are_those_of_these_rows():
    part = HandedRows(np.array([2, 5, 7]), np.array([2, 0, 3]), {"scores": np.arange(5, dtype=np.float32)})
    assert part.among(np.array([1, 5, 7])).columns["scores"].tolist() == [2, 3, 4]
    assert part.among(np.array([2])).columns["scores"].tolist() == [0, 1]
    assert part.among(np.array([9])).rows.tolist() == []


# ---------------------------------------------------------------- groups


def test_groups_and_generators_of_a_second_model_stand_in_for_the_firsts_and_give_them_back(tmp_path, monkeypatch):
    def tracked(*_, **__):  # without the seeds, which want a CUDA device
        generators.initialize_rng_tracker(force_reset=True)

    monkeypatch.setattr(parallel, "model_parallel_cuda_manual_seed", tracked)
    for name in parallel._GENERATORS:
        monkeypatch.setattr(generators, name, None)
    layout = TrainLayout.build({"world_size": 1}, model_spec(DENSE))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        others = parallel.OtherGroups()
        with others.in_place():
            parallel.init_model_parallel(layout, 0, 60)
            theirs = mpu.get_tensor_model_parallel_group(), generators.get_cuda_rng_tracker()
        assert not mpu.model_parallel_is_initialized()
        parallel.init_model_parallel(layout, 0, 60)
        own = mpu.get_tensor_model_parallel_group(), generators.get_cuda_rng_tracker()
        with pytest.raises(KeyError), others.in_place():
            assert (mpu.get_tensor_model_parallel_group(), generators.get_cuda_rng_tracker()) == theirs
            with pytest.raises(RuntimeError, match="in place already"), others.in_place():
                pass
            assert mpu.get_tensor_model_parallel_group() is theirs[0]
            raise KeyError
        assert (mpu.get_tensor_model_parallel_group(), generators.get_cuda_rng_tracker()) == own
        assert all(mine is not other for mine, other in zip(own, theirs, strict=True))
    finally:
        parallel.close()


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """A student, and a teacher of another family and size with the same tokenizer."""
    for name in ("student", "teacher"):
        write_model(tmp_path / name)
    put_sizes(tmp_path / "teacher", DENSE)
    return tmp_path / "student", tmp_path / "teacher"


def put_sizes(folder: Path, sizes: dict) -> None:
    (folder / "config.json").write_text(json.dumps(sizes))


def judged(folders, *overrides, check_paths=False):
    student, teacher = folders
    given = ["distillation.enabled=true", f"{TEACHER}model_path={teacher}", f"model.path={student}", *overrides]
    return violations(load_config(TINY, None, given), TINY_MODEL, check_paths)


def only_on_teacher(folders, *overrides, check_paths=False) -> str:
    found = [v for v in judged(folders, *overrides, check_paths=check_paths) if v.field.startswith(("dist", "algo"))]
    assert len(found) == 1, found
    return f"{found[0].field}: {found[0].rule} {found[0].why}"


def test_an_evaluation_asks_for_no_teacher(folders):
    given = ["distillation.enabled=true", f"{TEACHER}model_path=/nowhere/teacher", f"model.path={folders[0]}"]
    resolved = load_config(TINY, None, [*given, f"{TEACHER}layout={{world_size: 1}}"])
    assert [v.field for v in violations(resolved, TINY_MODEL)] == ["distillation.teacher_model.model_path"]
    assert violations(_without_teacher(resolved), TINY_MODEL) == []


def test_a_teacher_of_another_family_and_layout_is_legal(folders):
    layout = f"{TEACHER}layout={{tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2}}"
    legal = judged(folders, layout, check_paths=True)
    assert not [v for v in legal if v.field.startswith("distillation")]
    assert judged(folders) == []
    config = load_config(TINY, None, ["distillation.enabled=true", f"{TEACHER}model_path={folders[1]}"]).config
    assert folders_of_weights(config)[f"{TEACHER}model_path"] == folders[1]


CASES = [
    ([f"{TEACHER}model_path=null"], "must be set with distillation.enabled: true"),
    ([f"{TEACHER}model_path=/nowhere/teacher"], "cannot be used"),
    ([f"{TEACHER}layout={{world_size: 4}}"], "layout.world_size: must be actor.layout.world_size = 2"),
    (["actor.layout.expert_model_parallel_size=1", f"{TEACHER}layout={{expert_model_parallel_size: 2}}"],
        "layout.expert_model_parallel_size"),
    ([f"{LOSS}use_policy_gradient=false"], "loss_mode: must not be kl or k1 without use_policy_gradient"),
    (["algorithm.anchor=on_policy", "actor.ppo_mini_batch_size=64"], "must be false with algorithm.anchor: on_policy"),
    ([f"{TEACHER}log_prob_max_token_len_per_gpu=64"], "needs actor.use_dynamic_bsz: true"),
    (["actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=64",
        f"{TEACHER}log_prob_max_token_len_per_gpu=8"], "must be at least 20"),
    (["algorithm.filter_groups.enable=true", f"{LOSS}use_task_rewards=false"], "where rewards do not count"),
    ([f"{TEACHER}override_transformer_config={{moe_permute_fusion: true}}"], "the teacher is dense"),
    ([f"{TEACHER}override_transformer_config={{no_such: 1}}"], "is no field of TransformerConfig"),
    ([f"{TEACHER}override_transformer_config={{recompute_granularity: full, recompute_num_layers: 1}}"],
        "teacher_model.override_transformer_config.recompute_method: must say how"),
    (["algorithm.adv_estimator=gae", f"{LOSS}use_task_rewards=false"], "a critic would be trained"),
    (["algorithm.use_kl_in_reward=true", f"{LOSS}use_task_rewards=false"], "use_kl_in_reward: must be false where"),
    (["algorithm.use_kl_in_reward=true", f"{LOSS}task_rewards_coef=0"], "use_kl_in_reward: must be false where"),
    ([f"{TEACHER}layout={{world_size: 4, tensor_model_parallel_size: 4}}", "actor.layout.world_size=4",
        "cluster.versions.megatron-core=0.15.0"], "tensor_model_parallel_size: must divide num_key_value_heads = 2"),
    (["cluster.device=npu", f"{TEACHER}layout={{tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2, "
        "virtual_pipeline_model_parallel_size: 2}"], "virtual_pipeline_model_parallel_size: must be left out on npu"),
    ([f"{LOSS}loss_mode=forward_kl"], "loss_mode: unknown name"),
    ([f"{LOSS}loss_mode=forward_kl_topk"], "use_policy_gradient: must be false with loss_mode forward_kl_topk"),
    ([f"{LOSS}log_prob_min_clamp=-10"], "log_prob_min_clamp: needs loss_mode forward_kl_topk"),
    ([f"{LOSS}loss_mode=reverse_kl_topk"], "use_policy_gradient: must be false with loss_mode reverse_kl_topk"),
    ([f"{LOSS}loss_mode=reverse_kl_topk", f"{LOSS}use_policy_gradient=false", f"{LOSS}topk=129"],
        "topk: must be at most 128"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "said"), CASES, ids=[str(i) for i in range(len(CASES))])
def test_what_makes_no_sense_is_said_in_one_message(folders, overrides, said):
    if "expert_model" in overrides[0]:
        put_sizes(folders[1], DENSE)
    assert said in only_on_teacher(folders, *overrides)


def test_what_an_actor_does_with_its_routers_says_nothing_of_a_teachers(folders):
    """A teacher of the student's own model, whose routers may be fused while the student's replay."""
    student = (folders[0], folders[0])
    fused = f"{TEACHER}override_transformer_config={{moe_router_fusion: true}}"
    given = ["cluster.device=cuda", "model.allow_torch_layers=false", fused]
    for replay in ("disabled", "R2", "R3"):
        found = judged(student, *given, f"actor.router_replay={replay}")
        assert not [v for v in found if v.field.startswith("distillation")], found
    found = judged(
        student, *given, "actor.router_replay=R2", "model.override_transformer_config.moe_router_fusion=true"
    )
    assert [v.field for v in found if "fusion" in v.field] == ["model.override_transformer_config.moe_router_fusion"]


def test_one_response_a_prompt_is_enough_where_the_teacher_alone_counts(folders):
    assert judged(folders, "rollout.n=1", f"{LOSS}use_task_rewards=false") == []
    assert [v.field for v in judged(folders, "rollout.n=1")] == ["rollout.n"]


@pytest.mark.parametrize("alone", [True, False])
def test_the_only_judged_response_of_a_prompt_is_trained_on_where_the_teacher_alone_counts(alone):
    weigh = [f"{LOSS}use_task_rewards=false"] * alone
    config = load_config(TINY, None, [*STEP, "distillation.enabled=true", *weigh]).config
    results = [RewardResult(number, 0.0, {}, OK if number == 1 else LEFT_OUT) for number in range(4)]
    counted = compared(np.zeros(4, dtype=np.int64), results, config.compares_responses)
    assert counted.tolist() == [False, alone, False, False]


def test_a_teacher_of_fewer_words_or_places_is_refused(folders):
    put_sizes(folders[1], DENSE | {"vocab_size": 64})
    assert "a vocabulary of 64 tokens, and model.path one of 128" in only_on_teacher(folders)
    put_sizes(folders[1], DENSE | {"vocab_size": 192})  # padded further: it knows every word
    assert judged(folders) == []
    put_sizes(folders[1], DENSE | {"max_position_embeddings": 16})
    assert "16 positions, and the longest sample has 20" in only_on_teacher(folders)


def test_a_teacher_that_numbers_words_otherwise_is_refused(folders):
    file = folders[1] / "tokenizer.json"
    described = json.loads(file.read_text())
    vocab = described["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(described))
    assert "has another tokenizer than model.path: 2 of" in only_on_teacher(folders, check_paths=True)
    file.unlink()
    assert "has no tokenizer.json" in only_on_teacher(folders, check_paths=True)


def test_what_is_set_without_a_teacher_and_what_a_loss_makes_of_one_is_said():
    assert any("no teacher is loaded" in note for note in said(f"{LOSS}loss_mode=k2"))
    assert not any("distillation" in note for note in said())
    taught_by = ["distillation.enabled=true", f"{TEACHER}model_path=Qwen/Qwen3-30B-A3B"]
    geo_mean = "algorithm.policy_loss.loss_mode=geo_mean"
    assert any("gspo keeps them apart" in note for note in said(*taught_by, geo_mean))
    assert not any("keeps them apart" in note for note in said(*taught_by))
    assert any("k1 is" in note for note in said(*taught_by, f"{LOSS}loss_mode=k3"))


def test_the_loss_in_words_has_the_teacher():
    given = ["distillation.enabled=true", f"{LOSS}distillation_loss_coef=0.5", f"{LOSS}use_task_rewards=false"]
    assert describe_loss(load_config(TINY, None, given).config).endswith(
        "k1 to a teacher x 0.5 in advantages, rewards x 0"
    )
    given = ["distillation.enabled=true", f"{LOSS}use_policy_gradient=false", f"{LOSS}loss_mode=k2"]
    assert describe_loss(load_config(TINY, None, given).config).endswith("k2 to a teacher x 1 in the loss")


def said(*overrides) -> list[str]:
    return [n for n in notes(load_config(TINY, None, overrides), TINY_MODEL) if "distillation" in n]


# ---------------------------------------------------------------- plan, rehearsal, verl


@pytest.mark.parametrize("switched", [(), ("parameters",)])
def test_a_teacher_leaves_no_buffer_of_its_pass_wherever_its_weights_lie(monkeypatch, switched):
    buffer = SimpleNamespace(buffer={})
    monkeypatch.setattr(mpu, "get_global_memory_buffer", lambda: buffer)
    monkeypatch.setattr("mrl.rank.teacher.check_batch", lambda *_, **__: None)
    monkeypatch.setattr("mrl.rank.teacher.log_prob_pass", lambda *_, **__: buffer.buffer.update(gathered=b"large"))
    monkeypatch.setattr(parallel, "holds_result", lambda: False)
    teacher = object.__new__(Teacher)
    teacher.model = SimpleNamespace(vocab_size=8)
    teacher._chunks = teacher._likeliest = None
    teacher._inputs = lambda *_: None
    teacher._groups = SimpleNamespace(in_place=nullcontext)
    teacher._residence = SimpleNamespace(using=nullcontext, switched=switched, offload=lambda: None)
    assert teacher.columns(None, ()) is None
    assert not buffer.buffer


def planned(folders, *overrides) -> PlanInputs:
    given = ["distillation.enabled=true", f"{TEACHER}model_path={folders[1]}", *overrides]
    return PlanInputs.of(load_config(TINY, None, given).config, TINY_MODEL, default_device("cpu"))


def test_a_plan_counts_the_teachers_weights_where_they_are(folders):
    none = memory_section(PlanInputs.of(load_config(TINY).config, TINY_MODEL, default_device("cpu")))
    assert "teacher" not in none["phases"]
    stays = memory_section(planned(folders))
    size = stays["phases"]["teacher"]["terms"]["teacher"]
    whole = parameter_count(model_spec(DENSE)) * 4
    assert whole / 2 <= size < whole * 0.6  # over two tensor ranks; norms lie on both
    assert stays["phases"]["train"]["terms"]["teacher"] == size
    alone = memory_section(planned(folders, f"{TEACHER}layout={{tensor_model_parallel_size: 1}}"))
    assert alone["phases"]["teacher"]["terms"]["teacher"] == pytest.approx(whole, rel=0.01)
    moved = memory_section(planned(folders, f"{TEACHER}param_offload=true"))
    assert "teacher" not in moved["phases"]["train"]["terms"]
    assert moved["phases"]["teacher"]["terms"]["teacher"] == size
    assert moved["host"]["terms"]["teacher"] == 2 * size and "teacher" not in stays["host"]["terms"]


def test_a_plan_counts_scores_where_they_travel_and_what_a_loss_over_words_takes_of_each_rank(folders):
    words = [f"{LOSS}use_policy_gradient=false", f"{LOSS}loss_mode=reverse_kl_topk", f"{LOSS}topk=16"]
    one, other = (
        memory_section(planned(folders, *words[:1], f"{LOSS}loss_mode=k2", *more)) for more in ((), words[1:])
    )
    tokens = 64 * 8 * 4  # of a step
    stores = [each["host"]["object_store_bytes"] for each in (one, other)]
    assert stores[1] - stores[0] == tokens * 16 * 8  # a word's number and its log-prob
    assert other["host"]["bytes_of_a_rank"] > one["host"]["bytes_of_a_rank"]
    assert other["phases"]["train"]["bytes"] > one["phases"]["train"]["bytes"]


def test_a_plan_counts_the_teachers_pass(folders):
    inputs = planned(folders)
    batch = batch_plan(inputs.config, inputs.train)
    seconds = phase_seconds(inputs, batch, engine_of(inputs))
    before = phase_seconds(
        PlanInputs.of(load_config(TINY).config, TINY_MODEL, default_device("cpu")), batch, engine_of(inputs)
    )
    assert seconds.keys() - before.keys() == {"teacher"} and seconds["teacher"] > 0
    assert {name: seconds[name] for name in before} == before
    assert step_flops(inputs, batch)["teacher"] > 0


@pytest.mark.parametrize(("layout", "told"), [("", None), (", pipeline_model_parallel_size: 2", "pipeline 2")])
def test_a_plan_shows_the_teachers_layout_where_it_is_another(folders, layout, told):
    own = f"{TEACHER}layout={{world_size: 2, tensor_model_parallel_size: {1 if layout else 2}{layout}}}"
    plan = make_plan(planned(folders, own, "actor.layout.expert_model_parallel_size=1"))
    lines = [line.strip() for line in plan_lines(plan) if "its teacher" in line]
    assert lines == ([f"its teacher on these ranks: {told}"] if told else [])


def test_a_search_sorts_actors_by_all_that_a_step_does_beside_generation():
    preset = "parallel_configs/qwen3-8b/h100-1x8.yaml"
    given = ["distillation.enabled=true", f"{TEACHER}model_path=Qwen/Qwen3-30B-A3B"]
    config = load_config(preset, overrides=given).config
    model = planning_model_spec(config.model.path)[0]
    problem = search_problem(config, model, device_for(config), 8, 8, MEGATRON)
    result = search(problem)
    found = list(run_search._actors(config, problem, replace(result, fitting=result.fitting[:3]), ()))
    for (seconds,), settings, _ in found:
        phases = run_search.step_of(with_values(config, settings), model, device_for(config))
        assert phases["teacher"] > 0 and seconds == pytest.approx(sum(phases.values()) - phases["generation"])
    assert len({actor.expected for actor in found}) > 1


def test_a_rehearsal_has_a_small_teacher_and_says_that_it_lies_as_the_actor(folders):
    overrides = [f"{TEACHER}layout={{world_size: 2}}", f"{TEACHER}param_offload=true"]
    rehearsal = compose(planned(folders, *overrides).config, WorkFolder(Path("work")), 2)
    teacher = rehearsal.config.distillation.teacher_model
    assert (teacher.model_path, teacher.layout, teacher.param_offload) == ("work/model", None, True)
    assert "distillation.teacher_model.layout" in {lost.switch for lost in rehearsal.out_of_reach}


VERL = [
    "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B", "data.train_files=a.parquet",
    "actor_rollout_ref.actor.strategy=megatron", "algorithm.adv_estimator=grpo",
]  # fmt: skip


def imported(*words):
    return import_overrides([*VERL, *words])


def test_verls_distillation_is_carried():
    out = imported(
        "distillation.enabled=True",
        "+distillation.teacher_models.math.model_path=Qwen/Qwen3-32B",
        "+distillation.teacher_models.math.inference.tensor_model_parallel_size=4",
        "distillation.n_gpus_per_node=8",
        "distillation.distillation_loss.loss_mode=k1",
        "distillation.distillation_loss.use_policy_gradient=True",
        "distillation.distillation_loss.use_task_rewards=False",
        "distillation.distillation_loss.loss_max_clamp=10.0",
        "distillation.distillation_loss.topk=64",
    )
    assert {key: value for key, value in out.values.items() if key.startswith("distillation")} == {
        "distillation.enabled": True,
        f"{TEACHER}model_path": "Qwen/Qwen3-32B",
        f"{LOSS}loss_mode": "k1",
        f"{LOSS}use_policy_gradient": True,
        f"{LOSS}use_task_rewards": False,
        f"{LOSS}loss_max_clamp": 10.0,
    }
    assert not [loss for loss in out.losses if loss.key.startswith("distillation")]


def test_verls_defaults_of_a_distillation_are_written_and_what_is_not_here_is_said():
    out = imported("distillation.enabled=True", "+distillation.teacher_model.model_path=Qwen/Qwen3-32B")
    assert (out.values[f"{LOSS}loss_mode"], out.values[f"{LOSS}use_policy_gradient"]) == ("k3", False)
    two = imported(
        "distillation.enabled=True",
        "+distillation.teacher_models.a.model_path=A/B",
        "+distillation.teacher_models.b.model_path=C/D",
        "distillation.distillation_loss.loss_mode=no_such_kl",
    )
    lost = {loss.key.removeprefix("+"): loss.why for loss in two.losses if "distillation" in loss.key}
    assert lost["distillation.teacher_models.b.model_path"] == "a run has one teacher"
    assert "score the sampled token" in lost["distillation.distillation_loss.loss_mode"]
    words = {"loss_mode": "forward_kl_topk", "topk": 64, "log_prob_min_clamp": -10.0, "use_policy_gradient": False}
    over_top_k = imported(
        *("distillation.enabled=True", "+distillation.teacher_model.model_path=Qwen/Qwen3-32B"),
        *(f"{LOSS}{name}={value}" for name, value in words.items()),
    )
    assert {name: over_top_k.values[f"{LOSS}{name}"] for name in words} == words
    off = imported("distillation.enabled=False", "distillation.distillation_loss.loss_mode=k1")
    assert not [key for key in off.values if key.startswith("distillation")]


KLS = [
    ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.01"],
    ["algorithm.use_kl_in_reward=True"],
]


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("alone", [True, False])
def test_what_verl_drops_with_the_policy_loss_is_not_imported(alone, kl):
    """As its distillation_ppo_loss does: without task rewards the policy loss is 0, KL and entropy included."""
    out = imported(
        *("distillation.enabled=True", "+distillation.teacher_model.model_path=Qwen/Qwen3-32B", *kl),
        *("actor_rollout_ref.actor.entropy_coeff=0.02", "actor_rollout_ref.ref.megatron.param_offload=True"),
        f"distillation.distillation_loss.use_task_rewards={not alone}",
    )
    given = {name: out.values.get(f"algorithm.{name}", False) for name in ("use_kl_loss", "use_kl_in_reward")}
    assert (any(given.values()), out.values["algorithm.entropy_coeff"]) == ((False, 0.0) if alone else (True, 0.02))
    assert ("ref.param_offload" in out.values) is not alone
    dropped = [entry for entry in out.of("implied") if "drops the policy loss" in entry.why]
    assert bool(dropped) is alone
    if alone:
        entries = [entry for kind in KINDS for entry in out.of(kind) if entry.key == kl[0].partition("=")[0]]
        assert entries and all("drops the policy loss" in entry.why for entry in entries)
        assert "algorithm.kl_loss_coef" not in out.values
