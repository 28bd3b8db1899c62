"""Writes finished groups to the disk once, beside the loop: for checkpoints, and for a start that goes back to one.

    RUN/spool/X/group-N.A.npz   attempt A at group N, once it is finished; what is in it never changes
    RUN/spool/X/by-V.jsonl      those finished by the weights of V, which a checkpoint has: mrl/generate/spool_lines.py
    checkpoints/step-M/         has those on their way at step M: finished ones under a second name, others written then

    put ------> held by generation ---- forget ----------------+
    pinned ---> held by a snapshot ---- release ---------------+---> nobody holds it: removed
    put ------> held by V ------------- a newer one is whole --+

A start that goes back to V finds earlier processes' groups of V in `left`. Generation takes these instead of asking
engines. So the first repeated step is not generated twice. Groups of later steps are not kept.

A snapshot names the files that it holds. So a checkpoint that is written later has the groups of that moment, whatever
happens to them meanwhile. Groups for which the disk or the writer has no room are written with the checkpoint.

X belongs to one process only. A writer that outlives its process cannot write into the folder of the next one.
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
from mrl.generate.group_writer import GroupParts
from mrl.generate.sampled_by import SampledBy
from mrl.generate.spool_lines import SpoolLines, left_files

WRITTEN_AT_ONCE = 64  # groups that a checkpoint begins to write before it waits for them
ASK_AGAIN_S = 0.1  # seconds; the writer is busy with other groups


class GroupFileWriter(Protocol):
    """Writes files of groups, as GroupWriter."""

    def begin(self, path: Path, parts: GroupParts) -> Any | None:
        """Begins to write a file. Returns a handle of its facts, or None if too many groups are waiting."""

    def facts(self, under_way: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Returns size and digest of each file by name, when all are written."""

    def written(self, under_way: Any) -> Mapping[str, Any] | None:
        """Returns size and digest of a file; None before it is written."""


@dataclass(eq=False)
class SpoolFile:
    """The file of one finished attempt."""

    path: Path
    under_way: Any = None  # handle of future facts, for a file that is written here
    facts: Mapping[str, Any] | None = None  # of a file that came from a checkpoint, or is written
    holders: int = 1
    is_judged: bool = True  # for an earlier start's file: its rewards are those that would be given now


