"""The process in which tools and environments run: JSON lines on one descriptor, one answer line each on another.

mrl.reward.keeper forks it like a scoring process. The first input line is the ToolsSpec. The first output line says
what may be called, or has {"error": text}. Then

    [ticket, "reset", session, environment, row, seed]   --> [ticket, reason, text, 0.0, {}, false, []]
    [ticket, "step", session, name, arguments]           --> [ticket, reason, text, reward, parts, end, images]
    [ticket, "judge", session]                           --> same form as step
    [ticket, "close", session]                           --> same form as reset

Session null is that of the tools. Images are encoded bytes in base64. A line that a tool wrote has no ticket, and so is
no answer.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mrl.acting.environment import (
    LONGEST,
    Action,
    Environment,
    Reply,
    ToolBox,
    actions_of,
    parts_of,
    reply_of,
    settled,
)
from mrl.acting.named import resolve_agent, resolve_environments, resolve_tools
from mrl.acting.tool import Tool, ToolsSpec
from mrl.errors import ConfigError
from mrl.reward.items import NOT_A_NUMBER, OK, OUT_OF_MEMORY, RAISED, WRONG_TYPE
from mrl.reward.worker import serve

REFUSED = "refused"  # the call fits no tool, and nothing was called
UNREADABLE = "unreadable_image"  # an image of the answer cannot be read; its reward and end count

CallAnswer = tuple[str, str, float, dict[str, float], bool, list[str]]  # reason, text, reward, parts, end, images


def main(requests_fd: int, results_fd: int) -> None:
    """Serves until the requests end."""
    serve(requests_fd, results_fd, ToolsSpec, load, _broker)


def _broker(spec: ToolsSpec) -> Any:
    """Returns the process that starts sandboxes, made before this one is confined; None without sandboxes."""
    if spec.sandbox is None:
        return None
    from mrl.acting.sandboxes.broker import Broker
    from mrl.acting.sandboxes.sandbox import SandboxSpec

    return Broker(SandboxSpec(**spec.sandbox))


def load(spec: ToolsSpec, broker: Any) -> tuple[dict[str, Any], Callable[..., CallAnswer]]:
    """Returns what may be called, and what answers a request. Raises ConfigError."""
    tools = resolve_agent(spec) if spec.has_agent else resolve_tools(spec)
    of_servers, listed = _of_servers(spec, tools)
    sessions = Sessions(tools | of_servers, resolve_environments(spec, broker), spec.sees)
    return sessions.described | {"listed": listed}, sessions.answer


def _of_servers(spec: ToolsSpec, tools: Mapping[str, Tool]) -> tuple[dict[str, Tool], dict[str, Any]]:
    """Returns tools of MCP servers, and what each server listed. Raises ConfigError."""
    if not spec.mcp_servers:
        return {}, {}
    from mrl.acting.mcp_tools import KEY, mcp_tools

    found, listed = mcp_tools(spec.mcp_servers, spec.listed, spec.sees)
    if both := sorted(found.keys() & tools.keys()):
        raise ConfigError(f"{KEY}: {both[0]!r} is in rollout.turns.tools too; set a `prefix` for the server")
    return found, listed


class Sessions:
    """The tools of one process, and the environments of its responses."""

    def __init__(self, tools: Mapping[str, Tool], kinds: Mapping[str, type[Environment]], sees: bool = False):
        """`sees`: the model reads images. Raises ConfigError for an environment with an incomplete declaration."""
        self._sees = sees
        self._kinds = kinds
        self._callable = {None: tools} | {name: actions_of(kind, name) for name, kind in kinds.items()}
        self._parts = {name: parts_of(kind, name) for name, kind in kinds.items()}
        self._at: dict[int | None, tuple[str | None, Environment]] = {None: (None, ToolBox(tools))}

    @property
    def described(self) -> dict[str, Any]:
        """What may be called, for the pool."""
        environments = {
            name: {
                "schemas": _schemas(self._callable[name]),
                "repeatable": bool(kind.repeatable),
                "parts": self._parts[name],
                "has_task": kind.has_task,
                "judges": kind.judge is not Environment.judge,
            }
            for name, kind in self._kinds.items()
        }
        return {"schemas": _schemas(self._callable[None]), "environments": environments}

    def answer(self, verb: str, session: int | None, *arguments: Any) -> CallAnswer:
        """Answers a request, however it ends.

        A failed session is closed. The pool begins it again, or never asks for it.
        """
        answer = self._answered(verb, session, *arguments)
        if session is not None and answer[0] not in (OK, REFUSED):
            self._end(session)
        return answer

    def _answered(self, verb: str, session: int | None, *arguments: Any) -> CallAnswer:
        try:
            match verb:
                case "reset":
                    return self._reset(session, *arguments)
                case "step":
                    return self._step(session, *arguments)
                case "judge":
                    return self._replied(settled(self._at[session][1].judge()) or Reply(), is_read=False)
                case _:
                    self._end(session)
                    return _answer(OK, Reply())
        except MemoryError:
            return _answer(OUT_OF_MEMORY, Reply("out of memory"))
        except BaseException as error:  # SystemExit too: a user's function must not end its process
            return _answer(RAISED, Reply(f"{type(error).__name__}: {error}"[:LONGEST]))

    def _reset(self, session: int, environment: str, row: Mapping[str, Any], seed: int) -> CallAnswer:
        self._end(session)
        self._at[session] = environment, self._kinds[environment]()
        settled(self._at[session][1].reset(row, seed))
        return _answer(OK, Reply())

    def _end(self, session: int) -> None:
        """Closes a session if it exists, and ignores its errors."""
        _, environment = self._at.pop(session, (None, None))
        if environment is not None:
            with suppress(BaseException):
                settled(environment.close())

    def _step(self, session: int | None, name: str, arguments: Mapping[str, Any]) -> CallAnswer:
        kind, environment = self._at[session]
        tools = self._callable[kind]
        if name not in tools:
            return _answer(REFUSED, Reply(no_such_tool(name, tools)))
        problem = tools[name].problem(arguments)
        if problem is not None:
            return _answer(REFUSED, Reply(f"Error: {name}: {problem}"))
        return self._replied(settled(environment.step(Action(name, arguments))))

    def _replied(self, value: Any, is_read: bool = True) -> CallAnswer:
        """Returns the answer with what an environment replied. `is_read`: by the model; if not, images are left out."""
        try:
            reply = reply_of(value)
            if not is_read:
                reply = replace(reply, images=())
        except TypeError as error:
            return _answer(WRONG_TYPE, Reply(str(error)))
        except ValueError as error:
            return _answer(NOT_A_NUMBER, Reply(str(error)))
        if reply.images and not self._sees:
            return _answer(
                WRONG_TYPE, Reply("it answers with a picture, and the model reads text alone (model.vision)")
            )
        return _answer(OK, reply)


def no_such_tool(name: str, names: Mapping[str, Any]) -> str:
    """Returns the text that the model reads when it calls an unknown tool."""
    return f"Error: there is no tool {name!r}; there are: {', '.join(names)}"


def _schemas(tools: Mapping[str, Tool]) -> list[Mapping[str, Any]]:
    return [tool.schema for tool in tools.values()]


def _answer(reason: str, reply: Reply) -> CallAnswer:
    images = [b64encode(image).decode() for image in reply.images]
    return reason, reply.text, reply.reward, dict(reply.parts), reply.end, images
