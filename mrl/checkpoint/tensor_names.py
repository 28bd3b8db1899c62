"""The names of the tensors in a rank's part of a checkpoint, in short form, with their numbers separated.

    model.layers.3.mlp.experts.17.up_proj.weight
    model.layers.4.mlp.experts.17.up_proj.weight   ->   model.layers.*.mlp.experts.*.up_proj.weight: [[3, 4], [17]]

The numbers at each position are listed, but not their combinations. So a part may hold less than this, never more.
"""

from collections.abc import Iterable, Mapping, Sequence

TensorNames = Mapping[str, Sequence[Sequence[int]]]  # name with a * for each number -> numbers of each *


def tensor_names(names: Iterable[str]) -> TensorNames:
    """Shortens many names to patterns and their numbers."""
    found: dict[str, list[set[int]]] = {}
    for pattern, numbers in map(_split, names):
        positions = found.setdefault(pattern, [set() for _ in numbers])
        for position, number in zip(positions, numbers, strict=True):
            position.add(number)
    return {pattern: [sorted(position) for position in positions] for pattern, positions in found.items()}


def may_hold(short: TensorNames, name: str) -> bool:
    """Tells whether `name` may be one of the names in `short`."""
    pattern, numbers = _split(name)
    positions = short.get(pattern)
    return positions is not None and all(
        number in position for number, position in zip(numbers, positions, strict=True)
    )


def _split(name: str) -> tuple[str, list[int]]:
    parts = name.split(".")
    pattern = ".".join("*" if part.isdecimal() else part for part in parts)
    return pattern, [int(part) for part in parts if part.isdecimal()]
