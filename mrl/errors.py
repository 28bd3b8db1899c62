"""Errors that a user sees, each with the exit code the command ends with.

Everything that is the user's to mend is raised as one of these; the command line prints the message and nothing else.
Any other exception is a defect of mrl and keeps its traceback (exit code 1).
"""


class MrlError(Exception):
    """Base class. `exit_code` is the process exit status that `mrl` ends with."""

    exit_code = 1


class ConfigError(MrlError):
    """Configuration or usage: an unknown key, an illegal layout, a missing capability."""

    exit_code = 2


class DataError(MrlError):
    """Data that cannot be used: empty files, wrong schema, too many bad rows, prompts over length."""

    exit_code = 3


class EnvironmentFault(MrlError):
    """The machine or the installation: a port in use, too few CPUs, a checkpoint that cannot be read, a version off the matrix."""

    exit_code = 4


class Interrupted(MrlError):
    """Stopped but resumable: a signal, preemption, a lost worker."""

    exit_code = 5


class NumericAbort(MrlError):
    """Numbers that must not reach the optimizer (NaN, inf, ranks that disagree)."""

    exit_code = 6


class NothingToDo(MrlError):
    """No fault of anybody's: what was asked for is there already."""

    exit_code = 0


def described(error: Exception) -> str:
    """What an error says, after its type where the text alone may say nothing, as that of a KeyError does."""
    if isinstance(error, RuntimeError | ValueError | MrlError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")
