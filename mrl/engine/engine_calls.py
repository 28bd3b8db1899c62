"""Calls to vLLM's processes below one engine. Every call ends and names all causes, and a death is reported as such."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mrl.engine.process_watch import ProcessWatch
from mrl.engine.requests import log_name
from mrl.errors import LostProcess

WATCH_S = 1.0  # between two checks whether vLLM's processes live
_EXIT_S = 0.2  # after vLLM says that it stops, until the exit that caused it has been seen

DEATH = (LostProcess, ConnectionError)  # what a call raises once processes of the engine are gone


class EngineCalls:
    """An AsyncLLM, once it is started, and the guarded way to call it."""

    def __init__(self, name: str, on_death: Callable[[], None] = lambda: None):
        """`name`: of the engine, or of one of its data-parallel ranks.

        `on_death` is called when vLLM's processes turn out to be gone.
        """
        self.llm: Any = None
        self._name = name
        self._on_death = on_death
        self._watch: ProcessWatch | None = None
        self._has_peers = False
        self._has_waited = False  # for an exit to be seen

    def watch(self, has_peers: bool) -> None:
        """Sees a death at once from here on. With `has_peers` it distinguishes its own from that of another rank of the
        engine.
        """
        self._watch = ProcessWatch(lambda: self.llm.errored)
        self._has_peers = has_peers

    @property
    def tokens_inside(self) -> int:
        """Tokens made so far for responses under way. vLLM's front end counts them, though it hands out whole responses
        only.

        Private in vLLM 0.23 and 0.32: `output_processor.request_states`, `detokenizer`.
        """
        return sum(state.detokenizer.num_output_tokens() for state in self.llm.output_processor.request_states.values())

    async def check_there(self) -> None:
        """Returns once all of vLLM's processes have answered. Raises as `ask` does."""
        if self.llm.errored or (self._watch is not None and self._watch.lost):
            self._on_death()
            raise self._death()
        await self.workers("answer_call")

    async def workers(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of each of this engine's workers and returns their results.

        Raises RuntimeError with all that they raised, causes first; LostProcess when vLLM's processes died.
        """
        from mrl.reshard.sync_report import GAVE_UP

        answers = await self.ask(self.llm.collective_rpc("answer", args=(method, arguments)))
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise RuntimeError("; ".join(sorted(dict.fromkeys(errors), key=lambda text: GAVE_UP in text)))
        return [answer["value"] for answer in answers]

    async def ask(self, call: Awaitable[Any]) -> Any:
        """Returns the answer of vLLM's processes.

        Raises LostProcess when they died, ConnectionError when another rank of the engine died. A dead process never
        answers, and vLLM reports that only to requests. So this function watches for it.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        with self.alive():
            while not (await asyncio.wait([task], timeout=WATCH_S))[0]:
                if self.llm.errored:
                    task.cancel()
                    raise EngineDeadError
            try:
                return task.result()
            except Exception as error:  # a core whose worker dies under a call answers `failed: cancelled` first
                if self._has_died():
                    raise EngineDeadError from error
                raise

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Turns vLLM's error about dead processes into a lost worker like any other. The engine's own process may live
        on.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            self._on_death()
            raise self._death() from error

    def _has_died(self) -> bool:
        """Returns whether vLLM's processes are gone. Waits first, so that an exit can be seen."""
        if self._watch is not None and not self._watch.lost:
            time.sleep(_EXIT_S)
        return self.llm.errored or (self._watch is not None and self._watch.lost is not None)

    def _death(self) -> Exception:
        log = f"see logs/{log_name(self._name)}.log in the run directory"
        if self._watch is not None and not self._watch.lost and not self._has_waited:
            self._has_waited = True
            time.sleep(_EXIT_S)
        lost = None
        if self._watch is not None:
            lost = self._watch.lost
        if lost or not self._has_peers:
            return LostProcess(f"{self._name}: vLLM's process below it died{f' ({lost})' if lost else ''}; {log}")
        return ConnectionError(
            f"{self._name}: connection closed: vLLM gave up, as it does when another rank of its engine is lost; {log}"
        )
