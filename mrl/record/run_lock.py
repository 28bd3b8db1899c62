"""The lock of a run directory, as a lease. It only needs a file system on which exclusive creation of a file works.

    RUN/run.lock.7    who has the directory, and a beat that this process increments every BEAT_S seconds

Only its holder writes into a lock file. A successor creates the file with the next number and removes the older ones. A
holder that still runs notices from this that it has lost the lock. A holder on this host is succeeded as soon as its
process has ended. A holder elsewhere is only visible through its beat. It is succeeded after the beat has not changed
for LEASE_S seconds of the successor's own clock. A successor that is killed before it removes the older files leaves
two files. Then the directory is taken over once all named holders are gone.

Clocks of different hosts are never compared. The contents of files are compared, not their times, which network file
systems cache. A directory that is released keeps its last file.

Before it writes, a holder checks that its file is still there (`check`). A holder that was suspended for longer than
the lease, or cut off from the disk, ends without writing.
"""

import errno
import json
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Protocol

from mrl.errors import EnvironmentFault, LostLock
from mrl.plain_files import TEXT_BYTES, parse_json, read_text
from mrl.record.process_mark import ProcessMark

LOCK = "run.lock"  # of earlier versions, which had this file alone and no beat; counts as number 0, free when empty
BEAT_S = 5.0
LEASE_S = 60.0
LOOK_S = 1.0  # between reads of a beat
PATIENCE_S = 5.0  # for a disk that refuses a holder's check
ASK_AGAIN_S = 0.5
FREE = "given back"
_NAME = re.compile(rf"{re.escape(LOCK)}(?:\.(\d+))?")


class Waiting(Protocol):
    """The clock that waiting for a lock needs. The module `time` implements it."""

    def monotonic(self) -> float:
        """Returns seconds since some fixed moment."""

    def sleep(self, seconds: float) -> None:
        """Waits for `seconds`."""


@dataclass(frozen=True)
class LockHolder:
    """Who has the directory. `nonce` is unique to this lock. `since`: UTC, unknown for earlier versions."""

    process: ProcessMark
    nonce: str
    since: str | None

    def __str__(self) -> str:
        since = ""
        if self.since:
            since = f" since {self.since}"
        return f"process {self.process.pid} on host {self.process.host}{since}"


