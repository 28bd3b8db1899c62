"""The first groups of a buffer, and what has arrived of them, counted as it arrives."""

from collections.abc import Mapping
from itertools import islice

from mrl.schedule.groups import Group


class Front:
    """Counts responses and whole groups of the first groups. It sums over them only after which groups they are has
    changed.
    """

    def __init__(self, groups: Mapping[int, Group], most: int | None):
        """`groups`: the buffer's own, by number, in order. `most`: how many are the first; None: all."""
        self._groups = groups
        self._most = most
        self._numbers: set[int] | None = None  # None: to be found again
        self._ended = 0
        self._whole = 0

    def came(self) -> None:
        """Says that a group was put behind the others."""
        if self._most is None or len(self._groups) <= self._most:
            self._numbers = None

    def went(self, number: int) -> None:
        """Says that a group was removed."""
        if self._numbers is not None and number in self._numbers:
            self._numbers = None

    def responded(self, group: Group) -> None:
        """Says that one more response of a group has ended."""
        if self._numbers is not None and group.number in self._numbers:
            self._ended += 1
            self._whole += group.is_whole

    @property
    def size(self) -> int:
        """Number of groups."""
        if self._most is None:
            return len(self._groups)
        return min(self._most, len(self._groups))

    @property
    def ended(self) -> int:
        """Number of responses that have ended."""
        self._find()
        return self._ended

    @property
    def whole(self) -> int:
        """Number of groups whose responses have all ended."""
        self._find()
        return self._whole

    def _find(self) -> None:
        if self._numbers is not None:
            return
        first = list(islice(self._groups.values(), self._most))
        self._numbers = {group.number for group in first}
        self._ended = sum(sum(group.ended) for group in first)
        self._whole = sum(group.is_whole for group in first)
