"""Finished groups on the disk, written once, beside the loop: for checkpoints, and for a start that goes back to one.

    RUN/spool/X/group-N.A.npz   attempt A at group N, once it is finished; what is in it never changes
    RUN/spool/X/by-V.jsonl      those finished by the weights of V, which a checkpoint has: mrl/train/spool_lines.py
    checkpoints/step-M/         has those on their way at step M: finished ones under a second name, others written then

    put ------> held by generation ---- forget ----------------+
    pinned ---> held by a snapshot ---- release ---------------+---> nobody holds it: removed
    put ------> held by V ------------- a newer one is whole --+

A start that goes back to V finds in `left` what processes before it have of V, and generation takes them in place of
what it would ask engines for. So the first step that is repeated is not generated twice; of later ones nothing is kept.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mrl.checkpoint.group_files import group_file, name_again
from mrl.errors import EnvironmentFault, Interrupted, described
from mrl.flow.group_writer import GroupParts
from mrl.train.sampled_by import SampledBy
from mrl.train.spool_lines import SpoolLines, left_files

WRITTEN_AT_ONCE = 64  # groups that a checkpoint writes before it waits for them
ASK_AGAIN_S = 0.1  # a writer that is busy with what others gave it


class GroupFileWriter(Protocol):
    """Writes files of groups; see GroupWriter."""

    def begin(self, path: Path, parts: GroupParts) -> Any | None:
        """Begins with a file; facts of it to come. None where too much waits already."""

    def facts(self, under_way: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Size and digest of each file, by name, once all are written."""

    def written(self, under_way: Any) -> Mapping[str, Any] | None:
        """Size and digest of a file; None before it is written."""


@dataclass(eq=False)
class SpoolFile:
    """The file of one finished attempt."""

    path: Path
    under_way: Any = None  # facts to come, of one that is written here
    facts: Mapping[str, Any] | None = None  # of one that came from a checkpoint, or is written
    holders: int = 1
    is_judged: bool = True  # of one of a start before: its rewards were given as they would be now


@dataclass(eq=False)
class _Version:
    """Files by the weights of one checkpoint."""

    lines: SpoolLines
    most: int = 0  # groups
    begun: list[SpoolFile] = field(default_factory=list)  # held, and not in `lines` yet
    noted: list[SpoolFile] = field(default_factory=list)  # held

    @property
    def number(self) -> int:
        return self.lines.origin.version

    @property
    def has_room(self) -> bool:
        return len(self.begun) + len(self.noted) < self.most


