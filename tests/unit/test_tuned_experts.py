"""Tuned configurations of vLLM's fused experts: names and shapes are vLLM's own, and what lacks one is told."""

import importlib.util
import inspect
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_doctor import CPU
from test_memory_host import inputs_of
from vllm.model_executor.layers.fused_moe import fused_moe

from mrl.config.load import load_config
from mrl.errors import ConfigError
from mrl.model import planning_model_spec
from mrl.plan.devices import devices
from mrl.plan.generation_times import expert_shape, experts_are_tuned, generation_seconds
from mrl.plan.plan_inputs import batch_plan, engine_of
from mrl.platforms.device_state import DeviceState, Gpu
from mrl.platforms.tuned_experts import FOLDER, config_name, is_brought, lacking
from mrl.tools.doctor.version_checks import engine_checks

ROOT = Path(__file__).parents[2]

BROUGHT = Path(fused_moe.__file__).parent / "configs"
FP8 = ",dtype=fp8_w8a8,block_shape=[128,128]"
DEVICES = sorted({device.vllm_name for device in devices().values() if device.vllm_name})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [False, True])
def test_names_are_those_that_vllm_looks_for(device, fp8, monkeypatch):
    monkeypatch.setattr(fused_moe, "get_device_name_as_file_name", lambda: device)
    given = ("fp8_w8a8", [128, 128]) if fp8 else (None, None)
    assert config_name(16, 768, device, fp8) == fused_moe.get_config_file_name(16, 768, *given)


@pytest.mark.parametrize("device", DEVICES)
def test_the_shapes_that_are_taken_as_tuned_are_those_that_vllm_brings(device):
    found = {path.name for path in BROUGHT.glob(f"*device_name={device}*.json")}
    plain = re.compile(r"E=(\d+),N=(\d+),device_name=" + re.escape(device) + rf"({re.escape(FP8)})?\.json")
    shapes = [(int(m[1]), int(m[2]), bool(m[3])) for name in found if (m := plain.fullmatch(name))]
    assert shapes and all(is_brought(experts, width, device, fp8) for experts, width, fp8 in shapes)
    names = {config_name(experts, width, device, fp8) for experts in range(1, 513) for width in (768, 1536, 384, 1408)
             for fp8 in (False, True) if is_brought(experts, width, device, fp8)}  # fmt: skip
    assert names <= found


def test_a_folder_lacks_what_no_device_has_in_it(tmp_path):
    (tmp_path / config_name(16, 768, "NVIDIA_H200")).write_text("{}")
    assert lacking(str(tmp_path), 16, 768) is None
    assert lacking(str(tmp_path), 8, 1536) == "E=8,N=1536,device_name=*.json"
    assert lacking(str(tmp_path), 16, 768, fp8=True) == f"E=16,N=768,device_name=*{FP8}.json"


def test_the_plan_counts_a_kernel_that_is_not_tuned_until_a_folder_has_its_file(tmp_path):
    preset = "qwen3-30b-a3b/h100-4x8"
    seconds = []
    for folder in (None, tmp_path):
        settings = [] if folder is None else [f"rollout.tuned_experts={folder}"]
        inputs = inputs_of(preset, *settings)
        assert expert_shape(inputs) == (16, 768) and experts_are_tuned(inputs) == (folder is not None)
        seconds.append(generation_seconds(inputs, batch_plan(inputs.config, inputs.train), engine_of(inputs)))
        (tmp_path / config_name(16, 768, "NVIDIA_H100_80GB_HBM3")).write_text("{}")
    assert seconds[1] < 0.98 * seconds[0]
    assert experts_are_tuned(inputs_of("qwen3-30b-a3b/a2-4x8")) and experts_are_tuned(inputs_of("qwen3-8b/h100-1x8"))


# ---------------------------------------------------------------- scripts/tune_experts.py, all but the timer

_spec = importlib.util.spec_from_file_location("tune_experts", ROOT / "scripts" / "tune_experts.py")
tune = sys.modules["tune_experts"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tune)
FASTEST = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 256, "GROUP_SIZE_M": 1, "num_warps": 8,
           "num_stages": 4}  # fmt: skip


