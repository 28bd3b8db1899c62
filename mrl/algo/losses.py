"""Policy losses and KL terms: pure tensor functions of log-probabilities and advantages.

Notation: d = log_probs - old_log_probs per token, r = exp(d), A the advantage, L a response's length, sg stop-gradient.

A user's loss is one function under `@register_loss(name)` with the signature of those below. The configuration names
its file under algorithm.policy_loss.custom.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mrl.algo.aggregate import (
    LOG_SEQ_RATIO,
    LOG_SEQ_RATIO_SQUARE,
    MetricParts,
    aggregate,
    in_metrics,
    masked,
    sequence_mean,
)
from mrl.algo.own_functions import bind_own, load_registered
from mrl.algo.plain import Denominators, PolicyLossParameters
from mrl.algo.spec import FORWARD_OVER_TOP_K, KL_TYPES, LOG_RATIO_LIMIT, OVER_TOP_K, REVERSE_OVER_TOP_K
from mrl.errors import ConfigError

SEQUENCE_LOG_RATIO_MAX = 10.0
CUSTOM_LOSS_KEY = "algorithm.policy_loss.custom.path"


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. Every tensor is [batch, response_length] and holds whole sequences, not cut by context
    parallelism.
    """

    log_probs: Tensor  # of the current policy, carries the gradient
    old_log_probs: Tensor | None  # of the policy that anchors the ratio; None: the current one, so every ratio is 1
    advantages: Tensor
    response_mask: Tensor  # bool: the tokens that count; rejected ones do not
    entropy: Tensor | None = None  # nats per token, carries the gradient where entropy_coeff is not 0
    ref_log_probs: Tensor | None = None  # needed where kl_loss_coef is not 0
    weights: Tensor | None = None  # importance weights of the off-policy correction, on the policy loss alone
    selected: Tensor | None = None  # bool: the tokens that mrl.algo.selection chose from the whole mini-batch
    teacher_log_probs: Tensor | None = None  # needed where distillation_coef is not 0, or both of these:
    teacher_top_log_probs: Tensor | None = (
        None  # [batch, response_length, k]: the teacher's log-probs of its top tokens
    )
    top_log_probs: Tensor | None = None  # the current policy's log-probs of the same tokens; carries the gradient


@dataclass(frozen=True)
class LossOutput:
    """`loss` is this micro-batch's share of the mini-batch's loss; shares add up. `metrics` are parts
    (mrl.algo.aggregate).
    """

    loss: Tensor
    metrics: MetricParts


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token, and where the band (or its counterpart) or the dual clip clipped it.

    All tensors are [batch, response_length]. Where `weighted` is false, `values` are multiplied by the weights of the
    correction afterwards.
    """

    values: Tensor
    clipped: Tensor
    clipped_lower: Tensor | None = None
    weighted: bool = False


TokenLossFunction = Callable[[PolicyLossParameters, LossInputs, Tensor], TokenLoss]
TOKEN_LOSSES: dict[str, TokenLossFunction] = {}


def register_loss(name: str) -> Callable[[TokenLossFunction], TokenLossFunction]:
    """Registers `function(parameters, inputs, log_ratio) -> TokenLoss` under `name`. `log_ratio` is d, 0 outside the
    mask.

    The function sees one micro-batch. It must treat each sequence by itself, or the loss would depend on how a batch is
    cut. Raises ConfigError for a name that is taken.
    """

    def bind(function: TokenLossFunction) -> TokenLossFunction:
        bind_own(TOKEN_LOSSES, name, function, "register_loss")
        return function

    return bind


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, parameters: PolicyLossParameters) -> tuple[Tensor, Tensor]:
    """Returns PPO's pessimistic bound and where its clipped side is the larger one.

    The bound is max(-A r, -A clip(r, 1 - low, 1 + high)). So the upper end of the clip acts where A > 0 alone, the
    lower one where A < 0.
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - parameters.clip_ratio_low, 1 + parameters.clip_ratio_high)
    return torch.maximum(plain, clipped), clipped > plain


