"""NAME==VERSION of what the ladder needs beside torch, as installed here: megatron-core, mbridge, mrl's core and what
these need.

Left out is what is large and what the ladder skips by name where it is missing.
"""

import importlib.metadata
import re

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
)


def pins() -> dict[str, str]:
    """Name -> version of the closure of WANTED over what they require on this machine, extras aside."""
    found: dict[str, str] = {}
    waiting = list(WANTED)
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
    print("\n".join(f"{name}=={version}" for name, version in sorted(pins().items())))
