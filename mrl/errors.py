"""Errors that a user sees, each with the exit code that the command ends with.

Every problem that the user can solve is raised as one of these classes. The command line prints the message alone. Any
other exception is a defect of mrl and keeps its traceback (exit code 1). The end of the file holds what a rule says
about a value that is not allowed.
"""

import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class MrlError(Exception):
    """Base class. `exit_code` is the process exit status that `mrl` ends with."""

    exit_code = 1


class ConfigError(MrlError):
    """Configuration or usage: an unknown key, an illegal layout, a missing capability."""

    exit_code = 2


class DataError(MrlError):
    """Data that cannot be used: empty files, a wrong schema, too many bad rows, prompts that are too long."""

    exit_code = 3


class EnvironmentFault(MrlError):
    """The machine or the installation: a port in use, too few CPUs, an unreadable checkpoint, an untested version."""

    exit_code = 4


class DamagedCheckpoint(EnvironmentFault):
    """A file of a checkpoint differs from what was written. Made by `DamagedCheckpoint(text, folder)`."""

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return Path(self.args[1])

    def __str__(self) -> str:
        return self.args[0]


class LostLock(MrlError):
    """Another process owns the run directory now, so nothing more may be written into it.

    Not an EnvironmentFault: a run survives those, because a full disk raises them too.
    """

    exit_code = EnvironmentFault.exit_code


class Interrupted(MrlError):
    """Stopped but resumable: a signal, preemption, a lost worker."""

    exit_code = 5


class LostProcess(Interrupted):
    """A process of the run died or does not answer. `concerning` puts its name into the error."""


class LostWeights(LostProcess):
    """No process holds the weights any more with which responses were to be finished.

    The run can repeat them bit by bit only from an earlier checkpoint.
    """


class NumericAbort(MrlError):
    """Numbers that must not reach the optimizer (NaN, inf, ranks that disagree)."""

    exit_code = 6


class DoesNotFit(MrlError):
    """A plan whose memory is too large by more than the error of the plan. Only `mrl plan` ends with it."""

    exit_code = 7


class NothingToDo(MrlError):
    """Nobody's fault: what was asked for exists already."""

    exit_code = 0


def described(error: Exception) -> str:
    """Returns an error's text, with its type where the text alone may be empty or unclear (such as a KeyError's)."""
    if isinstance(error, RuntimeError | ValueError | MrlError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Returns the text with control characters and unpaired surrogates as Python escape sequences.

    A terminal obeys control characters, except newline and tab, and characters that change the direction of text.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


class UnknownValue(AttributeError):
    """A key was read whose value is unknown, because the written value was refused.

    A rule that reads such a key cannot be judged.
    """


class _Missing:
    """The value of a key that is absent or unknown."""

    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


VERBOSE = "MRL_VERBOSE"  # environment variable that `--verbose` sets to 1, also for the run's further processes
LONGEST = 280  # characters of a violation without --verbose: with what a command prints before it, 300
_MORE = " ... (--verbose)"


def verbose() -> bool:
    """Returns whether messages are to be whole, and lines of steps to have everything."""
    return os.environ.get(VERBOSE) == "1"


@dataclass(frozen=True)
class Violation:
    """One broken rule of a configuration: the key, what must hold, why, and values that would be accepted.

    A rule sets the first four fields. The caller adds the value and where it was written.
    """

    field: str  # dotted, e.g. "actor.optim.lr"
    rule: str
    why: str = ""
    allowed: tuple[Any, ...] = ()
    value: Any = MISSING
    where: str = ""  # "preset.yaml:12", "recipe gspo", "--set", "default"; "" for a key that is written nowhere

    def __str__(self) -> str:
        value = ""
        if self.value is not MISSING:
            value = f" = {shown(self.value)}"
        where = ""
        if self.where:
            where = f" ({self.where})"
        why = ""
        if self.why:
            why = f"; {self.why}"
        allowed = ""
        if self.allowed:
            allowed = f"; allowed: {', '.join(map(shown, self.allowed))}"
        return shortened(f"{self.field}{value}{where}: {self.rule}{why}", allowed)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data. An absent or unknown value is null."""
        return {
            "field": self.field,
            "where": self.where,
            "value": _plain(self.value),
            "rule": self.rule,
            "why": self.why,
            "allowed": [_plain(v) for v in self.allowed],
        }


def shortened(text: str, allowed: str = "") -> str:
    """Returns a text and what would be allowed as one, of at most LONGEST characters without --verbose.

    A third of them is kept for `allowed`, such as a list of names, where both are long.
    """
    if len(text) + len(allowed) <= LONGEST or verbose():
        return f"{text}{allowed}"
    room = LONGEST - len(_MORE)
    some = _cut(allowed, room // 3)
    return f"{_cut(text, room - len(some))}{some}{_MORE}"


def _cut(text: str, most: int) -> str:
    """Returns at most `most` characters of a text, cut between words where it can be."""
    if len(text) <= most:
        return text
    head, _, last = text[:most].rpartition(" ")
    return text[:most] if len(last) > most // 3 else head.rstrip(",;:")


def shown(value: Any) -> str:
    """Returns a value as YAML would write it, shortened to 120 characters."""
    text = _yaml_text(value)
    if len(text) <= 120:
        return text
    return f"{text[:117]}..."


_OTHER_THAN_TEXT = re.compile(
    r"|~|null|true|false|[-+]?[\d.][\d.]*(e[-+]?\d+)?|[#&*!|>%@`{}\[\],].*|.*(: | #).*", re.IGNORECASE
)


def _yaml_text(value: Any) -> str:
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case float() if not math.isfinite(value):
            return str(value).replace("inf", ".inf").replace("nan", ".nan")
        case float():
            text = repr(value)
            if "." in text:
                return text
            return text.replace("e", ".0e")
        case str() if _OTHER_THAN_TEXT.fullmatch(value):
            return "'" + value.replace("'", "''") + "'"
        case list() | tuple():
            return f"[{', '.join(map(_yaml_text, value))}]"
        case dict():
            return f"{{{', '.join(f'{_yaml_text(key)}: {_yaml_text(v)}' for key, v in value.items())}}}"
    return str(value)


def _plain(value: Any) -> Any:
    """Returns what strict JSON can hold. Numbers that JSON lacks, and all other types, become text."""
    match value:
        case _Missing():
            return None
        case dict():
            return {str(key): _plain(v) for key, v in value.items()}
        case list() | tuple():
            return [_plain(v) for v in value]
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
    return str(value)


class InvalidConfig(ConfigError):
    """All violations of one configuration. The message lists every one."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        head = f"{count} problem{'s' if count > 1 else ''} in the configuration:"
        super().__init__("\n".join([head, *(f"  {v}" for v in self.violations)]))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `did you mean X?` when a known name is close, else the list of known names."""
    known = list(known)
    close = get_close_matches(name, known, n=1, cutoff=0.7)  # remax is not maxrl, misspelt
    if close:
        return f"did you mean {close[0]}?"
    return f"known: {', '.join(known)}"


def nearest(value: int, highest: int, legal: Callable[[int], bool]) -> tuple[int, ...]:
    """Returns at most four legal numbers from 1 to `highest` that are closest to `value`, ascending."""
    close = sorted((v for v in range(1, highest + 1) if legal(v)), key=lambda v: (abs(v - value), v))
    return tuple(sorted(close[:4]))