def _token_ratio(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _either(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Picks one of two numbers, in the precision of `like`. torch.where alone would round them to float32."""
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))


@register_loss("gspo-token")
@register_loss("gspo")
def gspo(parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """GSPO (arXiv:2507.18071, eq. 13 and 14): r_t = sg[s] exp(log_probs - sg[log_probs]), clipped.

    s = exp(mean of d over the response). Every token has the ratio of the sequence as its value, and the gradient of
    its own log-probability. So an advantage or a weight that belongs to a token weighs that token's gradient. Where one
    advantage holds for the whole sequence, value and gradient are those of the sequence form (eq. 5).

    The log ratio is bounded above by 10. So a response that drifted past e^10 gives a large finite loss without
    gradient, and not infinity. No bound is needed below, where exp goes to 0 by itself. Inside a clip's band the bound
    is never reached.
    """
    sequence_log_ratio = sequence_mean(log_ratio, inputs.response_mask).detach()[:, None]
    ratio = torch.exp(
        (inputs.log_probs - inputs.log_probs.detach() + sequence_log_ratio).clamp(max=SEQUENCE_LOG_RATIO_MAX)
    )
    return TokenLoss(*_clipped_surrogate(ratio, inputs.advantages, parameters))


@register_loss("vanilla")
def vanilla(parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """PPO (arXiv:1707.06347, eq. 7) with separate bounds (DAPO) and the dual clip (arXiv:1912.09729, eq. 5).

    d is bounded to [-20, 20]. A large ratio would make the loss of a token with A < 0 unbounded. The dual clip holds it
    at -A clip_ratio_c.
    """
    values, clipped = _clipped_surrogate(_token_ratio(log_ratio), inputs.advantages, parameters)
    ceiling = -inputs.advantages * parameters.clip_ratio_c
    over = (inputs.advantages < 0) & (values > ceiling)
    return TokenLoss(torch.where(over, ceiling, values), clipped, over)


@register_loss("cispo")
def cispo(parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """CISPO (arXiv:2506.13585): -sg[clip(r, 1 - low, 1 + high)] A log_probs, so that no token loses its gradient.

    The paper has no lower bound (clip_ratio_low 1) and a wide upper one.
    """
    ratio = _token_ratio(log_ratio.detach())
    weight = ratio.clamp(1 - parameters.clip_ratio_low, 1 + parameters.clip_ratio_high)
    return TokenLoss(-weight * inputs.advantages * inputs.log_probs, weight != ratio)


@register_loss("geo_mean")
def geo_mean(parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """GMPO (arXiv:2507.20673): -A exp(mean of clipped d): one ratio a sequence, and each token clipped before the mean.

    The clip bounds d to [-low, high], on the side that the sign of the advantage rewards. A is the mean advantage of
    the sequence.

    The paper has no weights. Times its weight, a token's ratio is that to the policy which generated, so here a
    sequence is weighed by the geometric mean of its weights, as in verl. One weight of 0 makes it 0.
    """
    sign = torch.sign(inputs.advantages)
    bounded = sign * log_ratio.clamp(-parameters.clip_ratio_low, parameters.clip_ratio_high)
    clipped_log_ratio = sign * torch.minimum(sign * log_ratio, bounded)
    ratio = torch.exp(sequence_mean(clipped_log_ratio, inputs.response_mask).clamp(max=SEQUENCE_LOG_RATIO_MAX))
    values = -sequence_mean(inputs.advantages, inputs.response_mask) * ratio
    if inputs.weights is not None:
        values = values * torch.exp(sequence_mean(torch.log(inputs.weights), inputs.response_mask))
    return TokenLoss(values[:, None].expand_as(log_ratio), bounded < sign * log_ratio, weighted=True)


@register_loss("dro")
def dro(parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """DRO by token: -(A log_probs - dro_beta / 2 d^2). A squared step takes the clip's place, so nothing is clipped.

    Direct Reward Optimisation (arXiv:2405.19107, section 3) with the group's baseline in the place of its value
    function, as in Kimi k1.5 (arXiv:2501.12599, eq. 3) and in verl.
    """
    values = 0.5 * parameters.dro_beta * log_ratio.square() - inputs.advantages * inputs.log_probs
    return TokenLoss(values, torch.zeros_like(inputs.response_mask))


@register_loss("sapo")
def sapo(parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """SAPO (arXiv:2511.20347): -A (4 / tau) sigmoid(tau (r - 1)), which has slope 1 at r = 1.

    tau is tau_pos where A > 0, else tau_neg. Nothing is clipped.
    """
    tau = _either(inputs.advantages > 0, parameters.tau_pos, parameters.tau_neg, log_ratio)
    gate = 4.0 / tau * torch.sigmoid(tau * (_token_ratio(log_ratio) - 1))
    return TokenLoss(-inputs.advantages * gate, torch.zeros_like(inputs.response_mask))


@register_loss("clip_cov")
def clip_cov(parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """Clip-Cov (arXiv:2505.22617): PPO clipping. Selected tokens that it did not clip have no loss and no gradient."""
    values, clipped = _clipped_surrogate(_token_ratio(log_ratio), inputs.advantages, parameters)
    dropped = _selected(inputs) & ~clipped
    return TokenLoss(torch.where(dropped, 0.0, values), clipped | dropped)


@register_loss("kl_cov")
def kl_cov(parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """KL-Cov (arXiv:2505.22617): -A r, plus ppo_kl_coef |d| on selected tokens.

    Nothing is clipped; `clipped` marks the selected tokens.
    """
    picked = _selected(inputs)
    values = -inputs.advantages * _token_ratio(log_ratio)
    return TokenLoss(values + torch.where(picked, parameters.ppo_kl_coef * log_ratio.abs(), 0.0), picked)


def _selected(inputs: LossInputs) -> Tensor:
    if inputs.selected is None:
        raise ConfigError(
            "this loss needs the tokens that mrl.algo.selection chooses from the whole mini-batch, and was given none"
        )
    return inputs.selected


@register_loss("dppo_tv")
def dppo_tv(parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """DPPO (arXiv:2602.04879) by total variation.

    A token is dropped once its probability has moved by more than the clip in the advantage's direction.
    """
    moved = torch.exp(inputs.log_probs.detach()) - torch.exp(inputs.old_log_probs)
    beyond = torch.where(moved > 0, moved > parameters.clip_ratio_high, -moved > parameters.clip_ratio_low)
    return _divergence_masked(parameters, inputs, log_ratio, beyond)


@register_loss("dppo_kl")
def dppo_kl(parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """DPPO by KL(old || new) of the binary choice between this token and any other.

    The clip bounds the KL: by `high` where the probability grew, by `low` where it fell.
    """
    old = torch.exp(inputs.old_log_probs)
    new = torch.exp(inputs.log_probs.detach())
    rest = _log1m(inputs.old_log_probs) - _log1m(inputs.log_probs.detach())
    divergence = -old * log_ratio.detach() + (1 - old) * rest
    bound = _either(new > old, parameters.clip_ratio_high, parameters.clip_ratio_low, log_ratio)
    return _divergence_masked(parameters, inputs, log_ratio, divergence > bound)


def _log1m(log_probs: Tensor) -> Tensor:
    """Returns log(1 - p). p is held below 1 - 1e-6, so that the result stays finite."""
    return torch.log1p(-torch.exp(log_probs).clamp(max=1 - 1e-6))


def _divergence_masked(
    parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor, beyond: Tensor
) -> TokenLoss:
    """Computes -A sg[min(r, clip_ratio_c)] log_probs. Tokens that are `beyond` are dropped where A would push them
    further.
    """
    weight = _token_ratio(log_ratio.detach()).clamp(max=parameters.clip_ratio_c)
    dropped = beyond & (inputs.advantages * log_ratio.detach() > 0)
    return TokenLoss(torch.where(dropped, 0.0, -inputs.advantages * weight * inputs.log_probs), dropped)


def policy_loss(parameters: PolicyLossParameters, inputs: LossInputs, denominators: Denominators) -> LossOutput:
    """Computes the loss of one micro-batch from its four terms, all under the same aggregation.

      pg_loss - entropy_coeff * entropy + kl_loss_coef * kl + distillation_coef * (kl to the teacher)

    `denominators` count the whole mini-batch over all data-parallel ranks. So gradients have to be summed over
    micro-batches and ranks, not averaged. Raises ConfigError for an unknown name, or for a missing input that a
    coefficient needs.
    """
    function = TOKEN_LOSSES.get(parameters.loss_mode)
    if function is None:
        raise ConfigError(
            f"policy_loss.loss_mode: {parameters.loss_mode!r} is unknown; allowed: {', '.join(TOKEN_LOSSES)}"
        )
    inputs = _without_padding(_anchored(inputs))
    log_ratio = inputs.log_probs - inputs.old_log_probs
    token_loss = function(parameters, inputs, log_ratio)
    values = token_loss.values
    if inputs.weights is not None and not token_loss.weighted:
        values = values * inputs.weights
    numerators = {"actor/pg_loss": _numerator(parameters, inputs, values)}
    total = numerators["actor/pg_loss"]
    if inputs.entropy is not None:
        numerators["actor/entropy_loss"] = _numerator(parameters, inputs, inputs.entropy)
    if parameters.entropy_coeff:
        total = total - parameters.entropy_coeff * _needed(numerators, "actor/entropy_loss", "entropy", "entropy_coeff")
    if inputs.ref_log_probs is not None:
        kl = kl_per_token(inputs.log_probs, inputs.ref_log_probs, parameters.kl_loss_type)
        numerators["actor/kl_loss"] = _numerator(parameters, inputs, kl)
    if parameters.kl_loss_coef:
        total = total + parameters.kl_loss_coef * _needed(numerators, "actor/kl_loss", "ref_log_probs", "kl_loss_coef")
    if parameters.distillation_coef:
        numerators |= _distilled(parameters, inputs)
        kl = _needed(numerators, "distillation/loss", "teacher_log_probs", "distillation_coef")
        total = total + parameters.distillation_coef * kl
    mode = parameters.loss_agg_mode
    metrics = {
        name: in_metrics(numerator, inputs.response_mask, mode, denominators) for name, numerator in numerators.items()
    }
    return LossOutput(
        total / max(denominators.of(parameters.loss_agg_mode), 1),
        metrics | _ratio_metrics(inputs, log_ratio, token_loss),
    )


def _distilled(parameters: PolicyLossParameters, inputs: LossInputs) -> dict[str, Tensor]:
    """Returns the numerator of the teacher's term under the name of its metric; nothing without the teacher's
    log-probs.
    """
    mode = parameters.distillation_mode
    if mode == FORWARD_OVER_TOP_K and inputs.top_log_probs is not None:
        least = parameters.distillation_log_prob_clamp
        values = forward_kl_over_top_k(inputs.top_log_probs, inputs.teacher_top_log_probs, least)
    elif mode == REVERSE_OVER_TOP_K and inputs.top_log_probs is not None:
        values = kl_over_top_k(inputs.top_log_probs, inputs.teacher_top_log_probs)
    elif mode not in OVER_TOP_K and inputs.teacher_log_probs is not None:
        values = kl_to_teacher(inputs.log_probs, inputs.teacher_log_probs, mode)
    else:
        return {}
    if parameters.distillation_clamp is not None:
        values = values.clamp(-parameters.distillation_clamp, parameters.distillation_clamp)
    return {"distillation/loss": _numerator(parameters, inputs, values)}


def _anchored(inputs: LossInputs) -> LossInputs:
    """Takes the current log-probs where no old ones are given. The ratio is then exactly 1 and keeps its gradient."""
    if inputs.old_log_probs is not None:
        return inputs
    return replace(inputs, old_log_probs=inputs.log_probs.detach())


def _without_padding(inputs: LossInputs) -> LossInputs:
    """Writes zeros outside the mask before anything is computed.

    A NaN there would survive a later mask in the gradient (0 x NaN).
    """
    given = {name: value for name, value in vars(inputs).items() if value is not None and name != "response_mask"}
    mask = inputs.response_mask
    top_log_probs = mask[..., None]
    return replace(inputs, **{n: masked(v, mask if v.dim() == mask.dim() else top_log_probs) for n, v in given.items()})


def _numerator(parameters: PolicyLossParameters, inputs: LossInputs, values: Tensor) -> Tensor:
    return aggregate(values, inputs.response_mask, parameters.loss_agg_mode, parameters.loss_scale_factor)


def _needed(numerators: dict[str, Tensor], name: str, field: str, coefficient: str) -> Tensor:
    if name not in numerators:
        raise ConfigError(
            f"{coefficient} is not 0, so the loss needs {field} of every response token, and none was computed"
        )
    return numerators[name]


@torch.no_grad()
def _ratio_metrics(inputs: LossInputs, log_ratio: Tensor, token_loss: TokenLoss) -> MetricParts:
    """Returns clip fractions and the mean of -d over tokens, and moments of the log sequence ratio over sequences."""
    mask = inputs.response_mask
    tokens = mask.sum()
    sequences = mask.any(-1).sum()
    log_seq_ratio = sequence_mean(log_ratio, mask)
    lower = tokens.new_zeros(()) if token_loss.clipped_lower is None else (token_loss.clipped_lower & mask).sum()
    return {
        "actor/pg_clipfrac": ((token_loss.clipped & mask).sum(), tokens),
        "actor/pg_clipfrac_lower": (lower, tokens),
        "actor/ppo_kl": (-log_ratio.sum(), tokens),
        LOG_SEQ_RATIO: (log_seq_ratio.sum(), sequences),
        LOG_SEQ_RATIO_SQUARE: (log_seq_ratio.square().sum(), sequences),
    }


def load_custom_loss(path: str, loss_mode: str) -> None:
    """Runs the file at `path` once in this process. It must bind a function to `loss_mode` with @register_loss.

    Raises ConfigError where it does not, or cannot be loaded.
    """
    load_registered(path, CUSTOM_LOSS_KEY, "register_loss", loss_mode, TOKEN_LOSSES)


# ---------------------------------------------------------------- KL to the reference policy, from sampled tokens


K3_LIMIT = 10.0  # verl's bound on one token's k3


def _k3(log_ratio: Tensor) -> Tensor:
    inverse = (-log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(inverse) - inverse).clamp(-K3_LIMIT, K3_LIMIT)


ESTIMATORS = {
    "k1": lambda log_ratio: log_ratio,
    "abs": torch.abs,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": _k3,
}


def kl_per_token(log_probs: Tensor, ref_log_probs: Tensor, kl_loss_type: str) -> Tensor:
    """Returns the KL of each token, [batch, response_length].

    With a trailing `+` in the name the value is the base estimator's and the gradient k2's. As a loss term k1 has a
    gradient that is zero on average. k3 has the gradient of the reverse direction. On-policy, k2 has the right one.
    """
    spec = KL_TYPES.get(kl_loss_type)
    if spec is None:
        raise ConfigError(f"kl_loss_type: {kl_loss_type!r} is unknown; allowed: {', '.join(KL_TYPES)}")
    log_ratio = log_probs - ref_log_probs
    value = ESTIMATORS[spec.estimator](log_ratio)
    if not spec.k2_gradient:
        return value
    carrier = ESTIMATORS["k2"](log_ratio)
    return carrier - carrier.detach() + value.detach()  # in this order float32 keeps the value beside a large k2


def kl_in_reward(old_log_probs: np.ndarray, ref_log_probs: np.ndarray, kl_penalty: str) -> np.ndarray:
    """Returns the KL of each token under the policy before the update. Its multiple is taken off the token's reward.

    The result is float64 and has the shape of the inputs. Only values matter in a reward, so a trailing `+` changes
    nothing.
    """
    old, ref = (torch.from_numpy(np.asarray(x, dtype=np.float64)) for x in (old_log_probs, ref_log_probs))
    return kl_per_token(old, ref, kl_penalty).numpy()


# ---------------------------------------------------------------- KL to a teacher, from sampled tokens


_LEAST_REST = 1e-6  # probability of all other tokens; float32 cannot tell a smaller one from 0, and has no log of it


def kl_to_teacher(log_probs: Tensor, teacher_log_probs: Tensor, loss_mode: str) -> Tensor:
    """Estimates KL(student || teacher) at each token of the student, in nats, in the shape of the inputs.

    The mean of k1 over the student's tokens is that KL. Used as an advantage, -k1 gives the KL's policy gradient
    (on-policy distillation, arXiv:2306.13649).
    """
    return kl_per_token(log_probs, teacher_log_probs, loss_mode)


def kl_over_top_k(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """Returns KL(student || teacher) [...] over the given tokens, with all other tokens taken as one.

    Both log-probs are [..., k]. The result is never negative, and 0 where both agree. It is at most the KL over the
    whole vocabulary, and equals it where the tokens are the whole vocabulary.
    """
    among = (log_probs.exp() * (log_probs - teacher_log_probs)).sum(-1)
    rest = _rest(log_probs)
    return among + rest * (rest.log() - _rest(teacher_log_probs).log())


def forward_kl_over_top_k(log_probs: Tensor, teacher_log_probs: Tensor, least: float | None = None) -> Tensor:
    """Returns the sum of q log(q / p) [...] over the given tokens alone, q of the teacher and p of the student.

    Both log-probs are [..., k]. Smaller ones than `least` count as it, and have no gradient. Over the whole
    vocabulary this is KL(teacher || student). Over a part of it the sum may be negative, and is then 0, as in verl's
    forward_kl_topk (compute_forward_kl_topk).
    """
    if least is not None:
        log_probs = log_probs.clamp(min=least)
        teacher_log_probs = teacher_log_probs.clamp(min=least)
    return (teacher_log_probs.exp() * (teacher_log_probs - log_probs)).sum(-1).clamp(min=0.0)


def _rest(log_probs: Tensor) -> Tensor:
    """Returns the probability of all other tokens, at least _LEAST_REST."""
    return (1 - log_probs.exp().sum(-1)).clamp(min=_LEAST_REST)


def distilled(
    old_log_probs: np.ndarray, teacher_log_probs: np.ndarray, loss_mode: str, loss_max_clamp: float | None
) -> np.ndarray:
    """Returns `kl_to_teacher` under the policy before the update, to be taken off the advantages.

    The result is float64, has the shape of the inputs, and is clamped to +-`loss_max_clamp`.
    """
    old, teacher = (torch.from_numpy(np.asarray(x, dtype=np.float64)) for x in (old_log_probs, teacher_log_probs))
    values = kl_to_teacher(old, teacher, loss_mode).numpy()
    if loss_max_clamp is None:
        return values
    return values.clip(-loss_max_clamp, loss_max_clamp)
