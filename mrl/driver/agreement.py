"""Compares engines with ranks at each start, before its first step: equal weights must give equal log-probs.

    training prompts, without their first token --> engines --> some tokens each, with log-probs
                                                --> ranks   --> their own log-probs of these tokens

Kernels, number formats and drafts are chosen by arguments of vLLM, and a wrong one shows in these numbers alone. So
they are compared whatever the arguments are. Nothing of the comparison remains: seeds are the requests' own, ranks drop
the rows, and no later prompt begins as these do, so engines serve no later response from their caches.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest

from mrl.algo.rows import RowValues
from mrl.config.override_fields import VLLM_SPEED
from mrl.config.schema import RunConfig
from mrl.data.batch import Prompt
from mrl.driver.placement import Placement
from mrl.driver.step_batch import AllRanks, StepBatch
from mrl.engine.requests import Request, training_sampling
from mrl.errors import NumericAbort
from mrl.generate.rollouts import Responder, generate, sample_seed
from mrl.store.response_store import ResponseStore

AGREEMENT = "agreement"
SECONDS = f"timing_s/{AGREEMENT}"
PROMPTS = 8  # at least
TOKENS = 32  # of each response, at most
# largest mean difference of log-probs, in nats, by the least exact number format of engines and ranks
LARGEST = {"float32": 1e-3, "bfloat16": 0.05, "fp8": 0.2}


@dataclass(frozen=True)
class Compared:
    """The gap between engines and ranks: mean |log p_actor - log p_rollout| in nats, over `tokens`."""

    gap: float
    tokens: int


def compare(
    config: RunConfig,
    prompts: Sequence[Prompt],
    responder: Responder,
    actor: AllRanks,
    placement: Placement,
    step: int,
) -> dict[str, float]:
    """Compares engines with ranks, both of which hold the weights of `step`. Returns the seconds that it took.

    Raises NumericAbort that names unusual arguments of vLLM if the gap is above LARGEST.
    """
    began = time.perf_counter()
    placement.to_generation()
    samples = _short_responses(config, prompts, responder, actor.layout.data)
    if config.scores_before_update:
        placement.to_log_probs()
    else:  # the plan has no room of its own for this pass, and that of the update is larger
        placement.to_update()
    compared = _scored(actor, samples)
    check(config, compared)
    placement.take_back(step)
    seconds = time.perf_counter() - began
    print(
        f"engines and trainer agree: mean |log-prob difference| {compared.gap:.1e} over {compared.tokens} tokens "
        f"({seconds:.1f} s)",
        flush=True,
    )
    return {SECONDS: seconds}


def _short_responses(
    config: RunConfig, prompts: Sequence[Prompt], responder: Responder, replicas: int
) -> ResponseStore:
    """Returns responses of equally many rows for each of the `replicas`, from all engines."""
    least = max(PROMPTS, len(responder.engines.names))
    count = -(-least // replicas) * replicas
    if config.model.vision is not None:  # every second one has images
        seeing = islice((prompt for prompt in prompts if prompt.images), count)
        pairs = zip_longest(seeing, islice(prompts, count))
        prompts = [prompt for pair in pairs for prompt in pair if prompt is not None]
    requests = []
    for number in range(count):
        prompt = prompts[number % len(prompts)]
        seed = sample_seed(config.trainer.seed, AGREEMENT, 0, prompt.prompt_id, number)
        begins = min(1, len(prompt.token_ids) - 1)
        if any(image.start == 0 for image in prompt.images):
            begins = 0
        tokens = tuple(prompt.token_ids[begins:])
        images = tuple(replace(image, start=image.start - begins) for image in prompt.images)
        requests.append([Request(number, tokens, seed, prompt.prompt_id, number, images=images)])
    sampling = replace(
        training_sampling(config.rollout, config.data, config.actor, config.model.path),
        max_tokens=min(TOKENS, config.data.max_response_length),
        stop_token_ids=(),
        top_p=1.0,  # ranks score whole distributions, and engines what a filter leaves
        top_k=-1,
        in_one_turn=True,
    )
    return generate(responder.engines, requests, sampling, poll=responder.look_after)


def _scored(actor: AllRanks, samples: ResponseStore) -> Compared:
    gaps = StepBatch(actor, samples, 0).gaps().gaps
    return compared_of(gaps, int(samples.rows.sampled_lengths.sum()))


def compared_of(of_rows: RowValues, tokens: int) -> Compared:
    """Returns the gap over all rows, given their numbers (`mismatch_of_rows`); NaN if a log-prob is not finite."""
    if of_rows["bad_rollout"].any() or of_rows["bad_actor"].any():
        return Compared(math.nan, tokens)
    return Compared(float(of_rows["log_gap"].sum()) / max(tokens, 1), tokens)


def largest_gap(config: RunConfig) -> tuple[str, float]:
    """Returns the least exact number format of engines and ranks, and the largest gap that it explains."""
    name = "float32"
    if {config.rollout_dtype, config.model.dtype} != {name}:
        name = "bfloat16"
    if config.rollout.quantization:
        name = "fp8"
    return name, LARGEST[name]


def check(config: RunConfig, compared: Compared) -> None:
    """Raises NumericAbort for a gap that the number formats do not explain, or one that is no number."""
    name, largest = largest_gap(config)
    if compared.gap <= largest:
        return
    if math.isnan(compared.gap):
        raise NumericAbort(
            "log-probs of engines or trainer are not finite before the first step: the weights may have NaN or "
            f"infinities, which `mrl convert --check {config.model.path}` names; else compare rollout.dtype with "
            "model.dtype"
        )
    arguments = {key: value for key, value in config.rollout.vllm_kwargs.items() if key not in VLLM_SPEED}
    cure = (
        "no argument of vLLM is unusual; compare rollout.dtype with model.dtype, look at logs/engine-0.log in the run "
        "directory, and at model.override_transformer_config"
    )
    if arguments:
        named = ", ".join(f"rollout.engine_kwargs.vllm.{key} = {value!r}" for key, value in arguments.items())
        cure = f"unusual: {named}; leave it out"
    raise NumericAbort(
        f"engines and trainer disagree about {compared.tokens} tokens by the same weights, before the first step: "
        f"their log-probs differ by {compared.gap:.3g} nats on average, and {name} explains {largest:g} at most. {cure}"
    )
