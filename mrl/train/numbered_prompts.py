"""The prompt of every group number: numbers go on over epochs, prompts are drawn as the data has them, draw by draw."""

from collections import Counter
from dataclasses import dataclass

from mrl.data.batch import Prompt
from mrl.data.order import DataCursor, PromptStream

# between the response indices of a prompt that comes twice in one draw, so that it is not answered alike
REPEAT_OFFSET = 1_000_000


@dataclass(frozen=True)
class PromptCursor:
    """Where a draw of prompts begins: the `draw`-th of the run, and its place in the data."""

    draw: int
    cursor: DataCursor


class NumberedPrompts:
    """Prompts by number, drawn when they are first asked for."""

    def __init__(self, stream: PromptStream, place: PromptCursor):
        self._stream = stream
        self._next = place
        self._begins: dict[int, DataCursor] = {}  # by draw
        self._ends: dict[int, DataCursor] = {}
        self._drawn: dict[int, list[tuple[Prompt, int]]] = {}

    def __getitem__(self, number: int) -> tuple[Prompt, int]:
        """The prompt, and the index of its first response in the draw. Raises KeyError for one that was forgotten."""
        draw, place = divmod(number, self._stream.batch_size)
        self._draw_until(draw)
        return self._drawn[draw][place]

    @property
    def draw_size(self) -> int:
        """The number of prompts of a draw."""
        return self._stream.batch_size

    def draw_of(self, number: int) -> int:
        """The draw that the prompt is of, counted from the beginning of the run."""
        return number // self._stream.batch_size

    def _draw_until(self, draw: int) -> None:
        while self._next.draw <= draw:
            now = self._next.draw
            begin = self._next.cursor
            prompts, end = self._stream.next_batch(begin)
            self._drawn[now], self._begins[now], self._ends[now] = with_first_index(prompts), begin, end
            self._next = PromptCursor(now + 1, end)

    def after(self, number: int) -> DataCursor:
        """The place in the data behind the draw that the number is of."""
        draw = number // self._stream.batch_size
        self._draw_until(draw)
        return self._ends[draw]

    def forget_before(self, number: int) -> PromptCursor:
        """Where to begin so that `number` and all after it can be asked for; those before it no longer can."""
        draw = number // self._stream.batch_size
        for kept in (self._drawn, self._begins, self._ends):
            for old in [old for old in kept if old < draw]:
                del kept[old]
        if draw not in self._begins:
            return self._next
        return PromptCursor(draw, self._begins[draw])


def with_first_index(prompts: list[Prompt]) -> list[tuple[Prompt, int]]:
    """Each prompt with the index of its first response: 0,
    and further on where files mixed by weight bring it again.
    """
    times: Counter[int] = Counter()
    indexed = []
    for prompt in prompts:
        indexed.append((prompt, times[prompt.prompt_id] * REPEAT_OFFSET))
        times[prompt.prompt_id] += 1
    return indexed
