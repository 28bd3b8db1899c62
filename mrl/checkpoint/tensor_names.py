"""Which tensors a rank's part of a checkpoint holds, in few words: their names, with the numbers taken out.

    model.layers.3.mlp.experts.17.up_proj.weight
    model.layers.4.mlp.experts.17.up_proj.weight   ->   model.layers.*.mlp.experts.*.up_proj.weight: [[3, 4], [17]]

Each place of a name has its numbers, and their combinations are not said: a part may hold less than this, never more.
"""

from collections.abc import Iterable, Mapping, Sequence

TensorNames = Mapping[str, Sequence[Sequence[int]]]  # name with a * for each number -> numbers of each *


def tensor_names(names: Iterable[str]) -> TensorNames:
    """Shortens many names to patterns and the numbers in them."""
    found: dict[str, list[set[int]]] = {}
    for pattern, numbers in map(_split, names):
        places = found.setdefault(pattern, [set() for _ in numbers])
        for place, number in zip(places, numbers, strict=True):
            place.add(number)
    return {pattern: [sorted(place) for place in places] for pattern, places in found.items()}


def may_hold(short: TensorNames, name: str) -> bool:
    """Whether `name` may be one of the names in `short`."""
    pattern, numbers = _split(name)
    places = short.get(pattern)
    return places is not None and all(number in place for number, place in zip(numbers, places, strict=True))


def _split(name: str) -> tuple[str, list[int]]:
    words = name.split(".")
    pattern = ".".join("*" if word.isdecimal() else word for word in words)
    return pattern, [int(word) for word in words if word.isdecimal()]
