"""Removes the images of a run's tools, environments and agents that nothing refers to any more.

An image in RUN/images stays while

    a prompt of the data has it
    a row in samples/ has it; beyond record.samples_max_gib the oldest steps of samples/ go, and their images with them
    a group in a checkpoint or in the spool has it
    it was stored or shown again since some steps ago, so that a response under way may have it

It runs in the process that writes samples.
"""

import fnmatch
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from mrl.checkpoint.group_files import GROUPS, images_of_group
from mrl.record.run_dir import RunDir
from mrl.record.sample_files import DAMAGED, images_of_step, steps_with_responses

_CLOCK = ".step"  # a file whose time is that of the disk, which is not this host's
_ASIDE = ".unused"  # end of the name of an image that is about to be removed


class TurnImages:
    """The images of a run, for the process that writes its samples."""

    def __init__(self, run_dir: Path, of_data: Collection[str], steps: int):
        """`of_data`: names of those of prompts. `steps`: so many steps after its begin a response is trained."""
        self._run = RunDir(run_dir)
        self._of_data = frozenset(of_data)
        self._times: deque[float] = deque(maxlen=steps + 1)
        self._of_steps: dict[int, frozenset[str]] = {}
        self._of_groups: dict[Path, frozenset[str]] = {}
        self._sizes: dict[str, int] = {}

    def bytes_of_steps(self) -> Mapping[int, int]:
        """Returns the bytes of images that go with the samples of each step: no newer step has them."""
        found: dict[int, int] = {}
        newer: set[str] = set()
        for step, names in sorted(self._names_of_steps().items(), reverse=True):
            found[step] = sum(self._size(name) for name in names - newer - self._of_data)
            newer |= names
        return found

    def remove_unused(self) -> int:
        """Is called once a step, when its samples are written. Returns the number of images that it has removed.

        Removes none where it cannot read what refers to them, and leaves those that it cannot remove.
        """
        try:
            self._times.append(self._now())
            if len(self._times) == 1:
                self._put_back()
            if len(self._times) < self._times.maxlen:
                return 0
            named = frozenset().union(self._of_data, *self._names_of_steps().values(), *self._names_of_groups())
            unused = [file for file in self._files() if file.name not in named]
            removed = [file.name for file in unused if _removed(file, self._times[0])]
        except DAMAGED:
            return 0
        for name in removed:
            self._sizes.pop(name, None)
        return len(removed)

    def _put_back(self) -> None:
        """Undoes removals during which an earlier process was killed; an image may have been used at that moment."""
        for aside in self._run.images.glob("??/.*" + _ASIDE):
            with suppress(OSError):  # another user's
                with suppress(FileExistsError):  # it was stored again
                    os.link(aside, aside.with_name(aside.name[1:].removesuffix(_ASIDE)))
                aside.unlink()

    def _now(self) -> float:
        self._run.images.mkdir(parents=True, exist_ok=True)
        clock = self._run.images / _CLOCK
        clock.write_bytes(b"")
        return clock.stat().st_mtime

    def _files(self) -> Iterator[Path]:
        return (file for file in self._run.images.glob("??/*") if not file.name.startswith("."))

    def _size(self, name: str) -> int:
        if name not in self._sizes:
            with suppress(OSError):
                self._sizes[name] = (self._run.images / name[:2] / name).stat().st_size
        return self._sizes.get(name, 0)

    def _names_of_steps(self) -> Mapping[int, frozenset[str]]:
        steps = steps_with_responses(self._run.samples)
        known = self._of_steps
        self._of_steps = {
            step: known[step] if step in known else images_of_step(self._run.samples, step) for step in steps
        }
        return self._of_steps

    def _names_of_groups(self) -> Collection[frozenset[str]]:
        # the spool first: from there groups go to checkpoints
        files = [file for folder in (self._run.spool, self._run.checkpoints) for file in _groups_below(folder)]
        known = self._of_groups
        self._of_groups = {file: known[file] if file in known else images_of_group(file) for file in files}
        return self._of_groups.values()


def _removed(file: Path, time: float) -> bool:
    """Removes a file that was not used since `time`; returns whether it did.

    It is moved aside first: an engine may just have marked it as used (ImageReader.is_kept), and goes on with it. One
    that comes later does not find it, and stores it again.
    """
    aside = file.with_name(f".{file.name}{_ASIDE}")
    try:
        if file.stat().st_mtime >= time:
            return False
        file.rename(aside)
        if aside.stat().st_mtime >= time:
            aside.rename(file)
            return False
        aside.unlink()
    except OSError:  # another process has just replaced it, or it is another user's
        return False
    return True


def _groups_below(folder: Path) -> Iterator[Path]:
    """Yields the files of groups. Raises OSError for a folder that cannot be read, which is not an empty one."""
    if not folder.exists():
        return
    for parent, _, names in os.walk(folder, onerror=_raise, followlinks=True):
        yield from (Path(parent, name) for name in fnmatch.filter(names, GROUPS))


def _raise(error: OSError) -> None:
    raise error
