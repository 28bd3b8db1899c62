"""Reads files and texts that strangers may have made: within limits, or with a refusal of one sentence.

A file that cannot be read raises OSError. A file whose content is useless raises ValueError. Both say what to check.
"""

import errno
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, EnvironmentFault

_MIB = 2**20
CONFIG_BYTES = _MIB // 2  # a configuration; the largest real one has a few thousand characters
TEXT_BYTES = _MIB  # a script, or another file that somebody wrote by hand
JSON_BYTES = 256 * _MIB  # one object, such as the manifest of a checkpoint of thousands of ranks
LINES_BYTES = 1024 * _MIB  # a file to which a run appends lines
LFS_POINTER = b"version https://git-lfs"  # how a file begins that a clone has in place of a large one
NOT_PULLED = "is a pointer of Git LFS in place of the file: run git lfs pull in its folder"
_MOST_DIGITS = 100
_LONG_NUMBER = re.compile(rf"\d{{{_MOST_DIGITS}}}|[eE][-+]?\d{{3}}")


def open_regular(path: Path) -> int:
    """Opens a file for reading and returns its descriptor. Never blocks: a pipe or device is refused, not opened.

    Raises OSError.
    """
    _refuse_other_kinds(os.stat(path), path)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_other_kinds(os.fstat(handle), path)
    except OSError:
        os.close(handle)
        raise
    return handle


def read_bytes(path: Path, limit: int) -> bytes:
    """Returns all bytes of a regular file. Raises OSError, or ValueError for more than `limit` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"larger than {limit} bytes, the limit for such a file")
    return data


def read_text(path: Path, limit: int, errors: str = "strict") -> str:
    """Returns a UTF-8 file's text with "\\n" as line ending. Raises what `read_bytes` raises.

    `errors` has the meaning that it has for bytes.decode.
    """
    text = read_bytes(path, limit).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def utf8(data: bytes) -> str:
    """Returns text of bytes. Raises ValueError for what other readers of JSON would not take either: another encoding,
    a byte order mark.
    """
    encoding = json.detect_encoding(data)
    if encoding != "utf-8":
        kind = "UTF-8 with a byte order mark" if encoding == "utf-8-sig" else encoding.upper()
        raise ValueError(f"saved as {kind}; save it as UTF-8 without a mark")
    return data.decode()


class TwiceNamed(ValueError):
    """JSON in which an object has a key twice, so that nobody knows which value is meant."""


def parse_json(text: str | bytes, strict: bool = True, once: bool = False) -> Any:
    """Returns the value of JSON text. Without `strict`, NaN and infinities are accepted, as Python's own writer makes
    them.

    Raises ValueError for text that is not JSON, numbers too large for a float, and too deep nesting. With `once` raises
    TwiceNamed for a key that an object has twice.
    """
    constant = _no_number if strict else float
    pairs = _once if once else None
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    try:
        if _LONG_NUMBER.search(text):  # may also match inside a string
            return json.loads(
                text, parse_constant=constant, parse_int=_int, parse_float=_float, object_pairs_hook=pairs
            )
        return json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise TwiceNamed(f"the key {twice[:40]!r} is there twice in one object")
    return found


def read_json(path: Path, limit: int = JSON_BYTES, strict: bool = True) -> Any:
    """Returns the value of a JSON file, parsed by `parse_json`. Raises what `read_bytes` and `parse_json` raise."""
    return parse_json(utf8(read_bytes(path, limit)), strict)


def read_settings(path: Path, limit: int) -> dict[str, Any]:
    """Returns the object of a JSON file that came with a model. Raises EnvironmentFault for anything else."""
    try:
        settings = read_json(path, limit, strict=False)
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{path} cannot be read as JSON: {reason(error)}") from None
    if not isinstance(settings, dict):
        raise EnvironmentFault(f"{path} does not hold a JSON object")
    return settings


def reason(error: Exception) -> str:
    """Returns what an error of this module says, without the path, which the caller names."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def check_output(path: Path, inputs: tuple[Path, ...] = (), begins: bytes = b"") -> None:
    """Raises ConfigError for an output that would replace something other than an older output.

    Links, devices and pipes are never replaced. Neither is one of `inputs`, under any name, nor a file that does not
    begin with `begins`.
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # either the path is free, or writing will say what is wrong
    if stat.S_ISDIR(mode):
        return  # a file never replaces a folder
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is {_kind(mode)}, which is never replaced; name a file")
    if any(other.exists() and os.path.samefile(path, other) for other in inputs):
        raise ConfigError(f"{path} is one of the input files; name another one")
    with os.fdopen(open_regular(path), "rb") as file:
        if file.read(len(begins)) != begins:
            raise ConfigError(f"{path} exists and is another kind of file than the output; name another file")


def _refuse_other_kinds(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise OSError(number, f"is {_kind(status.st_mode)} and no file", str(path))


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number in JSON")


def _int(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number
