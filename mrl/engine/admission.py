"""The door between requests and vLLM. Only the engine shuts and opens it; vLLM itself would resume when it wakes."""

import asyncio

from mrl.errors import Interrupted, LostProcess


class TurnedBack(Exception):
    """The request never reached vLLM, so its sender has to send it again."""


class Admission:
    """The requests that are inside vLLM, and those that wait at the door.

    A request is listed as inside at the moment when the door opens for it. So the caller that shuts the door sees all
    requests that may still reach vLLM.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.turns_back = False  # while the door is shut: requests are given back and do not wait
        self.inside: set[str] = set()
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def enter(self, name: str) -> None:
        """Waits until the door is open.

        Raises Interrupted when waiting requests are ended, TurnedBack when they are given back.
        """
        if self.is_open:
            self.inside.add(name)
            return
        if self.turns_back:
            raise TurnedBack
        turn = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except BaseException:  # also where it is cancelled after the door was opened for it
            self._waiting.pop(name, None)
            self.inside.discard(name)
            raise

    def leave(self, name: str) -> None:
        """Notes that a request has ended, in whatever way. Does nothing for one that never came in."""
        self.inside.discard(name)

    def open(self) -> None:
        """Lets all waiting requests in."""
        self.is_open = True
        self.turns_back = False
        for name, turn in self._take_waiting():
            self.inside.add(name)
            turn.set_result(None)

    def shut(self) -> None:
        """Makes requests wait from here on."""
        self.is_open = False

    def turn_back(self) -> None:
        """Gives waiting requests back, and new ones too, until the door opens."""
        self.turns_back = True
        for _, turn in self._take_waiting():
            turn.set_exception(TurnedBack())

    def turn_back_one(self, name: str) -> None:
        """Gives one request back, if it waits."""
        turn = self._waiting.pop(name, None)
        if turn is not None and not turn.done():
            turn.set_exception(TurnedBack())

    def send_away(self, why: str, lost: bool = False) -> int:
        """Ends the waiting requests with `why` and returns their number. `lost`: the engine's processes are lost."""
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
