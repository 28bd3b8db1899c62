"""Tools of MCP servers (Model Context Protocol), called by the client of the package `mcp`.

    a call --> the server's connection, in a thread of this process --> stdio or HTTP --> the server

A server behind stdio is a process below this one, with this one's limits, and ends with it. What it writes is bounded:
one that writes too much is ended. A connection that is lost costs the call under way, and the next call makes another.
The model is told of the tools that a server listed when the run began, whatever it lists later.

    pip install 'mrl[mcp]'
"""

import asyncio
import json
import os
import shutil
import signal
import threading
from base64 import b64decode
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any

from mrl.acting.environment import LONGEST, Reply
from mrl.acting.tool import LONGEST_NAME, Tool
from mrl.errors import ConfigError

KEY = "rollout.turns.mcp_servers"
LONGEST_MESSAGE = 8 * 2**20  # bytes of one message of a server
MOST_LINES = 10_000  # of a server's output during one call, stray ones too
_MOST_DESCRIBED = 512 * 1024  # bytes of JSON of all tools of a server
_MOST_PAGES = 100  # of a list of tools
_END_S = 1.0  # for a server to end by itself once its input has ended
_LIST_S = 20.0  # to connect, and to list tools


class ToolError(Exception):
    """A server answered a call by an error, or did not answer it."""


@dataclass(frozen=True)
class ServerSpec:
    """How a server is reached. Names are those of an entry of `rollout.turns.mcp_servers`."""

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    tools: tuple[str, ...] | None = None  # those to offer; None: all
    prefix: str = ""  # before the names of its tools
    headers: Mapping[str, str] = field(default_factory=dict)  # of HTTP -> variable that has the value

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> "ServerSpec":
        """Reads an entry. Raises ValueError with what is wrong."""
        known = [each.name for each in fields(cls) if each.name != "name"]
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"has {unknown[0]!r}; known: {', '.join(known)}")
        values = {key: value for key, value in given.items() if value is not None}
        for key in ("command", "tools"):
            if isinstance(values.get(key), str):
                values[key] = (values[key],)
            if key in values:
                values[key] = tuple(values[key]) if isinstance(values[key], list | tuple) else (None,)
                if not all(isinstance(word, str) for word in values[key]):
                    raise ValueError(f"has a {key} that is no list of texts")
        for key in ("url", "prefix"):
            if not isinstance(values.get(key, ""), str):
                raise ValueError(f"has a {key} that is no text")
        headers = values.get("headers", {})
        if not isinstance(headers, Mapping) or not all(isinstance(each, str) for each in headers.values()):
            raise ValueError("has headers that are no mapping of names to names of variables")
        spec = cls(name, **values)
        if bool(spec.command) == (spec.url is not None):
            raise ValueError("needs either a command or a url")
        if spec.url is not None and not spec.url.startswith(("http://", "https://")):
            raise ValueError(f"has the url {spec.url!r}; it begins with http:// or https://")
        if spec.headers and spec.url is None:
            raise ValueError("has headers, which a command is not given")
        return spec


class McpTool(Tool):
    """One tool of a server. The server itself judges the arguments of a call."""

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """Finds nothing wrong."""
        return None


Schema = Mapping[str, Any]


def mcp_tools(
    given: Mapping[str, Mapping[str, Any]], listed: Mapping[str, Sequence[Schema]] | None, sees: bool = False
) -> tuple[dict[str, Tool], dict[str, list[Schema]]]:
    """Returns the tools of all servers by name, and the schemas that each server listed.

    `listed` are those that the first process of the run saw. With it a server may be away, until it is called. Unless
    the model reads images (`sees`), it is given the texts of an answer alone. Raises ConfigError for a server that does
    not answer, and for tools that cannot be offered.
    """
    found: dict[str, Tool] = {}
    schemas: dict[str, list[Schema]] = {}
    for name, entry in given.items():
        server = McpServer(ServerSpec.of(name, entry), sees)
        if listed is None:
            schemas[name] = server.chosen()
        else:
            server.offered = schemas[name] = list(listed[name])
            server.try_to_connect()
        for schema in schemas[name]:
            offered = schema["function"]["name"]
            if offered in found:
                raise ConfigError(f"{KEY}.{name}: another server has the tool {offered!r} too; set a `prefix` for one")
            found[offered] = McpTool(server.caller(offered), schema)
    return found, schemas