def layer_of(preset: str, *settings: str):
    config = load_config(ROOT / "parallel_configs" / f"{preset}.yaml", None, settings).config
    return tune.layer_of(config, planning_model_spec(config.model.path)[0])


def seconds(config: dict[str, int], tokens: int) -> float:
    """Least at FASTEST, infinite where a kernel would not fit a device."""
    if config["BLOCK_SIZE_M"] == config["BLOCK_SIZE_N"] == 128:
        return float("inf")
    return 1e-5 * tokens * (1 + sum(config[name] != value for name, value in FASTEST.items()))


def test_the_fastest_configuration_is_found_and_vllm_reads_it(tmp_path, monkeypatch, capsys):
    layer = layer_of("qwen3-235b-a22b/h100-16x8")
    assert (layer.experts, layer.width, layer.total, layer.chosen) == (8, 1536, 128, 8)
    starts = {}

    def start(tokens: int) -> dict[str, int]:
        starts[tokens] = fused_moe.get_default_config(
            tokens, layer.experts, layer.width, layer.hidden, layer.chosen, None
        )
        return starts[tokens]

    found = tune.tuned(start, seconds)
    assert sorted(starts) == sorted(tune.TOKENS)
    assert all({name: best[name] for name in FASTEST} == FASTEST for best in found.values())
    assert "1.00 times" not in capsys.readouterr().out
    monkeypatch.setattr(fused_moe, "get_device_name_as_file_name", lambda: "NVIDIA_H100_80GB_HBM3")
    name = fused_moe.get_config_file_name(layer.experts, layer.width, None)
    path = tune.written(tmp_path / "folder", name, found)
    monkeypatch.setenv(FOLDER, str(path.parent))
    fused_moe.get_moe_configs.cache_clear()
    assert fused_moe.get_moe_configs(layer.experts, layer.width, None) == {int(n): best for n, best in found.items()}
    fused_moe.get_moe_configs.cache_clear()
    assert lacking(str(path.parent), layer.experts, layer.width) is None


def test_a_configuration_that_fails_everywhere_is_never_taken():
    found = tune.tuned(lambda tokens: FASTEST, lambda config, tokens: seconds(config, tokens), (1,))
    assert {name: found["1"][name] for name in FASTEST} == FASTEST
    assert set(inspect.signature(fused_moe.fused_experts).parameters) >= {"global_num_experts", "expert_map"}


@pytest.mark.parametrize(
    ("preset", "settings", "said"),
    [
        ("qwen3-8b/h100-1x8", (), "is dense"),
        ("qwen3-30b-a3b/a2-4x8", (), "has no such kernel"),
        ("qwen3-30b-a3b/h100-4x8", ("rollout.quantization=fp8",), "only engines in 16 bits"),
    ],
)
def test_what_has_nothing_to_tune_says_so(preset, settings, said):
    with pytest.raises(ConfigError, match=said):
        layer_of(preset, *settings)


def test_without_a_device_the_command_ends_with_one_message(tmp_path, monkeypatch, capsys):
    preset = ROOT / "parallel_configs" / "qwen3-30b-a3b" / "h100-4x8.yaml"
    monkeypatch.setattr(sys, "argv", ["tune_experts.py", str(preset), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        tune.main()
    assert ended.value.code == 4 and "torch sees no CUDA device here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_doctor_names_the_files_that_engines_of_a_node_would_miss(tmp_path):
    gpu = Gpu("0", "NVIDIA H100 80GB HBM3", False, 1980, 1980, ())
    host = replace(CPU, device="cuda", state=DeviceState((gpu,)))
    (found,) = [each for each in engine_checks(host) if each.name == "tuned experts"]
    wanted = "E=16,N=768,device_name=NVIDIA_H100_80GB_HBM3.json"
    assert "take vLLM's default" in found.found and wanted in found.found and "tune_experts.py" in found.found
    for name in re.findall(r"E=\S+json", found.found):
        (tmp_path / name).write_text("{}")
    host = replace(host, environment={FOLDER: str(tmp_path)})
    (found,) = [each for each in engine_checks(host) if each.name == "tuned experts"]
    assert "default" not in found.found
