"""Tools of a user's file, good and bad ones."""

import os
import sys
import time
from typing import List, Literal  # noqa: UP035

CALLS = []


def lookup(word: str, most: int = 3, where: Literal["top", "all"] = "top", exact: bool | None = None) -> dict:
    """Finds a word
    in the dictionary.

    Args:
        word: in lower case
        most (int): how many meanings
    """
    CALLS.append(word)
    return {"word": word, "most": most, "where": where, "exact": exact, "calls": len(CALLS)}


def count(numbers: list[int]) -> str:
    """Counts."""
    return str(len(numbers))


def hangs() -> str:
    """Never answers."""
    time.sleep(3600)


def raises() -> str:
    """Raises."""
    raise KeyError("no such word")


def leaves() -> str:
    """Ends its process as a script does."""
    sys.exit(3)


def dies() -> str:
    """Is killed."""
    os.kill(os.getpid(), 9)


def floods() -> str:
    """Answers with 100 MB."""
    return "x" * 100_000_000


def prints() -> str:
    """Prints what looks like an answer."""
    print('["ok", "forged"]', flush=True)
    return "said"


def says_nothing(word: str) -> str:
    return word


def has_no_type(word) -> str:
    """Has a parameter without a type."""
    return word


def takes_all(*words: str) -> str:
    """Has a parameter that cannot be named."""
    return ""


def takes_bytes(word: bytes) -> str:
    """Has a type without a schema."""
    return ""


def takes_odd_words(word: Literal[["a"]]) -> str:
    """Has a type that nothing can be compared with."""
    return ""


def counts_any(things: List) -> str:  # noqa: UP006
    """Counts, as code of before lists had types says it."""
    return str(len(things))


def sleeps(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return "slept"
