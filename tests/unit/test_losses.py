"""Policy losses against hand-computed numbers, finite differences and invariants;
other forms' own numbers are in test_loss_forms.py.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from mrl.algo import selection
from mrl.algo.aggregate import NUMERATORS, aggregate, count, merge, to_floats
from mrl.algo.losses import ESTIMATORS, TOKEN_LOSSES, LossInputs, kl_per_token, policy_loss
from mrl.algo.plain import Denominators, PolicyLossParameters
from mrl.algo.spec import AGGREGATIONS, KL_TYPES, LOSSES
from mrl.errors import ConfigError
from mrl.record.metrics import reduce_parts

LOG2 = math.log(2.0)
PPO = PolicyLossParameters("vanilla", "token-mean", clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)
GSPO = PolicyLossParameters("gspo", "seq-mean-token-mean", clip_ratio_low=0.1, clip_ratio_high=0.2)
GSPO_TOKEN = replace(GSPO, loss_mode="gspo-token")
BOTH_GSPO = pytest.mark.parametrize("parameters", [GSPO, GSPO_TOKEN], ids=lambda p: p.loss_mode)


def make(log_probs, old=None, advantages=1.0, mask=None, **more) -> LossInputs:
    """Inputs from nested lists, float64; old log-probs default to 0 so that log_probs is the log ratio."""
    log_probs = torch.as_tensor(log_probs, dtype=torch.float64)
    if not log_probs.requires_grad:
        log_probs = log_probs.clone().requires_grad_()
    old = torch.zeros_like(log_probs) if old is None else torch.as_tensor(old, dtype=torch.float64)
    advantages = torch.as_tensor(advantages, dtype=torch.float64).expand(log_probs.shape)
    mask = torch.ones(log_probs.shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    return LossInputs(log_probs, old.detach(), advantages, mask, **more)


def loss_and_gradient(parameters, inputs, denominators=None):
    output = policy_loss(parameters, inputs, denominators or count(inputs.response_mask))
    return output.loss.item(), torch.autograd.grad(output.loss, inputs.log_probs)[0]


def random_batch(rows=6, width=5, seed=0, **more) -> LossInputs:
    """Ragged rows with garbage in the padding, ratios on both sides of every band, both signs of advantage."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 1, 3, 4, 2, 5])[:rows]
    mask = torch.arange(width)[None] < lengths[:, None]
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64)
    log_probs = old + 0.5 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    log_probs = torch.where(mask, log_probs, torch.nan)
    more = {name: torch.rand(rows, width, generator=generator, dtype=torch.float64) for name in more}
    selected = torch.rand(rows, width, generator=generator) < 0.3  # of the losses that treat some tokens apart
    return make(log_probs, old, advantages, mask, selected=selected, **more)


class Watched:
    """Parameters that remember what was asked of them."""

    def __init__(self, parameters: PolicyLossParameters):
        self.parameters = parameters
        self.asked = set()

    def __getattr__(self, name):
        self.asked.add(name)
        return getattr(self.parameters, name)


@pytest.mark.parametrize("name", LOSSES)
def test_the_constants_that_a_loss_names_are_those_that_it_reads(name):
    watched = Watched(PolicyLossParameters(name, LOSSES[name].aggregations[0]))
    inputs = random_batch()
    mask = inputs.response_mask
    log_ratio = torch.where(mask, inputs.log_probs - inputs.old_log_probs, 0.0)
    TOKEN_LOSSES[name](watched, inputs, log_ratio)
    flat = [x[mask].detach().numpy() for x in (inputs.advantages, inputs.old_log_probs, mask)]
    selection.select(watched, *flat, mask.sum(1).numpy())
    constants = {key for spec in LOSSES.values() for key in spec.constants}
    assert watched.asked & constants == set(LOSSES[name].constants)


