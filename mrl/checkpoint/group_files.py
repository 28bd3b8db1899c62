"""The responses of one group in a file: columns as they travel through a run, compressed; the same bytes for the same.

A file appears whole or not at all, and is never changed afterwards. So where it was written before, a checkpoint has
a second name of it, and its bytes are on the disk once.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mrl.checkpoint.manifest import file_facts, fsync
from mrl.data.samples import Samples
from mrl.whole_file import appears_whole


def group_file(number: int) -> str:
    """The name of a group's file."""
    return f"group-{number}.npz"


def write_group(path: Path, samples: Samples) -> dict[str, Any]:
    """Writes `path` durably; its size and digest."""
    with appears_whole(path) as work:
        with work.open("wb") as file:
            np.savez_compressed(file, **samples.arrays)
        return file_facts(work)


def read_group(path: Path) -> Samples:
    """What `write_group` wrote."""
    with np.load(path) as columns:
        return Samples(**columns)


def name_again(written: Path, path: Path) -> None:
    """`path` is another name of a file that is there; a copy where the disk has no second names."""
    try:
        os.link(written, path)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(written, path)
        fsync(path)