@dataclass(frozen=True)
class LockFile:
    """A lock file of a run directory, as it was read."""

    number: int
    path: Path
    text: str

    @property
    def is_free(self) -> bool:
        """Tells whether the lock was released or never taken."""
        return self.text.strip() == (FREE if self.number else "")

    @cached_property
    def holder(self) -> LockHolder | None:
        """The holder; None for a file that is free, incomplete or torn."""
        try:
            row = parse_json(self.text)
            return LockHolder(ProcessMark.from_json(row), row.get("nonce", ""), row.get("since"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def beats_lately(self) -> bool:
        """Tells whether the file is younger than a lease by the disk's clock. For display only, not for decisions."""
        try:
            return abs(time.time() - self.path.stat().st_mtime) < LEASE_S
        except OSError:
            return False


def read_locks(folder: Path) -> tuple[LockFile, ...]:
    """Reads all lock files, the newest last; a free one with number 0 if there is none. Raises OSError."""
    numbers = sorted(_numbers(folder)) or [0]
    paths = [(number, _path(folder, number)) for number in numbers]
    return tuple(LockFile(number, path, _text(path)) for number, path in paths)


def newest_lock(folder: Path) -> LockFile:
    """Reads the lock file of the last holder. Raises OSError."""
    return read_locks(folder)[-1]


def in_use(folder: Path) -> bool:
    """Tells whether a live process has the run directory. Only reads. For a holder elsewhere the file's age decides."""
    try:
        return any(_seems_held(found) for found in read_locks(folder))
    except OSError:
        return False


def _seems_held(found: LockFile) -> bool:
    if found.holder is None:
        return False
    lives = found.holder.process.lives()
    if lives is None:
        return found.beats_lately()
    return lives


def _numbers(folder: Path) -> list[int]:
    names = [_NAME.fullmatch(name) for name in os.listdir(folder)]
    return [int(found[1] or 0) for found in names if found]


def _path(folder: Path, number: int) -> Path:
    return folder / (f"{LOCK}.{number}" if number else LOCK)


def _text(path: Path) -> str:
    """Returns the content of a lock file, or "" if it is absent."""
    try:
        return read_text(path, TEXT_BYTES, errors="replace")
    except FileNotFoundError:
        return ""
    except ValueError as error:
        raise OSError(errno.EFBIG, str(error), str(path)) from error


class RunLock:
    """A run directory held by this process, until `give_back`, its end, or a takeover. Made by `take`."""

    def __init__(self, folder: Path, number: int):
        self._folder = folder
        self._number = number
        self._path = _path(folder, number)
        self._nonce = secrets.token_hex(8)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._mark = ProcessMark.own().to_json() | {"nonce": self._nonce, "since": since}
        self._beats = 0
        self._lost: LostLock | None = None
        self._writing = threading.Lock()
        self._ended = threading.Event()

    @classmethod
    def take(cls, folder: Path, poll: Callable[[], None] = lambda: None, clock: Waiting = time) -> "RunLock":
        """Takes the directory. Waits first if only its holder's beat can tell whether the holder is alive.

        `poll` may raise during the wait. Raises EnvironmentFault if the holder is alive, and OSError from the disk.
        """
        while True:
            found = read_locks(folder)
            if not _are_over(found, folder, poll, clock):
                continue
            lock = cls(folder, found[-1].number + 1)
            if lock._succeed(found):
                threading.Thread(target=lock._beat_on, name="run-lock", daemon=True).start()
                return lock

    def _succeed(self, before: Sequence[LockFile]) -> bool:
        """Creates this lock's file and removes the earlier ones. Does nothing if another process was faster or a former
        holder is alive.
        """
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        follows = False
        try:
            with os.fdopen(descriptor, "wb") as file:
                self._write(file.fileno(), self._content())
            follows = self._follows(before)
        finally:
            if not follows:  # it does not follow, or the disk is full
                self._path.unlink(missing_ok=True)
        if follows:
            for number in _numbers(self._folder):
                if number < self._number:
                    _path(self._folder, number).unlink(missing_ok=True)
        return follows

    def _follows(self, before: Sequence[LockFile]) -> bool:
        """Tells whether no file came after this one, and the earlier ones are unchanged."""
        are_same = all(_text(found.path) == found.text for found in before)
        return are_same and max(_numbers(self._folder)) == self._number

    def check(self) -> None:
        """Reads the file. Raises LostLock if another process has the lock now.

        Raises EnvironmentFault if the disk refuses, and still does so after PATIENCE_S seconds.
        """
        if self._nonce not in self._read():
            raise self._loss()

    def _read(self) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return _text(self._path)
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise EnvironmentFault(
                        f"trainer.run_dir: {self._path} cannot be read ({error.strerror}), so nothing is written into "
                        f"{self._folder}, which may belong to another process now; check its disk"
                    ) from error
            time.sleep(ASK_AGAIN_S)

    def raise_if_lost(self) -> None:
        """Raises LostLock once a beat has found that the lock is lost. Reads nothing itself."""
        if self._lost is not None:
            raise self._lost

    def give_back(self) -> None:
        """Releases the directory for the next process, if this process still holds it."""
        self._ended.set()
        with self._writing, suppress(OSError, EnvironmentFault, LostLock):
            self.check()
            with self._path.open("r+b") as file:
                self._write(file.fileno(), FREE)
                file.truncate(len(FREE))

    def beat(self) -> None:
        """Increments the beat. Raises what `check` raises, and OSError from the disk."""
        self.check()
        with self._writing, self._path.open("r+b") as file:
            if self._ended.is_set():
                return
            self._beats += 1
            self._write(file.fileno(), self._content())

    def _beat_on(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self.beat()
            except (LostLock, FileNotFoundError):
                self._lost = self._loss()
                return
            except (OSError, EnvironmentFault):
                continue  # whoever writes will check again

    def _content(self) -> str:
        """Returns the lock file's text. Its length is constant, so that one write replaces the former text."""
        return json.dumps(self._mark | {"beat": f"{self._beats:012}"})

    @staticmethod
    def _write(descriptor: int, text: str) -> None:
        content = text.encode()
        if os.pwrite(descriptor, content, 0) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)

    def _loss(self) -> LostLock:
        try:
            now = newest_lock(self._folder).holder
        except OSError:
            now = None
        by = f"{now} has taken it over" if now else f"its lock {self._path.name} is gone"
        return LostLock(
            f"trainer.run_dir: {self._folder} no longer belongs to this run: {by}. A run without a sign of life for "
            f"{LEASE_S:.0f} s, because its host was suspended or cut off from the disk, may be resumed elsewhere; "
            "this process ends without further writes"
        )


def _are_over(found: Sequence[LockFile], folder: Path, poll: Callable[[], None], clock: Waiting) -> bool:
    """Waits until it is known whether all holders are gone. Returns False if a lock has changed and must be read again.

    Raises EnvironmentFault if a holder is alive.
    """
    unknown = []
    for lock in found:
        lives = None
        if lock.holder:
            lives = lock.holder.process.lives()
        if lives:
            raise _in_use(lock, folder, "its process runs")
        if lives is None and not lock.is_free:
            unknown.append(lock)
    return not unknown or _beats_stopped(found, " and ".join(map(_who, unknown)), folder, poll, clock)


def _beats_stopped(
    found: Sequence[LockFile], holders: str, folder: Path, poll: Callable[[], None], clock: Waiting
) -> bool:
    """Waits until the beats of the holders have stopped for a lease, or a lock has changed. Returns as `_are_over`.

    `holders` describes them.
    """
    still_s = 0.0
    looked = clock.monotonic()
    has_printed = False
    while True:
        clock.sleep(LOOK_S)
        poll()
        asked = clock.monotonic()  # before the read, so that a pause of this process does not count
        still_s += min(asked - looked, 2 * LOOK_S)  # while the disk stalls, no beat can be seen
        looked = asked
        seen = read_locks(folder)
        if beating := _beating(found, seen):
            raise _in_use(beating, folder, "its heartbeat continues")
        if seen != found:
            return False
        if still_s >= LEASE_S:
            _say(f"{folder}: {holders} gave no sign of life for {LEASE_S:.0f} s; it is taken over")
            return True
        if not has_printed:
            has_printed = True
            _say(
                f"{folder} is held by {holders}, of which only the heartbeat can be seen from here; it is taken "
                f"over if there is none for {LEASE_S:.0f} s"
            )


def _beating(before: Sequence[LockFile], after: Sequence[LockFile]) -> LockFile | None:
    """Returns a lock whose holder incremented the beat between two reads; else None."""
    earlier = {found.number: found for found in before}
    for found in after:
        one = earlier.get(found.number, found)
        if one.text != found.text and one.holder is not None and one.holder == found.holder:
            return found
    return None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _who(found: LockFile) -> str:
    if found.holder:
        return str(found.holder)
    return f"a process that {found.path.name} does not name"


def _in_use(found: LockFile, folder: Path, why: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"trainer.run_dir: {folder} is in use by {_who(found)} ({why}); stop that run, or give another --run-dir"
    )
