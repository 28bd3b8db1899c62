"""What a rehearsal sees of a run: code that a switch turns on says that it ran.

Nothing happens outside a rehearsal. In one, MRL_REHEARSAL names a folder, and all processes of the run inherit it; each
writes the names that it has seen into a file of its own there.
"""

import os
from pathlib import Path

VARIABLE = "MRL_REHEARSAL"
_FOLDER = os.environ.get(VARIABLE)
_seen: set[str] = set()


def exercised(name: str) -> None:
    """Notes that the code of a switch ran; `name` is its key, or key=value where the value chooses the code."""
    if _FOLDER is not None and name not in _seen:
        _append(Path(_FOLDER), name)


def _append(folder: Path, name: str) -> None:
    """Opens the file each time: a forked process then has its own, and of a killed one no name is lost."""
    with (folder / f"{os.getpid()}.txt").open("a", encoding="utf-8") as file:
        file.write(f"{name}\n")
    _seen.add(name)
