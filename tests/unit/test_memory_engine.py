"""What a vLLM worker holds: weights against hand-computed bounds of published engines,
the cache a token takes from its definition.
"""

from math import prod

import pytest

from mrl.model import known_spec
from mrl.model.layout import RolloutLayout
from mrl.model.vllm_parameters import target_parameters
from mrl.plan.engine_memory import cache_bytes_per_token, engine_memory, engine_memory_with_cache, worker_weights

# (tensor, data, expert) -> bytes a worker must receive of the 30B and the 235B model, GB
RECEIVED = {
    (4, 1, 1): (15.29, 117.6),
    (8, 1, 1): (7.68, 58.96),
    (16, 1, 1): (3.88, 29.63),
    (4, 2, 8): (8.04, 60.85),
    (4, 4, 16): (4.41, 32.46),
    (4, 8, 32): (2.60, 18.27),
    (8, 2, 16): (4.06, 30.57),
    (8, 4, 32): (2.24, 16.38),
    (4, 32, 128): (1.24, 7.62),
}


@pytest.mark.parametrize("shape", RECEIVED, ids=str)
def test_weights_of_a_worker_are_what_it_must_receive(shape):
    for name, gigabytes in zip(("Qwen3-30B-A3B", "Qwen3-235B-A22B"), RECEIVED[shape], strict=True):
        assert 2 * worker_weights(known_spec(name), RolloutLayout(1, *shape)) / 1e9 == pytest.approx(
            gigabytes, rel=1e-3, abs=0.006
        )  # the table has two decimals


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen2.5-0.5B", "Qwen3-8B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_weights_are_those_of_the_target_layout(name, tensor):
    model, layout = known_spec(name), RolloutLayout(1, tensor)
    if model.num_attention_heads % tensor or (
        model.num_key_value_heads % tensor and tensor % model.num_key_value_heads
    ):
        pytest.skip("vLLM refuses this degree")
    held = sum(prod(parameter.local_shape) for parameter in target_parameters(model, layout, 0, "cuda", "bfloat16"))
    assert worker_weights(model, layout) == held


def test_experts_that_do_not_divide_count_on_the_worker_that_has_most():
    """128 experts over 3 workers: 43 on the first, 42 on the last."""
    model, layout = known_spec("Qwen3-30B-A3B"), RolloutLayout(1, 1, 3, 3)
    first, last = (
        sum(prod(p.local_shape) for p in target_parameters(model, layout, n, "cuda", "bfloat16")) for n in (0, 2)
    )
    assert worker_weights(model, layout) == first == last + 48 * 3 * 2048 * 768


@pytest.mark.parametrize(("name", "tensor", "gib"), [("Qwen3-Next-80B-A3B", 4, 0.75), ("DeepSeek-V3", 8, 2.625)])
def test_the_largest_module_is_that_of_one_layer_whatever_kinds_there_are(name, tensor, gib):
    """Experts of one layer: 512 of 3 x 2048 x 512, and 256 of 3 x 7168 x 2048 elements."""
    found = engine_memory(known_spec(name), RolloutLayout(1, tensor), 2**40)
    assert found.largest_module == gib * 2**30


def test_a_token_takes_keys_and_values_of_every_layer():
    model = known_spec("Qwen3-30B-A3B")  # 48 layers, 4 key/value heads of 128
    assert cache_bytes_per_token(model, 1, 2) == 48 * 2 * 4 * 128 * 2
    assert cache_bytes_per_token(model, 4, 2) == 48 * 2 * 1 * 128 * 2
    assert cache_bytes_per_token(model, 8, 2) == cache_bytes_per_token(model, 4, 2)  # heads are repeated, not halved


def test_the_cache_gets_what_weights_and_passes_leave_in_whole_blocks():
    model, layout = known_spec("Qwen3-8B"), RolloutLayout(1, 2)
    engine = engine_memory(model, layout, 40 * 10**9)
    assert engine.weights + engine.working_set + engine.cache == 40 * 10**9 == engine.total
    per_token = cache_bytes_per_token(model, 2, 2)
    assert engine.cache_tokens % 16 == 0
    assert 0 <= engine.cache - engine.cache_tokens * per_token < 16 * per_token


def test_data_parallel_ranks_have_caches_of_their_own():
    model = known_spec("Qwen3-8B")
    one, two = (
        engine_memory_with_cache(
            model, RolloutLayout(1, 1, data), 10**9, dtype_bytes=2, batched_tokens=1, max_num_seqs=1
        )
        for data in (1, 2)
    )
    assert two.cache_tokens == 2 * one.cache_tokens


def test_a_model_that_is_larger_than_the_share_leaves_no_token():
    assert engine_memory(known_spec("Qwen3-235B-A22B"), RolloutLayout(1, 4), 80 * 10**9).cache_tokens == 0
