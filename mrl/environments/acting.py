"""Who answers the calls of one response: tools, in whichever process is free, and the row's environment."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from mrl.environments.environment_pool import CallAnswer, EnvironmentPool, Session
from mrl.environments.environment_worker import REFUSED, no_such_tool
from mrl.environments.offer import name_of


class Acting:
    """Who answers the calls of one response; to be closed."""

    def __init__(self, pool: EnvironmentPool, row: Mapping[str, Any] | None, seed: int):
        """Begins the row's environment. `row`: see Environment.reset; None where all tools are meant and nothing else.

        Raises UnknownChoice.
        """
        self._pool = pool
        offer = pool.offer
        extra_info = (row or {}).get("extra_info") or {}
        self.functions = {name_of(each): each["function"] for each in offer.schemas(extra_info)}  # by name
        environment = offer.environment(extra_info)
        self._actions: set[str] = set()
        self._session: Session | None = None
        if environment is not None:
            self._actions = {name_of(schema) for schema in offer.environments[environment]}
            self._session = pool.session(environment, row or {"extra_info": {}}, seed)

    @property
    def ready(self) -> "Future[CallAnswer] | None":
        """Whether the environment has begun, to come; None: there is none."""
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
        """The answer to come. It raises EnvironmentFault where no process starts."""
        if name in self._actions:
            return self._session.step(name, arguments)
        if name in self.functions:
            return self._pool.call(name, arguments)
        refused: Future[CallAnswer] = Future()
        refused.set_result(CallAnswer(REFUSED, no_such_tool(name, self.functions)))
        return refused

    def close(self) -> None:
        """Ends the environment, without waiting for it."""
        if self._session is not None:
            self._session.close()
