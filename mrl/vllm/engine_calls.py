"""What is asked of vLLM's processes below one engine: every call ends, with all causes, and a death is told as one."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mrl.errors import Interrupted

WATCH_S = 1.0  # between looks whether vLLM's processes live


class EngineCalls:
    """An AsyncLLM, once it is started, and the guarded way to it."""

    def __init__(self, engine_id: int, on_death: Callable[[], None] = lambda: None):
        """`on_death` is called when vLLM's processes turn out to be gone."""
        self.llm: Any = None
        self._engine_id, self._on_death = engine_id, on_death

    async def workers(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of each of this engine's workers returns.

        Raises RuntimeError with all that they raised, causes first; Interrupted when vLLM's processes died.
        """
        from mrl.reshard.sync_report import GAVE_UP

        answers = await self.ask(self.llm.collective_rpc("answer", args=(method, arguments)))
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise RuntimeError("; ".join(sorted(dict.fromkeys(errors), key=lambda text: GAVE_UP in text)))
        return [answer["value"] for answer in answers]

    async def ask(self, call: Awaitable[Any]) -> Any:
        """The answer of vLLM's processes. Raises Interrupted when they died.

        One that died never answers, and vLLM tells only requests so: its death is watched for here.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        with self.alive():
            while not (await asyncio.wait([task], timeout=WATCH_S))[0]:
                if self.llm.errored:
                    task.cancel()
                    raise EngineDeadError
            return task.result()

    @contextmanager
    def alive(self) -> Iterator[None]:
        """vLLM's processes may die below an engine that lives: that is a lost worker like any other."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            self._on_death()
            raise Interrupted(
                f"engine {self._engine_id}: vLLM's process below it died; see logs/engine-{self._engine_id}.log in the run directory"
            ) from error
