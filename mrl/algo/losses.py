"""Policy losses: pure tensor functions of log-probabilities and advantages.

Notation: d = log_probs - old_log_probs per token, r = exp(d), A the advantage, L a response's length, sg stop-gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrl.algo.aggregate import Denominators, aggregate, local_weight, masked, sequence_mean
from mrl.algo.kl import LOG_RATIO_LIMIT, kl_per_token
from mrl.algo.metrics import LOG_SEQ_RATIO, LOG_SEQ_RATIO_SQUARE, MetricParts
from mrl.algo.spec import LOSSES
from mrl.errors import ConfigError

SEQUENCE_LOG_RATIO_MAX = 10.0


@dataclass(frozen=True)
class PolicyLossParameters:
    """Which loss, and its constants; names are those of the configuration."""

    loss_mode: str = "gspo"
    loss_agg_mode: str = "seq-mean-token-mean"
    clip_ratio_low: float = 3e-4
    clip_ratio_high: float = 4e-4
    clip_ratio_c: float = 10.0
    loss_scale_factor: float | None = None
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch; every tensor is [batch, response_length] and whole sequences (not cut by context parallelism)."""

    log_probs: Tensor  # of the current policy, carries the gradient
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor  # bool
    entropy: Tensor | None = None  # nats per token, carries the gradient where entropy_coeff is not 0
    ref_log_probs: Tensor | None = None  # needed where kl_loss_coef is not 0


@dataclass(frozen=True)
class LossOutput:
    """`loss`: this micro-batch's share of the mini-batch's loss (shares add up). `metrics`: see mrl.algo.metrics."""

    loss: Tensor
    metrics: MetricParts


@dataclass(frozen=True)
class TokenLoss:
    """All [batch, response_length]: the loss, and where it was clipped by the band or by the dual clip."""

    values: Tensor
    clipped: Tensor
    clipped_lower: Tensor


TokenLossFunction = Callable[[PolicyLossParameters, LossInputs, Tensor], TokenLoss]
TOKEN_LOSSES: dict[str, TokenLossFunction] = {}


def _loss(name: str) -> Callable[[TokenLossFunction], TokenLossFunction]:
    def bind(function: TokenLossFunction) -> TokenLossFunction:
        TOKEN_LOSSES[LOSSES[name].name] = function
        return function

    return bind


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, parameters: PolicyLossParameters) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic bound max(-A r, -A clip(r, 1 - low, 1 + high)), and where the clipped side is the larger one."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - parameters.clip_ratio_low, 1 + parameters.clip_ratio_high)
    return torch.maximum(plain, clipped), clipped > plain


@_loss("gspo")
def gspo(parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """GSPO-token (arXiv:2507.18071, eq. 13 and 14): r_t = sg[s] exp(log_probs - sg[log_probs]), s = exp(mean of d over the response).

    Every token has the sequence's ratio as its value and its own log-probability's gradient; with one advantage for the whole
    sequence this is the sequence form. The log ratio is bounded above by 10, so a response that drifted past e^10 gives a large finite
    loss without gradient instead of infinity; there is no bound below, where exp goes to 0 by itself. Neither is reached inside a band.
    """
    sequence_log_ratio = sequence_mean(log_ratio, inputs.response_mask).detach()[:, None]
    ratio = torch.exp((inputs.log_probs - inputs.log_probs.detach() + sequence_log_ratio).clamp(max=SEQUENCE_LOG_RATIO_MAX))
    values, clipped = _clipped_surrogate(ratio, inputs.advantages, parameters)
    return TokenLoss(values, clipped, torch.zeros_like(clipped))


@_loss("vanilla")
def vanilla(parameters: PolicyLossParameters, inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """PPO (arXiv:1707.06347, eq. 7) with separate bounds (DAPO), d bounded to [-20, 20], and the dual clip (arXiv:1912.09729, eq. 5).

    The dual clip holds the loss of a token with A < 0 at -A clip_ratio_c, where a large ratio would otherwise make it unbounded.
    """
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    values, clipped = _clipped_surrogate(ratio, inputs.advantages, parameters)
    ceiling = -inputs.advantages * parameters.clip_ratio_c
    over = (inputs.advantages < 0) & (values > ceiling)
    return TokenLoss(torch.where(over, ceiling, values), clipped, over)


def policy_loss(parameters: PolicyLossParameters, inputs: LossInputs, denominators: Denominators) -> LossOutput:
    """pg_loss - entropy_coeff * entropy + kl_loss_coef * kl of one micro-batch, all under the same aggregation.

    `denominators` count the whole mini-batch over all data-parallel ranks, so gradients are to be summed over micro-batches and ranks,
    not averaged. Raises ConfigError for an unknown name or an input that the coefficients need and that is missing.
    """
    spec = LOSSES.get(parameters.loss_mode)
    if spec is None:
        raise ConfigError(f"policy_loss.loss_mode: {parameters.loss_mode!r} is unknown; allowed: {', '.join(LOSSES)}")
    inputs = _without_padding(inputs)
    log_ratio = inputs.log_probs - inputs.old_log_probs
    token_loss = TOKEN_LOSSES[spec.name](parameters, inputs, log_ratio)
    numerators = {"actor/pg_loss": _numerator(parameters, inputs, token_loss.values)}
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
    weight = local_weight(inputs.response_mask, parameters.loss_agg_mode)
    metrics = {name: (numerator.detach(), weight) for name, numerator in numerators.items()}
    return LossOutput(total / max(denominators.of(parameters.loss_agg_mode), 1), metrics | _ratio_metrics(inputs, log_ratio, token_loss))


def _without_padding(inputs: LossInputs) -> LossInputs:
    """Zeros outside the mask before anything is computed: a NaN there would survive a later mask in the gradient (0 x NaN)."""
    given = {name: value for name, value in vars(inputs).items() if value is not None and name != "response_mask"}
    return replace(inputs, **{name: masked(value, inputs.response_mask) for name, value in given.items()})


def _numerator(parameters: PolicyLossParameters, inputs: LossInputs, values: Tensor) -> Tensor:
    return aggregate(values, inputs.response_mask, parameters.loss_agg_mode, parameters.loss_scale_factor)


def _needed(numerators: dict[str, Tensor], name: str, field: str, coefficient: str) -> Tensor:
    if name not in numerators:
        raise ConfigError(f"{coefficient} is not 0, so the loss needs {field} of every response token, and none was computed")
    return numerators[name]


@torch.no_grad()
def _ratio_metrics(inputs: LossInputs, log_ratio: Tensor, token_loss: TokenLoss) -> MetricParts:
    """Clip fractions and -d over tokens; first and second moment of the log sequence ratio over sequences."""
    mask = inputs.response_mask
    tokens, sequences = mask.sum(), mask.any(-1).sum()
    log_seq_ratio = sequence_mean(log_ratio, mask)
    return {
        "actor/pg_clipfrac": ((token_loss.clipped & mask).sum(), tokens),
        "actor/pg_clipfrac_lower": ((token_loss.clipped_lower & mask).sum(), tokens),
        "actor/ppo_kl": (-log_ratio.sum(), tokens),
        LOG_SEQ_RATIO: (log_seq_ratio.sum(), sequences),
        LOG_SEQ_RATIO_SQUARE: (log_seq_ratio.square().sum(), sequences),
    }
