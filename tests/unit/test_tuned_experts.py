"""Tuned configurations of vLLM's fused experts: names and shapes are vLLM's own, and what lacks one is told."""

import re
from pathlib import Path

import pytest
from test_memory_host import inputs_of
from vllm.model_executor.layers.fused_moe import fused_moe

from mrl.plan.devices import devices
from mrl.plan.generation_times import expert_shape, experts_are_tuned, generation_seconds
from mrl.plan.plan_inputs import batch_plan, engine_of
from mrl.platforms.tuned_experts import config_name, is_brought, lacking

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
