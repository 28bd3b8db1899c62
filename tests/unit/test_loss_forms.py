"""Every form of the policy loss, one token or sequence at a time, worked by hand;
and gradients against finite differences in float64.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mrl.algo.aggregate import to_floats
from mrl.algo.losses import TOKEN_LOSSES, LossInputs, load_custom_loss, policy_loss, register_loss
from mrl.algo.plain import Denominators, PolicyLossParameters
from mrl.algo.selection import SELECTIONS, Means, _lots, covariance, select
from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.data.row_columns import positions
from mrl.errors import ConfigError
from mrl.model import ModelSpec
from mrl.model.rotation import Rotation
from mrl.record.metrics import reduce_parts

LOG2 = math.log(2.0)
BASE = PolicyLossParameters("vanilla", "seq-mean-token-mean", clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def one_sequence(log_probs, old, advantages, selected=None) -> LossInputs:
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (log_probs, old, advantages)]
    picked = torch.zeros(1, len(log_probs), dtype=torch.bool) if selected is None else torch.tensor([selected])
    return LossInputs(tensors[0].requires_grad_(), tensors[1], tensors[2], torch.ones_like(picked), selected=picked)


def worked(parameters, inputs):
    """(loss, gradient by token, clipped share) of one sequence under seq-mean-token-mean."""
    output = policy_loss(parameters, inputs, Denominators(inputs.log_probs.numel(), 1))
    gradient = torch.autograd.grad(output.loss, inputs.log_probs)[0][0].tolist()
    return output.loss.item(), gradient, reduce_parts([to_floats(output.metrics)])["actor/pg_clipfrac"]


def of_one_token(parameters, ratio, advantage, old=-1.0, selected=False):
    loss, gradient, clipped = worked(parameters, one_sequence([old + math.log(ratio)], [old], [advantage], [selected]))
    return pytest.approx((loss, gradient[0], clipped), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [
        (1.1, 1.0, 1.1, 0),  # inside the band
        (2.0, 1.0, 1.3, 1),  # above it: held at 1 + high, and still has a gradient
        (2.0, -1.0, 1.3, 1),  # on both signs of the advantage alike
        (0.5, 1.0, 0.8, 1),
        (0.5, -1.0, 0.8, 1),
    ],
)
def test_cispo_weighs_the_log_probability_by_the_clipped_ratio(ratio, advantage, weight, clipped):
    expected = (-weight * advantage * (-1 + math.log(ratio)), -weight * advantage, clipped)
    assert expected == of_one_token(replace(BASE, loss_mode="cispo"), ratio, advantage)


def test_cispo_without_a_lower_bound_as_its_paper_has_it():
    _, gradient, clipped = worked(
        replace(BASE, loss_mode="cispo", clip_ratio_low=1.0), one_sequence([-4.0], [0.0], [1.0])
    )
    assert gradient == pytest.approx([-math.exp(-4.0)])
    assert clipped == 0


GMPO = replace(BASE, loss_mode="geo_mean", clip_ratio_low=LOG2, clip_ratio_high=LOG2)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "log_ratio", "gradient_share", "clipped"),
    [
        ([0.5 * LOG2, 3 * LOG2], 1.0, 0.75 * LOG2, [0.5, 0.0], 0.5),  # A > 0: the second token is held at +log 2
        ([LOG2, 3 * LOG2], -1.0, 2 * LOG2, [0.5, 0.5], 0.0),  # A < 0: nothing holds an upward move
        ([-0.5 * LOG2, -3 * LOG2], -1.0, -0.75 * LOG2, [0.5, 0.0], 0.5),  # A < 0: held at -log 2
        ([-LOG2, -3 * LOG2], 1.0, -2 * LOG2, [0.5, 0.5], 0.0),  # A > 0: nothing holds a downward move
    ],
)
def test_gmpo_clips_tokens_before_their_geometric_mean(log_ratios, advantage, log_ratio, gradient_share, clipped):
    ratio = math.exp(log_ratio)
    expected = (-advantage * ratio, [-advantage * ratio * share for share in gradient_share], clipped)
    loss, gradient, found = worked(GMPO, one_sequence(log_ratios, [0.0, 0.0], [advantage] * 2))
    assert (loss, found) == pytest.approx((expected[0], expected[2]))
    assert gradient == pytest.approx(expected[1])


@pytest.mark.parametrize(("advantage", "tau"), [(1.0, 1.0), (2.0, 1.0), (-1.0, 1.05), (0.0, 1.05)])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 4.0])
def test_sapo_gates_by_a_sigmoid_of_its_own_temperature_for_each_sign(ratio, advantage, tau):
    gate = sigmoid(tau * (ratio - 1))
    expected = (-advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * ratio, 0)
    assert expected == of_one_token(replace(BASE, loss_mode="sapo", tau_pos=1.0, tau_neg=1.05), ratio, advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "selected", "loss", "gradient", "clipped"),
    [
        (1.1, 1.0, False, -1.1, -1.1, 0),
        (1.1, 1.0, True, 0.0, 0.0, 1),  # selected: neither loss nor gradient
        (2.0, 1.0, True, -1.3, 0.0, 1),  # what the band clips already is left as it is
        (2.0, 1.0, False, -1.3, 0.0, 1),
        (5.0, -1.0, False, 5.0, 5.0, 0),  # no dual clip
    ],
)
def test_clip_cov_leaves_selected_tokens_out(ratio, advantage, selected, loss, gradient, clipped):
    assert (loss, gradient, clipped) == of_one_token(
        replace(BASE, loss_mode="clip_cov"), ratio, advantage, selected=selected
    )


@pytest.mark.parametrize(
    ("ratio", "selected", "loss", "gradient"),
    [
        (2.0, False, -2.0, -2.0),  # no clip at all
        (2.0, True, -2.0 + 0.1 * LOG2, -2.0 + 0.1),
        (0.5, True, -0.5 + 0.1 * LOG2, -0.5 - 0.1),
    ],
)
def test_kl_cov_penalises_selected_tokens(ratio, selected, loss, gradient):
    assert (loss, gradient, selected) == of_one_token(
        replace(BASE, loss_mode="kl_cov", ppo_kl_coef=0.1), ratio, 1.0, selected=selected
    )


@pytest.mark.parametrize(
    ("old", "new", "advantage", "weight"),
    [
        (0.5, 0.8, 1.0, 0.0),  # moved by 0.3 > 0.25 upwards, and A > 0 would push on
        (0.5, 0.8, -1.0, 1.6),  # A < 0 brings it back
        (0.5, 0.7, 1.0, 1.4),  # within 0.25
        (0.5, 0.2, -1.0, 0.0),  # moved by 0.3 > 0.2 downwards, and A < 0 would push on
        (0.5, 0.2, 1.0, 0.4),
        (0.01, 0.2, 1.0, 3.0),  # a ratio of 20 within the distance: the weight is bounded at clip_ratio_c
    ],
)
def test_dppo_masks_by_the_distance_that_the_probability_moved(old, new, advantage, weight):
    parameters = replace(BASE, loss_mode="dppo_tv", clip_ratio_low=0.2, clip_ratio_high=0.25)
    expected = (-advantage * weight * math.log(new), -advantage * weight, float(weight == 0))
    assert expected == of_one_token(parameters, new / old, advantage, old=math.log(old))


# KL of a coin of 0.5 against one of 0.8 is 0.5 log(0.5 / 0.8) + 0.5 log(0.5 / 0.2) = 0.5 log 1.5625; of 0.5 against 0.2
# the same
COIN = 0.5 * math.log(1.5625)


@pytest.mark.parametrize(
    ("new", "advantage", "low", "high", "kept"),
    [
        (0.8, 1.0, 0.0, COIN + 1e-9, True),
        (0.8, 1.0, 9.0, COIN - 1e-9, False),
        (0.8, -1.0, 0.0, 0.0, True),
        (0.2, -1.0, COIN + 1e-9, 0.0, True),
        (0.2, -1.0, COIN - 1e-9, 9.0, False),
        (0.2, 1.0, 0.0, 0.0, True),
    ],
)
def test_dppo_by_binary_kl_has_a_bound_for_each_direction(new, advantage, low, high, kept):
    parameters = replace(BASE, loss_mode="dppo_kl", clip_ratio_low=low, clip_ratio_high=high)
    weight = new / 0.5 if kept else 0.0
    expected = (-advantage * weight * math.log(new), -advantage * weight, float(not kept))
    assert expected == of_one_token(parameters, new / 0.5, advantage, old=math.log(0.5))


def test_gspo_token_gives_each_token_its_own_advantage_under_the_sequence_ratio():
    """d = 0 and log 4, s = 2, band wide open: token gradients are -s A_t / L."""
    parameters = replace(BASE, loss_mode="gspo-token", clip_ratio_low=5.0, clip_ratio_high=5.0)
    loss, gradient, _ = worked(parameters, one_sequence([0.0, 2 * LOG2], [0.0, 0.0], [3.0, -1.0]))
    assert loss == pytest.approx(-2 * (3.0 - 1.0) / 2)
    assert gradient == pytest.approx([-2 * 3.0 / 2, 2 * 1.0 / 2])


def test_a_weight_of_a_token_weighs_its_own_gradient_and_geo_mean_takes_their_geometric_mean():
    """s = 2, A = 1, L = 2: -s w_t / L for GSPO; GMPO, with its clip wide open, has s sqrt(w_1 w_2) / L for both."""
    given = one_sequence([0.0, 2 * LOG2], [0.0, 0.0], [1.0, 1.0])
    given = replace(given, weights=torch.tensor([[0.5, 2.0]], dtype=torch.float64))
    open_band = replace(BASE, clip_ratio_low=5.0, clip_ratio_high=5.0)
    loss, gradient, _ = worked(replace(open_band, loss_mode="gspo"), given)
    assert loss == pytest.approx(-2 * 2.5 / 2)
    assert gradient == pytest.approx([-0.5, -2.0])
    given = replace(given, weights=torch.tensor([[0.5, 8.0]], dtype=torch.float64))
    loss, gradient, _ = worked(replace(open_band, loss_mode="geo_mean"), given)
    assert loss == pytest.approx(-2 * 2.0)
    assert gradient == pytest.approx([-2.0, -2.0])


def test_dro_worked_by_hand():
    """A = 2, log-probs -1 and -3 after -1.5 and -2: -(2 x -1 - 0.25 x 0.25), and -(2 x -3 - 0.25 x 1); d loss =
    beta d - A.
    """
    now = torch.tensor([[-1.0, -3.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.5, -2.0]], dtype=torch.float64)
    given = LossInputs(now, old, torch.full_like(old, 2.0), torch.ones(1, 2, dtype=torch.bool))
    parameters = replace(BASE, loss_mode="dro", loss_agg_mode="token-sum", dro_beta=0.5)
    loss = policy_loss(parameters, given, Denominators(2, 1)).loss
    assert loss.item() == pytest.approx(2.0625 + 6.25)
    (gradient,) = torch.autograd.grad(loss, now)
    assert gradient.tolist() == [[0.5 * 0.5 - 2.0, 0.5 * -1.0 - 2.0]]


OLD = np.log([[0.5, 0.3, 0.9, 0.05], [0.6, 0.2, 0.7, 0.4]])
MOVES = {"inside": 0.05, "above": 0.6, "below": -0.6}


@pytest.mark.parametrize(
    "loss_mode", [name for name in TOKEN_LOSSES if name not in ("gspo", "gspo-token", "cispo", "dppo_tv", "dppo_kl")]
)
@pytest.mark.parametrize("advantage", [-1.5, 1.5])
@pytest.mark.parametrize("move", MOVES)
def test_gradients_agree_with_finite_differences(loss_mode, advantage, move):
    """Of losses whose gradient is that of their value; moves are kept off the points where a clip sets in."""
    parameters = replace(BASE, loss_mode=loss_mode)
    selected = torch.tensor([[True, False, False, True], [False, True, False, False]])
    start = torch.tensor(OLD + MOVES[move] * np.array([1.0, 0.9, 0.1, 1.1]), dtype=torch.float64, requires_grad=True)

    def loss(log_probs):
        mask = torch.ones_like(selected)
        given = LossInputs(log_probs, torch.tensor(OLD), torch.full_like(log_probs, advantage), mask, selected=selected)
        return policy_loss(parameters, given, Denominators(8, 2)).loss

    assert torch.autograd.gradcheck(loss, (start,), eps=1e-6, atol=1e-7)


def frozen_weight(loss_mode: str, ratio: np.ndarray, old: np.ndarray, advantage: float) -> np.ndarray:
    """The stop-gradient factor of log_probs, restated in numpy."""
    moved, p, q = old * ratio - old, old, old * ratio
    if loss_mode == "gspo":
        s = np.exp(np.log(ratio).mean(-1, keepdims=True)) * np.ones_like(ratio)
        held = (s > 1.3) if advantage > 0 else (s < 0.8)
        return np.where(held, 0.0, s)
    if loss_mode == "cispo":
        return np.clip(ratio, 0.8, 1.3)
    kl = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    distance = np.abs(moved) if loss_mode == "dppo_tv" else kl
    onwards = np.sign(moved) == np.sign(advantage)
    bound = np.where(moved > 0, 0.3, 0.2)
    return np.where(onwards & (distance > bound), 0.0, np.minimum(ratio, 3.0))


@pytest.mark.parametrize("loss_mode", ["gspo", "cispo", "dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("advantage", [-1.5, 1.5])
@pytest.mark.parametrize("move", MOVES)
def test_gradients_of_stopped_ratios_agree_with_finite_differences_of_the_frozen_form(loss_mode, advantage, move):
    """The gradient is that of -A w log_probs with the ratio's part w held where it is; probabilities stay below 1."""
    old = OLD - 0.7
    start = old + MOVES[move] * np.array([1.0, 0.9, 0.1, 1.1])
    weight = frozen_weight(loss_mode, np.exp(start - old), np.exp(old), advantage)
    rows, width = start.shape

    def frozen(log_probs):
        return (-advantage * weight * log_probs).sum() / width / rows

    log_probs = torch.tensor(start, requires_grad=True)
    given = LossInputs(
        log_probs, torch.tensor(old), torch.full_like(log_probs, advantage), torch.ones(rows, width, dtype=torch.bool)
    )
    loss = policy_loss(replace(BASE, loss_mode=loss_mode), given, Denominators(8, 2)).loss
    gradient = torch.autograd.grad(loss, log_probs)[0].numpy()
    for index in np.ndindex(rows, width):
        step = np.zeros_like(start)
        step[index] = 1e-6
        assert gradient[index] == pytest.approx((frozen(start + step) - frozen(start - step)) / 2e-6, abs=1e-9)