def test_every_name_in_the_tables_has_an_implementation():
    assert set(TOKEN_LOSSES) == set(LOSSES)
    assert set(NUMERATORS) == set(AGGREGATIONS)
    assert {spec.estimator for spec in KL_TYPES.values()} == set(ESTIMATORS)
    assert all(set(spec.aggregations) <= set(AGGREGATIONS) for spec in LOSSES.values())


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("token-sum", 1 + 2 + 3 + 10),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 8 / 2),
    ],
)
def test_aggregations_of_two_rows_worked_by_hand(mode, expected):
    values = torch.tensor([[1.0, 2.0, 3.0], [10.0, torch.nan, torch.nan]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert (aggregate(values, mask, mode, 8.0) / count(mask).of(mode)).item() == pytest.approx(expected)


def test_an_empty_row_counts_in_no_denominator():
    assert count(torch.tensor([[True, True], [False, False]])) == Denominators(tokens=2, sequences=1)


def test_the_constant_of_dr_grpo_must_be_given():
    with pytest.raises(ConfigError, match="loss_scale_factor"):
        policy_loss(PolicyLossParameters("vanilla", "seq-mean-token-sum-norm"), make([[0.0]]), Denominators(1, 1))


@pytest.mark.parametrize("field", ["loss_mode", "loss_agg_mode"])
def test_unknown_names_are_refused_with_the_known_ones(field):
    known = LOSSES if field == "loss_mode" else AGGREGATIONS
    with pytest.raises(ConfigError, match=next(iter(known))):
        policy_loss(PolicyLossParameters(**{field: "nope"}), make([[0.0]]), Denominators(1, 1))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "dual"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),  # on policy: d loss / d log_prob = -A
        (2.0, 1.0, -1.3, 0.0, 1, 0),  # above the band, A > 0: held at 1 + high
        (0.5, 1.0, -0.5, -0.5, 0, 0),  # below the band, A > 0: not held
        (0.5, -1.0, 0.8, 0.0, 1, 0),  # below the band, A < 0: held at 1 - low
        (2.0, -1.0, 2.0, 2.0, 0, 0),  # above the band, A < 0: not held by the band
        (5.0, -1.0, 3.0, 0.0, 0, 1),  # held by the dual clip at c
        (math.exp(30), -1.0, 3.0, 0.0, 0, 1),  # log ratio bounded at 20: finite
    ],
)
def test_ppo_of_one_token_worked_by_hand(ratio, advantage, loss, gradient, clipped, dual):
    inputs = make([[math.log(ratio)]], advantages=advantage)
    output = policy_loss(PPO, inputs, Denominators(1, 1))
    assert output.loss.item() == pytest.approx(loss)
    assert torch.autograd.grad(output.loss, inputs.log_probs)[0].item() == pytest.approx(gradient)
    metrics = reduce_parts([to_floats(output.metrics)])
    assert (metrics["actor/pg_clipfrac"], metrics["actor/pg_clipfrac_lower"]) == (clipped, dual)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(ratio))


@BOTH_GSPO
def test_gspo_of_two_sequences_worked_by_hand(parameters):
    """Row 0: log ratios log 2 and log 8, mean log 4, s = 4, A = -1: not clipped, loss 4, each token's gradient
    A s / L = 4 / 2, over 2 rows. Row 1: one token, s = 2, A = 1: held at 1.2, no gradient.
    """
    inputs = make([[LOG2, 3 * LOG2], [LOG2, 99.0]], advantages=[[-1.0], [1.0]], mask=[[True, True], [True, False]])
    output = policy_loss(parameters, inputs, Denominators(tokens=3, sequences=2))
    assert output.loss.item() == pytest.approx((4.0 - 1.2) / 2)
    gradient = torch.autograd.grad(output.loss, inputs.log_probs)[0]
    torch.testing.assert_close(gradient, torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64))
    metrics = reduce_parts([to_floats(output.metrics)])
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1 / 3)
    assert metrics["actor/pg_clipfrac_lower"] == 0
    assert metrics["actor/ppo_kl"] == pytest.approx(-5 * LOG2 / 3)
    assert metrics["actor/log_seq_ratio_mean"] == pytest.approx(1.5 * LOG2)
    assert metrics["actor/log_seq_ratio_std"] == pytest.approx(0.5 * LOG2)


@BOTH_GSPO
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -1.0, 0),  # on policy: d loss / d log_prob = -A s / L
        (1.1, 2.0, -2.2, -1.1, 0),  # inside the band
        (1.1, -2.0, 2.2, 1.1, 0),
        (1.5, 2.0, -2.4, 0.0, 1),  # above it, A > 0: held at 1.2
        (1.5, -2.0, 3.0, 1.5, 0),  # above it, A < 0: not held, and there is no dual clip
        (0.5, 2.0, -1.0, -0.5, 0),  # below it, A > 0: not held
        (0.5, -2.0, 1.8, 0.0, 1),  # below it, A < 0: held at 0.9
        (1.5, 0.0, 0.0, 0.0, 0),  # a group of one mind
    ],
)
def test_gspo_of_one_sequence_on_both_sides_of_its_band(parameters, ratio, advantage, loss, gradient, clipped):
    """Two tokens that moved by 2 log s and not at all, so their geometric mean is s;
    the gradient falls on both alike.
    """
    inputs = make([[2 * math.log(ratio), 0.0]], advantages=advantage)
    output = policy_loss(parameters, inputs, Denominators(2, 1))
    assert output.loss.item() == pytest.approx(loss)
    assert torch.autograd.grad(output.loss, inputs.log_probs)[0][0].tolist() == pytest.approx([gradient, gradient])
    assert reduce_parts([to_floats(output.metrics)])["actor/pg_clipfrac"] == clipped


