"""Adapters in PEFT's form mean to PEFT what they mean here: its model computes the same, and so do its gradients.

PEFT is no dependency. The tests are skipped where it is not installed. With transformers 5, which has the experts of a
layer in one tensor, PEFT takes adapters of Qwen3-MoE's experts alone. With 4.57 it takes those of all families:

    pip install --no-deps --target peft4 peft==0.21.2 accelerate==1.15.0 transformers==4.57.3 \
        huggingface_hub==0.36.0 tokenizers==0.22.1
    MRL_PEFT=peft4 python -m pytest tests/real/test_peft.py
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft_worker import loss_of
from safetensors.torch import load_file, save_file
from test_lora import ALPHA, ATTENTION, DELTA, MODELS, RANK, SOME, Merged, _factors
from tiny_models import save
from torch import Tensor

from mrl.errors import ConfigError
from mrl.model import load_model_spec
from mrl.model.adapters import TARGETS, Lora
from mrl.model.peft_files import BASE_DIGEST, CONFIG, PREFIX, WEIGHTS, base_digest, peft_config, read_peft

OWN = os.environ.get("MRL_PEFT")  # a folder with PEFT, and perhaps another transformers
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not OWN and not importlib.util.find_spec("peft"), reason="peft is not installed"),
]
LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
CASES = {
    "dense": ("dense", TARGETS),
    "dense-attention": ("dense", ATTENTION),
    "moe": ("moe", TARGETS),
    "shared": ("shared", TARGETS),
    "shared-some": ("shared", SOME),
    "glm": ("glm", TARGETS),
    "latent": ("latent", TARGETS),
    "latent-attention": ("latent", LATENT),
    "direct-attention": ("direct", LATENT),
    "next-delta": ("next", DELTA),
    "kinds-delta": ("kinds", DELTA),
}
IN_TRANSFORMERS_5 = (
    "dense",
    "dense-attention",
    "moe",
    "latent-attention",
    "direct-attention",
    "next-delta",
    "kinds-delta",
)


@dataclass(frozen=True)
class Loaded:
    """A model with adapters, as this code and as PEFT computes it."""

    folder: Path
    lora: Lora
    factors: dict[str, Tensor]
    logits: Tensor
    gradients: dict[str, Tensor]
    said: dict  # PEFT's versions, and its warnings of missing factors

    @property
    def has_transformers_5(self) -> bool:
        return int(self.said["transformers"].partition(".")[0]) >= 5


@pytest.fixture(scope="module", params=CASES)
def loaded(request, tmp_path_factory) -> Loaded:
    name, targets = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = MODELS[name]()
    path = save(model, folder / "model")
    spec = load_model_spec(path)
    lora = Lora.of(RANK, ALPHA, targets)
    factors = {name: tensor.requires_grad_() for name, tensor in _factors(spec, lora).items()}
    adapter = folder / "adapter"
    adapter.mkdir()
    named = {f"{PREFIX}{name}": tensor.detach() for name, tensor in factors.items()}
    save_file(named, adapter / WEIGHTS, {"format": "pt", BASE_DIGEST: base_digest(path)})
    (adapter / CONFIG).write_text(json.dumps(peft_config(lora, str(path))))
    ids = torch.randint(0, 120, (3, 11), generator=torch.Generator().manual_seed(5))
    save_file({"ids": ids}, folder / "ids.safetensors")
    paths = [OWN, os.environ.get("PYTHONPATH"), str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, Path(__file__).with_name("peft_worker.py"), folder]
    subprocess.run(command, env=environment, check=True, timeout=600)
    logits = Merged(model, load_file(path / "model.safetensors"), factors)(ids).logits
    loss_of(logits, ids).backward()
    gradients = {name: tensor.grad for name, tensor in factors.items()}
    said = json.loads((folder / "report.json").read_text())
    found = Loaded(folder, lora, factors, logits.detach(), gradients, said)
    if found.has_transformers_5 and request.param not in IN_TRANSFORMERS_5:
        pytest.skip("PEFT does not take adapters of this family's experts with transformers 5")
    return found


def test_peft_computes_what_the_merged_model_does(loaded):
    assert loaded.said["missing"] == []
    found = load_file(loaded.folder / "logits.safetensors")["logits"]
    assert (found - loaded.logits).abs().max() < 1e-5 * loaded.logits.abs().max()


def test_gradients_of_both_factors_are_pefts(loaded):
    found = load_file(loaded.folder / "gradients.safetensors")
    wanted = loaded.gradients
    if loaded.has_transformers_5:  # factors of experts are those of a layer there
        wanted = {name: gradient for name, gradient in wanted.items() if ".experts." not in name}
        found = {name: gradient for name, gradient in found.items() if ".experts." not in name}
    assert found.keys() == wanted.keys() and len(found) > 8
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() < 1e-5 * gradient.norm(), name


def test_what_peft_writes_is_read(loaded):
    saved = loaded.folder / "saved"
    spec = load_model_spec(loaded.folder / "model")
    if loaded.has_transformers_5 and any(".experts." in name for name in loaded.factors):
        with pytest.raises(ConfigError, match="only plain LoRA adapters are read"):
            read_peft(saved, spec, loaded.lora)
        return
    assert read_peft(saved, spec, loaded.lora).keys() == loaded.factors.keys()
    written = load_file(saved / WEIGHTS)
    assert all(torch.equal(written[f"{PREFIX}{name}"], factor) for name, factor in loaded.factors.items())
