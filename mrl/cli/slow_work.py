"""Lines on standard error about work that takes longer than a few seconds."""

import sys
import time

_SILENT_S = 3.0


class SlowWork:
    """Says every few seconds how far some work is."""

    def __init__(self, text: str) -> None:
        """`text`: a format of the numbers that calls give."""
        self._text = text
        self._begun = time.monotonic()
        self._next = self._begun + _SILENT_S

    def __call__(self, *numbers: int) -> None:
        """Takes how far the work is."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SILENT_S
            said = self._text.format(*numbers)
            print(f"{said}, {now - self._begun:.0f} s", file=sys.stderr, flush=True)