@BOTH_GSPO
def test_gspo_holds_a_log_ratio_above_ten_finite_and_without_gradient(parameters):
    loss, gradient = loss_and_gradient(parameters, make([[200.0, 400.0]], advantages=-1.0))
    assert loss == pytest.approx(math.exp(10.0))
    assert not gradient.any()


def sequence_form(log_probs, inputs, parameters):
    """GSPO as the paper's eq. 5 has it: one ratio and one advantage a sequence, gradient through the ratio itself."""
    losses = []
    for row in range(len(log_probs)):
        picked = inputs.response_mask[row]
        s = torch.exp((log_probs[row][picked] - inputs.old_log_probs[row][picked]).mean())
        advantage = inputs.advantages[row, 0]
        bounded = torch.clamp(s, 1 - parameters.clip_ratio_low, 1 + parameters.clip_ratio_high)
        losses.append(-torch.minimum(s * advantage, bounded * advantage))
    return torch.stack(losses).mean()


@BOTH_GSPO
def test_gspo_equals_its_sequence_form_when_the_advantage_is_constant(parameters):
    inputs = random_batch()
    loss, gradient = loss_and_gradient(parameters, inputs)
    expected = sequence_form(inputs.log_probs, inputs, parameters)
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, inputs.log_probs)[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("log_ratio", "advantage"), list(itertools.product([-3.0, -0.4, 0.05, 0.5, 3.0], [-1.5, 1.5])))
def test_gradients_agree_with_finite_differences_inside_and_outside_the_band(log_ratio, advantage):
    """With the entropy and KL terms besides; the other losses' gradients are in test_loss_forms.py."""
    old = torch.tensor([[-1.0, -2.0], [-0.5, -0.1]], dtype=torch.float64)
    log_probs = (old + log_ratio + torch.tensor([[0.01, -0.02], [0.03, 0.0]], dtype=torch.float64)).requires_grad_()
    ref = old - 0.3

    def loss(values):
        full = PolicyLossParameters(**(vars(PPO) | {"entropy_coeff": 0.1, "kl_loss_coef": 0.2}))
        return policy_loss(
            full, make(values, old, advantage, entropy=values.square(), ref_log_probs=ref), Denominators(4, 2)
        ).loss

    assert torch.autograd.gradcheck(loss, (log_probs,), eps=1e-6, atol=1e-6)


@BOTH_GSPO
@pytest.mark.parametrize(("log_ratio", "advantage"), list(itertools.product([-0.5, 0.05, 0.5], [-1.5, 1.5])))
def test_gspo_gradient_agrees_with_finite_differences_of_its_value(parameters, log_ratio, advantage):
    """Moving every token of a sequence by eps moves the mean log ratio by eps:
    the directional derivative is the gradient's row sum.
    """
    old = torch.tensor([[-1.0, -2.0, -0.5], [-0.5, -0.1, -0.7]], dtype=torch.float64)
    start = old + log_ratio + torch.tensor([[0.01, -0.02, 0.0], [0.03, 0.0, -0.01]], dtype=torch.float64)
    _, gradient = loss_and_gradient(parameters, make(start, old, advantage))
    eps = 1e-6
    for row in range(2):
        step = torch.zeros_like(start)
        step[row] = eps
        up, _ = loss_and_gradient(parameters, make(start + step, old, advantage))
        down, _ = loss_and_gradient(parameters, make(start - step, old, advantage))
        assert gradient[row].sum().item() == pytest.approx((up - down) / (2 * eps), abs=1e-8)


def parameters_for(loss_mode: str, mode: str) -> PolicyLossParameters:
    return PolicyLossParameters(
        loss_mode, mode, 0.2, 0.3, 3.0, loss_scale_factor=7.0, entropy_coeff=0.1, kl_loss_coef=0.2, kl_loss_type="k3+"
    )


