"""Covering arrays: few rows in which every legal pair of values occurs, and every legal triple of some axes."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

Row = Mapping[str, str]  # value by axis
Values = frozenset[tuple[str, str]]  # some axes with a value each
Refusal = Callable[[Row], str | None]  # why a whole row is illegal; None: it is legal

TRIES = 20  # completions of values that are said to be illegal together


class Contradiction(ValueError):
    """Rules under which no array can be made; the message names them."""


@dataclass
class Rules:
    """What is legal, asked seldom: values that were refused together are kept.

    `axes`: values by axis, the first of which goes with every other value.
    """

    axes: Mapping[str, Sequence[str]]
    refusal: Refusal
    refused: dict[Values, str] = field(default_factory=dict)

    @property
    def usual(self) -> dict[str, str]:
        return {axis: values[0] for axis, values in self.axes.items()}

    def check(self) -> None:
        """Raises Contradiction where the usual row, or one value with it, is refused."""
        for axis, values in self.axes.items():
            for value in values:
                why = self.refusal(self.usual | {axis: value})
                if why is not None:
                    raise Contradiction(f"{axis} {value} is refused beside the first value of every axis: {why}")

    def is_refused(self, values: Iterable[tuple[str, str]]) -> bool:
        """Whether they hold some that are known to be refused together."""
        held = frozenset(values)
        return any(few <= held for few in self.refused)

    def accepts(self, row: Row) -> bool:
        """Asks about a whole row; where it is refused, keeps the fewest of its values that are."""
        why = self.refusal(row)
        if why is None:
            return True
        usual = self.usual
        few = dict(row)
        for axis in row:
            without = few | {axis: usual[axis]}
            if few[axis] != usual[axis] and self.refusal(without) is not None:
                few = without
        values = frozenset((axis, value) for axis, value in few.items() if value != usual[axis])
        self.refused[values] = self.refusal(few) or why
        return False


@dataclass(frozen=True)
class Array:
    """Rows, and which sets of values can be in none with the reason."""

    rows: tuple[Row, ...]
    illegal: Mapping[Values, str]


def wanted(axes: Mapping[str, Sequence[str]], tripled: Sequence[str] = ()) -> list[Values]:
    """All pairs of values of different axes, and all triples of the axes `tripled`."""
    groups = [*combinations(axes, 2), *combinations(tripled, 3)]
    return [frozenset(zip(group, values, strict=True)) for group in groups for values in product(*map(axes.get, group))]


def most_first(rows: Sequence[Row], asked: Iterable[Values], held: Iterable[Row] = ()) -> list[int]:
    """Numbers of the rows, so that each has most of what is asked for and in none before it, nor in those of `held`."""
    before = [frozenset(row.items()) for row in held]
    missing = {values for values in asked if not any(values <= row for row in before)}
    new = {number: _held_by(row, missing) for number, row in enumerate(rows)}
    order = []
    while new:
        best = max(new, key=lambda number: len(new[number]))
        found = new.pop(best)
        new = {number: values - found for number, values in new.items()}
        order.append(best)
    return order


def _held_by(row: Row, asked: Iterable[Values]) -> set[Values]:
    items = frozenset(row.items())
    return {values for values in asked if values <= items}


def covering_array(
    axes: Mapping[str, Sequence[str]], refusal: Refusal, tripled: Sequence[str] = (), seed: int = 0
) -> Array:
    """Rows that hold every legal pair, and every legal triple of the axes `tripled`; the same ones for a seed.

    Greedy: each row begins with values that are in none yet, and takes on each further axis what is new with most.
    Raises Contradiction where rules let no row be made.
    """
    draw = random.Random(seed)
    rules = Rules(axes, refusal)
    rules.check()
    asked = wanted(axes, tripled)
    draw.shuffle(asked)
    missing = dict.fromkeys(sorted(asked, key=len, reverse=True))
    rows: list[Row] = []
    illegal: dict[Values, str] = {}
    while missing:
        begun = next(iter(missing))
        row = _row(begun, missing, rules, draw)
        if row is None:
            illegal[begun] = _why(begun, rules, draw)
            del missing[begun]
            continue
        rows.append(row)
        held = frozenset(row.items())
        missing = {values: None for values in missing if not values <= held}
    return Array(tuple(rows), illegal)


def _row(begun: Values, missing: Mapping[Values, None], rules: Rules, draw: random.Random) -> Row | None:
    """A legal row with these values and as many missing ones as are found; None where there is none."""
    while not rules.is_refused(begun):
        row = dict(begun)
        rest = [axis for axis in rules.axes if axis not in row]
        draw.shuffle(rest)
        for axis in rest:
            row[axis] = _best(axis, row, missing, rules, draw)
        if rules.accepts(row):
            return row
    return None


def _best(axis: str, row: Row, missing: Mapping[Values, None], rules: Rules, draw: random.Random) -> str:
    """The value of an axis that is new with most of what the row holds; the usual one where all are refused."""
    gains: dict[str, int] = {}
    for value in rules.axes[axis]:
        held = frozenset({*row.items(), (axis, value)})
        if not rules.is_refused(held):
            gains[value] = sum(1 for values in missing if (axis, value) in values and values <= held)
    most = max(gains.values(), default=0)
    best = [value for value, gain in gains.items() if gain == most]
    return draw.choice(best) if best else rules.usual[axis]


def _why(values: Values, rules: Rules, draw: random.Random) -> str:
    """The reason why values are in no row, after some rows with them were tried.

    Raises Contradiction where one of them is legal: then a refusal hangs on a usual value.
    """
    few = next(few for few in rules.refused if few <= values)
    for _ in range(TRIES):
        row = {axis: draw.choice(rules.axes[axis]) for axis in rules.axes} | dict(values)
        if rules.refusal(row) is None:
            raise Contradiction(f"{sorted(few)} was refused, and is legal in {row}: {rules.refused[few]}")
    return rules.refused[few]
