"""Games for one player from the package `textarena` as an environment: `pip install 'mrl[games]'`.

A row names its game, `extra_info.game` (`GuessTheNumber-v0-raw`), and may name the `seed` that its prompt was made
with. scripts/make_rows.py makes such rows. Games use the random generators of the whole process. Each response has its
own state of these, so that games in the same process do not affect each other.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from mrl.acting.environment import Environment, Reply, given_by
from mrl.errors import ConfigError

TEXTARENA = "textarena"
RAW = "-raw"  # suffix of games without wrappers, which would repeat what the model has read


def load_textarena() -> Any:
    """Returns the package. Raises ConfigError if it is not installed."""
    try:
        import textarena
    except ImportError as error:
        raise ConfigError(
            f"rollout.turns.environments: {TEXTARENA} plays games of the package textarena, which cannot be imported "
            f"({error}): pip install 'mrl[games]'"
        ) from error
    return textarena


class TextArena(Environment):
    """One game. Its reward is what the game gives at its end."""

    actions = ("act",)
    repeatable = True
    parts = MappingProxyType({"moves": 0.0, "finished": 0.0})

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Begins the row's game. Raises ValueError for a row without a playable game."""
        given = given_by(row)
        self._chance: list[Any] | None = None
        self._moves = 0
        with self._own_chance():
            self._game, self.opening = begun(given.get("game"), given.get("seed", seed))

    def act(self, action: str) -> Reply:
        """Makes a move.

        Args:
            action: as the rules of the game say, [5] or [up]
        """
        with self._own_chance():
            ended, _ = self._game.step(action)
            text = unread_text(self._game)
            rewards = None
            if ended:
                rewards, _ = self._game.close()
        self._moves += 1
        parts = {"moves": float(self._moves), "finished": float(ended)}
        return Reply(text, float((rewards or {}).get(0, 0.0)), parts, end=bool(ended))

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
        """Uses the response's own state of the process's random generators during the block."""
        before = _drawn()
        if self._chance is not None:
            _set_drawn(self._chance)
        try:
            yield
        finally:
            self._chance = _drawn()
            _set_drawn(before)


def begun(game: Any, seed: int) -> tuple[Any, str]:
    """Returns a game that has begun, and its first text. Raises ValueError for a game that is not for one player."""
    arena = load_textarena()
    if not isinstance(game, str) or not game.endswith(RAW):
        raise ValueError(
            f"extra_info.game is {str(game)[:60]!r}, expected a game of textarena that ends in {RAW}, like "
            "GuessTheNumber-v0-raw"
        )
    made = arena.make(game)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    made.reset(num_players=1, seed=seed)
    return made, unread_text(made)


def unread_text(game: Any) -> str:
    """Returns what the player has not read yet, without its own moves."""
    _, seen = game.get_observation()
    return "\n\n".join(message for who, message, _ in seen if who != 0)


def _drawn() -> list[Any]:
    drawn = [random.getstate()]
    if "numpy" in sys.modules:
        drawn.append(sys.modules["numpy"].random.get_state())
    return drawn


def _set_drawn(drawn: list[Any]) -> None:
    random.setstate(drawn[0])
    if len(drawn) > 1:
        sys.modules["numpy"].random.set_state(drawn[1])
