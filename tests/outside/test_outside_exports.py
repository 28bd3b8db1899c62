"""`mrl convert --check` of models that peers wrote: what verl, slime and Megatron-Bridge write rightly is sound, and
what is wrong with the others is named.
"""

import base64
from pathlib import Path

import pytest
from golden import golden

from mrl.checkpoint.export_check import check_export
from mrl.errors import EnvironmentFault

MODELS = sorted({case["model"] for case in golden("exports")})
MOVED = 0.01  # by which each element was moved, as a standard deviation


def written(folder: Path, model: str, way: str) -> Path:
    (case,) = (case for case in golden("exports") if (case["model"], case["way"]) == (model, way))
    for name, text in case["files"].items():
        (folder / way / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / way / name).write_bytes(base64.b64decode(text))
    return folder / way


@pytest.mark.parametrize("way", ["transformers", "verl's FSDP merger", "slime", "Megatron-Bridge"])
@pytest.mark.parametrize("model", MODELS)
def test_what_peers_write_is_sound(model, way, tmp_path):
    origin, export = written(tmp_path, model, "origin"), written(tmp_path, model, way)
    assert check_export(export).is_sound
    report = check_export(export, origin)
    assert report.is_sound
    assert report.usual_move == pytest.approx(MOVED, rel=0.2)
    # the whole spread: no tensor was left out or taken from another
    assert all(0.3 * MOVED < each.share < 3 * MOVED for each in report.moved)


@pytest.mark.parametrize("model", MODELS)
def test_adapters_that_verl_leaves_beside_the_weights_are_told(model, tmp_path):
    origin, export = written(tmp_path, model, "origin"), written(tmp_path, model, "verl's FSDP merger, adapters")
    notes = check_export(export, origin).notes
    assert "all tensors are the origin's, unmoved" in notes
    assert any("lora_adapter/ has adapters" in note for note in notes)


@pytest.mark.parametrize("model", MODELS)
def test_rows_that_slime_was_not_told_to_cut_are_named(model, tmp_path):
    faults = check_export(written(tmp_path, model, "slime, padded vocabulary")).faults
    assert {fault.tensor for fault in faults} == {"model.embed_tokens.weight"} | (
        set() if model.startswith("tied") else {"lm_head.weight"}
    )
    assert all("8 rows beyond vocab_size" in fault.what for fault in faults)


@pytest.mark.parametrize("model", MODELS)
def test_what_megatron_bridge_was_not_given_is_named(model, tmp_path):
    folder = written(tmp_path, model, "Megatron-Bridge, a tensor not given")
    assert len(list(folder.glob("*.safetensors"))) > 1
    faults = check_export(folder).faults
    assert [fault.tensor for fault in faults] == ["model.layers.1.self_attn.o_proj.weight"]


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("torch.compile", "names begin with '_orig_mod.'"),
        ("DataParallel", "names begin with 'module.'"),
        ("torch.save", "pickles"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_what_nobody_can_load_is_named(model, way, words, tmp_path):
    with pytest.raises(EnvironmentFault, match=words):
        check_export(written(tmp_path, model, way))
