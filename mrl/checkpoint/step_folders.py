"""The `step-N` folders of a run: which are complete, the newest readable one, writing one whole, removing one."""

import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mrl.checkpoint.manifest import MANIFEST, Manifest, fsync, read_manifest
from mrl.errors import EnvironmentFault

_REPLACED = ".replaced"  # the checkpoint of a step while a new one takes its name


def checkpoint_steps(folder: Path) -> list[tuple[int, Path]]:
    """Finished checkpoints below `folder`, oldest first: those that have a manifest.

    One that was being replaced when its process was killed counts where no other of its step is finished.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("step-*")):  # step-5 before step-5.replaced
        match = re.fullmatch(rf"step-(\d+)(?:{re.escape(_REPLACED)})?", path.name)
        if match and (path / MANIFEST).exists():
            found.setdefault(int(match[1]), path)
    return sorted(found.items())


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint that can be read, and the newer ones that cannot."""

    path: Path | None  # None: there is none that can be read
    manifest: Manifest | None
    damaged: dict[Path, EnvironmentFault]  # newest first, with what is wrong


def newest_checkpoint(folder: Path, known: Mapping[Path, EnvironmentFault] = MappingProxyType({})) -> Newest:
    """Looks below `folder`, newest first, until manifest and sizes are right. Bytes are compared with their digests by
    those who read them, in parallel; `known`: which were found damaged so.
    """
    damaged: dict[Path, EnvironmentFault] = {}
    for _, path in reversed(checkpoint_steps(folder)):
        try:
            if path in known:
                raise known[path]
            return Newest(path, read_manifest(path), damaged)
        except EnvironmentFault as error:
            damaged[path] = error
    return Newest(None, None, damaged)


def superseded(folder: Path, saved: int, keep: int) -> list[Path]:
    """Checkpoints that are not among the `keep` newest up to step `saved`, which was saved just now and stays.

    A folder of a later step is of another attempt; it neither counts nor goes.
    """
    return [path for step, path in checkpoint_steps(folder) if step <= saved][:-keep]


def write_atomically(folder: Path, write: Callable[[Path], None], check: Callable[[], None] = lambda: None) -> None:
    """Calls `write(work)` on a fresh folder, then gives it the name `folder`, durably. What was there stays until then,
    and for good where `check`, called last, raises.

    A process killed in between leaves `work`, `folder` with `.tmp-` and a suffix; opening the run again removes it.
    What was there is `folder` with `.replaced` between the two renames; see `finish_replacements`.
    """
    work = _aside(folder)
    old = folder.with_name(f"{folder.name}{_REPLACED}")
    work.mkdir()
    try:
        write(work)
        check()
        if folder.exists() and old.exists():  # of a kill before
            discard(folder)
        elif folder.exists():
            folder.rename(old)
        work.rename(folder)
        fsync(folder.parent)
        fsync(folder.parent.parent)  # made with the run, whose folder nobody else waits for
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    if old.exists():
        discard(old)


def finish_replacements(folder: Path) -> None:
    """Ends what a kill in the middle of `write_atomically` left below `folder`.

    What was being replaced goes, or gets its name back where no other has it.
    """
    for old in folder.glob(f"step-*{_REPLACED}"):
        named = old.with_name(old.name.removesuffix(_REPLACED))
        if (named / MANIFEST).exists():
            discard(old)
        elif not named.exists():
            old.rename(named)


def set_aside(checkpoint: Path) -> Path:
    """Renames a damaged `step-N` to `damaged-step-N`, so that a step trained again can be saved under its name;
    returns the new path.
    """
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
    return checkpoint.rename(aside)


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint.

    It loses its name first: a kill in the middle leaves nothing that looks like a damaged one.
    """
    try:
        shutil.rmtree(checkpoint.rename(_aside(checkpoint)))
    except OSError as error:
        print(f"warning: {checkpoint}, which is no longer wanted, cannot be removed: {error}", flush=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
