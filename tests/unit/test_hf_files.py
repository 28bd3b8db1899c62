"""A checkpoint that is not the one config.json describes is refused before a model is built,
and the message says what is wrong.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from mrl.errors import EnvironmentFault
from mrl.model import model_spec, tensor_specs
from mrl.model.hf_files import check_checkpoint, checkpoint_tensors, read_safetensors_header

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 16, "intermediate_size": 12, "max_position_embeddings": 32,
    "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def model():
    return model_spec(CONFIG)


@pytest.fixture
def tensors(model):
    return {spec.name: np.zeros(spec.shape, np.float32) for spec in tensor_specs(model)}


def test_the_right_tensors_pass_in_one_file_or_by_index(tmp_path, model, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    check_checkpoint(tmp_path, model)
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    (tmp_path / "model.safetensors").unlink()
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_checkpoint(tmp_path, model)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(EnvironmentFault, match=r"b\.safetensors does not exist"):
        check_checkpoint(tmp_path, model)


def test_a_file_that_was_cut_short_is_named(tmp_path, model, tensors):
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    whole = file.read_bytes()
    for kept in (len(whole) - 1, 100, 3):
        file.write_bytes(whole[:kept])
        with pytest.raises(EnvironmentFault, match=r"model\.safetensors cannot be read"):
            check_checkpoint(tmp_path, model)


def test_missing_foreign_and_misshapen_tensors_are_all_told(tmp_path, model, tensors):
    del tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(8, np.float32)
    tensors["model.norm.weight"] = np.zeros(9, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentFault) as error:
        check_checkpoint(tmp_path, model)
    text = str(error.value)
    assert "lm_head.weight is missing" in text
    assert "q_proj.bias is not part of the model" in text
    assert "model.norm.weight has shape [9], not [8]" in text


def test_a_head_beside_tied_embeddings_must_be_the_same(tmp_path, tensors):
    """transformers 5.19 keeps both tensors, and vLLM ties them (EvolvingLMMs-Lab/lmms-engine#157)."""
    tied = model_spec({**CONFIG, "tie_word_embeddings": True})
    save_file(tensors, tmp_path / "model.safetensors")
    check_checkpoint(tmp_path, tied)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + np.float32(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        EnvironmentFault, match=r"lm_head\.weight differs .* vLLM ties them and transformers keeps both"
    ):
        check_checkpoint(tmp_path, tied)


def test_one_file_beside_an_index_of_others_is_refused(tmp_path, model, tensors):
    """transformers reads model.safetensors, and vLLM the files of the index."""
    save_file(tensors, tmp_path / "old.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "old.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_checkpoint(tmp_path, model)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EnvironmentFault, match="transformers reads the former and vLLM the latter"):
        check_checkpoint(tmp_path, model)


def test_a_pickle_in_place_of_safetensors_is_told(tmp_path):
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(EnvironmentFault, match=r"adapter_model\.bin beside it is a pickle"):
        read_safetensors_header(tmp_path / "adapter_model.safetensors")


def test_a_directory_without_safetensors_is_refused_and_pickles_are_not_opened(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(EnvironmentFault, match="pickles and are never read"):
        checkpoint_tensors(tmp_path)


def test_an_index_cannot_reach_outside_its_directory(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(EnvironmentFault, match="outside its directory"):
        checkpoint_tensors(tmp_path)
