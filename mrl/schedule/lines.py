"""Lines of responses: those that are ready to be sent, and those that wait for later weights.

A group that is dropped leaves a line by its number, without a look at what others have there: what it leaves in a heap
is passed over once it comes to the top.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple


class InLine(NamedTuple):
    """One response in line. The least goes first."""

    priority: int
    shortness: int  # less the tokens that it has: among equals the longest goes first
    number: int
    index: int
    tokens: int  # prompt, kept, and all that it may add


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
        """Puts a response in line. Its place follows from what it is, not from when it came."""
        heapq.heappush(self._heap, response)
        self._of_group[response.number][response.index] = response
        self._length += 1
        self.tokens += response.tokens

    def pop(self) -> InLine:
        """The first, which leaves. Raises IndexError where none is in line."""
        while True:
            response = heapq.heappop(self._heap)
            if self._of_group.get(response.number, {}).get(response.index) == response:
                self._forget(response)
                return response

    def leave(self, number: int) -> None:
        """All responses of the group do."""
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
    """Responses whose next token is of later weights, by group."""

    def __init__(self) -> None:
        self._numbers: list[int] = []  # a heap, also of groups that have left
        self._of_group: dict[int, list[int]] = {}

    def add(self, number: int, index: int) -> None:
        """One more response of the group."""
        if number not in self._of_group:
            heapq.heappush(self._numbers, number)
            self._of_group[number] = []
        self._of_group[number].append(index)

    def leave(self, number: int) -> None:
        """All responses of the group do."""
        self._of_group.pop(number, None)

    def pop_while(self, due: Callable[[int], bool]) -> list[tuple[int, int]]:
        """(number, index) of the groups, the least number first, up to the first that is not due. They leave."""
        found: list[tuple[int, int]] = []
        while self._numbers and due(self._numbers[0]):
            number = heapq.heappop(self._numbers)
            found += [(number, index) for index in self._of_group.pop(number, ())]
        return found
