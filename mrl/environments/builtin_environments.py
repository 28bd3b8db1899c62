"""Built-in environments."""

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mrl.environments.environment import Environment, Reply
from mrl.environments.text_arena import TEXTARENA, TextArena


class GuessTheNumber(Environment):
    """A hidden whole number between `low` and `high` of the row's extra_info, by default 1 and 100.

    Rewards 1 for the right guess, and 0 before. `guesses` of extra_info: after so many the game ends; by default it
    goes on as long as the conversation may.
    """

    actions = ("guess",)
    repeatable = True
    parts = MappingProxyType({"guesses": 0.0, "won": 0.0})

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Raises ValueError for a row without a number in between, or without a guess."""
        given = row["extra_info"]
        self._low = int(given.get("low", 1))
        self._high = int(given.get("high", 100))
        if self._low > self._high:
            raise ValueError(f"extra_info: no number lies between low {self._low} and high {self._high}")
        self._most = given.get("guesses")
        if self._most is not None and self._most < 1:
            raise ValueError(f"extra_info: guesses {self._most}: must be at least 1")
        self._hidden = random.Random(seed).randint(self._low, self._high)
        self._guesses = 0

    def guess(self, number: int) -> Reply:
        """Guesses the hidden number.

        Args:
            number: a whole number
        """
        self._guesses += 1
        parts = {"guesses": float(self._guesses), "won": float(number == self._hidden)}
        if number == self._hidden:
            return Reply("That is the number.", 1.0, parts, end=True)
        way = "lower"
        if number < self._hidden:
            way = "higher"
        return Reply(f"The hidden number is {way} than {number}.", 0.0, parts, end=self._guesses == self._most)


BUILTIN_ENVIRONMENTS: dict[str, type[Environment]] = {"guess_the_number": GuessTheNumber, TEXTARENA: TextArena}
