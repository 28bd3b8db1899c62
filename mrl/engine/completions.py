"""vLLM's answer to one request: tokens, log-probs, and which weights made which tokens.

An example. Version 4 began a response and had made two tokens when the engine was paused; version 5 made three more:

    tokens      9  2 | 7  7  1
    spans       0: 4 | 2: 5          version 4 from token 0 on, version 5 from token 2 on

vLLM 0.32's core writes the version on the output of every step when the step ends. The version changes only while no
step runs. So the boundary lies exactly where the pause was. 0.23 reports no versions: a request has one version from
its beginning to its end, and is given back at a pause.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from mrl.data.routes import ASKED
from mrl.data.samples import Sample, Samples
from mrl.engine.requests import Request, Sampling

ABORTED = "abort"  # vLLM's stop reason of an aborted request
CUT_OFF = "length"  # stop reason of a response that can be continued

Spans = tuple[tuple[int, int], ...]  # (first token, version), from token 0 on


def sampling_parameters(request: Request, sampling: Sampling) -> Any:
    """Returns vLLM's SamplingParams of one request."""
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
        skip_clone=True,  # without it vLLM makes a deep copy, for callers that reuse the object
    )


def engine_input(request: Request) -> dict[str, Any]:
    """Returns a prompt without images as vLLM's `TokensInput`, which its front end takes as it is.

    Any other form goes through a renderer. That takes one request after the other, in a thread that the event loop
    waits for.
    """
    return {"type": "token", "prompt_token_ids": list(request.prompt_ids)}


def sample_of(request: Request, answer: Any, spans: Spans) -> Sample:
    """Makes the response, without its routes. An aborted one is cut off at its last token."""
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
        images=request.images,
    )


def nothing_of(request: Request, version: int) -> Sample:
    """Makes the answer to a request that was turned back before it had a token."""
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
        images=request.images,
    )


def with_routes(sample: Sample, routes: np.ndarray | None) -> Sample:
    """Returns the response with the routes of its tokens."""
    return replace(sample, routes=routes)


def _log_probs(answer: Any) -> np.ndarray:
    """Returns the log-probs of the sampled tokens, float32 [tokens]. With logprobs=0 they stand first at each
    position.
    """
    if not len(answer.token_ids):
        return np.zeros(0, np.float32)
    first = np.asarray(answer.logprobs.start_indices, np.int64)
    return np.asarray(answer.logprobs.logprobs, np.float32)[first]


def stamped_spans(answer: Any, begun: int, newest: int) -> Spans:
    """Returns the spans as vLLM stamped them.

    Raises RuntimeError where they do not cover all tokens, or hold versions outside `begun` to `newest`.
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
    # vLLM uses a name that is no number for weights without a version
    if version.isdecimal():
        return int(version)
    return -1


def unstamped_spans(begun: int, newest: int) -> Spans:
    """Returns the spans of a generation that stamps nothing. Raises RuntimeError if the version changed during the
    request.
    """
    if begun != newest:
        raise RuntimeError(
            f"it was begun by weight version {begun} and ended by {newest}, and which tokens are whose is not known"
        )
    return ((0, begun),)


def bits_of(samples: Samples, row: int) -> bytes:
    """Returns a response's tokens and log-probabilities as bytes."""
    one = samples.rows(slice(row, row + 1))
    return one.token_ids.tobytes() + one.rollout_log_probs.tobytes()
