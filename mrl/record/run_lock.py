"""The lock of a run directory: a lease. Of the file system it asks only that a file is made by one of those who try.

    RUN/run.lock.7    who has the directory, and a beat that this process counts up every BEAT_S seconds

Only its holder writes into a lock file; who succeeds it makes the one of the next number and removes the older ones,
which tells a holder that still runs that it has lost. A holder on this host is succeeded as soon as its process is
gone. Of one elsewhere nothing is known but its beat: it is succeeded once that has stood still for LEASE_S seconds of
the successor's own clock. Nobody's clock is compared with another's, and contents are compared, not times of files,
which network file systems keep for a while. A directory that is given back keeps its last file: no number comes twice.

Before it writes, a holder looks whether its file is still there (`check`): one that stood still for longer than the
lease, or was cut off from the disk, ends without writing.
"""

import errno
import json
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Protocol

from mrl.errors import EnvironmentFault, LostLock
from mrl.record.process_mark import ProcessMark

LOCK = "run.lock"  # of earlier versions, which had this one file and no beat; counts as number 0, free when empty
BEAT_S = 5.0
LEASE_S = 60.0
LOOK_S = 1.0  # between looks at a beat
FREE = "given back"
_NUMBERED = re.compile(rf"{re.escape(LOCK)}\.(\d+)")


class Waiting(Protocol):
    """What who waits for a lock needs of a clock; the module `time` has it."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float) -> None:
        """Waits."""


@dataclass(frozen=True)
class LockHolder:
    """Who has the directory. `nonce` is of this one lock alone; `since`: UTC, unknown of earlier versions."""

    process: ProcessMark
    nonce: str
    since: str | None

    def __str__(self) -> str:
        since = f" since {self.since}" if self.since else ""
        return f"process {self.process.pid} on host {self.process.host}{since}"


@dataclass(frozen=True)
class LockFile:
    """The newest lock file of a run directory, as it was read."""

    number: int
    path: Path
    text: str

    @property
    def is_free(self) -> bool:
        """Whether it was given back, or never taken."""
        return self.text.strip() == (FREE if self.number else "")

    @cached_property
    def holder(self) -> LockHolder | None:
        """Who has it; None of a file that is free, is just being made, or is torn."""
        try:
            row = json.loads(self.text)
            return LockHolder(ProcessMark.from_json(row), row.get("nonce", ""), row.get("since"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def beats_lately(self) -> bool:
        """Whether the file is younger than a lease by the disk's clock and this host's: to be shown, not to act on."""
        try:
            return abs(time.time() - self.path.stat().st_mtime) < LEASE_S
        except OSError:
            return False


def newest_lock(folder: Path) -> LockFile:
    """Reads the lock file that counts; a free one of number 0 where there is none. Raises OSError."""
    number = max(_numbers(folder), default=0)
    path = _path(folder, number)
    return LockFile(number, path, _text(path))


def in_use(folder: Path) -> bool:
    """Whether a live process has the run directory. It is only looked at, and of a holder elsewhere the file's age
    counts.
    """
    try:
        found = newest_lock(folder)
    except OSError:
        return False
    if found.holder is None:
        return False
    lives = found.holder.process.lives()
    return found.beats_lately() if lives is None else lives


def _numbers(folder: Path) -> list[int]:
    names = [_NUMBERED.fullmatch(name) for name in os.listdir(folder)]
    return [int(found[1]) for found in names if found]


def _path(folder: Path, number: int) -> Path:
    return folder / (f"{LOCK}.{number}" if number else LOCK)


def _text(path: Path) -> str:
    """Content of a lock file; nothing of one that is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


