"""Losses, KL estimators and the value loss have the values and gradients of verl's, OpenRLHF's and TRL's functions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden import differences, golden

from mrl.algo.aggregate import count
from mrl.algo.correction import CorrectionParameters, correct
from mrl.algo.losses import LossInputs, kl_per_token, policy_loss
from mrl.algo.plain import PolicyLossParameters, ValueLossParameters
from mrl.algo.selection import select
from mrl.algo.spec import KL_TYPES, LOSSES
from mrl.algo.value_loss import ValueInputs, value_loss

CLOSE = {"rel": 2e-7, "abs": 2e-9}  # verl adds 1e-8 to denominators, and 1e-10 to weights in a logarithm


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def of(peer: str, key: str = "loss_mode") -> list[dict]:
    return [case for case in golden("losses") if case["peer"] == peer and key in case]


def inputs_of(case: dict) -> LossInputs:
    columns = {name: tensor(case[name]) for name in ("log_probs", "old_log_probs", "advantages")}
    weights = tensor(case["weights"]) if "weights" in case else None
    mask = torch.tensor(case["mask"], dtype=torch.bool)
    columns["log_probs"].requires_grad_()
    return LossInputs(response_mask=mask, weights=weights, **columns)


def parameters_of(case: dict, loss_mode: str, **constants: float) -> PolicyLossParameters:
    low, high = case["clip"]
    return PolicyLossParameters(
        loss_mode, case["aggregation"], low, high, loss_scale_factor=8.0, **({"clip_ratio_c": 2.0} | constants)
    )


def is_equal(parameters: PolicyLossParameters, inputs: LossInputs, gave: dict, **close: float) -> bool:
    out = policy_loss(parameters, inputs, count(inputs.response_mask))
    (gradient,) = torch.autograd.grad(out.loss, inputs.log_probs)
    assert not gradient[~inputs.response_mask].any()
    values = [out.loss.item(), *gradient[inputs.response_mask].tolist()]
    expected = [gave["loss"], *gave["gradient"]]
    if "clipped" in gave:
        clipped, tokens = out.metrics["actor/pg_clipfrac"]
        values.append((clipped / tokens).item())
        expected.append(gave["clipped"])
    return values == pytest.approx(expected, **(CLOSE | close))


def selected(parameters: PolicyLossParameters, inputs: LossInputs) -> LossInputs:
    """With the tokens that clip_cov and kl_cov choose, by the log-probs that verl takes: the current ones."""
    columns = (x.detach().numpy().ravel() for x in (inputs.advantages, inputs.log_probs, inputs.response_mask))
    rows, width = inputs.response_mask.shape
    found = select(parameters, *columns, np.full(rows, width))
    return replace(inputs, selected=torch.from_numpy(found.reshape(rows, width)))


@pytest.mark.parametrize("loss_mode", [name for name in LOSSES if name != "gspo-token"])
def test_a_loss_is_verls_with_weights_and_advantages_of_tokens(loss_mode):
    cases = [case for case in of("verl") if case["loss_mode"] == loss_mode]
    assert len(cases) >= 100
    assert {case["kind"] for case in cases} >= {"none", "token", "sequence"}
    assert {case["of_tokens"] for case in cases} == {True, False}
    constants = {
        "clip_cov_ratio": 1.0,
        "clip_cov_lb": 0.1,
        "clip_cov_ub": 2.0,
        "kl_cov_ratio": 0.25,
        "ppo_kl_coef": 0.3,
        "dro_beta": 0.05,
    }
    differing = []
    for case in cases:
        parameters = parameters_of(case, loss_mode, **constants)
        inputs = inputs_of(case)
        if loss_mode in ("clip_cov", "kl_cov"):
            inputs = selected(parameters, inputs)
        if not is_equal(parameters, inputs, case["gave"]):
            differing.append(case)
    if loss_mode == "geo_mean":
        assert all(not np.array(case["mask"]).any(1).all() for case in differing)
        assert len(differing) == differences("losses")["geo_mean_of_empty_responses"]["cases"]
    else:
        assert not differing


def test_a_sum_over_tokens_is_verls():
    cases = [case for case in of("verl") if case.get("aggregation") == "token-sum"]
    assert {case["loss_mode"] for case in cases} == {"vanilla", "cispo", "clip_cov", "gspo", "dro"}


def test_gspo_by_either_name_is_verls():
    for case in of("verl"):
        if case["loss_mode"] == "gspo":
            assert is_equal(parameters_of(case, "gspo-token"), inputs_of(case), case["gave"]), case


def test_openrlhfs_losses_and_its_icepop_are_ours():
    cases = of("openrlhf", "kind")
    assert {case["kind"] for case in cases} == {"ppo", "gspo", "mask", "clip"}
    differing = []
    for case in cases:
        inputs = inputs_of(case)
        if case["kind"] in ("mask", "clip"):
            inputs = replace(inputs, weights=weights_of(case, "icepop" if case["kind"] == "mask" else "clip"))
        loss_mode = "gspo" if case["kind"] == "gspo" else "vanilla"
        if not is_equal(
            parameters_of(case, loss_mode), inputs, case["gave"], rel=1e-6, abs=1e-7
        ):  # weights are float32
            differing.append(case)
    assert all(case["kind"] == "gspo" and case["of_tokens"] for case in differing)
    assert len(differing) == differences("losses")["openrlhf_gspo_of_token_advantages"]["cases"]


def weights_of(case: dict, mode: str) -> torch.Tensor:
    old, rollout = (np.array(case[name]) for name in ("old_log_probs", "rollout_log_probs"))
    mask = np.array(case["mask"], bool)
    rows, width = mask.shape
    parameters = CorrectionParameters("token", mode, 0.7, 1.6)
    found = correct(parameters, old.ravel(), rollout.ravel(), mask.ravel(), np.full(rows, width))
    assert (found.keep == mask.ravel()).all()
    return torch.from_numpy(found.weights.astype(np.float64).reshape(rows, width))


def test_trls_losses_are_ours():
    cases = of("trl")
    assert {case["loss_mode"] for case in cases} == {"vanilla", "gspo", "cispo", "sapo"}
    differing = []
    for case in cases:
        parameters = parameters_of(case, case["loss_mode"], clip_ratio_c=1e9, tau_neg=1.25)  # it has no dual clip
        if case["loss_mode"] == "cispo":
            parameters = replace(parameters, clip_ratio_low=1.0)  # no lower bound
        if not is_equal(parameters, inputs_of(case), case["gave"]):
            differing.append(case)
    assert {(case["loss_mode"], case["kind"]) for case in differing} <= {("gspo", "token"), ("gspo", "icepop")}
    assert len(differing) == differences("losses")["trl_weights_of_a_sequence_ratio"]["cases"]


def test_kl_estimators_and_their_gradients_are_verls():
    cases = of("verl", "kl")
    assert {case["kl"] for case in cases} <= KL_TYPES.keys()
    for case in cases:
        log_probs = tensor(case["log_probs"]).requires_grad_()
        values = kl_per_token(log_probs, tensor(case["ref_log_probs"]), case["kl"])
        (gradient,) = torch.autograd.grad(values.sum(), log_probs)
        assert values.tolist() == pytest.approx(case["gave"]["values"], rel=1e-9, abs=1e-12), case
        assert gradient.tolist() == pytest.approx(case["gave"]["gradient"], rel=1e-9, abs=1e-12), case


def test_the_value_loss_is_verls():
    cases = of("verl", "value")
    assert len(cases) == 60
    for case in cases:
        columns = {name: tensor(case[name]) for name in ("values", "old_values", "returns")}
        columns["values"].requires_grad_()
        mask = torch.tensor(case["mask"], dtype=torch.bool)
        parameters = ValueLossParameters(cliprange_value=0.2, loss_agg_mode=case["value"])
        out = value_loss(parameters, ValueInputs(response_mask=mask, **columns), count(mask))
        (gradient,) = torch.autograd.grad(out.loss, columns["values"])
        clipped, tokens = out.metrics["critic/vf_clipfrac"]
        found = [out.loss.item(), (clipped / tokens).item(), *gradient[mask].tolist()]
        gave = case["gave"]
        assert found == pytest.approx([gave["loss"], gave["clipped"], *gave["gradient"]], **CLOSE), case
