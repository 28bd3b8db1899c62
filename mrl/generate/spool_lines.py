"""Lists the files of a spool for the weights of one checkpoint: one line for each file, with size and digest.

    {"version": 4, "weights": "9f2...", "data": ..., "model": ..., "sampling": ..., "rewards": ...}
    {"file": "group-32.0.npz", "bytes": 81920, "sha256": ...}
    {"file": "group-35.0.npz", ...

The first line is their origin (sampled_by.py). The others are added when their files are written. A line without its
end, or a file without a line, is from a process that was killed. Then the group is generated again.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from mrl.generate.sampled_by import SampledBy
from mrl.plain_files import LINES_BYTES, parse_json, read_text, reason

GROUP = re.compile(r"group-(\d+)\.\d+\.npz")


@dataclass(frozen=True)
class LeftFile:
    """A file of an earlier process."""

    path: Path
    facts: Mapping[str, Any]  # size and digest
    is_judged: bool  # its rewards are those that would be given now


@dataclass(frozen=True)
class SpoolLines:
    """The file of lines of one version, open for further lines."""

    path: Path
    origin: SampledBy
    file: TextIO

    @classmethod
    def begin(cls, folder: Path, origin: SampledBy) -> "SpoolLines":
        """Begins the file in `folder`. Raises OSError for a full disk."""
        path = folder / lines_name(origin.version)
        lines = cls(path, origin, path.open("w", encoding="utf-8"))
        lines._write(asdict(origin))
        return lines

    def add(self, name: str, facts: Mapping[str, Any]) -> None:
        """Adds the line of a written file. Raises OSError for a full disk."""
        self._write({"file": name, **facts})

    def _write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Closes the file. Lines that a full disk refused are no loss by then."""
        with suppress(OSError):
            self.file.close()

    def remove(self) -> None:
        """Removes the file."""
        self.close()
        with suppress(OSError):
            self.path.unlink()


def lines_name(version: int) -> str:
    """Returns the file name of one version."""
    return f"by-{version}.jsonl"


def left_files(spool: Path, origin: SampledBy) -> dict[int, LeftFile]:
    """Returns earlier processes' files of `origin` by number, from folders of `spool`.

    Prints which cannot be used, and why. The bytes of the files are not checked.
    """
    found: dict[int, LeftFile] = {}
    for path in sorted(spool.glob(f"*/{lines_name(origin.version)}")):
        try:
            found |= _read(path, origin)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path} is damaged, and its groups are generated again: {reason(error)}", flush=True)
    return found


def _read(path: Path, origin: SampledBy) -> dict[int, LeftFile]:
    lines = read_text(path, LINES_BYTES, errors="replace").split("\n")[:-1]
    if not lines:
        return {}
    rows = [parse_json(line) for line in lines]
    made_by = SampledBy(**rows[0])
    differing = made_by.differing(origin)
    if differing:
        if rows[1:]:
            print(
                f"{len(rows) - 1} groups of step {origin.version + 1} are there from an earlier start, and are "
                f"generated again: they were made by other {' and '.join(differing)}",
                flush=True,
            )
        return {}
    files = {}
    for row in rows[1:]:
        name = GROUP.fullmatch(row["file"])
        if name is None:
            raise ValueError(f"{row['file']!r} is no file of a group")
        file = path.parent / row["file"]
        if file.is_file():
            facts = {"bytes": row["bytes"], "sha256": row["sha256"]}
            files[int(name[1])] = LeftFile(file, facts, made_by.rewards == origin.rewards)
    return files