class McpServer:
    """One server, from the thread that calls tools. It is connected with its first use."""

    def __init__(self, spec: ServerSpec, sees: bool = False):
        """`sees`: the model reads images."""
        self._spec = spec
        self._sees = sees
        self._connection: _Connection | None = None
        self.offered: list[Schema] = []  # what the model is told of
        self._said_changed = False

    def chosen(self) -> list[Schema]:
        """Returns schemas of the tools to offer, as the server lists them. Raises ConfigError."""
        where = f"{KEY}.{self._spec.name}"
        if self._spec.command and shutil.which(self._spec.command[0]) is None:
            raise ConfigError(f"{where}.command: no executable program {self._spec.command[0]!r} was found")
        try:
            self.offered = self._offered(self._asked(self._list(), _LIST_S))
        except ToolError as error:
            raise ConfigError(f"{where}: the server does not list its tools: {error}") from error
        except ImportError as error:
            raise ConfigError(
                f"{where}: needs the package mcp, which cannot be imported ({error}): pip install 'mrl[mcp]'"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        return self.offered

    def try_to_connect(self) -> None:
        """Connects before the first call, whose time limit is shorter. A server that is away may come back."""
        try:
            self._asked(self._connected(), _LIST_S)
        except ToolError as error:
            print(f"{KEY}.{self._spec.name}: not connected: {error}", flush=True)

    def caller(self, offered: str) -> Any:
        """Returns the function that calls a tool."""
        name = offered.removeprefix(self._spec.prefix)

        def call(**arguments: Any) -> Reply:
            return self._asked(self._call(name, arguments), None)

        return call

    def _asked(self, asked: Coroutine[Any, Any, Any], seconds: float | None) -> Any:
        """Waits for what runs in the connections' loop. Raises ToolError."""
        try:
            return asyncio.run_coroutine_threadsafe(asyncio.wait_for(asked, seconds), _loop()).result()
        except TimeoutError as error:
            raise ToolError(f"no answer within {seconds:g} s") from error

    async def _connected(self) -> "_Connection":
        if self._connection is not None and self._connection.lost is not None:
            await self._connection.end()
            self._connection = None
        if self._connection is None:
            self._connection = await _Connection.made(self._spec)
        return self._connection

    async def _list(self) -> list[Any]:
        connection = await self._connected()
        return await connection.answered(_all_tools(connection.client))

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Reply:
        connection = await self._connected()
        connection.lines = 0
        try:
            result = await connection.answered(connection.client.call_tool(name, dict(arguments)))
            reply = reply_with(result.content, result.structured_content, self._sees)
            if result.is_error:
                raise ToolError(reply.text or "the server says that it failed, and not why")
            return reply
        except ToolError:
            await self._look_for_changes()
            raise

    async def _look_for_changes(self) -> None:
        """Prints into the log, once, how the server's tools differ from those that the model is told of."""
        if self._said_changed or self._connection is None or self._connection.lost is not None:
            return
        with suppress(Exception):  # it says nothing of the call that failed
            listed = await asyncio.wait_for(self._list(), _LIST_S)
            if changes := changes_of(self.offered, [_schema(tool, self._spec.prefix) for tool in listed]):
                self._said_changed = True
                print(
                    f"{KEY}.{self._spec.name}: its tools are not those that it had when the run began: {changes}; "
                    "the model still sees the old ones",
                    flush=True,
                )

    def _offered(self, listed: Sequence[Any]) -> list[Schema]:
        """Returns schemas of the chosen tools. Raises ValueError."""
        by_name = {tool.name: tool for tool in listed}
        chosen = by_name if self._spec.tools is None else self._spec.tools
        if unknown := [name for name in chosen if name not in by_name]:
            raise ValueError(f"`tools` names {unknown[0]!r}; the server has {', '.join(by_name) or 'none'}")
        if not chosen:
            raise ValueError("the server has no tools")
        schemas = [_schema(by_name[name], self._spec.prefix) for name in chosen]
        size = len(json.dumps(schemas))
        if size > _MOST_DESCRIBED:
            raise ValueError(f"its tools are described by {size} bytes; choose fewer by `tools`")
        for schema in schemas:
            if not 0 < len(schema["function"]["name"].encode()) <= LONGEST_NAME:
                name = schema["function"]["name"]
                raise ValueError(f"a tool is named {name!r}; a name has at most {LONGEST_NAME} bytes: choose others")
        return schemas


def changes_of(offered: Sequence[Schema], listed: Sequence[Schema]) -> str:
    """Says which tools that the model is told of are gone or described otherwise now; empty for none."""
    now = {schema["function"]["name"]: schema for schema in listed}
    before = {schema["function"]["name"]: schema for schema in offered}
    gone = [name for name in before if name not in now]
    other = [name for name in before if name in now and before[name] != now[name]]
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in (("gone", gone), ("changed", other)) if names)