# --- tokens chosen from the whole mini-batch --------------------------------------------------------------------------


def test_covariance_worked_by_hand():
    """A = 1, 1, -2 (mean 0), log p = -1, -3, -2 (mean -2): products 1, -1, 0; the fourth token is rejected."""
    advantages, log_probs = np.array([1.0, 1.0, -2.0, 9.0]), np.array([-1.0, -3.0, -2.0, np.nan])
    found = covariance(advantages, log_probs, np.array([True, True, True, False]), Means(0.0, -2.0, 3))
    np.testing.assert_allclose(found, [1.0, -1.0, 0.0, 0.0])


def selection_batch(rows=64, width=50, seed=0):
    """Advantages, log-probs and mask of responses of up to `width` tokens, end to end, and their lengths."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, width + 1, rows)
    tokens = int(lengths.sum())
    return (
        np.repeat(generator.normal(size=rows), lengths),
        -2 * generator.random(tokens),
        np.ones(tokens, bool),
        lengths,
    )


def test_kl_cov_takes_the_share_of_highest_covariance():
    advantages, log_probs, mask, lengths = selection_batch()
    parameters = PolicyLossParameters("kl_cov", kl_cov_ratio=0.01)
    picked = select(parameters, advantages, log_probs, mask, lengths)
    found = covariance(advantages, log_probs, mask, Means(advantages.mean(), log_probs.mean(), len(mask)))
    assert picked.sum() == int(0.01 * mask.sum()) and not (picked & ~mask).any()
    assert found[picked].min() > found[mask & ~picked].max()
    # at least one, as upstream
    assert select(replace(parameters, kl_cov_ratio=0.0), advantages, log_probs, mask, lengths).sum() == 1


def test_a_tokens_lot_is_of_its_place_and_its_log_prob_and_moves_with_its_row():
    lots = _lots(np.array([-1.0, -1.0, -1.0, -1.0, -2.0]), np.array([2, 3]))
    assert lots[0] == lots[2] and lots[1] == lots[3] and len(set(lots.tolist())) == 3


def test_clip_cov_draws_its_share_between_its_two_bounds():
    advantages, log_probs, mask, lengths = selection_batch()
    parameters = PolicyLossParameters("clip_cov", clip_cov_ratio=0.01, clip_cov_lb=0.2, clip_cov_ub=0.8)
    picked = select(parameters, advantages, log_probs, mask, lengths)
    found = covariance(advantages, log_probs, mask, Means(advantages.mean(), log_probs.mean(), len(mask)))
    assert picked.sum() == int(0.01 * mask.sum())
    assert ((found[picked] > 0.2) & (found[picked] < 0.8)).all()
    ranks = found[mask & (found > 0.2) & (found < 0.8)].argsort().argsort()
    taken = np.isin(found[mask & (found > 0.2) & (found < 0.8)], found[picked])
    assert 0.25 < ranks[taken].mean() / len(ranks) < 0.75  # drawn from all over the candidates, not from one end


@pytest.mark.parametrize("loss_mode", SELECTIONS)
def test_a_token_is_chosen_wherever_its_row_stands(loss_mode):
    advantages, log_probs, mask, lengths = selection_batch()
    parameters = PolicyLossParameters(loss_mode, clip_cov_ratio=0.02, kl_cov_ratio=0.02, clip_cov_lb=0.1)
    order = np.random.default_rng(1).permutation(len(lengths))
    moved = positions(lengths, order)
    picked = select(parameters, advantages, log_probs, mask, lengths)
    elsewhere = select(parameters, advantages[moved], log_probs[moved], mask[moved], lengths[order])
    np.testing.assert_array_equal(elsewhere, picked[moved])


def test_nothing_is_chosen_for_other_losses_nor_from_nothing():
    advantages, log_probs, mask, lengths = selection_batch()
    assert select(PolicyLossParameters("vanilla"), advantages, log_probs, mask, lengths) is None
    for loss_mode in SELECTIONS:
        assert not select(PolicyLossParameters(loss_mode), advantages, log_probs, np.zeros_like(mask), lengths).any()


def test_a_loss_that_needs_a_selection_and_has_none_says_so():
    inputs = replace(one_sequence([0.0], [0.0], [1.0]), selected=None)
    with pytest.raises(ConfigError, match=r"mrl\.algo\.selection"):
        policy_loss(replace(BASE, loss_mode="kl_cov"), inputs, Denominators(1, 1))


# --- a user's own -----------------------------------------------------------------------------------------------------

USERS_LOSS = """
import torch
from mrl.algo.losses import TokenLoss, register_loss

