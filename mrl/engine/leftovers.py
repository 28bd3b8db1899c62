"""Shared memory that a killed engine would leave behind: noted while it lives, and removed by the next engine."""

import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mrl.platforms.hosting import BUCKET_FOLDER
from mrl.reward.process import KEEPER

SHARED = "/dev/shm"
SOCKETS = "VLLM_RPC_BASE_PATH"  # names the folder where vLLM puts files of sockets
RENDEZVOUS = "vllm_dist_"  # prefix of the files through which vLLM's workers meet
NOTED_EVERY_S = 2.0  # while an engine starts


def shared_memory_below(pid: int) -> set[Path]:
    """Returns the shared memory that descendants of `pid` have mapped, made by multiprocessing and vLLM's CPU
    collectives.

    Mappings of tools and agents are left out: these may belong to others.
    """
    import psutil

    ours = {}
    with suppress(OSError):
        ours = {path.stat().st_ino: path for path in Path(SHARED).iterdir() if _is_ours(path.name)}
    segments = set()
    for child in _processes_below(psutil.Process(pid)):
        segments |= {ours[inode] for inode in _shared_inodes(child.pid) & ours.keys()}
    return segments


def _shared_inodes(pid: int) -> set[int]:
    """Returns the inodes of shared memory files that a process has mapped; empty for a process that has ended.

    Names would not do, since a semaphore was created under another name.
    """
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        return {int(line.split(None, 5)[4]) for line in lines if f" {SHARED}/" in line}
    return set()


def _processes_below(process: Any) -> Iterator[Any]:
    """Yields the descendants, without those that run a user's code."""
    import psutil

    try:
        children = process.children()
    except psutil.Error:
        return
    for child in children:
        try:
            is_users = KEEPER in child.cmdline()
        except psutil.Error:
            continue
        if not is_users:
            yield child
            yield from _processes_below(child)


def _is_ours(name: str) -> bool:
    return name.startswith(("psm_", "sem.mp-")) or "cpushm" in name


def rendezvous_files(places: Iterable[str]) -> set[Path]:
    """Returns the files among the URIs through which workers met."""
    return {Path(place.removeprefix("file://")) for place in places if place.startswith("file://")}


def note(file: str, own: set[Path]) -> None:
    """Writes down what a kill would leave behind: `own`, and what processes below this one have mapped.

    Entries whose file still exists stay, because the process that mapped it may have died meanwhile. On a full disk the
    file stays as it was.
    """
    existing = {path for path in noted(file) if path.exists()}
    part = Path(f"{file}.part")
    with suppress(OSError):
        part.write_text("\n".join(map(str, shared_memory_below(os.getpid()) | own | existing)))
        part.replace(file)


def noted(file: str) -> set[Path]:
    """Returns the paths in the file; empty when there is none."""
    if Path(file).exists():
        return set(map(Path, Path(file).read_text().splitlines()))
    return set()


def remove_all(paths: set[Path]) -> None:
    """Removes segments, and folders of buckets or sockets.

    Other paths stay: a run directory may come from a stranger and name anybody's files.
    """
    for path in paths:
        if path.name.startswith(BUCKET_FOLDER):
            shutil.rmtree(path, ignore_errors=True)
        elif _is_ours(path.name) or path.name.startswith(RENDEZVOUS):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def new_folder() -> Path:
    """Makes an empty folder in memory, with a name that `remove_all` knows."""
    return Path(tempfile.mkdtemp(prefix=BUCKET_FOLDER, dir=memory_folder()))


@contextmanager
def noted_start(file: str) -> Iterator[Path]:
    """Notes in `file`, every few seconds, what vLLM creates while it starts, in case of a kill.

    Yields a folder for the sockets through which its processes meet, and removes it at the end. A connection outlives
    its file, and vLLM itself would leave each file behind.
    """
    before = os.environ.get(SOCKETS)
    folder = new_folder()
    note(file, {folder})
    os.environ[SOCKETS] = str(folder)
    over = threading.Event()
    noting = threading.Thread(target=_note_on, args=(file, folder, over), daemon=True)
    noting.start()  # a thread, because vLLM's start blocks the event loop
    try:
        yield folder
    finally:
        over.set()
        noting.join()
        os.environ.pop(SOCKETS)
        if before is not None:
            os.environ[SOCKETS] = before
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            note(file, set())


def _note_on(file: str, folder: Path, over: threading.Event) -> None:
    while not over.wait(NOTED_EVERY_S):
        with suppress(OSError):
            note(file, {folder})


def remove_noted(logs: Path) -> None:
    """Removes what engines with these logs left behind. They must have ended."""
    for file in logs.glob("*.segments"):
        remove_all(noted(str(file)))


def memory_folder() -> str | None:
    """Returns a folder whose files are memory; None on hosts without one."""
    if Path(SHARED).is_dir():
        return SHARED
    return None
