"""Writes a wheel of vLLM without the libraries that a Hopper device does not load.

    python scripts/hardware/hopper_subset.py vllm-0.32.0-....whl FOLDER

The libraries that stay use torch's stable interface, so they load under another release of torch than the wheel names.
"""

import sys
import zipfile
from pathlib import Path

KEPT = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_vllm_fa3_C", "cumem_allocator", "spinloop")


def is_kept(name: str) -> bool:
    """Whether a file of the wheel stays: Python, data, and the libraries of KEPT."""
    return ".so" not in Path(name).name or Path(name).name.startswith(KEPT)


def subset(wheel: Path, folder: Path) -> tuple[Path, list[str]]:
    """Returns the new wheel, and the libraries that were left out."""
    left_out = []
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(folder / wheel.name, "w", zipfile.ZIP_DEFLATED) as made:
        for entry in whole.infolist():
            if is_kept(entry.filename):
                made.writestr(entry, whole.read(entry), zipfile.ZIP_DEFLATED)
            else:
                left_out.append(entry.filename)
    return folder / wheel.name, left_out


if __name__ == "__main__":
    path, names = subset(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{path}: {path.stat().st_size} bytes, without {', '.join(names)}", file=sys.stderr)