@register_loss("dro_{name}")
def dro(parameters, inputs, log_ratio):
    values = -(inputs.advantages * inputs.log_probs - parameters.custom["beta"] * log_ratio.square() / 2)
    return TokenLoss(values, torch.zeros_like(inputs.response_mask))
"""


@pytest.fixture
def users_loss(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(USERS_LOSS.format(name="a"))
    yield file
    TOKEN_LOSSES.pop("dro_a", None)


def test_a_users_loss_is_one_decorated_function(users_loss):
    load_custom_loss(str(users_loss), "dro_a")
    load_custom_loss(str(users_loss), "dro_a")  # a second actor in the same process
    parameters = PolicyLossParameters("dro_a", "token-mean", custom={"beta": 0.5})
    loss, gradient, clipped = worked(parameters, one_sequence([-1.0], [-1.5], [2.0]))
    assert (loss, gradient[0], clipped) == pytest.approx((-(2.0 * -1.0 - 0.5 * 0.25 / 2), -(2.0 - 0.5 * 0.5), 0))


def test_what_is_wrong_with_a_users_file_is_said(tmp_path, users_loss):
    with pytest.raises(ConfigError, match=r"custom\.path: .*gone\.py is no Python file"):
        load_custom_loss(str(tmp_path / "gone.py"), "x")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"broken\.py cannot be loaded: ZeroDivisionError"):
        load_custom_loss(str(broken), "x")
    with pytest.raises(ConfigError, match=r"registers dro_a, not 'other'"):
        load_custom_loss(str(users_loss), "other")


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(ConfigError, match="'gspo' is taken"):
        register_loss("gspo")(TOKEN_LOSSES["gspo"])


TINY = "parallel_configs/tiny-moe/cpu.yaml"
TINY_MODEL = ModelSpec(
    family="qwen3_moe", num_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    vocab_size=128,
    intermediate_size=256, max_position_embeddings=128, rotation=Rotation(1e4), rms_norm_eps=1e-6,
    tie_word_embeddings=False, qkv_bias=False,
    qk_norm=True, dtype="float32", moe_layers=(0, 1, 2, 3), num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=64,
    norm_topk_prob=True,
)  # fmt: skip
POLICY = "algorithm.policy_loss."


def broken_rules(*overrides):
    return {v.field: v for v in violations(load_config(TINY, None, overrides), TINY_MODEL)}


def test_the_spec_of_a_users_loss_stands_in_the_yaml():
    own = f"{POLICY}custom={{path: mine.py, aggregations: [token-mean], parameters: {{beta: 0.1}}}}"
    assert broken_rules(own, POLICY + "loss_mode=mine", POLICY + "loss_agg_mode=token-mean") == {}
    assert broken_rules(own, POLICY + "loss_mode=mine")[POLICY + "loss_agg_mode"].allowed == ("token-mean",)
    # gspo is the name of a built-in
    assert POLICY + "loss_mode" in broken_rules(own, POLICY + "loss_agg_mode=token-mean")
    assert (
        "did you mean token-mean?"
        in broken_rules(f"{POLICY}custom={{path: m.py, aggregations: [tokenmean]}}", POLICY + "loss_mode=m")[
            POLICY + "custom.aggregations"
        ].rule
    )
