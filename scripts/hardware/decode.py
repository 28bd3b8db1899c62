"""Steps of an engine: what one takes at least, for a layer and for a sequence (mrl/plan/generation_times.py)."""

import json
import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from checks import Figures, Machine, Skip, check

_TOKENS, _BATCHES = 32, (1, 32, 256, 512)
_LENGTH = 512  # of the longest sequence
_SHARE = 0.3  # of the device's memory: two engines fit, should one still be ending
TUNED = "VLLM_TUNED_CONFIG_FOLDER"  # of configurations of vLLM's expert kernels that somebody made here


@check(limit_s=240)
def decode(machine: Machine) -> Figures:
    """Seconds of a step by batch at two depths: their difference is a layer's, and what is left without layers the
    host's, of which each sequence has a share. With 16 experts, for which vLLM has no tuned configuration but one of
    `TUNED`, and at the smaller depth with all 128, for which it has one on an H200.
    """
    from engine_sync import engine_environment

    if find_spec("vllm") is None:
        raise Skip("vLLM is not installed")
    os.environ.update(engine_environment(machine))
    few, many = machine.size(2, 1), machine.size(6, 2)
    batches = (1, 4) if machine.small else _BATCHES
    shallow, deep = _steps(machine, few, batches), _steps(machine, many, batches)
    layers = {batch: (deep[batch] - shallow[batch]) / (many - few) for batch in batches}
    host = {batch: shallow[batch] - few * layers[batch] for batch in batches}
    a_sequence = (host[batches[-1]] - host[1]) / (batches[-1] - 1)
    by_batch = {name: {str(batch): round(steps[batch], 6) for batch in batches}
                for name, steps in ((f"{few} layers", shallow), (f"{many} layers", deep))}  # fmt: skip
    of_layer = {str(batch): round(seconds * 1e6, 1) for batch, seconds in layers.items()}
    found = machine.part({"layer_us": of_layer, "sequence_us": a_sequence * 1e6, "step_s": by_batch})
    found["tuned_folder"] = os.environ.get(TUNED, "")
    whole = _steps(machine, few, batches, experts=128)
    found["step_of_128_experts_s"] = {str(batch): round(seconds, 6) for batch, seconds in whole.items()}
    return found


def _steps(machine: Machine, layers: int, batches: tuple[int, ...], experts: int = 16) -> dict[int, float]:
    """Of an engine with weights that nobody set, by the number of its sequences."""
    from vllm import LLM, SamplingParams

    from mrl.platforms.hosting import get_hosting

    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                  "hidden_size": machine.size(2048, 256), "num_hidden_layers": layers,
                  "num_attention_heads": machine.size(32, 8), "num_key_value_heads": 4,
                  "head_dim": machine.size(128, 32), "intermediate_size": machine.size(6144, 256),
                  "moe_intermediate_size": machine.size(768, 128), "num_experts": machine.size(experts, experts // 4),
                  "num_experts_per_tok": machine.size(8, 4), "vocab_size": machine.size(32000, 1000),
                  "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
                  "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "rope_theta": 1e6,
                  "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False}  # fmt: skip
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        engine = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=_LENGTH,
                     max_num_seqs=batches[-1], gpu_memory_utilization=_SHARE,
                     **get_hosting(machine.device).engine_arguments(_LENGTH, None))  # fmt: skip
        steps = {}
        for batch in batches:
            prompts = [{"prompt_token_ids": [1 + number % 100] * 8} for number in range(batch)]
            params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True, detokenize=False)
            engine.generate(prompts, params, use_tqdm=False)  # makes the kernels of this batch
            times = []
            for _ in range(3):
                began = time.perf_counter()
                engine.generate(prompts, params, use_tqdm=False)
                times.append(time.perf_counter() - began)
            steps[batch] = min(times) / _TOKENS
        engine.llm_engine.engine_core.shutdown()  # the next one must not see memory become free while it measures
    return steps
