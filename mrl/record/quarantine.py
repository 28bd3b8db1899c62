"""What a run set aside: `quarantine.jsonl` in the run directory, with a line for each bad row and each failed reward.

`kind` row has `file`, `row` (from 1) and `why`, for the data that the last start read. `kind` reward has `step`,
`prompt_id`, `sample_id`, `data_source`, `reason` and `detail`, for responses that the step was trained on. A resume
removes the rewards of steps that are trained again. At most QUARANTINE_BYTES are kept.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mrl.plain_files import LINES_BYTES, parse_json, read_text
from mrl.record.run_dir import append_lines, json_line, write_text

QUARANTINE = "quarantine.jsonl"
QUARANTINE_BYTES = 64 * 2**20
ROW = "row"
REWARD = "reward"


class Quarantine:
    """Appends to the file. If the disk refuses, the run goes on after one note."""

    def __init__(self, folder: Path, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises where nothing may be written."""
        self._path = folder / QUARANTINE
        self._check = check
        self._failed = False

    def rewind(self, after_step: int) -> None:
        """Drops rows of data, which every start finds again, and rewards of steps after `after_step`."""
        if not self._path.exists():
            return
        self._check()
        try:
            lines = read_text(self._path, LINES_BYTES, errors="replace").splitlines(keepends=True)
            write_text(self._path, "".join(line for line in lines if _is_kept(line, after_step)))
        except (OSError, ValueError) as error:
            self._say(error)

    def add(self, kind: str, things: Iterable[Mapping[str, Any]]) -> None:
        """Appends a line for each thing."""
        rows = [json_line({"kind": kind} | dict(thing)) for thing in things]
        # a lone surrogate is escaped, as in JSON
        lines = [row.encode("utf-8", "backslashreplace").decode() for row in rows]
        if not lines:
            return
        self._check()
        try:
            size = 0
            if self._path.exists():
                size = self._path.stat().st_size
            fitting = []
            for line in lines:
                size += len(line.encode())
                if size > QUARANTINE_BYTES:
                    break
                fitting.append(line)
            append_lines(self._path, "".join(fitting))
        except (OSError, ValueError) as error:
            self._say(error)

    def _say(self, error: Exception) -> None:
        if not self._failed:
            print(f"note: {self._path} cannot be written ({error}); the run continues", flush=True)
        self._failed = True


def _is_kept(line: str, after_step: int) -> bool:
    try:
        row = parse_json(line)
        return row["kind"] == REWARD and row["step"] <= after_step
    except (ValueError, LookupError, TypeError):
        return False
