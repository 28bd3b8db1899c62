"""The door between requests and vLLM. Shut and opened by the engine alone, never by vLLM, which opens when it wakes."""

import asyncio

from mrl.errors import Interrupted, LostProcess


class TurnedBack(Exception):
    """The request never came in: its sender has to send it again."""


class Admission:
    """The requests that are inside, and those that wait at the door.

    Names are entered at the moment when the door opens for them: who shuts it sees all that may still reach vLLM.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.turns_back = False  # while it is shut
        self.inside: set[str] = set()
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def enter(self, name: str) -> None:
        """Waits until the door is open.

        Raises Interrupted when those who wait are sent away, TurnedBack when they are given back.
        """
        if self.is_open:
            self.inside.add(name)
            return
        if self.turns_back:
            raise TurnedBack
        turn = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except BaseException:  # also cancelled after the door was opened for it
            self._waiting.pop(name, None)
            self.inside.discard(name)
            raise

    def leave(self, name: str) -> None:
        """However the request ended; nothing for one that never came in."""
        self.inside.discard(name)

    def open(self) -> None:
        """Lets in everybody who waits."""
        self.is_open = True
        self.turns_back = False
        for name, turn in self._take_waiting():
            self.inside.add(name)
            turn.set_result(None)

    def shut(self) -> None:
        """Lets requests wait from here on."""
        self.is_open = False

    def turn_back(self) -> None:
        """Gives back the requests that wait, and those that come, until the door opens."""
        self.turns_back = True
        for _, turn in self._take_waiting():
            turn.set_exception(TurnedBack())

    def turn_back_one(self, name: str) -> None:
        """Gives back one request, if it waits."""
        turn = self._waiting.pop(name, None)
        if turn is not None and not turn.done():
            turn.set_exception(TurnedBack())

    def send_away(self, why: str, lost: bool = False) -> int:
        """Ends the requests that wait, with `why`; how many they were. `lost`: the engine's processes are."""
        kind = LostProcess if lost else Interrupted
        self.turns_back = False
        waiting = self._take_waiting()
        for name, turn in waiting:
            turn.set_exception(kind(f"request {name}: {why}"))
        return len(waiting)

    def _take_waiting(self) -> list[tuple[str, asyncio.Future[None]]]:
        waiting = [(name, turn) for name, turn in self._waiting.items() if not turn.done()]
        self._waiting.clear()
        return waiting
