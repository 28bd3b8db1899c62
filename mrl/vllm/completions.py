"""What vLLM answers to one request: tokens, their log-probs, and which weights made which of them.

An example: begun by version 4, of which it had two tokens when the engine was paused, and three more by version 5:

    tokens      9  2 | 7  7  1
    spans       0: 4 | 2: 5          version 4 from token 0 on, version 5 from token 2 on

vLLM 0.32's core puts the version on every step's output when the step ends, and the version changes only while no step
is under way; so the border is where the pause fell, token by token. 0.23 says nothing of versions: a request is of the
one version that was served from its begin to its end, and is given back at a pause.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from mrl.data.routes import ASKED
from mrl.data.samples import Sample, Samples
from mrl.vllm.requests import Request, Sampling

ABORTED = "abort"  # vLLM's stop reason
CUT_OFF = "length"  # of a response that can go on

Spans = tuple[tuple[int, int], ...]  # (first token, version), from token 0 on


def sampling_parameters(request: Request, sampling: Sampling) -> Any:
    """vLLM's SamplingParams of one request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request.seed,
        logprobs=0,
        max_tokens=request.max_tokens or sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        flat_logprobs=True,
        extra_args={ASKED: True} if sampling.routes else None,
        skip_clone=True,  # vLLM would copy them deeply, for callers who go on using them
    )


def engine_input(request: Request) -> dict[str, Any]:
    """The prompt as vLLM's `TokensInput`, which its front end takes as it is.

    Any other form goes through a renderer, one request after the other, in a thread that the event loop waits for.
    """
    return {"type": "token", "prompt_token_ids": list(request.prompt_ids)}


def sample_of(request: Request, answer: Any, spans: Spans) -> Sample:
    """The response, routes left out. One that was ended is cut off where it was."""
    reason = CUT_OFF if answer.finish_reason == ABORTED else answer.finish_reason
    (_, begun), *later = spans
    return Sample(
        request.prompt_id,
        request.group_id,
        request.sample_id,
        request.seed,
        request.prompt_ids,
        np.asarray(answer.token_ids, np.int32),
        _log_probs(answer),
        reason,
        begun,
        later_versions=tuple(later),
    )


def nothing_of(request: Request, version: int) -> Sample:
    """The answer to a request that was turned back before it had a token."""
    return Sample(
        request.prompt_id,
        request.group_id,
        request.sample_id,
        request.seed,
        request.prompt_ids,
        (),
        (),
        CUT_OFF,
        version,
    )


def with_routes(sample: Sample, routes: np.ndarray | None) -> Sample:
    """The response with the routes of its tokens."""
    return replace(sample, routes=routes)


def _log_probs(answer: Any) -> np.ndarray:
    """float32 [tokens]: with logprobs=0 the sampled token's entry stands first at each position."""
    if not len(answer.token_ids):
        return np.zeros(0, np.float32)
    first = np.asarray(answer.logprobs.start_indices, np.int64)
    return np.asarray(answer.logprobs.logprobs, np.float32)[first]


def stamped_spans(answer: Any, begun: int, newest: int) -> Spans:
    """Spans as vLLM stamped them.

    Raises RuntimeError where they are not of all tokens, by versions from `begun` to `newest`.
    """
    spans = [(int(span.start), int(span.end), _number(span.version)) for span in answer.weight_versions or ()]
    if not spans and not len(answer.token_ids):
        return ((0, newest),)
    ends = [0, *(end for _, end, _ in spans)]
    versions = [version for *_, version in spans]
    whole = [start for start, *_ in spans] == ends[:-1] and ends[-1] == len(answer.token_ids)
    if not (whole and versions == sorted(set(versions)) and begun <= versions[0] and versions[-1] <= newest):
        raise RuntimeError(
            f"its {len(answer.token_ids)} tokens are of weight versions {spans}, not of {begun} to {newest}"
        )
    return tuple((start, version) for start, _, version in spans)


def _number(version: str) -> int:
    # vLLM's name for weights that nobody gave a version
    if version.isdecimal():
        return int(version)
    return -1


def unstamped_spans(begun: int, newest: int) -> Spans:
    """Where vLLM says nothing. Raises RuntimeError for a request during which another version was served."""
    if begun != newest:
        raise RuntimeError(
            f"it was begun by weight version {begun} and ended by {newest}, and which tokens are whose is not known"
        )
    return ((0, begun),)


def bits_of(samples: Samples, row: int) -> bytes:
    """A response's tokens and log-probabilities."""
    one = samples.rows(slice(row, row + 1))
    return one.token_ids.tobytes() + one.rollout_log_probs.tobytes()
