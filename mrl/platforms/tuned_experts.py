"""Names the tuned configurations of vLLM's Triton kernel of fused experts, and knows those that vLLM brings. Loads no
torch.

Without one of its shape the kernel takes a default, which is slower in decode steps. scripts/tune_experts.py measures
one on the user's device.
"""

import fnmatch
import json
from functools import cache
from pathlib import Path

# shapes of which vLLM 0.32 brings configurations, by its name of the device (model_executor/layers/fused_moe/configs)
_BROUGHT = Path(__file__).with_name("tuned_experts.json")
_FP8 = ",dtype=fp8_w8a8,block_shape=[128,128]"  # engines in FP8 have blocks of 128 by 128

FOLDER = "VLLM_TUNED_CONFIG_FOLDER"  # vLLM's variable


def config_name(experts: int, width: int, device: str, fp8: bool = False) -> str:
    """Returns vLLM's file name for the experts of one worker and the inner width of each (get_config_file_name).

    `device` is vLLM's name of it: NVIDIA_H100_80GB_HBM3.
    """
    return f"E={experts},N={width},device_name={device}{_FP8 * fp8}.json"


def vllm_name(device: str) -> str:
    """Returns vLLM's name of a device in its files, from the one that torch and the driver give it."""
    name = device.replace(" ", "_")
    return "NVIDIA_H200" if "H200" in name.split("_") else name


def shape_of_worker(num_experts: int, width: int, expert_parallel: int, workers: int) -> tuple[int, int]:
    """Returns the experts of one worker and the inner width of each: whole experts are spread, or all are cut."""
    if expert_parallel > 1:
        return num_experts // expert_parallel, width
    return num_experts, width // workers


def lacking(folder: str, experts: int, width: int, fp8: bool = False) -> str | None:
    """Returns the file name that `folder` lacks; None where it has one of the shape, for any device."""
    wanted = config_name(experts, width, "*", fp8)
    if any(fnmatch.fnmatchcase(path.name, wanted.replace("[", "[[]")) for path in Path(folder).glob("*.json")):
        return None
    return wanted


def is_brought(experts: int, width: int, device: str, fp8: bool = False) -> bool:
    """Tells whether vLLM 0.32 itself has a configuration of this shape."""
    return [experts, width] in _brought().get(device, {}).get("fp8" if fp8 else "bfloat16", [])


def is_tuned(experts: int, width: int, device: str, fp8: bool, folder: str | None) -> bool:
    """Tells whether an engine finds a configuration: vLLM's own, or one in `folder`."""
    if folder is not None and (Path(folder) / config_name(experts, width, device, fp8)).is_file():
        return True
    return is_brought(experts, width, device, fp8)


@cache
def _brought() -> dict[str, dict[str, list[list[int]]]]:
    return json.loads(_BROUGHT.read_text(encoding="utf-8"))
