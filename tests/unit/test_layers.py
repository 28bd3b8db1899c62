"""Which layers ranks compute with: Megatron's own answer, refused on an accelerator where it is plain torch and nobody
said that it may be, and the same in the plan.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from test_memory_host import inputs_of

from mrl.errors import EnvironmentFault
from mrl.model.hf_config import LayerKind
from mrl.plan.memory import activations_of, actor_bytes, memory_section
from mrl.plan.plan_inputs import batch_plan
from mrl.platforms.inventory import CUDA_MAJOR
from mrl.platforms.layers import check_layers, engine_attention, layers

ROOT = Path(__file__).parents[2]
TRANSFORMER_ENGINE = {
    "transformer_engine/__init__.py": "__version__ = '2.11.0'",
    "transformer_engine/pytorch/__init__.py": "",
    "transformer_engine/pytorch/fp8.py": "class FP8GlobalStateManager: pass\ndef fp8_autocast(): pass",
}
ASK = """
import sys, types
core = types.ModuleType("megatron.core.extensions.transformer_engine")
try:  # as megatron-core 0.16.1 asks, extensions/transformer_engine.py
    import transformer_engine as te
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast
    core.HAVE_TE = True
except ImportError:
    core.HAVE_TE = False
sys.modules["megatron.core.extensions.transformer_engine"] = core
from mrl.platforms.layers import layers
print(layers())
"""


# how MindSpeed core_r0.16.0 makes modules that are not there (mindspeed/patch_utils.py, Patch.parse_path)
MINDSPEED = """
import sys, types
from importlib.machinery import ModuleSpec
for path in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8"):
    module = sys.modules[path] = types.ModuleType(path)
    module.__file__, module.__spec__ = "mindspeed.dummy_module.py", ModuleSpec(path, None)
    if "." in path:
        setattr(sys.modules[path.rpartition(".")[0]], path.rpartition(".")[2], module)
module.FP8GlobalStateManager = module.fp8_autocast = type("Module", (), {})
"""


def answer(folder: Path, files: dict[str, str], before: str = "") -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    start = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\n"
    return subprocess.run(
        [sys.executable, "-c", start + before + ASK], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_layers_are_those_that_megatron_found(tmp_path):
    assert answer(tmp_path, TRANSFORMER_ENGINE) == "transformer_engine"
    assert layers() == "torch"  # as it is installed for these tests


def test_a_transformer_engine_that_cannot_be_imported_is_none(tmp_path):
    broken = TRANSFORMER_ENGINE | {
        "transformer_engine/pytorch/__init__.py": "raise ImportError('undefined symbol: _ZN3c10')"
    }
    assert answer(tmp_path, broken) == "torch"


def test_mindspeeds_stand_ins_count_as_the_layers_that_they_bring(tmp_path):
    assert answer(tmp_path, {}, MINDSPEED) == "transformer_engine"


def test_megatron_asks_as_the_stand_in_does():
    import megatron.core

    source = (Path(megatron.core.__path__[0]) / "extensions/transformer_engine.py").read_text()
    for line in (
        "import transformer_engine as te",
        "from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast",
    ):
        assert f"try:\n    {line}" in source or f"\n    {line}\n" in source
    assert "HAVE_TE = False" in source


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_plain_torch_is_refused_on_an_accelerator_unless_it_is_allowed(device):
    with pytest.raises(EnvironmentFault, match=r"model\.allow_torch_layers: true"):
        check_layers(device, "torch", allow_torch=False)
    check_layers(device, "torch", allow_torch=True)
    check_layers(device, "transformer_engine", allow_torch=False)
    check_layers("cpu", "torch", allow_torch=False)


def test_torchs_adam_takes_the_roots_of_all_moments_at_once_where_its_step_is_not_fused():
    """7.6 GB of 30.5 B parameters on 16 ranks: four bytes a parameter of the shard."""
    preset, one_rank = "qwen3-30b-a3b/h100-4x8-separate", 30.5e9 / 16
    inputs = inputs_of(preset, "model.allow_torch_layers=true")
    state = actor_bytes(inputs, batch_plan(inputs.config, inputs.train), 0)
    scratch = 4 * state.optimizer / 12  # of master weights and two moments
    assert state.activations + state.temporaries >= scratch
    assert inputs.train.world_size == 16 and scratch == pytest.approx(4 * one_rank, rel=0.1)


@pytest.mark.parametrize("preset", ["qwen3-30b-a3b/h100-4x8", "qwen3-30b-a3b/a3-1x16"])
def test_the_plan_counts_with_the_layers_that_the_run_would_have(preset):
    found = {}
    for allowed in ("false", "true"):
        inputs = inputs_of(preset, f"model.allow_torch_layers={allowed}")
        found[allowed] = (
            memory_section(inputs)["layers"],
            activations_of(inputs, batch_plan(inputs.config, inputs.train).micro),
        )
    assert [found[allowed][0] for allowed in ("false", "true")] == ["transformer_engine", "torch"]
    one, other = (sum(found[allowed][1].layer(LayerKind(True)).values()) for allowed in ("false", "true"))
    assert other > one


def test_engines_attention_is_what_the_installed_vllm_would_take():
    """Read in its sources, since importing a platform of another device does more than reading."""
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]) / "platforms"
    cpu, cuda = ((folder / f"{name}.py").read_text(encoding="utf-8") for name in ("cpu", "cuda"))
    assert f"return AttentionBackendEnum.{engine_attention('cpu')}.get_path()" in cpu
    plain = cuda.partition("def _get_backend_priorities")[2].partition("\ndef ")[0].rpartition("use_non_causal:")[2]
    blackwell, others = (part.split("AttentionBackendEnum.") for part in plain.split("else:\n            return", 1))
    known = ("FLASHINFER", "FLASH_ATTN")
    first = [next(word.split(",")[0] for word in part if word.startswith(known)) for part in (others, blackwell)]
    assert engine_attention("cuda") == "{}, or {} on Blackwell".format(*first)


def test_the_cuda_that_a_driver_has_to_serve_is_that_of_the_row():
    assert f"core_cu{CUDA_MAJOR}]" in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f"FROM nvidia/cuda:{CUDA_MAJOR}." in (ROOT / "Dockerfile").read_text(encoding="utf-8")
