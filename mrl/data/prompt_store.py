"""Prompts in a temporary file without a name: a data set of any size costs eight bytes of memory a prompt."""

import contextlib
import os
import tempfile
from array import array
from collections.abc import Callable

import numpy as np

from mrl.errors import EnvironmentFault

TOKEN = np.dtype("<i4")
LENGTH_BYTES = 4  # in front of a prompt's tokens, their number


class PromptStore:
    """Takes prompts, then gives them back by position. The file lies in TMPDIR and goes with the process, however that ends.

    Read with pread and not mapped: pages of a mapping count as the process's memory, all of them after one epoch.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  as long as the store lives
        self._ends = array("q")  # bytes: where each prompt's record ends

    def add(self, tokens: list[int], rest: str) -> None:
        """One prompt: its token ids, and everything else as text. Raises EnvironmentFault when there is no room for it."""
        ids, text = np.array(tokens, TOKEN), rest.encode()
        record = len(ids).to_bytes(LENGTH_BYTES, "little") + ids.tobytes() + text
        self._written(lambda: self._file.write(record))
        self._ends.append((self._ends[-1] if self._ends else 0) + len(record))

    def finish(self) -> None:
        """Makes everything readable; nothing is added any more. Raises EnvironmentFault."""
        self._written(self._file.flush)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> tuple[tuple[int, ...], str]:
        """Token ids and text of a prompt."""
        place = range(len(self))[index]  # counts from the end where it is negative, and refuses what is beyond
        start = self._ends[place - 1] if place else 0
        record = os.pread(self._file.fileno(), self._ends[place] - start, start)
        text = LENGTH_BYTES + TOKEN.itemsize * int.from_bytes(record[:LENGTH_BYTES], "little")
        return tuple(np.frombuffer(record[LENGTH_BYTES:text], TOKEN).tolist()), record[text:].decode()

    def close(self) -> None:
        """Gives the file up. May be called twice."""
        with contextlib.suppress(OSError):  # closing writes what is buffered: where there was no room, there is none still
            self._file.close()

    @staticmethod
    def _written(write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            where = tempfile.gettempdir()
            raise EnvironmentFault(f"{where}: prompts cannot be kept there ({error.strerror}); set TMPDIR to a folder with room") from error