def select(inputs: LossInputs, rows: list[int]) -> LossInputs:
    return LossInputs(**{name: None if value is None else value[rows] for name, value in vars(inputs).items()})


EVERY_LOSS_AND_AGGREGATION = pytest.mark.parametrize(
    ("loss_mode", "mode"), list(itertools.product(LOSSES, AGGREGATIONS))
)


@EVERY_LOSS_AND_AGGREGATION
@pytest.mark.parametrize("split", [[[5, 3], [0], [4, 1, 2]], [[2], [1], [0], [5], [4], [3]]])
def test_loss_gradient_and_metrics_do_not_depend_on_the_micro_batches(loss_mode, mode, split):
    parameters, whole = parameters_for(loss_mode, mode), random_batch(entropy=True, ref_log_probs=True, weights=True)
    denominators = count(whole.response_mask)
    output = policy_loss(parameters, whole, denominators)
    expected = torch.autograd.grad(output.loss, whole.log_probs)[0]
    parts = [policy_loss(parameters, select(whole, rows), denominators) for rows in split]
    total = sum(part.loss for part in parts)
    assert total.item() == pytest.approx(output.loss.item(), rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, whole.log_probs)[0], expected, rtol=1e-12, atol=1e-15)
    assert reduce_parts([merge(to_floats(part.metrics) for part in parts)]) == pytest.approx(
        reduce_parts([to_floats(output.metrics)]), rel=1e-9, abs=1e-12
    )


@EVERY_LOSS_AND_AGGREGATION
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_data_parallel_ranks_add_up_to_one_process(loss_mode, mode, ranks):
    """Each rank counts its own rows, the counts are added, and gradients are summed;
    four ranks hold unequally many rows.
    """
    parameters, whole = parameters_for(loss_mode, mode), random_batch(entropy=True, ref_log_probs=True, weights=True)
    loss, gradient = loss_and_gradient(parameters, whole)
    shares = [select(whole, list(range(6))[rank::ranks]) for rank in range(ranks)]
    counts = sum((count(share.response_mask) for share in shares), start=Denominators(0, 0))
    total = sum(policy_loss(parameters, share, counts).loss for share in shares)
    assert total.item() == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, whole.log_probs)[0], gradient, rtol=1e-12, atol=1e-15)


@EVERY_LOSS_AND_AGGREGATION
def test_rows_unpacked_to_other_widths_give_the_same_loss(loss_mode, mode):
    """Packing lays rows of any length end to end; unpacked, each has the width of its micro-batch.

    Width is padding and means nothing.
    """
    parameters, whole = parameters_for(loss_mode, mode), random_batch(entropy=True, ref_log_probs=True, weights=True)
    loss, gradient = loss_and_gradient(parameters, whole)
    denominators, width = count(whole.response_mask), whole.log_probs.shape[1]
    for row in range(6):
        one, length = select(whole, [row]), int(whole.response_mask[row].sum())
        narrow = LossInputs(**{name: None if value is None else value[:, :length] for name, value in vars(one).items()})
        loss -= policy_loss(parameters, narrow, denominators).loss.item()
        wide = {
            n: None if v is None else torch.nn.functional.pad(v, (0, 3), value=1.0 if v.is_floating_point() else 0)
            for n, v in vars(one).items()
        }
        part = policy_loss(parameters, LossInputs(**wide), denominators).loss
        found = torch.autograd.grad(part, whole.log_probs)[0]
        torch.testing.assert_close(found[row, :width], gradient[row], rtol=1e-12, atol=1e-15)
    assert loss == pytest.approx(0.0, abs=1e-12)


@EVERY_LOSS_AND_AGGREGATION
def test_a_rejected_sample_might_as_well_not_be_there(loss_mode, mode):
    """Rejection empties a row's mask: loss and gradient are those of the batch without it, denominators included."""
    parameters, whole = parameters_for(loss_mode, mode), random_batch(entropy=True, ref_log_probs=True)
    mask = whole.response_mask.clone()
    mask[[1, 4]] = False
    loss, gradient = loss_and_gradient(parameters, replace(whole, response_mask=mask))
    left = [0, 2, 3, 5]
    output = policy_loss(parameters, select(whole, left), count(whole.response_mask[left]))
    assert loss == pytest.approx(output.loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(output.loss, whole.log_probs)[0], rtol=1e-12, atol=1e-15)


