"""Samples of mean length as a plan counts them: tokens, and operations a token."""

from dataclasses import dataclass

from mrl.config.schema import RunConfig
from mrl.model import ModelSpec, forward_flops_per_token
from mrl.plan.devices import Assumptions


@dataclass(frozen=True)
class Lengths:
    """Assumed mean tokens of a sample."""

    prompt: float
    response: float
    spread: float = 1.0  # mean square of a sample's tokens, divided by the square of their mean

    @property
    def total(self) -> float:
        """Tokens of a sample."""
        return self.prompt + self.response


def mean_lengths(config: RunConfig, assumptions: Assumptions) -> Lengths:
    """Returns the configured limits times the assumed shares, or measured lengths within these limits."""
    data = config.data
    if assumptions.measured and (found := assumptions.measured.lengths):
        prompt = min(found.prompt, data.max_prompt_length)
        return Lengths(prompt, found.mean_response(data.max_response_length), found.spread)
    return Lengths(
        data.max_prompt_length * assumptions.prompt_share, data.max_response_length * assumptions.response_share
    )


def mean_flops_per_token(model: ModelSpec, lengths: Lengths) -> float:
    """Returns the FLOPs a token of a forward pass over a sample of mean length.

    A token attends to (length + 1) / 2 others on average. Long samples have more tokens, so that `spread` counts there.
    """
    return forward_flops_per_token(model, (lengths.spread * lengths.total + 1) / 2)


def longest_response(config: RunConfig, assumptions: Assumptions) -> float:
    """Returns the tokens of a step's longest response: the limit, unless runs have shown that none reaches it."""
    limit = config.data.max_response_length
    if assumptions.measured and (found := assumptions.measured.lengths):
        return found.longest_response(limit)
    return limit
