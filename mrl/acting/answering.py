"""Answers the calls of one response: with tools, in any free process, and with the row's environment."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from mrl.acting.environment_pool import CallAnswer, EnvironmentPool, Session, Step
from mrl.acting.environment_worker import REFUSED, no_such_tool
from mrl.acting.offer import name_of


class Acting:
    """Answers the calls of one response. Close it afterwards."""

    def __init__(self, pool: EnvironmentPool, row: Mapping[str, Any] | None, seed: int):
        """`row` as in Environment.reset; None means all tools and no environment. Raises UnknownChoice."""
        self._pool = pool
        self._row = row or {"extra_info": {}}
        self._seed = seed
        offer = pool.offer
        extra_info = (row or {}).get("extra_info") or {}
        self.functions = {name_of(each): each["function"] for each in offer.schemas(extra_info)}  # by name
        self._environment = offer.environment(extra_info)
        schemas = ()
        if self._environment is not None:
            schemas = offer.environments[self._environment]
        self.actions = {name_of(schema) for schema in schemas}  # functions of the environment
        self._session: Session | None = None

    def begin(self, made: Sequence[Step] = ()) -> None:
        """Begins the row's environment. `made` as in EnvironmentPool.session."""
        if self._environment is not None:
            self._session = self._pool.session(self._environment, self._row, self._seed, made)

    @property
    def is_repeatable(self) -> bool:
        """Whether the environment, if there is one, can be restored by repeating its actions."""
        return self._environment not in self._pool.offer.unrepeatable

    @property
    def ready(self) -> "Future[CallAnswer] | None":
        """A future that ends when the environment has begun; None without environment."""
        if self._session is None:
            return None
        return self._session.ready

    @property
    def parts(self) -> Mapping[str, float]:
        """The parts of rewards that the environment declares."""
        if self._session is None:
            return {}
        return self._session.parts

    def call(self, name: str, arguments: Mapping[str, Any]) -> "Future[CallAnswer]":
        """Returns a future answer. It raises EnvironmentFault if no process starts."""
        if name in self.actions:
            return self._session.step(name, arguments)
        if name in self.functions:
            return self._pool.call(name, arguments)
        refused: Future[CallAnswer] = Future()
        refused.set_result(CallAnswer(REFUSED, no_such_tool(name, self.functions)))
        return refused

    def judge(self) -> "Future[CallAnswer] | None":
        """Returns the future last reward of the environment; None where it gives none."""
        if self._session is None or not self._session.judges:
            return None
        return self._session.judge()

    def close(self) -> None:
        """Ends the environment without waiting for it."""
        if self._session is not None:
            self._session.close()