class Spool:
    """Files of finished groups by number. Threads may share it."""

    def __init__(
        self,
        folder: Path,
        writer: GroupFileWriter,
        check: Callable[[], None] = lambda: None,
        origin: SampledBy | None = None,
    ):
        """Makes a folder in `folder`.

        What earlier processes left there is removed: checkpoints have their own names for it. Only what they have of
        `origin` comes to `left`. `check`: raises LostLock where nothing may be written.
        """
        self.folder = folder / secrets.token_hex(4)
        self._writer = writer
        self._check = check
        self._lock = threading.RLock()
        self._files: dict[int, SpoolFile] = {}  # held by generation
        self._unheld: list[SpoolFile] = []  # that were not there yet when they could be removed
        self._told = False
        self._versions: list[_Version] = []  # in their order
        self._served: _Version | None = None  # the one that gets what is finished now
        self._whole: int | None = None  # version of the newest checkpoint that is whole, or of the start
        self.left: dict[int, SpoolFile] = {}  # by number: of starts before, and not taken yet
        check()
        self.folder.mkdir(parents=True)
        if origin is not None:
            self._take_left(origin)
        for older in folder.iterdir():
            if older != self.folder:
                _remove(older)

    def _take_left(self, origin: SampledBy) -> None:
        """Names what is left in this folder, with lines at once: a start that fails loses nothing of it.

        What is not judged as it would be now has no line until it is.
        """
        found = left_files(self.folder.parent, origin)
        version = self._begun_version(origin) if found else None
        for number, written in found.items():
            if version not in self._versions:  # the disk is full
                return
            file = SpoolFile(self.folder / written.path.name, facts=written.facts, is_judged=written.is_judged)
            try:
                name_again(written.path, file.path)
            except OSError as error:
                self._tell(error)
                continue
            self.left[number] = file
            if file.is_judged:
                version.begun.append(file)
                self._note()

    def _begun_version(self, origin: SampledBy) -> _Version | None:
        try:
            self._versions.append(_Version(SpoolLines.begin(self.folder, origin)))
        except OSError as error:
            self._tell(error)
            return None
        return self._versions[-1]

    @property
    def keeps(self) -> bool:
        """Whether what is finished now is kept for a start that goes back to the weights which are served."""
        return self._served is not None and self._served.has_room

    def put(self, parts: GroupParts) -> None:
        """The group is finished: its file is begun, unless it is there, or too many are. Raises LostLock."""
        self._check()
        path = self.folder / group_file(parts.number, parts.attempt)
        with self._lock:
            self._remove_unheld()
            if parts.number in self.left:
                self._files[parts.number] = self.left.pop(parts.number)
                self.hold([self._files[parts.number]])
                return
            under_way = self._writer.begin(path, parts)
            if under_way is None:
                return
            file = SpoolFile(path, under_way)
            self._files[parts.number] = file
            if self.keeps and parts.newest <= self._served.number:  # engines may go on before `serve` says by what
                self.hold([file])
                self._served.begun.append(file)

    def serve(self, origin: SampledBy | None, most: int) -> None:
        """What is finished from now on is by the weights of `origin`, which runs may go back to; None: they may not.

        At most so many groups are kept for that, those of a step. Weights between the newest whole checkpoint and these
        have none: their save has failed.
        """
        with self._lock:
            self._note()
            self._served = None
            left_of = [each for each in self._versions if each.lines.origin == origin]
            if not left_of:
                self.left.clear()
            if origin is None:
                return
            if self._whole is None:
                self._whole = origin.version
            self._drop([each for each in self._versions if each.number != self._whole])
            self._served = left_of[0] if left_of else self._begun_version(origin)
            if self._served is not None:
                self._served.most = most

    def saved(self, version: int) -> None:
        """A checkpoint of these weights is whole: nobody goes back to those before."""
        with self._lock:
            self._whole = version
            self._drop([each for each in self._versions if each.number < version])

    def ended(self) -> None:
        """The run has its last step: no start goes back to any weights."""
        with self._lock:
            self._drop(list(self._versions))
            self.left.clear()

    def give_up(self, numbers: Iterable[int]) -> None:
        """What starts before left of these groups is not used as it is."""
        with self._lock:
            files = [self.left.pop(number) for number in numbers if number in self.left]
            for version in self._versions:
                version.noted = [file for file in version.noted if file not in files]
            self.release(files)

    def note(self) -> None:
        """Notes which files are written by now, so that a later start finds them. Raises LostLock."""
        with self._lock:
            if any(version.begun and self._has_ended(version.begun[0]) for version in self._versions):
                self._check()
                self._note()

    def _has_ended(self, file: SpoolFile) -> bool:
        """Whether the file is written, or its writer has failed."""
        try:
            file.facts = file.facts or self._writer.written(file.under_way)
        except (EnvironmentFault, Interrupted):
            return True
        return file.facts is not None

    def _note(self) -> None:
        for version in list(self._versions):
            try:
                self._note_written(version)
            except OSError as error:
                self._tell(error)
                self._drop([version])

    def _note_written(self, version: _Version) -> None:
        """In the order in which they were begun, as far as they are written."""
        while version.begun:
            file = version.begun[0]
            try:
                file.facts = file.facts or self._writer.written(file.under_way)
            except (EnvironmentFault, Interrupted) as fault:
                self._tell(fault)
                self.release([version.begun.pop(0)])
                continue
            if file.facts is None:
                return
            version.lines.add(file.path.name, file.facts)
            version.noted.append(version.begun.pop(0))

    def _drop(self, versions: Iterable[_Version]) -> None:
        for version in versions:
            self._versions.remove(version)
            version.lines.remove()
            files = [*version.begun, *version.noted]
            self.left = {number: file for number, file in self.left.items() if file not in files}
            self.release(files)
            if self._served is version:
                self._served = None

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
        """What is not there yet may still come, unless its writer has failed."""
        left = []
        for file in self._unheld:
            try:
                file.path.unlink()
            except FileNotFoundError:
                if self._may_come(file):
                    left.append(file)
        self._unheld = left

    def _may_come(self, file: SpoolFile) -> bool:
        if file.under_way is None:
            return False
        try:
            self._writer.written(file.under_way)
        except (EnvironmentFault, Interrupted):
            return False
        return True

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
            print(
                f"warning: {self.folder}: {described(fault)}. Groups are written with checkpoints instead, and a start "
                "that goes back to one generates its step again",
                flush=True,
            )
            self._told = True

    def close(self) -> None:
        """Removes all files but those that a start after this one may use.

        Checkpoints have names of their own for what they need.
        """
        with self._lock:
            kept = [version for version in self._versions if version.noted]
            names = {file.path.name for version in kept for file in version.noted}
            names |= {version.lines.path.name for version in kept}
            for version in self._versions:
                version.lines.close()
        for path in self.folder.glob("*"):
            if path.name not in names:
                _remove(path)
        with suppress(OSError):  # something is kept, or another process's folder stands beside it
            self.folder.rmdir()
            self.folder.parent.rmdir()


def _remove(path: Path) -> None:
    """Removes a file or a folder; one that another still writes into may stay."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()
