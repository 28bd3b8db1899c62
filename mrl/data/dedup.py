"""Which prompts came before, in 16 to 32 bytes a prompt; a Python set of digests needs some 100."""

import hashlib
from array import array


class SeenPrompts:
    """A hash table with open addressing. Two of 2 million different prompts are taken for one with a chance of 1e-7."""

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * 1024))
        self._count = 0

    def add(self, text: str) -> bool:
        """Whether the text is new."""
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
        """Where the key is, or belongs."""
        slot = key % len(self._table)
        while self._table[slot] not in (0, key):
            slot = (slot + 1) % len(self._table)
        return slot

    def _grow(self) -> None:
        keys, self._table = self._table, array("Q", bytes(16 * len(self._table)))
        for key in keys:
            if key:
                self._table[self._slot(key)] = key
