"""Lets a rehearsal see which code ran: code behind a switch reports that it was executed.

Outside a rehearsal nothing happens. During one, MRL_REHEARSAL names a folder, which all processes of the run inherit.
Each process writes the names that it has seen into its own file there.
"""

import os
from pathlib import Path

VARIABLE = "MRL_REHEARSAL"
_FOLDER = os.environ.get(VARIABLE)
_seen: set[str] = set()


def exercised(name: str) -> None:
    """Records that the code of a switch ran. `name` is its key, or key=value where the value selects the code."""
    if _FOLDER is not None and name not in _seen:
        _append(Path(_FOLDER), name)


def _append(folder: Path, name: str) -> None:
    """Opens the file each time, so a forked process gets its own and a killed process loses no name."""
    with (folder / f"{os.getpid()}.txt").open("a", encoding="utf-8") as file:
        file.write(f"{name}\n")
    _seen.add(name)
