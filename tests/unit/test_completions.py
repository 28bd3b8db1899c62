"""What vLLM is asked for one response, against vLLM's own types."""

import copy

from vllm.inputs.engine import tokens_input

from mrl.engine.completions import engine_input, sampling_parameters
from mrl.engine.requests import Request, Sampling

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
