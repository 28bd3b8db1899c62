"""The door between requests and vLLM. Shut and opened by the engine alone, never by vLLM, which opens when it wakes."""

import asyncio

from mrl.errors import Interrupted


class Admission:
    """Who is inside, who waits at the door.

    Names are entered at the moment when the door opens for them: whoever shuts it sees all that may still reach vLLM.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.inside: set[str] = set()
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def enter(self, name: str) -> None:
        """Waits until the door is open. Raises Interrupted when those who wait are sent away."""
        if self.is_open:
            self.inside.add(name)
            return
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
        """Lets everybody in who waits."""
        self.is_open = True
        for name, turn in self._take_waiting():
            self.inside.add(name)
            turn.set_result(None)

    def shut(self) -> None:
        """From here on requests wait."""
        self.is_open = False

    def send_away(self, why: str) -> int:
        """Ends the requests that wait, with `why`; how many they were."""
        waiting = self._take_waiting()
        for name, turn in waiting:
            turn.set_exception(Interrupted(f"request {name}: {why}"))
        return len(waiting)

    def _take_waiting(self) -> list[tuple[str, asyncio.Future[None]]]:
        waiting = [(name, turn) for name, turn in self._waiting.items() if not turn.done()]
        self._waiting.clear()
        return waiting
