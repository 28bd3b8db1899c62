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

    @property
    def total(self) -> float:
        """Tokens of a sample."""
        return self.prompt + self.response


def mean_lengths(config: RunConfig, assumptions: Assumptions) -> Lengths:
    """Returns the configured limits times the assumed shares."""
    data = config.data
    return Lengths(
        data.max_prompt_length * assumptions.prompt_share, data.max_response_length * assumptions.response_share
    )


def mean_flops_per_token(model: ModelSpec, lengths: Lengths) -> float:
    """Returns the FLOPs a token of a forward pass over a sample of mean length.

    A token attends to (length + 1) / 2 others on average.
    """
    return forward_flops_per_token(model, (lengths.total + 1) / 2)
