"""All that is wrong with a configuration, told at once; and how a rule finds what would be right."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches

from mrl.errors import ConfigError, Violation


class InvalidConfig(ConfigError):
    """All violations of one configuration; the message lists every one of them."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        head = f"{count} problem{'s' if count > 1 else ''} in the configuration:"
        super().__init__("\n".join([head, *(f"  {v}" for v in self.violations)]))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean X?` when a known name is close, else the list of known names."""
    known = list(known)
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def nearest(value: int, highest: int, legal: Callable[[int], bool], count: int = 4) -> tuple[int, ...]:
    """The legal numbers from 1 to `highest` that are closest to `value`, ascending."""
    close = sorted((v for v in range(1, highest + 1) if legal(v)), key=lambda v: (abs(v - value), v))
    return tuple(sorted(close[:count]))
