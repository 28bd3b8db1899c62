"""Reads and writes the pickles of torch_dist checkpoints without importing or calling anything that they name.

Each class or function that a pickle names is replaced by a placeholder, which records the arguments. Names outside of a
few packages are refused, so a file that was made to run something is detected.
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
    """The record of an object that a pickle would have made."""

    pickled_name = ""  # "torch.Size"

    def __new__(cls, *arguments: Any, **_: Any) -> "Recorded":
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Does nothing. `__new__` keeps the arguments, because some pickles call it alone."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def attribute(self, name: str) -> Any:
        """Returns an attribute of an object that was pickled by its attributes. Raises KeyError."""
        return self.state[name]


@cache
def _recorder(module: str, name: str) -> type[Recorded]:
    return type("Recorded", (Recorded,), {"pickled_name": f"{module}.{name}"})


def _member(of: Any, name: Any) -> Recorded:
    """Records a member of an enumeration as Python 3.11.2 pickles it: getattr of the class and its name."""
    if not (isinstance(of, type) and issubclass(of, Recorded) and isinstance(name, str)):
        raise pickle.UnpicklingError("it asks for an attribute, which no checkpoint's description needs")
    return of(name)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _HARMLESS:
            return _HARMLESS[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module.split(".")[0] not in _PACKAGES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint's description needs")
        return _recorder(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_pickle(data: bytes) -> Any:
    """Returns what `data` describes, as plain values and `Recorded`.

    Raises ValueError for anything else, with its name.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a pickle is a program; a damaged one may raise anything
        raise ValueError(str(error) or type(error).__name__) from error


@dataclass(frozen=True)
class Persistent:
    """An object that a pickle leaves to its reader, such as torch.save's storages."""

    id: tuple[Any, ...]


@dataclass(frozen=True, eq=False)  # compares by identity, and can be a dictionary key whatever it contains
class Named:
    """An object to be pickled with the name of a class or function that is not imported here.

    With neither arguments nor state it is the named object itself, and with arguments the result of calling it. With
    state it is an instance: the state is a dictionary of its attributes, or whatever its class's `__setstate__` takes.
    """

    module: str
    name: str
    arguments: tuple[Any, ...] | None = None
    state: Any = None


def write_pickle(value: Any) -> bytes:
    """Returns a pickle (protocol 2) of plain values and `Named`."""
    opcodes = [b"\x80\x02"]
    _write(value, opcodes)
    return b"".join([*opcodes, b"."])


def _write(value: Any, opcodes: list[bytes]) -> None:
    """Appends the opcodes of `value`. A large checkpoint's metadata are hundreds of thousands of values, only a few
    levels deep.
    """
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
        opcodes.append(pickle.dumps(value, 2)[2:-1])  # without the protocol before and the stop after it


def _write_all(begin: bytes, items: Iterable[Any], end: bytes, opcodes: list[bytes]) -> None:
    opcodes.append(begin)
    for item in items:
        _write(item, opcodes)
    opcodes.append(end)
