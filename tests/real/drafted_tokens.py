"""Samples tokens through vLLM's rejection sampler on CPU: `python drafted_tokens.py FOLDER`. See test_engine_drafts.

Prints JSON: what vLLM's own repetition of temperatures gives; and with the fix, for each way of sampling and each
position, [tokens, chi-square of their counts, degrees of freedom] against the model's distribution, and the largest
difference of a log-prob. Of FOLDER, a text model of Qwen3.5: rows of positions of the model, and of its drafting model
as vLLM has it and with the fix.
"""

import json
import sys

import torch
import vllm.v1.sample.rejection_sampler as vllm_sampler
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from mrl.engine import cpu_drafts
from mrl.engine.receive import register_models

WORDS = 24
DRAFTED = 2
# name -> temperature, top_p, whether drafts are sampled and judged by their own distribution, whether requests have
# seeds, requests, rounds
WAYS = {
    "temperature 1": (1.0, 1.0, False, False, 20_000, 5),
    "temperature 1, seeds": (1.0, 1.0, False, True, 4_000, 3),
    "temperature 0.7, drafts by their distribution": (0.7, 1.0, True, True, 4_000, 3),
    "top_p 0.8": (1.0, 0.8, False, False, 20_000, 5),
    "top_p 0.8, drafts by their distribution": (1.0, 0.8, True, True, 4_000, 3),
}


def model_and_draft() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the model [DRAFTED + 1, WORDS], and probabilities of the drafts [DRAFTED, WORDS]."""
    torch.manual_seed(0)
    logits = torch.randn(DRAFTED + 1, WORDS) * 1.5
    return logits, (logits[:DRAFTED] + torch.randn(DRAFTED, WORDS)).softmax(-1)


def expected(temperature: float, top_p: float) -> torch.Tensor:
    """Log-probs [DRAFTED + 1, WORDS] of the distribution to sample from."""
    log_probs = (model_and_draft()[0].double() / temperature).log_softmax(-1)
    ordered, words = log_probs.exp().sort(-1, descending=True)
    keeps = torch.zeros_like(ordered, dtype=torch.bool).scatter(1, words, ordered.cumsum(-1) - ordered < top_p)
    return log_probs.masked_fill(~keeps, float("-inf")).log_softmax(-1)


def sampled(requests: int, temperature: float, top_p: float, by_distribution: bool, seeds: bool, seed: int):
    """Returns the tokens of each request, and their log-probs one behind the other."""
    logits, draft = model_and_draft()
    torch.manual_seed(seed)
    drafts = torch.stack([torch.multinomial(each, requests, replacement=True) for each in draft], 1).int()
    places = torch.arange(requests * (DRAFTED + 1), dtype=torch.int32).view(requests, DRAFTED + 1)
    ends = torch.arange(1, requests + 1, dtype=torch.int32)
    metadata = SpecDecodeMetadata(
        drafts.flatten(), [DRAFTED] * requests, ends * DRAFTED, ends * (DRAFTED + 1),
        places[:, :DRAFTED].flatten().contiguous(), places[:, DRAFTED].contiguous(), places.flatten(),
    )  # fmt: skip
    generators = {}
    if seeds:
        generators = {number: torch.Generator().manual_seed(seed * requests + number) for number in range(requests)}
    nothing = torch.zeros(requests)
    sampling = SamplingMetadata(
        temperature=torch.full((requests,), temperature), all_greedy=False, all_random=True,
        top_p=torch.full((requests,), top_p) if top_p < 1 else None, top_k=None, generators=generators,
        max_num_logprobs=0, no_penalties=True, prompt_token_ids=None, frequency_penalties=nothing,
        presence_penalties=nothing, repetition_penalties=nothing + 1, output_token_ids=[[] for _ in range(requests)],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    sampler = vllm_sampler.RejectionSampler(Sampler(logprobs_mode="processed_logprobs"))
    probabilities = draft.repeat(requests, 1) if by_distribution else None
    output = sampler(metadata, probabilities, logits.repeat(requests, 1), sampling)
    tokens, log_probs = sampler.parse_output(output.sampled_token_ids, WORDS, (), output.logprobs_tensors)
    return tokens, torch.as_tensor(log_probs.logprobs[:, 0])


def judged(temperature: float, top_p: float, by_distribution: bool, seeds: bool, requests: int, rounds: int) -> dict:
    truth = expected(temperature, top_p)
    counts = torch.zeros_like(truth)
    worst = 0.0
    for seed in range(1, rounds + 1):
        rows, log_probs = sampled(requests, temperature, top_p, by_distribution, seeds, seed)
        places = torch.tensor([[position, token] for row in rows for position, token in enumerate(row)]).T
        counts.index_put_(tuple(places), torch.ones(places.shape[1], dtype=counts.dtype), accumulate=True)
        worst = max(worst, float((log_probs - truth[tuple(places)]).abs().nan_to_num(99).max()))
    positions = []
    for log_prob, found in zip(truth, counts, strict=True):
        wanted = log_prob.exp() * found.sum()
        possible = wanted > 0
        chi_square = float(((found - wanted)[possible] ** 2 / wanted[possible]).sum() + 1e9 * found[~possible].sum())
        positions.append([int(found.sum()), chi_square, int(possible.sum()) - 1])
    return {"positions": positions, "worst": worst}


def rows_of_positions(folder: str) -> list[int]:
    register_models()
    drafting = {"method": "mtp", "num_speculative_tokens": DRAFTED}
    config = EngineArgs(
        folder, dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
        enable_prefix_caching=False, speculative_config=drafting,
    ).create_engine_config()  # fmt: skip
    drafting = config.speculative_config.draft_model_config
    own = drafting.uses_mrope
    cpu_drafts.share_positions(config)
    return [3 if several else 1 for several in (config.model_config.uses_mrope, own, drafting.uses_mrope)]


if __name__ == "__main__":
    current_platform.register_triton_kernel_overrides()
    given = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 3, 6], dtype=torch.int32), 6, 0, 1
    memory = [torch.full((6,), 7.0) for _ in range(64)]  # freed at once, so that what nobody writes is known
    del memory
    found = {"own": vllm_sampler.expand_batch_to_tokens(*given).tolist()}
    cpu_drafts.install()
    found["mended"] = vllm_sampler.expand_batch_to_tokens(*given).tolist()
    found["ways"] = {name: judged(*way) for name, way in WAYS.items()}
    one, again = (sampled(500, 1.0, 0.9, True, True, 3) for _ in range(2))
    found["repeats"] = one[0] == again[0] and torch.equal(one[1], again[1])
    found["rows of positions"] = rows_of_positions(sys.argv[1])
    print(json.dumps(found))
