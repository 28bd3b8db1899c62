"""Runs a user's Python files that bind functions to names with a decorator, and reads the names off their text. No
torch.
"""

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mrl.errors import ConfigError

# modules that such a file may import and that register nothing
_PLAIN = frozenset(sys.stdlib_module_names) | {"mrl", "numpy", "torch"}


class _Bound(NamedTuple):
    """Who has bound a user's function to a name of a table."""

    table: dict[str, Any]
    module: str
    file: str


_bound: dict[tuple[str, str], _Bound] = {}  # by decorator and name


def registered_names(file: Path, decorator: str) -> tuple[str, ...] | None:
    """Returns the names that `file` gives to @`decorator`, as far as its text shows them.

    Returns None where the text does not show them, for instance where another module of the user is imported. Raises
    SyntaxError where the file is no Python, OSError where it cannot be read.
    """
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except ValueError as error:  # a null byte
        raise SyntaxError(str(error)) from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last_name(node.func) == decorator]
    given = [call.args[0] if call.args else None for call in calls]
    if not all(isinstance(name, ast.Constant) for name in given):
        return None
    if not given and not _imports(tree) <= _PLAIN:
        return None
    return tuple(str(name.value) for name in given)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return getattr(node, "id", "")


def _imports(tree: ast.Module) -> set[str]:
    """Returns the top-level names of the modules that a file imports; relative imports count as "."."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0] if not node.level else ".")
    return found


def load_registered(path: str, key: str, decorator: str, name: str, table: Mapping[str, Any]) -> None:
    """Runs the file at `path` once in this process. It must bind a function to `name` in `table` with @`decorator`.

    Raises ConfigError where it does not; the message names the configuration's `key`.
    """
    file = Path(path).resolve()
    module = _module_name(file)
    if module not in sys.modules:
        _run_file(file, module, key)
    if name not in table:
        registered = [one for (_, one), by in _bound.items() if by.table is table and by.file == str(file)]
        raise ConfigError(
            f"{key}: {file} registers {', '.join(sorted(registered)) or 'nothing'}, not {name!r}; "
            f'put @{decorator}("{name}") on the function'
        )


def bind_own(table: dict[str, Any], name: str, function: Any, decorator: str) -> bool:
    """Binds a user's function to a name, for what a decorator returns, which the user's file calls.

    A file that another one imports runs twice: then the first function stays, and the answer is False. Raises
    ConfigError for a name that is taken otherwise.
    """
    asking = sys._getframe(2).f_globals  # a function need not know its file: it may be a partial
    file = asking.get("__file__")  # none in a notebook
    by = _Bound(table, str(asking["__name__"]), os.path.realpath(file) if file else "")
    if name in table:
        held = _bound.get((decorator, name))
        if held is not None and by.file and held.file == by.file and held.module != by.module:
            return False
        raise ConfigError(f"{decorator}: the name {name!r} is taken; taken: {', '.join(table)}")
    table[name] = function
    _bound[decorator, name] = by
    return True


def has_run(path: str) -> bool:
    """Tells whether the file at `path` has run in this process."""
    return _module_name(Path(path).resolve()) in sys.modules


def unload(path: str) -> None:
    """Takes back what the file at `path` has bound, so that the next load runs it anew."""
    _forget(_module_name(Path(path).resolve()))


def _forget(module: str) -> None:
    sys.modules.pop(module, None)
    for key, by in list(_bound.items()):
        if by.module == module:
            del _bound[key]
            by.table.pop(key[1], None)


def _module_name(file: Path) -> str:
    return f"mrl_own_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"


def _run_file(file: Path, name: str, key: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"{key}: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        _forget(name)
        if isinstance(error, ConfigError) or not isinstance(error, Exception | SystemExit):
            raise
        raise ConfigError(f"{key}: {file} cannot be loaded: {type(error).__name__}: {error}") from error
