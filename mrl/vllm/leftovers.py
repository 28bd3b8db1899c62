"""Shared memory that a killed engine would leave behind: noted while it lives, removed by its successor."""

import os
import shutil
from pathlib import Path

from mrl.platforms.hosting import BUCKET_FOLDER


def shared_memory_below(pid: int) -> set[Path]:
    """Shared memory that descendants of `pid` have mapped:
    segments of multiprocessing and of vLLM's CPU collectives.
    """
    import psutil

    segments = set()
    for child in psutil.Process(pid).children(recursive=True):
        try:
            paths = {Path(region.path) for region in child.memory_maps()}
        except psutil.Error:
            continue
        segments |= {
            p for p in paths if p.parent == Path("/dev/shm") and (p.name.startswith("psm_") or "cpushm" in p.name)
        }
    return segments


def note(file: str, own: set[Path]) -> None:
    """Writes down what a kill would leave behind: `own`, and what processes below this one have mapped."""
    Path(file).write_text("\n".join(map(str, shared_memory_below(os.getpid()) | own)))


def noted(file: str) -> set[Path]:
    """What stands in the file; nothing when there is none."""
    return set(map(Path, Path(file).read_text().split())) if Path(file).exists() else set()


def remove_all(paths: set[Path]) -> None:
    """Removes segments and folders of buckets."""
    for path in paths:
        if path.name.startswith(BUCKET_FOLDER):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def memory_folder() -> str | None:
    """Where files are memory, on hosts that have such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
