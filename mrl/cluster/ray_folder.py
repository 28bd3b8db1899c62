"""Ray's temporary folder of a run that has a cluster of its own: sessions, and what Ray spilled to the disk.

A process that is killed leaves it, so each says whose it is, and the next start of any run removes those of the dead.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mrl.record.process_mark import ProcessMark

PREFIX = "mrl-ray-"
PLACE = Path("/tmp")  # short: Ray puts sockets below it
_OWNER = "owner.json"


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Makes the folder for the time of the block."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
    try:
        (folder / _OWNER).write_text(json.dumps(ProcessMark.own().to_json()), encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_folders_of_the_dead() -> None:
    """Removes folders that this user's processes of this host left, once they run no more. One that does not say whose
    it is, or is of a process elsewhere, stays.
    """
    for folder in PLACE.glob(f"{PREFIX}*"):
        if _is_of_the_dead(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_of_the_dead(folder: Path) -> bool:
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        owner = ProcessMark.from_json(json.loads((folder / _OWNER).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return owner.lives() is False