def test_weights_of_the_correction_are_on_the_policy_loss_alone():
    parameters = PolicyLossParameters("vanilla", "token-mean", 0.2, 0.2, entropy_coeff=0.5)
    inputs = make(
        [[0.0, 0.0]], advantages=1.0, entropy=torch.ones(1, 2), weights=torch.tensor([[2.0, 0.5]], dtype=torch.float64)
    )
    loss, gradient = loss_and_gradient(parameters, inputs)
    assert loss == pytest.approx(-(2.0 + 0.5) / 2 - 0.5 * 1.0)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, -0.25]], dtype=torch.float64))


@pytest.mark.parametrize("loss_mode", LOSSES)
def test_what_stands_in_the_padding_has_no_value_and_no_gradient(loss_mode):
    inputs = random_batch(entropy=True, ref_log_probs=True)
    loss, gradient = loss_and_gradient(parameters_for(loss_mode, "token-mean"), inputs)
    assert math.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert not gradient[~inputs.response_mask].any()


@pytest.mark.parametrize("loss_mode", LOSSES)
def test_on_policy_every_loss_is_the_policy_gradient(loss_mode):
    """At log_probs = old_log_probs the gradient is -A / (L x sequences) for seq-mean-token-mean,
    and nothing is clipped.
    """
    same, none = [[-1.0, -2.0], [-3.0, -1.0]], torch.zeros(2, 2, dtype=torch.bool)
    inputs = make(same, same, [[2.0], [-1.0]], selected=none)
    output = policy_loss(PolicyLossParameters(loss_mode, "seq-mean-token-mean"), inputs, Denominators(4, 2))
    gradient = torch.autograd.grad(output.loss, inputs.log_probs)[0]
    torch.testing.assert_close(gradient, torch.tensor([[-0.5, -0.5], [0.25, 0.25]], dtype=torch.float64))
    assert output.metrics["actor/pg_clipfrac"][0] == 0


def test_on_policy_dr_grpo_and_dapo_differ_from_grpo_by_their_normalisers_alone():
    """Rows of 5, 1, 3, 4, 2, 5 tokens: GRPO divides a row by its length and the 6 rows, Dr.GRPO by 7 and 6,
    DAPO by all 20 tokens.
    """
    inputs = random_batch()
    inputs = replace(inputs, old_log_probs=inputs.log_probs.detach())
    lengths = torch.tensor([5.0, 1, 3, 4, 2, 5], dtype=torch.float64)[:, None]
    grpo, dr_grpo, dapo = (
        loss_and_gradient(PolicyLossParameters("vanilla", mode, 0.2, 0.2, loss_scale_factor=7.0), inputs)[1]
        for mode in ("seq-mean-token-mean", "seq-mean-token-sum-norm", "token-mean")
    )
    torch.testing.assert_close(dr_grpo, grpo * lengths / 7)
    torch.testing.assert_close(dapo, grpo * lengths * 6 / 20)


def test_entropy_is_rewarded_and_kl_is_punished_with_their_coefficients():
    zero = torch.zeros(1, 2, dtype=torch.float64)
    parameters = PolicyLossParameters("vanilla", "token-mean", entropy_coeff=0.5, kl_loss_coef=0.25, kl_loss_type="k2")
    inputs = make(
        zero,
        entropy=torch.tensor([[1.0, 3.0]]),
        ref_log_probs=torch.tensor([[-2.0, 0.0]], dtype=torch.float64),
        advantages=0.0,
    )
    output = policy_loss(parameters, inputs, Denominators(2, 1))
    assert output.loss.item() == pytest.approx(-0.5 * 2.0 + 0.25 * 1.0)
    metrics = reduce_parts([to_floats(output.metrics)])
    assert (metrics["actor/entropy_loss"], metrics["actor/kl_loss"]) == (2.0, 1.0)


