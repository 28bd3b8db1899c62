"""Groups that are finished and not yet trained on, on the disk: written once, beside the loop, for checkpoints.

    RUN/spool/X/group-N.A.npz   attempt A at group N, once it is finished; what is in it never changes
    checkpoints/step-M/         has those on their way at step M: finished ones under a second name, others written then

    put ------> held by generation ---- forget ----+
    pinned ---> held by a snapshot ---- release ---+---> nobody holds it: removed

A snapshot names the files that it holds, so that a checkpoint that is written later has what was there then, whatever
was trained on, finished or begun anew meanwhile. What finds no room here, or comes faster than it is written, is
written with the checkpoint.

X is of one process alone: a writer that outlives the process which it wrote for has no name in the folder of the next.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mrl.checkpoint.group_files import group_file, name_again
from mrl.errors import EnvironmentFault
from mrl.flow.group_writer import GroupParts

WRITTEN_AT_ONCE = 64  # groups that a checkpoint writes before it waits for them
ASK_AGAIN_S = 0.1  # a writer that is busy with what others gave it


class GroupFileWriter(Protocol):
    """Writes files of groups; see GroupWriter."""

    def begin(self, path: Path, parts: GroupParts) -> Any | None:
        """Begins with a file; facts of it to come. None where too much waits already."""

    def facts(self, under_way: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Size and digest of each file, by name, once all are written."""


@dataclass(eq=False)
class SpoolFile:
    """The file of one finished attempt."""

    path: Path
    under_way: Any = None  # facts to come, of one that is written here
    facts: Mapping[str, Any] | None = None  # of one that came from a checkpoint
    holders: int = 1


class Spool:
    """Files of finished groups by number. Threads may share it."""

    def __init__(self, folder: Path, writer: GroupFileWriter, check: Callable[[], None] = lambda: None):
        """Makes a folder in `folder`.

        What earlier processes left there is removed: checkpoints have their own names for it. `check`: raises LostLock
        where nothing may be written.
        """
        self.folder = folder / secrets.token_hex(4)
        self._writer = writer
        self._check = check
        self._lock = threading.RLock()
        self._files: dict[int, SpoolFile] = {}  # held by generation
        self._unheld: list[SpoolFile] = []  # that were not there yet when they could be removed
        self._told = False
        check()
        shutil.rmtree(folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def put(self, parts: GroupParts) -> None:
        """The group is finished: its file is begun, unless too many are. Raises LostLock."""
        self._check()
        path = self.folder / group_file(parts.number, parts.attempt)
        with self._lock:
            self._remove_unheld()
            under_way = self._writer.begin(path, parts)
            if under_way is not None:
                self._files[parts.number] = SpoolFile(path, under_way)

    def take_over(self, number: int, written: Path, facts: Mapping[str, Any]) -> None:
        """The group was finished by an earlier process, and a checkpoint has its file."""
        path = self.folder / written.name
        name_again(written, path)
        with self._lock:
            self._files[number] = SpoolFile(path, facts=facts)

    def forget(self, numbers: Iterable[int]) -> None:
        """Generation holds them no more: they are trained on, dropped or begun anew."""
        with self._lock:
            files = [self._files.pop(number) for number in numbers if number in self._files]
            self.release(files)

    def pinned(self, numbers: Iterable[int]) -> dict[int, SpoolFile]:
        """Files of these groups, as far as there are any, by number; they stay until they are given to `release`."""
        with self._lock:
            files = {number: self._files[number] for number in numbers if number in self._files}
            self.hold(files.values())
            return files

    def hold(self, files: Iterable[SpoolFile]) -> None:
        """One more holds them, until `release`."""
        with self._lock:
            for file in files:
                file.holders += 1

    def release(self, files: Iterable[SpoolFile]) -> None:
        """One fewer holds them; a file that nobody holds is removed."""
        with self._lock:
            for file in files:
                file.holders -= 1
                if not file.holders:
                    self._unheld.append(file)
            self._remove_unheld()

    def _remove_unheld(self) -> None:
        """What is not there yet may still come."""
        left = []
        for file in self._unheld:
            try:
                file.path.unlink()
            except FileNotFoundError:
                left.append(file)
        self._unheld = left

    def write(
        self, folder: Path, files: Mapping[int, SpoolFile], groups: Mapping[int, GroupParts]
    ) -> dict[str, dict[str, Any]]:
        """Writes all of `groups` into `folder`, those of `files` as second names; size and digest by name.

        Raises as GroupFileWriter.facts.
        """
        facts = {}
        others = []
        for number, parts in groups.items():
            known = None
            if number in files:
                known = self._named_again(files[number], folder)
            if known is None:
                others.append(parts)
            else:
                facts[files[number].path.name] = known
        for first in range(0, len(others), WRITTEN_AT_ONCE):
            facts |= self._written(folder, others[first : first + WRITTEN_AT_ONCE])
        return facts

    def _written(self, folder: Path, groups: Iterable[GroupParts]) -> dict[str, dict[str, Any]]:
        """Writes groups into `folder`; where too much waits, what was begun is waited for."""
        facts = {}
        begun: dict[str, Any] = {}
        for parts in groups:
            name = group_file(parts.number, parts.attempt)
            while (under_way := self._begun(folder / name, parts)) is None:
                if not begun:
                    time.sleep(ASK_AGAIN_S)
                facts |= self._writer.facts(begun)
                begun = {}
            begun[name] = under_way
        return facts | self._writer.facts(begun)

    def _begun(self, path: Path, parts: GroupParts) -> Any | None:
        with self._lock:
            return self._writer.begin(path, parts)

    def _named_again(self, file: SpoolFile, folder: Path) -> Mapping[str, Any] | None:
        """Facts of a file that `folder` has too now; None where the disk had no room for it."""
        name = file.path.name
        try:
            facts = file.facts or self._writer.facts({name: file.under_way})[name]
            name_again(file.path, folder / name)
        except (EnvironmentFault, FileNotFoundError) as fault:
            self._tell(fault)
            return None
        return facts

    def _tell(self, fault: Exception) -> None:
        if not self._told:
            print(f"warning: {self.folder}: {fault}. Groups are written with checkpoints instead", flush=True)
            self._told = True

    def close(self) -> None:
        """Removes all files: checkpoints have names of their own for what they need."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # another process's folder stands beside it
            self.folder.parent.rmdir()
