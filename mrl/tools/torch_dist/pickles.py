"""Reads and writes the pickles of torch_dist checkpoints without importing or calling anything that they name.

Every class or function that a pickle names becomes a stand-in which remembers what it was given. Names outside the few
packages that such files are made of are refused, so that a file made to run something is told from a checkpoint.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

_PACKAGES = ("torch", "megatron", "transformer_engine", "pathlib")
_HARMLESS = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}


class Recorded:
    """What a pickle would have made an object of."""

    pickled_name = ""  # "torch.Size"

    def __new__(cls, *arguments: Any, **_: Any) -> "Recorded":
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """The arguments are kept by `__new__`, which is all that some pickles call."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def attribute(self, name: str) -> Any:
        """An attribute of an object that was pickled by its attributes. Raises KeyError."""
        return self.state[name]


@cache
def _stand_in(module: str, name: str) -> type[Recorded]:
    return type("Recorded", (Recorded,), {"pickled_name": f"{module}.{name}"})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _HARMLESS:
            return _HARMLESS[module, name]
        if module.split(".")[0] not in _PACKAGES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint's description needs")
        return _stand_in(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_pickle(data: bytes) -> Any:
    """What `data` describes, made of plain values and `Recorded`.

    Raises ValueError for anything else, naming what it asks for.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a pickle is a program; a damaged one fails in any way there is
        raise ValueError(str(error) or type(error).__name__) from error


@dataclass(frozen=True)
class Persistent:
    """What a pickle leaves to its reader: torch.save's storages."""

    id: tuple[Any, ...]


@dataclass(frozen=True, eq=False)  # a key of dictionaries by what it is, whatever it holds
class Named:
    """An object to be pickled under the name of a class or function that is not imported here.

    With neither arguments nor state it is the named thing itself, and with arguments what calling it gives. With state
    it is an instance that has it: a dictionary of its attributes, or whatever its class's `__setstate__` takes.
    """

    module: str
    name: str
    arguments: tuple[Any, ...] | None = None
    state: Any = None


def write_pickle(value: Any) -> bytes:
    """A pickle (protocol 2) of plain values and `Named`."""
    opcodes = [b"\x80\x02"]
    _write(value, opcodes)
    return b"".join([*opcodes, b"."])


def _write(value: Any, opcodes: list[bytes]) -> None:
    """Appends those of `value`: the metadata of a large checkpoint are hundreds of thousands, some levels deep."""
    if isinstance(value, Named):
        opcodes.append(f"c{value.module}\n{value.name}\n".encode())
        if value.arguments is not None:
            _write(value.arguments, opcodes)
            opcodes.append(b"R")
        elif value.state is not None:
            opcodes.append(b")\x81")
            _write(value.state, opcodes)
            opcodes.append(b"b")
    elif isinstance(value, Persistent):
        _write(value.id, opcodes)
        opcodes.append(b"Q")
    elif isinstance(value, tuple):
        _write_all(b"(", value, b"t", opcodes)
    elif isinstance(value, list):
        _write_all(b"](", value, b"e", opcodes)
    elif isinstance(value, dict):
        _write_all(b"}(", chain.from_iterable(value.items()), b"u", opcodes)
    else:
        opcodes.append(pickle.dumps(value, 2)[2:-1])  # without the protocol before and the stop behind


def _write_all(begin: bytes, items: Iterable[Any], end: bytes, opcodes: list[bytes]) -> None:
    opcodes.append(begin)
    for item in items:
        _write(item, opcodes)
    opcodes.append(end)
