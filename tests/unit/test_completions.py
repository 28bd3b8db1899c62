"""What vLLM is asked for one response, against vLLM's own types."""

import copy

import pytest
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from mrl.data.routes import ASKED
from mrl.vllm.completions import engine_input, sampling_parameters
from mrl.vllm.requests import Request, Sampling

REQUEST = Request(7, (5, 6, 9), seed=3)


def test_a_prompt_comes_as_vllms_front_end_has_it_after_rendering():
    assert engine_input(REQUEST) == tokens_input([5, 6, 9])


def test_parameters_belong_to_one_request_so_that_vllm_need_not_copy_them_deeply():
    sampling = Sampling(temperature=1.0, max_tokens=4, stop_token_ids=(1,))
    ours, others = (sampling_parameters(REQUEST, sampling) for _ in range(2))
    before = copy.deepcopy(others)
    handed_on = ours.clone()
    handed_on.update_from_generation_config({}, 2)  # what vLLM does with its copy
    handed_on.stop_token_ids.append(8)
    assert others == before and others.stop_token_ids is not ours.stop_token_ids
    assert sampling.stop_token_ids == (1,)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, max_tokens=4, stop_token_ids=(1, 2)),
        Sampling(temperature=0.0, max_tokens=4, stop_token_ids=(1,), top_p=0.9, top_k=5),  # greedy: vLLM drops the rest
        Sampling(temperature=0.7, max_tokens=9, stop_token_ids=(), top_p=0.9, top_k=5, routes=True),
    ],
)
@pytest.mark.parametrize("limit", [None, 3])
def test_each_request_has_the_parameters_that_vllm_makes_of_its_own_numbers(sampling, limit):
    requests = [Request(number, (5, 6), seed=number + 40, max_tokens=limit) for number in range(3)]
    for request, made in [(each, sampling_parameters(each, sampling)) for each in requests]:
        assert made == SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=request.seed,
            logprobs=0, max_tokens=limit or sampling.max_tokens, stop_token_ids=list(sampling.stop_token_ids),
            detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True,
            extra_args={ASKED: True} if sampling.routes else None, skip_clone=True,
        )  # fmt: skip
