"""An engine's meters, by vLLM's own statistics: what of its cache is in use, and what it dropped for want of room."""

import math

import pytest
from engine_driver import run_engine
from engine_pressure import ASKED
from tiny_models import save, tiny_moe

from mrl.model import load_model_spec, tensor_specs
from mrl.platforms.hosting import get_hosting

pytestmark = [pytest.mark.real, pytest.mark.long]
BLOCKS, BLOCK = 20, 128  # tokens of one; a request of 203 tokens needs two
KEPT = 1  # by vLLM
# where all want their second block at once, as many give up their first as make room for the others' second
PREEMPTED = math.ceil((2 * ASKED - (BLOCKS - KEPT)) / 2)


def test_a_cache_that_is_too_small_is_told_by_its_peak_and_by_preemptions(tmp_path):
    model = save(tiny_moe(), tmp_path / "model")
    spec = load_model_spec(model)
    arguments = {
        "dtype": "float32", "tensor_parallel_size": 1, "max_model_len": 256, "max_num_seqs": 32, "seed": 0,
        "skip_tokenizer_init": True, "generation_config": "vllm", "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True, "distributed_executor_backend": "mp", "enable_prefix_caching": False,
        "block_size": BLOCK, "num_gpu_blocks_override": BLOCKS, **get_hosting("cpu").engine_arguments(256, 1024),
    }  # fmt: skip
    job = {
        "model": str(model), "arguments": arguments, "vocab_size": spec.vocab_size,
        "expected": [[t.name, t.shape] for t in tensor_specs(spec)],
    }  # fmt: skip
    idle, one, many = run_engine("engine_pressure.py", tmp_path, job, 1, 200)
    assert idle == {"tokens": 0, "cache_share": 0, "cache_peak": 0, "preemptions": 0, "all_act": False}
    assert one["tokens"] == one["asked"] == 200 and one["preemptions"] == 0
    assert 1 / BLOCKS <= one["cache_peak"] <= 3 / BLOCKS
    assert many["tokens"] - one["tokens"] == many["asked"] == 200 * ASKED, "what was dropped is not lost"
    assert many["cache_peak"] > 0.9 and many["preemptions"] == PREEMPTED > 0
    assert many["cache_share"] < many["cache_peak"]
