"""vLLM's own scheduler below one engine. On command it stands still, without requests and with empty caches.

The meaning of a pause for the engine's state and version is not known here, but in mrl.engine.vllm_engine.
"""

import asyncio
import time

from mrl.engine.admission import Admission
from mrl.engine.engine_calls import EngineCalls
from mrl.engine.requests import EngineSettings, log_name
from mrl.errors import Interrupted

DROP_S = 5.0  # until blocks of the prefix cache are free
EMPTY_S = 30.0  # until requests have ended that a sleep aborted


class EngineScheduler:
    """Pauses and resumes the scheduler, exactly once each. A second resume would race with the next pause."""

    def __init__(self, calls: EngineCalls, door: Admission, settings: EngineSettings):
        self._calls = calls
        self._door = door
        self._settings = settings
        self.is_paused = False

    async def pause(self, mode: str) -> None:
        """Shuts the door and pauses vLLM, with empty caches. Mode `keep` freezes requests in flight, `abort` ends
        them.
        """
        self._door.shut()
        await self._calls.ask(self._calls.llm.pause_generation(mode=mode, clear_cache=True))
        self.is_paused = True

    async def resume(self) -> None:
        """Resumes vLLM where it is paused. No other code does."""
        if self.is_paused:
            await self._calls.ask(self._calls.llm.resume_generation())
            self.is_paused = False

    async def empty(self) -> None:
        """Waits until no request is inside vLLM. One may have been on its way there at the pause.

        Raises Interrupted when they do not end.
        """
        deadline = time.monotonic() + EMPTY_S
        while self._door.inside:
            if time.monotonic() > deadline:
                left = len(self._door.inside)
                raise Interrupted(f"{self._settings.name}: {left} aborted requests did not end in {EMPTY_S:g} s")
            await self._calls.ask(self._calls.llm.abort(list(self._door.inside)))
            await asyncio.sleep(0.01)

    async def drop_cache(self) -> None:
        """Empties the prefix cache, which old weights filled, and that of images' features if their tower is trained.
        Raises Interrupted when vLLM does not empty the former.

        vLLM 0.23 and 0.32 answer True, with prefix caching off as well. They answer False while a block is in use, for
        example by a request that was just aborted. With several data-parallel cores, 0.32 answers for all, 0.23 for the
        first.
        """
        if self._settings.syncs_tower:
            await self._calls.ask(self._calls.llm.reset_encoder_cache())
        deadline = time.monotonic() + DROP_S
        while True:
            emptied = await self._calls.ask(self._calls.llm.reset_prefix_cache())
            if emptied or time.monotonic() >= deadline:
                break
            await asyncio.sleep(DROP_S / 50)
        if emptied is not True and self._settings.arguments.get("enable_prefix_caching", True):
            raise Interrupted(
                f"{self._settings.name}: vLLM did not empty its prefix cache within {DROP_S:g} s (it answered "
                f"{emptied}). So it still holds what other weights computed; see "
                f"logs/{log_name(self._settings.name)}.log in the run directory"
            )
