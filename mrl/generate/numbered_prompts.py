"""Returns the prompt of every group number. Numbers continue over epochs, and prompts are drawn in the order of the
data.
"""

from collections import Counter
from dataclasses import dataclass

from mrl.data.batch import Prompt
from mrl.data.order import DataCursor, PromptStream

# offset of response indices of a prompt that occurs twice in one draw, so that its answers differ
REPEAT_OFFSET = 1_000_000


@dataclass(frozen=True)
class PromptCursor:
    """The start of a draw of prompts: its number in the run, and its place in the data."""

    draw: int
    cursor: DataCursor


class NumberedPrompts:
    """Prompts by number, drawn when they are first requested."""

    def __init__(self, stream: PromptStream, position: PromptCursor):
        self._stream = stream
        self._next = position
        self._begins: dict[int, DataCursor] = {}  # by draw
        self._ends: dict[int, DataCursor] = {}
        self._drawn: dict[int, list[tuple[Prompt, int]]] = {}

    def __getitem__(self, number: int) -> tuple[Prompt, int]:
        """Returns the prompt, and the index of its first response in the draw. Raises KeyError for a forgotten one."""
        draw, position = divmod(number, self._stream.batch_size)
        self._draw_until(draw)
        return self._drawn[draw][position]

    @property
    def draw_size(self) -> int:
        """Returns the number of prompts in a draw."""
        return self._stream.batch_size

    def draw_of(self, number: int) -> int:
        """Returns the draw of a prompt, counted from the beginning of the run."""
        return number // self._stream.batch_size

    def _draw_until(self, draw: int) -> None:
        while self._next.draw <= draw:
            now = self._next.draw
            begin = self._next.cursor
            prompts, end = self._stream.next_batch(begin)
            self._drawn[now], self._begins[now], self._ends[now] = with_first_index(prompts), begin, end
            self._next = PromptCursor(now + 1, end)

    def after(self, number: int) -> DataCursor:
        """Returns the place in the data after the draw of this number."""
        draw = number // self._stream.batch_size
        self._draw_until(draw)
        return self._ends[draw]

    def forget_before(self, number: int) -> PromptCursor:
        """Forgets the prompts before `number`.

        Returns the cursor from which `number` and later ones can be requested.
        """
        draw = number // self._stream.batch_size
        for kept in (self._drawn, self._begins, self._ends):
            for old in [old for old in kept if old < draw]:
                del kept[old]
        if draw not in self._begins:
            return self._next
        return PromptCursor(draw, self._begins[draw])


def with_first_index(prompts: list[Prompt]) -> list[tuple[Prompt, int]]:
    """Returns each prompt with the index of its first response: 0, or higher if mixed files repeat the prompt."""
    times: Counter[int] = Counter()
    indexed = []
    for prompt in prompts:
        indexed.append((prompt, times[prompt.prompt_id] * REPEAT_OFFSET))
        times[prompt.prompt_id] += 1
    return indexed
