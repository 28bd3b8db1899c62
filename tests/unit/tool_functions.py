"""Tools of a user's file, good and bad ones."""

import asyncio
import os
import sys
import threading
import time
from contextlib import suppress
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


async def later(word: str) -> str:
    """Answers after a while."""
    await asyncio.sleep(0.01)
    return word * 2


def later_hidden(word: str) -> str:
    """Says nothing of its being asynchronous."""
    return later(word)


async def later_raises() -> str:
    """Raises after a while."""
    await asyncio.sleep(0)
    raise KeyError("no such word")


async def later_leaves() -> str:
    """Ends its process as a script does."""
    sys.exit(3)


async def later_hangs() -> str:
    """Never answers."""
    await asyncio.sleep(3600)


def parts_by_part(word: str) -> str:
    """Is a generator."""
    yield word


async def later_by_part(word: str) -> str:
    """Is an asynchronous generator."""
    yield word


def gives_parts(word: str) -> list:
    """Returns what gives nothing by itself."""
    return list(word), (letter for letter in word)


def strays(before: int, after: int, end: str) -> str:
    """Writes lines into every descriptor that it finds, as a library with a stray handle might."""

    def write(times: int) -> None:
        for fd in range(3, 500):
            for _ in range(times):
                with suppress(OSError):
                    os.write(fd, f"a stray line{end}".encode())

    write(before)
    if after:
        threading.Timer(0.2, write, [after]).start()
    return "said"
