"""Shared memory that a killed engine would leave behind: noted while it lives, removed by its successor."""

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
SOCKETS = "VLLM_RPC_BASE_PATH"  # where vLLM puts the files of sockets
RENDEZVOUS = "vllm_dist_"  # begins names of files by which vLLM's workers meet
NOTED_EVERY_S = 2.0  # while an engine starts


def shared_memory_below(pid: int) -> set[Path]:
    """Shared memory that descendants of `pid` have mapped: what multiprocessing and vLLM's CPU collectives made.

    What tools and agents have mapped is theirs, or of somebody whom they work with.
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
    """Files of shared memory that a process has mapped: by their inodes, since a semaphore was made by another name.

    Empty for a process that has ended.
    """
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        return {int(line.split(None, 5)[4]) for line in lines if f" {SHARED}/" in line}
    return set()


def _processes_below(process: Any) -> Iterator[Any]:
    """Descendants, without those that a user's code runs in."""
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
    """Files among the URIs by which workers met."""
    return {Path(place.removeprefix("file://")) for place in places if place.startswith("file://")}


def note(file: str, own: set[Path]) -> None:
    """Writes down what a kill would leave behind: `own`, and what processes below this one have mapped.

    What was noted and is still there stays: who had mapped it may have died meanwhile.
    """
    there = {path for path in noted(file) if path.exists()}
    part = Path(f"{file}.part")
    part.write_text("\n".join(map(str, shared_memory_below(os.getpid()) | own | there)))
    part.replace(file)


def noted(file: str) -> set[Path]:
    """Reads the file; nothing when there is none."""
    if Path(file).exists():
        return set(map(Path, Path(file).read_text().splitlines()))
    return set()


def remove_all(paths: set[Path]) -> None:
    """Removes segments, and folders of buckets or sockets.

    Whatever else is among them stays: a run directory may be a stranger's, and name anybody's files.
    """
    for path in paths:
        if path.name.startswith(BUCKET_FOLDER):
            shutil.rmtree(path, ignore_errors=True)
        elif _is_ours(path.name) or path.name.startswith(RENDEZVOUS):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def new_folder() -> Path:
    """An empty folder in memory, of a name that `remove_all` knows."""
    return Path(tempfile.mkdtemp(prefix=BUCKET_FOLDER, dir=memory_folder()))


@contextmanager
def noted_start(file: str) -> Iterator[Path]:
    """Notes in `file` now and then what vLLM makes while it starts, for a kill meanwhile.

    Yields a folder that is removed at the end. Sockets that its processes meet by are in it: a connection outlives its
    file, and vLLM itself leaves each file behind.
    """
    before = os.environ.get(SOCKETS)
    folder = new_folder()
    note(file, {folder})
    os.environ[SOCKETS] = str(folder)
    over = threading.Event()
    noting = threading.Thread(target=_note_on, args=(file, folder, over), daemon=True)
    noting.start()  # vLLM's start keeps the event loop
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
    """Removes what engines with these logs left, which have ended."""
    for file in logs.glob("*.segments"):
        remove_all(noted(str(file)))


def memory_folder() -> str | None:
    """Where files are memory, on hosts that have such a place."""
    if Path(SHARED).is_dir():
        return SHARED
    return None
