"""Ray's temporary folder for a run with its own cluster: sessions, and objects that Ray spilled to disk.

A killed process leaves it behind. So each folder names its owner, and the next start of any run removes those of ended
processes.
"""

import getpass
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mrl.record.process_mark import ProcessMark

PREFIX = "mrl-ray-"
PLACE = Path("/tmp")  # short, because Ray puts sockets below it
_OWNER = "owner.json"
_TRIES = 3


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Makes the folder for the duration of the block."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
    try:
        (folder / _OWNER).write_text(json.dumps(ProcessMark.own().to_json()), encoding="utf-8")
        yield folder
    finally:
        _remove(folder)
        _remove_empty_cache()


def _remove_empty_cache() -> None:
    """Removes the folder of torch's compiler, which it makes in each process that imports it, unless it is used."""
    with suppress(OSError, KeyError):
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())  # as torch/_inductor/runtime/cache_dir_utils.py
        (Path(tempfile.gettempdir()) / f"torchinductor_{user}").rmdir()


def remove_folders_of_the_dead() -> None:
    """Removes folders of this user's ended processes on this host.

    A folder without an owner, or of a process elsewhere, stays.
    """
    for folder in PLACE.glob(f"{PREFIX}*"):
        if _is_of_the_dead(folder):
            _remove(folder)


def remove_own_folders() -> None:
    """Removes the folders of this process, which is about to end and whose Ray processes have ended."""
    for folder in PLACE.glob(f"{PREFIX}*"):
        if _owner(folder) == ProcessMark.own():
            _remove(folder)


def _remove(folder: Path) -> None:
    """Removes the owner's note last, so that a later start recognises what a Ray process still writes."""
    for _ in range(_TRIES):
        for entry in folder.iterdir():
            if entry.name != _OWNER:
                _remove_entry(entry)
        if all(entry.name == _OWNER for entry in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
            return


def _remove_entry(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with suppress(OSError):
            entry.unlink()


def _is_of_the_dead(folder: Path) -> bool:
    owner = _owner(folder)
    return owner is not None and owner.lives() is False


def _owner(folder: Path) -> ProcessMark | None:
    """Returns the folder's owner; None if it has none, or belongs to another user."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return None
        return ProcessMark.from_json(json.loads((folder / _OWNER).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
