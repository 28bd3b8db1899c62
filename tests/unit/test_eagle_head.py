"""EAGLE-3 heads are judged by what vLLM's class makes of their configuration, and damaged ones by one message."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_memory_host import inputs_of

from mrl.model.eagle_head import head_bytes, head_cache_elements, head_faults

MODEL = inputs_of("qwen3-30b-a3b/h100-4x8").model
HIDDEN = MODEL.hidden_size
CONFIG = {  # as published heads of this model have it
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": HIDDEN, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 1, "vocab_size": MODEL.vocab_size,
    "draft_vocab_size": 32,
}  # fmt: skip


def head(folder: Path, states: int = 3, **changes) -> Path:
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"fc.weight": (HIDDEN, states * HIDDEN), "lm_head.weight": (32, HIDDEN), "d2t": (32,)}
    save_file({name: np.zeros(shape, np.int8) for name, shape in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}, "states": 4},
        {"eagle_aux_hidden_state_layer_ids": [1, 2], "num_aux_hidden_states": 2, "states": 2},
        {"target_hidden_size": HIDDEN},
    ],
)
def test_heads_that_vllm_builds_are_sound(tmp_path, changes):
    assert list(head_faults(head(tmp_path, **changes), MODEL)) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"eagle_aux_hidden_state_layer_ids": ["a"]}, "must be a list of whole numbers"),
        ({"eagle_aux_hidden_state_layer_ids": 3}, "must be a list of whole numbers"),
        ({"eagle_config": "x"}, "must be a mapping"),
        ({"hidden_size": None, "target_hidden_size": HIDDEN}, "hidden_size is null"),
        ({"architectures": 7}, "must be a list of names"),
        ({"architectures": ["Other"]}, "were seen to draft"),
        ({"vocab_size": 7}, f"vocab_size is 7, and the model's is {MODEL.vocab_size}"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 300]}, "of a model with 48"),
        # vLLM reads the states of these four layers, and its class joins three (llama_eagle3.py, vLLM 0.32)
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4], "states": 4}, "joins 3 hidden states"),
        ({"states": 2}, "fc.weight has shape"),
    ],
)
def test_what_vllm_could_not_build_is_one_fault_each(tmp_path, changes, why):
    (fault,) = head_faults(head(tmp_path, **changes), MODEL)
    assert why in fault


def test_folders_without_a_head_and_damaged_files_are_faults(tmp_path):
    assert "no folder with a head" in next(head_faults(tmp_path / "none", MODEL))
    folder = head(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x00" * 7)
    (fault,) = head_faults(folder, MODEL)
    assert "model.safetensors" in fault
    (folder / "config.json").write_text("{")
    (fault,) = head_faults(folder, MODEL)
    assert "config.json" in fault and "model.path" not in fault


def test_a_heads_weights_and_cache_are_its_own(tmp_path):
    folder = head(tmp_path, num_hidden_layers=2)
    assert head_bytes(folder) == HIDDEN * 3 * HIDDEN + 32 * HIDDEN + 32
    assert [head_cache_elements(folder, size) for size in (1, 2, 8)] == [2 * 2 * heads * 128 for heads in (4, 2, 1)]