@dataclass(eq=False)
class _Version:
    """The files of groups that were finished with the weights of one checkpoint."""

    lines: SpoolLines
    most: int = 0  # limit of groups
    begun: list[SpoolFile] = field(default_factory=list)  # held, and not yet in `lines`
    noted: list[SpoolFile] = field(default_factory=list)  # held

    @property
    def number(self) -> int:
        return self.lines.origin.version

    @property
    def has_space(self) -> bool:
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

        Removes the files of earlier processes, because checkpoints have names of their own for them. Only files of
        `origin` are kept, in `left`. `check` raises LostLock if nothing may be written.
        """
        self.folder = folder / secrets.token_hex(4)
        self._writer = writer
        self._check = check
        self._lock = threading.RLock()
        self._files: dict[int, SpoolFile] = {}  # held by generation
        self._unheld: list[SpoolFile] = []  # files that were not written yet when they should have been removed
        self._warned = False
        self._versions: list[_Version] = []  # in order
        self._served: _Version | None = None  # the version that gets newly finished groups
        self._whole: int | None = None  # version of the newest complete checkpoint, or of the start
        self.left: dict[int, SpoolFile] = {}  # by number: groups of earlier starts that are not taken yet
        check()
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise EnvironmentFault(f"{self.folder}: {described(error)}; make room and pass --resume") from None
        if origin is not None:
            self._take_left(origin)
        for older in folder.iterdir():
            if older != self.folder:
                _remove(older)

    def _take_left(self, origin: SampledBy) -> None:
        """Names the remaining files in this folder, with lines at once, so that a failing start loses none of them.

        Files with outdated rewards have no line until they are judged again.
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
        """Tells whether newly finished groups are kept for a start that goes back to the served weights."""
        return self._served is not None and self._served.has_space

    def put(self, parts: GroupParts) -> None:
        """Begins to write a finished group, unless its file exists or too many are kept. Raises LostLock."""
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
        """Sets the weights, `origin`, of groups that finish from now on; None: runs may not go back to them.

        At most `most` groups are kept for that, those of one step. Weights between the newest complete checkpoint and
        these have no groups, because their save failed.
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
        """Records that a checkpoint of these weights is complete. No start goes back to earlier weights any more."""
        with self._lock:
            self._whole = version
            self._drop([each for each in self._versions if each.number < version])

    def ended(self) -> None:
        """Drops all versions: the run has its last step, and no start goes back."""
        with self._lock:
            self._drop(list(self._versions))
            self.left.clear()

    def give_up(self, numbers: Iterable[int]) -> None:
        """Drops earlier starts' files of these groups, which are not used unchanged."""
        with self._lock:
            files = [self.left.pop(number) for number in numbers if number in self.left]
            for version in self._versions:
                version.noted = [file for file in version.noted if file not in files]
            self.release(files)

    def note(self) -> None:
        """Records which files are written, so that a later start finds them. Raises LostLock."""
        with self._lock:
            if any(version.begun and self._has_ended(version.begun[0]) for version in self._versions):
                self._check()
                self._note()

    def _has_ended(self, file: SpoolFile) -> bool:
        """Tells whether the file is written, or its writer has failed."""
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
        """Records files in the order in which they were begun, up to the first that is not written."""
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
        """Takes over the file of a group that an earlier process finished. A checkpoint has the file."""
        path = self.folder / written.name
        name_again(written, path)
        with self._lock:
            self._files[number] = SpoolFile(path, facts=facts)

    def forget(self, numbers: Iterable[int]) -> None:
        """Ends generation's use of groups: they were trained on, dropped or begun again."""
        with self._lock:
            files = [self._files.pop(number) for number in numbers if number in self._files]
            self.release(files)

    def pinned(self, numbers: Iterable[int]) -> dict[int, SpoolFile]:
        """Returns the existing files of these groups by number. They stay until `release`."""
        with self._lock:
            files = {number: self._files[number] for number in numbers if number in self._files}
            self.hold(files.values())
            return files

    def hold(self, files: Iterable[SpoolFile]) -> None:
        """Adds a user of the files, until `release`."""
        with self._lock:
            for file in files:
                file.holders += 1

    def release(self, files: Iterable[SpoolFile]) -> None:
        """Removes a user of the files. A file without users is deleted."""
        with self._lock:
            for file in files:
                file.holders -= 1
                if not file.holders:
                    self._unheld.append(file)
            self._remove_unheld()

    def _remove_unheld(self) -> None:
        """Deletes files without users. Those that are not written yet may still appear, unless their writer failed."""
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
        """Writes all of `groups` into `folder`, those of `files` as second names. Returns size and digest by name.

        Raises the errors of GroupFileWriter.facts.
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
        """Writes groups into `folder`. If the writer is full, it waits for earlier ones."""
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
        """Gives a file a second name in `folder`. Returns its facts; None if the disk had no room for it."""
        name = file.path.name
        try:
            facts = file.facts or self._writer.facts({name: file.under_way})[name]
            name_again(file.path, folder / name)
        except (EnvironmentFault, FileNotFoundError) as fault:
            self._tell(fault)
            return None
        return facts

    def _tell(self, fault: Exception) -> None:
        if not self._warned:
            print(
                f"warning: {self.folder}: {described(fault)}. Groups are written with checkpoints instead, and a start "
                "that goes back to one generates its step again",
                flush=True,
            )
            self._warned = True

    def close(self) -> None:
        """Removes all files except those that a later start may use.

        Checkpoints have names of their own for their files.
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
        with suppress(OSError):  # some files are kept, or another process's folder is beside it
            self.folder.rmdir()
            self.folder.parent.rmdir()


def _remove(path: Path) -> None:
    """Removes a file or a folder. A folder into which another process still writes may stay."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()