def _schema(tool: Any, prefix: str) -> Schema:
    """Returns a tool in the form of chat templates. Raises ValueError for a schema of arguments that is none."""
    given = dict(tool.input_schema or {})
    properties = given.get("properties", {})
    required = given.get("required", [])
    if given.get("type", "object") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        raise ValueError(f"the schema of the tool {tool.name!r} is of no object")
    parameters = {**given, "type": "object", "properties": properties, "required": required}
    own = {"name": prefix + tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": own}


async def _all_tools(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if not cursor:
            return found
    raise ToolError(f"its list of tools has more than {_MOST_PAGES} pages")


def reply_with(content: Sequence[Any], structured: Any = None, sees: bool = False) -> Reply:
    """Returns what a model reads of an answer, with images if it `sees`. Raises ToolError where that is nothing."""
    texts = []
    images = []
    others = []
    for block in content or ():
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "resource_link":
            texts.append(str(block.uri))
        elif block.type == "resource" and hasattr(block.resource, "text"):
            texts.append(block.resource.text)
        elif block.type == "image" and sees:
            images.append(_bytes_of(block.data))
        else:
            others.append(block.type)
    if not texts and not images and structured is not None:
        return Reply(json.dumps(structured, ensure_ascii=False)[:LONGEST])
    if others and not texts and not images:
        raise ToolError(f"it answered by {others[0]}, which a model of {'images' if sees else 'text'} cannot read")
    texts += [f"[{kind} left out]" for kind in others]
    return Reply("\n".join(texts)[:LONGEST], images=images)


def _bytes_of(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise ToolError(f"it answered by an image that is no base64: {error}") from error


_loops: list[asyncio.AbstractEventLoop] = []  # one for this process


def _loop() -> asyncio.AbstractEventLoop:
    """Returns the loop in which all connections live, in a thread of its own."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
        threading.Thread(target=_loops[0].run_forever, name="mcp", daemon=True).start()
    return _loops[0]


class _Connection:
    """A client that is connected. It lives in one task, as its package wants."""

    def __init__(self, spec: ServerSpec):
        self.lost: str | None = None  # why it is of no use any more
        self.lines = 0  # that a process wrote since the last call
        self._spec = spec
        self._over = asyncio.Event()
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._live())

    @classmethod
    async def made(cls, spec: ServerSpec) -> "_Connection":
        """Connects. Raises ToolError."""
        connection = cls(spec)
        try:
            connection.client = await connection._ready
        except asyncio.CancelledError:
            connection._task.cancel()
            raise
        return connection

    async def _live(self) -> None:
        from mcp import Client

        try:
            async with Client(self._transport(), cache=None) as client:
                if not self._ready.done():
                    self._ready.set_result(client)
                await self._over.wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error if isinstance(error, ImportError) else ToolError(self._why(error)))
        finally:
            self.lose("the connection was closed")

    def lose(self, why: str) -> None:
        """Notes that it is of no use any more."""
        if self.lost is None:
            self.lost = why
        if not self._gone.done():
            self._gone.set_result(None)
        self._over.set()

    async def answered(self, asked: Coroutine[Any, Any, Any]) -> Any:
        """Returns what the client is answered. Raises ToolError, also where the connection is lost meanwhile."""
        task = asyncio.ensure_future(asked)
        try:
            await asyncio.wait((task, self._gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ToolError(self.lost)
            return task.result()
        except ToolError:
            raise
        except Exception as error:  # of the package, of its transports
            why = self._why(error)
            if self._spec.url is not None:  # nothing tells whether a server elsewhere still knows the session
                self.lose(why)
            raise ToolError(why) from error
        finally:
            task.cancel()

    def _why(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if self.lost is not None:
            return self.lost
        return f"{type(error).__name__}: {error}"[:1000]

    async def end(self) -> None:
        """Closes it."""
        self.lose("the connection was closed")
        with suppress(Exception):
            await asyncio.wait_for(self._task, 3 * _END_S)

    def _transport(self) -> Any:
        if self._spec.url is None:
            return self._process()
        from mcp.client.streamable_http import streamable_http_client

        return streamable_http_client(self._spec.url, http_client=_http_client(self._spec))

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[Any]:
        """The server as a process: a message is a line of JSON, in both directions."""
        import anyio
        from mcp.shared.message import SessionMessage

        process = await asyncio.create_subprocess_exec(
            *self._spec.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_MESSAGE,
            start_new_session=True,
        )
        incoming, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, sent = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [
            asyncio.ensure_future(self._read(process.stdout, incoming)),
            asyncio.ensure_future(self._write(process.stdin, sent)),
        ]
        try:
            yield received, outgoing
        finally:
            for task in tasks:
                task.cancel()
            await _ended(process)

    async def _read(self, output: asyncio.StreamReader, incoming: Any) -> None:
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        why = "the server has ended"
        try:
            while line := await output.readline():
                self.lines += 1
                if self.lines > MOST_LINES:
                    why = f"the server wrote {MOST_LINES} lines for one call, and was ended"
                    break
                with suppress(ValueError):  # a stray line
                    await incoming.send(SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False)))
        except ValueError:  # of readline
            why = f"the server wrote a message of more than {LONGEST_MESSAGE} bytes, and was ended"
        except Exception as error:  # the client is gone, or the pipe broke
            why = f"its output cannot be read: {error}"
        finally:
            self.lose(why)
            incoming.close()

    async def _write(self, input: asyncio.StreamWriter, sent: Any) -> None:
        with suppress(Exception):  # what is not read any more is told by the other direction
            async for message in sent:
                line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                input.write(line.encode() + b"\n")
                await input.drain()


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Ends a server with all that is of its group."""
    with suppress(Exception):
        process.stdin.close()
    with suppress(TimeoutError, asyncio.TimeoutError, asyncio.CancelledError):
        await asyncio.wait_for(process.wait(), _END_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _http_client(spec: ServerSpec) -> Any:
    """Returns a client of HTTP that sends the headers, and reads at most LONGEST_MESSAGE bytes of an answer that is no
    stream.
    """
    import httpx2

    async def bounded(response: Any) -> None:
        if "text/event-stream" in response.headers.get("content-type", ""):
            return  # the package has a limit for each event
        stream = response.stream

        class Bounded(httpx2.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                read = 0
                async for part in stream:
                    read += len(part)
                    if read > LONGEST_MESSAGE:
                        raise httpx2.ReadError(f"the answer has more than {LONGEST_MESSAGE} bytes")
                    yield part

            async def aclose(self) -> None:
                await stream.aclose()

        response.stream = Bounded()

    headers = {name: os.environ.get(variable, "") for name, variable in spec.headers.items()}
    timeout = httpx2.Timeout(_LIST_S, read=None)  # whoever waits for an answer has a time limit of its own
    return httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [bounded]})
