"""Prompts that take little memory: kept in a temporary file (8 bytes each), remembered as seen (16 to 32 bytes
each).
"""

import contextlib
import hashlib
import os
import tempfile
from array import array
from collections.abc import Callable

import numpy as np

from mrl.errors import EnvironmentFault

TOKEN = np.dtype("<i4")
LENGTH_BYTES = 4  # the number of a prompt's tokens, which stands before them


class PromptStore:
    """Takes prompts, then gives them back by position.

    The file lies in TMPDIR and disappears with the process, however that ends. It is read with pread and not mapped.
    Pages of a mapping count as the process's memory, and after one epoch these would be all of them.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  stays open as long as the store lives
        self._ends = array("q")  # bytes: where each prompt's record ends

    def add(self, tokens: list[int], rest: str) -> None:
        """Adds one prompt: its token ids, and all other fields as text.

        Raises EnvironmentFault where the disk has no space for it.
        """
        ids = np.array(tokens, TOKEN)
        text = rest.encode()
        record = len(ids).to_bytes(LENGTH_BYTES, "little") + ids.tobytes() + text
        self._written(lambda: self._file.write(record))
        self._ends.append((self._ends[-1] if self._ends else 0) + len(record))

    def finish(self) -> None:
        """Makes all prompts readable; no more can be added. Raises EnvironmentFault."""
        self._written(self._file.flush)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> tuple[tuple[int, ...], str]:
        """Returns token ids and text of a prompt."""
        position = range(len(self))[index]  # a negative index counts from the end; one beyond raises IndexError
        start = 0
        if position:
            start = self._ends[position - 1]
        record = os.pread(self._file.fileno(), self._ends[position] - start, start)
        text = LENGTH_BYTES + TOKEN.itemsize * int.from_bytes(record[:LENGTH_BYTES], "little")
        return tuple(np.frombuffer(record[LENGTH_BYTES:text], TOKEN).tolist()), record[text:].decode()

    def close(self) -> None:
        """Closes and deletes the file. May be called twice."""
        # closing writes the buffer, which fails again on a full disk
        with contextlib.suppress(OSError):
            self._file.close()

    @staticmethod
    def _written(write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            where = tempfile.gettempdir()
            raise EnvironmentFault(
                f"{where}: prompts cannot be kept there ({error.strerror}); set TMPDIR to a folder with room"
            ) from error


class SeenPrompts:
    """Remembers which prompts came before. Two of 2 million different prompts are taken for one with a chance of 1e-7.

    This is a hash table with open addressing. A Python set of digests would need some 100 bytes each.
    """

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * 1024))
        self._count = 0

    def add(self, text: str) -> bool:
        """Adds a text and returns whether it is new."""
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        key = int.from_bytes(digest, "big") or 1  # 0 marks a free slot
        slot = self._slot(key)
        if self._table[slot] == key:
            return False
        self._table[slot] = key
        self._count += 1
        if 2 * self._count > len(self._table):
            self._grow()
        return True

    def _slot(self, key: int) -> int:
        """Returns the slot that holds the key, or else the free one where it belongs."""
        slot = key % len(self._table)
        while self._table[slot] not in (0, key):
            slot = (slot + 1) % len(self._table)
        return slot

    def _grow(self) -> None:
        keys = self._table
        self._table = array("Q", bytes(16 * len(self._table)))
        for key in keys:
            if key:
                self._table[self._slot(key)] = key
