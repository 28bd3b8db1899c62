"""The `step-N` folders of a run: lists complete ones, finds the newest readable one, writes and removes them."""

import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mrl.checkpoint.manifest import MANIFEST, Manifest, fsync, read_manifest
from mrl.crash_points import crash_point
from mrl.errors import EnvironmentFault

_REPLACED = ".replaced"  # a step's former checkpoint while a new one gets its name


def checkpoint_steps(folder: Path) -> list[tuple[int, Path]]:
    """Returns finished checkpoints below `folder`, oldest first: those with a manifest.

    One that was being replaced when its process was killed counts, unless another of its step is finished.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("step-*")):  # step-5 comes before step-5.replaced
        match = re.fullmatch(rf"step-(\d+)(?:{re.escape(_REPLACED)})?", path.name)
        if match and (path / MANIFEST).exists():
            found.setdefault(int(match[1]), path)
    return sorted(found.items())


@dataclass(frozen=True)
class Newest:
    """The newest readable checkpoint, and the newer ones that are not readable."""

    path: Path | None  # None: none is readable
    manifest: Manifest | None
    damaged: dict[Path, EnvironmentFault]  # newest first, each with its fault


def newest_checkpoint(folder: Path, known: Mapping[Path, EnvironmentFault] = MappingProxyType({})) -> Newest:
    """Looks below `folder`, newest first, until manifest and sizes are right.

    Readers compare bytes with digests later, in parallel. `known` has the checkpoints that they found damaged.
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
    """Returns checkpoints beyond the `keep` newest up to step `saved`, which was just saved and stays.

    Folders of later steps belong to another attempt. They neither count nor are removed.
    """
    return [path for step, path in checkpoint_steps(folder) if step <= saved][:-keep]


def write_atomically(folder: Path, write: Callable[[Path], None], check: Callable[[], None] = lambda: None) -> None:
    """Calls `write(work)` on a fresh folder, then renames it to `folder`, durably.

    A former folder stays until then, and forever if `check`, called last, raises. A process killed meanwhile leaves
    `work`, named `folder` with `.tmp-` and a suffix. The next opening of the run removes it. Between the two renames
    the former folder is `folder` with `.replaced`, see `finish_replacements`.
    """
    work = _aside(folder)
    old = folder.with_name(f"{folder.name}{_REPLACED}")
    work.mkdir()
    try:
        write(work)
        check()
        crash_point("checkpoint", "written")
        if folder.exists() and old.exists():  # left by an earlier kill
            discard(folder)
        elif folder.exists():
            folder.rename(old)
        work.rename(folder)
        crash_point("checkpoint", "renamed")
        fsync(folder.parent)
        fsync(folder.parent.parent)  # created with the run; nobody else syncs it
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    if old.exists():
        discard(old)


def finish_replacements(folder: Path) -> None:
    """Finishes replacements below `folder` that a kill during `write_atomically` left.

    The former checkpoint is removed, or gets its name back if no other has it.
    """
    for old in folder.glob(f"step-*{_REPLACED}"):
        named = old.with_name(old.name.removesuffix(_REPLACED))
        if (named / MANIFEST).exists():
            discard(old)
        elif not named.exists():
            old.rename(named)


def set_aside(checkpoint: Path) -> Path:
    """Renames a damaged `step-N` to `damaged-step-N`, so that the step can be saved again. Returns the new path."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)  # left by an earlier one
    return checkpoint.rename(aside)


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint.

    It is renamed first, so that a kill during removal leaves nothing that looks like a damaged one.
    """
    try:
        shutil.rmtree(checkpoint.rename(_aside(checkpoint)))
    except OSError as error:
        print(f"warning: {checkpoint}, which is no longer wanted, cannot be removed: {error}", flush=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
