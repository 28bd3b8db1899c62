"""Finds what belongs to the code that runs: the commit that it is of, and the presets that came with it.

In a clone both lie beside the package. In a wheel setup.py has put them into it.
"""

import subprocess
from functools import cache
from pathlib import Path

import mrl

PACKAGE = Path(mrl.__file__).resolve().parent
PRESETS = "parallel_configs"
GIT_S = 10.0


def preset_folder() -> Path:
    """Returns the folder of presets that came with the code."""
    own = PACKAGE / PRESETS
    return own if own.is_dir() else PACKAGE.parent / PRESETS


def preset_file(path: Path) -> Path:
    """Returns the file at `path`; where none is, that of parallel_configs/... which came with the code."""
    if path.exists() or path.is_absolute() or path.parts[:1] != (PRESETS,):
        return path
    own = preset_folder().joinpath(*path.parts[1:])
    return own if own.is_file() else path


def own_version() -> str:
    """Returns such as `0.1.0+g3934b1a2ab12`, `.dirty` behind it where tracked files differ; `0.1.0` of no clone."""
    commit = _commit()
    return mrl.__version__ + (f"+g{commit.replace('-', '.')}" if commit else "")


@cache
def _commit() -> str | None:
    written = PACKAGE / "commit.txt"
    if written.is_file():
        return written.read_text(encoding="ascii").strip()
    if not (PACKAGE.parent / ".git").exists():  # git itself would find that of a folder further up
        return None
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
