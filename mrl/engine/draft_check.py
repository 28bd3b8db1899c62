"""Checks at an engine's start that speculation gives tokens and log-probs of the model.

A few prompts are answered with drafts. Then each answer is given to the engine as a prompt, whose tokens it computes in
one pass without drafts. Log-probs must agree. And the model's likeliest token must have been sampled about as often as
its probability says: sampling that takes drafts for granted, or ignores them, takes it too often or too seldom.
"""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mrl.data.samples import Samples
from mrl.engine.requests import Request, Sampling

SAMPLING = Sampling(temperature=1.0, max_tokens=32, stop_token_ids=())
# Mean difference of a token's log-prob, in nats. Answers are computed again in other products: in float32 their
# rounding is all that differs. In 16 bits it is larger, but vLLM's fault on CPU makes 0.2 and more.
TOLERANCES = {"float32": 1e-4}
_TOLERANCE_16 = 0.1
_DEVIATIONS = 6.0  # standard deviations; chance exceeds them once in 500 million starts


class ScoredToken(NamedTuple):
    """The likeliest token at a position, and the log-prob of the token that stands there."""

    token: int
    log_prob: float
    own_log_prob: float


def requests(vocabulary: int, longest: int) -> list[Request]:
    """Returns requests whose prompts repeat themselves, so that a lookup finds something. `longest`: tokens of a
    sequence.
    """
    rng = random.Random(0)
    width = max(1, min(8, longest // 8))
    made = []
    for number in range(8):
        pattern = [rng.randrange(vocabulary) for _ in range(width)]
        made.append(Request(number, tuple(pattern * 3), number, max_tokens=max(1, min(32, longest - 3 * width - 1))))
    return made


def scoring_parameters() -> Any:
    """Returns vLLM's SamplingParams under which it tells the log-probs of a prompt's tokens, and the likeliest ones."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def scored(prompt_logprobs: Sequence[Any], ids: Sequence[int], first: int) -> Iterator[ScoredToken]:
    """Yields what vLLM says of the tokens of a prompt from number `first` on. `ids` are all of them."""
    for position in range(first, len(ids)):
        by_token = prompt_logprobs[position]
        token = next(token for token, entry in by_token.items() if entry.rank == 1)
        yield ScoredToken(token, by_token[token].logprob, by_token[ids[position]].logprob)


def fault(answers: Samples, scores: Sequence[Sequence[ScoredToken]], dtype: str) -> str:
    """Returns what is wrong with answers made with drafts; empty if nothing is. `scores`: of each answer's tokens."""
    differences = []
    expected = variance = 0.0
    hits = 0
    for row, of_row in enumerate(scores):
        one = answers.rows(slice(row, row + 1))
        (response,) = one.responses()
        for token, log_prob, score in zip(response, one.rollout_log_probs, of_row, strict=True):
            differences.append(abs(float(log_prob) - score.own_log_prob))
            share = math.exp(score.log_prob)
            expected += share
            variance += share * (1 - share)
            hits += int(token == score.token)
    mean = float(np.mean(differences))
    if not mean <= TOLERANCES.get(dtype, _TOLERANCE_16):
        return f"log-probs of {len(differences)} tokens differ from the model's by {mean:.3g} nats on average"
    if abs(hits - expected) > _DEVIATIONS * math.sqrt(variance) + 1:
        return f"the most likely token was sampled {hits} times in {len(differences)}, not {expected:.1f} as it should"
    return ""
