"""Adapters of peft's own making are read here: the same names and shapes, and the same merged weights."""

import json

import numpy as np
import pytest
from golden import golden
from safetensors.numpy import save_file

from mrl.model import model_spec
from mrl.model.adapters import TARGETS, Lora, add_factors
from mrl.model.peft_files import PREFIX, read_peft

EACH = range(len(golden("adapters")))


def lora_of(case: dict) -> Lora:
    targets = {name.split(".")[-3] for name in case["shapes"]}
    assert targets <= set(TARGETS)
    return Lora.of(case["rank"], case["alpha"], targets)


@pytest.mark.parametrize("number", EACH)
def test_what_peft_writes_is_read(number, tmp_path):
    case = golden("adapters")[number]
    (tmp_path / "adapter_config.json").write_text(json.dumps(case["adapter_config"]))
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in case["shapes"].items()},
        tmp_path / "adapter_model.safetensors",
    )
    found = read_peft(tmp_path, model_spec(case["config"]), lora_of(case))
    assert {PREFIX + name: list(place.shape) for name, place in found.items()} == case["shapes"]


def test_merged_weights_are_pefts():
    for case in golden("adapters"):
        base, first, second, merged = (np.array(case[x], np.float32) for x in ("base", "first", "second", "merged"))
        scale = np.float32(lora_of(case).scale)
        total, product = np.empty_like(base), np.empty_like(base)
        add_factors(base, first, second * scale, np.multiply, total, product)
        np.testing.assert_allclose(total, merged, rtol=2e-6, atol=2e-6)
