"""Lines of responses: those that are ready to be sent, and those that wait for later weights.

A dropped group leaves a line by its number, without a search. Its entries in a heap are skipped when they reach the
top.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple


class InLine(NamedTuple):
    """One response in line. The lowest goes first."""

    priority: int
    shortness: int  # minus its tokens: of equal priority, the longest goes first
    number: int
    index: int
    tokens: int  # prompt, kept, and all that may be added


class ReadyLine:
    """Responses that may be sent."""

    def __init__(self) -> None:
        self.tokens = 0  # of all in line
        self._heap: list[InLine] = []
        self._of_group: dict[int, dict[int, InLine]] = defaultdict(dict)  # number -> index -> what is in line
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, response: InLine) -> None:
        """Adds a response. Its position depends on its values, not on the time."""
        heapq.heappush(self._heap, response)
        self._of_group[response.number][response.index] = response
        self._length += 1
        self.tokens += response.tokens

    def pop(self) -> InLine:
        """Removes and returns the first response. Raises IndexError if the line is empty."""
        while True:
            response = heapq.heappop(self._heap)
            if self._of_group.get(response.number, {}).get(response.index) == response:
                self._forget(response)
                return response

    def leave(self, number: int) -> None:
        """Removes all responses of a group."""
        for response in list(self._of_group.get(number, {}).values()):
            self._forget(response)

    def _forget(self, response: InLine) -> None:
        of_group = self._of_group[response.number]
        del of_group[response.index]
        if not of_group:
            del self._of_group[response.number]
        self._length -= 1
        self.tokens -= response.tokens


class AheadLine:
    """Responses that wait for later weights, by group."""

    def __init__(self) -> None:
        self._numbers: list[int] = []  # a heap, which may contain groups that have left
        self._of_group: dict[int, list[int]] = {}

    def add(self, number: int, index: int) -> None:
        """Adds a response of a group."""
        if number not in self._of_group:
            heapq.heappush(self._numbers, number)
            self._of_group[number] = []
        self._of_group[number].append(index)

    def leave(self, number: int) -> None:
        """Removes all responses of a group."""
        self._of_group.pop(number, None)

    def pop_while(self, due: Callable[[int], bool]) -> list[tuple[int, int]]:
        """Removes the groups with the lowest numbers, up to the first that is not due. Returns (number, index)."""
        found: list[tuple[int, int]] = []
        while self._numbers and due(self._numbers[0]):
            number = heapq.heappop(self._numbers)
            found += [(number, index) for index in self._of_group.pop(number, ())]
        return found