@pytest.mark.parametrize(("coefficient", "field"), [("entropy_coeff", "entropy"), ("kl_loss_coef", "ref_log_probs")])
def test_a_coefficient_without_its_input_is_refused(coefficient, field):
    with pytest.raises(ConfigError, match=field):
        policy_loss(PolicyLossParameters(**{coefficient: 0.1}), make([[0.0]]), Denominators(1, 1))


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("kl", LOG2, 1.0),
        ("abs", LOG2, 1.0),
        ("mse", LOG2**2 / 2, LOG2),
        ("low_var_kl", 0.5 + LOG2 - 1, 0.5),
        ("low_var_kl+", 0.5 + LOG2 - 1, LOG2),
        ("kl+", LOG2, LOG2),
    ],
)
def test_kl_estimators_at_a_ratio_of_two(kind, value, gradient):
    log_probs = torch.tensor([[LOG2]], dtype=torch.float64, requires_grad=True)
    kl = kl_per_token(log_probs, torch.zeros(1, 1, dtype=torch.float64), kind)
    assert kl.item() == pytest.approx(value)
    assert torch.autograd.grad(kl.sum(), log_probs)[0].item() == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", -LOG2, 1.0),
        ("k1+", -LOG2, -LOG2),
        ("abs", LOG2, -1.0),
        ("abs+", LOG2, -LOG2),
        ("k2", LOG2**2 / 2, -LOG2),
        ("mse+", LOG2**2 / 2, -LOG2),
        ("k3", 2 - LOG2 - 1, -1.0),
        ("k3+", 2 - LOG2 - 1, -LOG2),
    ],
)
def test_kl_estimators_at_a_ratio_of_one_half(kind, value, gradient):
    """l = -log 2: exp(-l) = 2, and k3's gradient is 1 - exp(-l) = -1."""
    log_probs = torch.tensor([[-LOG2]], dtype=torch.float64, requires_grad=True)
    kl = kl_per_token(log_probs, torch.zeros(1, 1, dtype=torch.float64), kind)
    assert kl.item() == pytest.approx(value)
    assert torch.autograd.grad(kl.sum(), log_probs)[0].item() == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("log_ratio", "value"),
    [(-30.0, 10.0), (30.0, 10.0), (-3.0, 10.0), (-2.0, math.exp(2) - 3), (3.0, math.exp(-3) + 2)],
)
def test_k3_is_bounded_at_ten_and_stays_finite(log_ratio, value):
    """exp(3) - 3 - 1 = 16 is beyond the bound, exp(2) - 2 - 1 = 4.4 is not; a log ratio counts up to 20."""
    kl = kl_per_token(torch.tensor([log_ratio], dtype=torch.float64), torch.zeros(1, dtype=torch.float64), "k3")
    assert kl.item() == pytest.approx(value)


@pytest.mark.parametrize("name", ["k1", "abs", "k3"])
@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 3.0, 100.0, 1e4])
def test_a_value_beside_k2s_gradient_is_not_rounded_with_k2(name, log_ratio):
    """As verl's kl_penalty, which takes k2 off itself before it adds the value."""
    log_probs, ref = torch.tensor([[log_ratio]], requires_grad=True), torch.zeros(1, 1)
    found = kl_per_token(log_probs, ref, f"{name}+")
    assert found.item() == kl_per_token(log_probs, ref, name).item()
    assert torch.autograd.grad(found.sum(), log_probs)[0].item() == log_ratio


def test_k1_and_k3_are_unbiased_against_the_exact_kl_of_a_small_vocabulary():
    """The expectation is taken exactly, over all 50 words, so no sampling noise is allowed for;
    no ratio reaches k3's bound of 10.
    """
    generator = torch.Generator().manual_seed(1)
    log_p, log_q = (
        torch.log_softmax(0.5 * torch.randn(50, generator=generator, dtype=torch.float64), 0) for _ in range(2)
    )
    exact = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")
    for kind in ("k1", "k3"):
        assert (log_p.exp() * kl_per_token(log_p, log_q, kind)).sum().item() == pytest.approx(exact.item())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k1+", "k3+"])
def test_expected_gradients_of_kl_losses_over_a_small_vocabulary(kind):
    """On-policy, k2's gradient is that of KL(p || q), k1's is zero on average, k3's is that of KL(q || p);
    with `+` all are k2's.
    """
    generator = torch.Generator().manual_seed(2)
    theta = (0.5 * torch.randn(50, generator=generator, dtype=torch.float64)).requires_grad_()
    log_q = torch.log_softmax(0.5 * torch.randn(50, generator=generator, dtype=torch.float64), 0)
    log_p = torch.log_softmax(theta, 0)
    # words drawn from p, and not followed by the gradient
    expected = (log_p.detach().exp() * kl_per_token(log_p, log_q, kind)).sum()
    found = torch.autograd.grad(expected, theta, retain_graph=True)[0]
    forward = (log_p.exp() * (log_p - log_q)).sum()
    reverse = (log_q.exp() * (log_q - log_p)).sum()
    right = torch.autograd.grad(reverse if kind == "k3" else forward, theta)[0]
    torch.testing.assert_close(found, torch.zeros_like(theta) if kind == "k1" else right, rtol=1e-9, atol=1e-12)
