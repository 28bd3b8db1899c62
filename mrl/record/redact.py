"""Keeps secrets out of what a run writes, shows and sends to loggers. Both names and values can reveal a secret."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
_NAME = re.compile(
    r"(?:^|[._-])(?:api_?key|access_?key|private_?key|secret(?:_?key)?|(?:[a-z]+_)?(?:api|auth|access|bearer|hf)_token|"
    r"token|password|passwd|pwd|credentials?|authorization)$",
    re.IGNORECASE,
)
# How keys of well-known services begin, and a password in a URL.
_VALUE = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|AKIA[A-Z0-9]{16}|"
    r"xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
)


def without_secrets(value: Any, name: str = "") -> Any:
    """Replaces every secret in plain data by HIDDEN. `name` is the key of the data."""
    if value is not None and not isinstance(value, bool) and name and _NAME.search(name):
        return HIDDEN
    match value:
        case str():
            return _VALUE.sub(HIDDEN, value)
        case Mapping():
            return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
        case list() | tuple():
            return [without_secrets(inner) for inner in value]
    return value


def command_without_secrets(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a command. The value of KEY=VALUE is hidden where the key reveals a secret."""
    shown = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        shown.append(f"{key}={without_secrets(value, key)}" if equals else without_secrets(argument))
    return shown
