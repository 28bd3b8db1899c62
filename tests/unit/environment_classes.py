"""Environments of a user's file, good and bad ones."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import ClassVar

from mrl.acting.environment import Environment, Reply


def hangs() -> str:
    """A tool that never answers."""
    time.sleep(3600)


class Stairs(Environment):
    """So many steps up as the row says."""

    actions = ("climb",)
    repeatable = True

    def reset(self, row, seed):
        self.left = row["extra_info"].get("height", 3)
        self.seed = seed

    def climb(self, steps: int) -> Reply:
        """Goes up.

        Args:
            steps: how many
        """
        self.left -= steps
        done = self.left <= 0
        return Reply(f"{self.left} to go, seed {self.seed}", steps / 4, {"left": self.left}, end=done)

    def close(self):
        print(f"closed at {self.left}", flush=True)


class Counted(Stairs):
    """Declares what it says of its rewards, and more than one reply gives."""

    parts = {"left": 3, "falls": 0.0}  # noqa: RUF012


class Forgetful(Stairs):
    """Cannot be begun anew."""

    repeatable = False


class Trouble(Environment):
    """Does what it is asked for, the first time in a process alone where `once` names a file that is not there yet."""

    actions = ("act", "count")
    repeatable = True

    def reset(self, row, seed):
        self.row = row["extra_info"]
        self.counted = 0
        time.sleep(self.row.get("begins_after", 0))
        self.note("begun")
        if self.row.get("begins") is False:
            raise OSError("no board")

    def close(self):
        self.note("closed")
        raise OSError("it does not close")

    def note(self, what):
        if "notes" in self.row:
            with Path(self.row["notes"]).open("a") as file:
                file.write(f"{what}\n")

    def count(self) -> str:
        """Counts calls."""
        self.counted += 1
        return str(self.counted)

    def act(self, how: str) -> Reply:
        """Acts.

        Args:
            how: what goes wrong
        """
        once = self.row.get("once")
        if once is not None:
            if Path(once).exists():
                return Reply(f"well, after {self.counted}", 1.0)
            Path(once).touch()
        return getattr(self, f"_{how}")()

    def _raises(self):
        raise KeyError("no such field")

    def _half(self):
        raise ValueError("\ud800 of it")

    def _leaves(self):
        sys.exit(3)

    def _hangs(self):
        time.sleep(3600)

    def _dies(self):
        os.kill(os.getpid(), 9)

    def _floods(self):
        return Reply("x" * 100_000_000)

    def _fills(self):
        return Reply("x" * 10**13)

    def _nan(self):
        return Reply("nothing", float("nan"))

    def _words(self):
        return Reply("nothing", "much")

    def _maybe(self):
        return Reply("nothing", end="perhaps")

    def _many(self):
        return Reply("nothing", parts={str(i): i for i in range(99)})


class Drifting(Environment):
    """Calls itself repeatable and is not: its replies are of its process."""

    actions = ("where", "dies")
    repeatable = True

    def reset(self, row, seed):
        self.notes = row["extra_info"].get("notes")

    def close(self):
        if self.notes:
            with Path(self.notes).open("a") as file:
                file.write("closed\n")

    def where(self) -> str:
        """Says where it is."""
        return str(os.getpid())

    def dies(self) -> str:
        """Is killed."""
        os.kill(os.getpid(), 9)


class Still(Environment):
    """Has no actions."""


class Vague(Environment):
    """Its action has no types."""

    actions = ("go",)

    def go(self, where):
        """Goes."""


class Missing(Environment):
    """Names an action that it does not have."""

    actions = ("fly",)


class Wordy(Stairs):
    """Declares no numbers."""

    parts = {"left": "many"}  # noqa: RUF012


class Plain:
    """Is no Environment."""


class Angry(dict):
    """Cannot be read."""

    def items(self):
        raise RuntimeError("not now")


class Huge(Stairs):
    """Declares a number that no float holds."""

    parts = {"left": 10**400}  # noqa: RUF012


class Unreadable(Stairs):
    """Raises what nobody expects when it is looked at."""

    parts = Angry(left=1)


def _schema(name: str, parameters: dict) -> dict:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


class Misnamed(Environment):
    """Offers an action under a name that nobody can call."""

    schemas: ClassVar = {"act": _schema("do", {"type": "object", "properties": {}, "required": []})}


class Unsaid(Environment):
    """Says nothing of its parameters."""

    schemas: ClassVar = {"act": _schema("act", {"type": "object"})}


class Typeless(Environment):
    """Takes what may be anything."""

    schemas: ClassVar = {
        "act": _schema("act", {"type": "object", "properties": {"what": {"type": ["string"]}}, "required": []})
    }


class Later(Environment):
    """All of it is asynchronous."""

    actions = ("climb",)
    repeatable = True

    async def reset(self, row, seed):
        await asyncio.sleep(0)
        self.left = row["extra_info"].get("height", 3)

    async def climb(self, steps: int) -> Reply:
        """Goes up."""
        await asyncio.sleep(0)
        self.left -= steps
        return Reply(f"{self.left} to go", float(not self.left), end=not self.left)

    async def close(self):
        await asyncio.sleep(0)
        print(f"closed at {self.left}", flush=True)


class LaterStep(Later):
    """Overrides what acts."""

    async def step(self, action):
        answered = await super().step(action)
        return Reply(f"Well: {answered.text}", answered.reward, end=answered.end)


class ByPart(Stairs):
    """Its beginning is a generator."""

    def reset(self, row, seed):
        yield