class RunLock:
    """A run directory that this process has, until `give_back`, its end, or another takes it over. See `take`."""

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
        """Takes the directory, after a wait where only its holder's beat can say whether it lives.

        `poll` may raise while it waits. Raises EnvironmentFault where the holder lives, and OSError as the disk does.
        """
        while True:
            found = newest_lock(folder)
            if not (found.is_free or _is_over(found, folder, poll, clock)):
                continue
            lock = cls(folder, found.number + 1)
            if lock._succeed(found):
                threading.Thread(target=lock._beat_on, name="run-lock", daemon=True).start()
                return lock

    def _succeed(self, before: LockFile) -> bool:
        """Makes this lock's file, and removes those before it; nothing where another was faster, or the one before
        beats after all.
        """
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            self._write(file.fileno(), self._content())
        newest = max(_numbers(self._folder))
        if newest != self._number or _text(before.path) != before.text:
            self._path.unlink(missing_ok=True)
            return False
        for number in (0, *_numbers(self._folder)):
            if number < self._number:
                _path(self._folder, number).unlink(missing_ok=True)
        return True

    def check(self) -> None:
        """Looks into the file. Raises LostLock where the lock is another's by now, OSError where nobody can say."""
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            text = ""
        if self._nonce not in text:
            raise self._loss()

    def raise_if_lost(self) -> None:
        """Raises LostLock once a beat found that the lock is another's; looks at nothing."""
        if self._lost is not None:
            raise self._lost

    def give_back(self) -> None:
        """Leaves the directory to whoever comes next, if it is this process's still."""
        self._ended.set()
        with self._writing, suppress(OSError, LostLock):
            self.check()
            with self._path.open("r+b") as file:
                self._write(file.fileno(), FREE)
                file.truncate(len(FREE))

    def beat(self) -> None:
        """Counts the beat up. Raises LostLock where the lock is another's, OSError as the disk does."""
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
            except OSError:
                continue  # who writes looks for itself

    def _content(self) -> str:
        """Of one length whatever the count, so that one write replaces the other."""
        return json.dumps(self._mark | {"beat": f"{self._beats:012}"})

    @staticmethod
    def _write(descriptor: int, text: str) -> None:
        os.pwrite(descriptor, text.encode(), 0)
        os.fsync(descriptor)

    def _loss(self) -> LostLock:
        try:
            now = newest_lock(self._folder).holder
        except OSError:
            now = None
        by = f"{now} has taken it over" if now else f"its lock {self._path.name} is gone"
        return LostLock(
            f"trainer.run_dir: {self._folder} is not this run's any more: {by}. A run that gives no sign of life for "
            f"{LEASE_S:.0f} s, as one whose host stood still or was cut off from the disk, may be resumed elsewhere; "
            "this process ends without writing anything more"
        )


def _is_over(found: LockFile, folder: Path, poll: Callable[[], None], clock: Waiting) -> bool:
    """Waits until it is known whether a lock's holder is gone; False where the lock has changed and is to be looked at
    again. Raises EnvironmentFault where the holder lives.
    """
    lives = found.holder.process.lives() if found.holder else None
    if lives:
        raise _in_use(found, folder, "its process runs")
    return lives is False or _stands_still(found, folder, poll, clock)


def _stands_still(found: LockFile, folder: Path, poll: Callable[[], None], clock: Waiting) -> bool:
    """As _is_over, of a holder of which only the beat can be seen."""
    since = clock.monotonic()
    told = False
    while True:
        clock.sleep(LOOK_S)
        poll()
        asked = clock.monotonic()  # before the look, so that a pause of this process counts for nothing
        seen = newest_lock(folder)
        if _beat_between(found, seen):
            raise _in_use(seen, folder, "its lock's beat goes on")
        if seen != found:
            return False
        if asked - since >= LEASE_S:
            _say(f"{folder}: {_who(found)} gave no sign of life for {LEASE_S:.0f} s; it is taken over")
            return True
        if not told:
            told = True
            _say(
                f"{folder} is held by {_who(found)}, of which only its lock's beat can be seen from here; it is taken "
                f"over if there is none for {LEASE_S:.0f} s"
            )


def _beat_between(before: LockFile, after: LockFile) -> bool:
    one_lock = before.holder is not None and before.holder == after.holder and before.number == after.number
    return one_lock and before.text != after.text


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _who(found: LockFile) -> str:
    return str(found.holder) if found.holder else f"a process that {found.path.name} does not name"


def _in_use(found: LockFile, folder: Path, why: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"trainer.run_dir: {folder} is in use by {_who(found)} ({why}); stop that run, or give another --run-dir"
    )
