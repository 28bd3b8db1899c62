"""Which layers Megatron builds in this process: Transformer Engine's, or mrl's in plain torch."""

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

from mrl.errors import EnvironmentFault

Layers = Literal["torch", "transformer_engine"]
# what the row of an accelerator installs
FAMILIES = {"cuda": "Transformer Engine", "npu": "MindSpeed's, under Transformer Engine's names"}


# device -> attention and experts of a rank with the layers of its row
_KERNELS = {
    "cuda": ("Transformer Engine's, over cuDNN or an installed flash-attn", "Transformer Engine's grouped GEMM"),
    "npu": ("MindSpeed's fused one (use_flash_attn)", "MindSpeed's grouped GEMM"),
}
# Attention of engines where nobody chooses: vLLM 0.32 takes the first that works (platforms/cuda.py and cpu.py),
# vllm-ascend 0.23 has only one (attention/attention_v1.py).
_ENGINE_ATTENTION = {"cuda": "FLASH_ATTN, or FLASHINFER on Blackwell", "npu": "vllm-ascend's own", "cpu": "CPU_ATTN"}
_PLAIN = ("torch's scaled_dot_product_attention", "one after the other")


def kernels_of_row(device: str | None) -> tuple[str, str]:
    """Describes attention and experts of a rank on that device. None: a rank with mrl's own layers."""
    return _KERNELS.get(device or "", _PLAIN)


def engine_attention(device: str) -> str:
    """Describes the attention that vLLM chooses on that device. The first weight sync tells what it really uses."""
    return _ENGINE_ATTENTION[device]


def has_grouped_product(device: str, element_bytes: int) -> bool:
    """Tells whether torch multiplies the rows of several experts with their own weights in one call on that device.

    On NVIDIA's it is one kernel, for 16 bits (torch.nn.functional.grouped_mm). torch_npu 2.10 has none under that name.
    """
    return device == "cpu" or (device == "cuda" and element_bytes == 2)


def layers() -> Layers:
    """Returns Megatron's own answer. A Transformer Engine that is installed but cannot be imported does not count.

    Imports Megatron, if it is installed.
    """
    if find_spec("transformer_engine") is None:
        return "torch"
    has_engine = importlib.import_module("megatron.core.extensions.transformer_engine").HAVE_TE
    if has_engine:
        return "transformer_engine"
    return "torch"


def check_layers(device: str, found: Layers, allow_torch: bool) -> None:
    """Raises EnvironmentFault where an accelerator would compute in plain torch without permission."""
    if device in FAMILIES and found == "torch" and not allow_torch:
        raise EnvironmentFault(
            f"cluster.device={device}, but Megatron finds no Transformer Engine in this process ({FAMILIES[device]} is "
            "missing, or cannot be imported): it would compute in plain torch, expert by expert, unfused, in more "
            "memory than was planned. Install it (scripts/install.sh, mrl doctor --deep), or set "
            "model.allow_torch_layers: true"
        )


def check_dispatcher(overrides: Mapping[str, Any]) -> None:
    """Raises EnvironmentFault if the chosen kernels that send tokens to experts are missing in this process.

    `overrides` are fields of Megatron's transformer config. Megatron would only fail after it has built the earlier
    layers.
    """
    if overrides.get("moe_token_dispatcher_type") == "flex" and find_spec("deep_ep") is None:
        raise EnvironmentFault(
            "model.override_transformer_config.moe_token_dispatcher_type: flex needs the package deep_ep (DeepEP; its "
            "branch hybrid-ep for HybridEP), which is built against the cluster's network: install it on every node, "
            "or leave the key out for alltoall"
        )


def check_gated_delta(kernel: str) -> None:
    """Raises EnvironmentFault if the chosen kernel of gated delta layers is missing in this process."""
    if kernel == "fla" and find_spec("fla") is None:
        raise EnvironmentFault(
            "model.gated_delta: fla needs the package fla-core (flash-linear-attention), which this process does not "
            "find: pip install fla-core==0.6.0 on every node, or set model.gated_delta: torch"
        )
