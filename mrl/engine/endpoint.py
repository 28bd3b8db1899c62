"""Serves the chat endpoint of an engine: HTTP on loopback, with a key of each session, and one of its reward.

    POST /v1/chat/completions, /v1/messages, /v1/responses, /v1/completions
                                              --> the session's conversation is asked, and its answer written
    POST /v1/messages/count_tokens            --> how many tokens a request has
    POST /v1/reward {"reward", "parts", "answer"}
                                              --> the reward of an answer, by its id, or of the session, each once
    GET  /v1/models, /v1/models/NAME          --> one name, for clients that look; any other is the same model
    (in place of /v1/ also / alone, or /v1/v1/: clients disagree on what the address that they are given ends with)
    HEAD                                      --> for clients that look whether anybody listens, without a key

Requests for another host name are refused (403), and so are keys of no open session (401). A body has at most
BODY_BYTES (413), or more for a model that sees. A request that a session cannot answer gets a 400, which clients do not
repeat. A stream is written at once, when the answer is complete; if that takes longer than QUIET_S, it begins with
comments, as clients end a stream that is silent (those of Node.js after five minutes). The endpoint runs in the event
loop of its engine.
"""

import asyncio
import hashlib
import json
import logging
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from mrl.acting.chat_api import Api, BadRequest, ChatAnswer, ChatRequest, parse_anthropic
from mrl.acting.environment import LARGEST_REWARD, Reply, reply_of
from mrl.acting.responses_api import APIS
from mrl.errors import EnvironmentFault

HOST = "127.0.0.1"
MODEL = "policy"
BODY_BYTES = 8 * 2**20
BODY_WITH_IMAGES_BYTES = 64 * 2**20  # where bodies bring images, which clients send again with each request
QUIET_S = 15.0  # longest time without a byte of a stream
REWARD_PATH = "/v1/reward"
_REWARD = re.compile("/(v1/)*reward")
COUNT_PATH = "/v1/messages/count_tokens"
WRONG_KEY = (
    "this is the key of the chat, which whatever runs for the model can see; a reward has a key of its own: "
    "`reward_key` on a command's standard input, or the argument reward_key of your function",
    "this is the key of the reward alone; the chat's is in OPENAI_API_KEY",
)


class ChatSession(Protocol):
    """The conversation that a key stands for."""

    async def ask(self, asked: ChatRequest) -> ChatAnswer:
        """Returns the model's answer. It is cancelled once nobody waits for it. Raises BadRequest."""

    async def count(self, asked: ChatRequest) -> int:
        """Returns the number of tokens of a request. Raises BadRequest."""

    def reward(self, reply: Reply, answer: str | None) -> None:
        """Takes the reward of an answer, or of the response. Raises BadRequest for a second one."""


class Keys(NamedTuple):
    """The keys of a session. An agent's own processes see the first; the second is for whoever judges."""

    chat: str
    reward: str


class _NoForeignHeads(logging.Filter):
    """Drops what aiohttp writes of requests that are no HTTP: it has their senders' answer, and no bound."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tells whether a record is written."""
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


_LOGGER = logging.getLogger("mrl.endpoint")
_LOGGER.addFilter(_NoForeignHeads())
_SESSION = web.RequestKey("session", ChatSession)


class Endpoint:
    """One address, and the sessions behind it."""

    def __init__(self, port: int = 0, body_bytes: int = BODY_BYTES):
        """Binds a port of loopback, by default a free one. `body_bytes` limits the body of a request. Raises
        EnvironmentFault where the port is taken.
        """
        self._body_bytes = body_bytes
        self._socket = socket.socket()
        try:
            self._socket.bind((HOST, port))
        except OSError as error:
            self._socket.close()
            raise EnvironmentFault(f"the chat endpoint finds no port: {HOST}:{port}: {error}") from error
        self.port = self._socket.getsockname()[1]
        self._sessions: dict[bytes, tuple[ChatSession, bool]] = {}  # by the digest of a key; true: of the reward
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    @property
    def url(self) -> str:
        """The address, without /v1."""
        return f"http://{HOST}:{self.port}"

    async def serve(self) -> None:
        """Starts to listen, in the running event loop. Safe to call twice."""
        async with self._starting:
            if self._server is not None:
                return
            app = web.Application(middlewares=[self._guarded], client_max_size=self._body_bytes)
            for path, api in APIS.items():
                app.router.add_post(_route(path), _handler(api))
            app.router.add_post(_route(REWARD_PATH), _rewarded)
            app.router.add_post(_route(COUNT_PATH), _counted)
            app.router.add_get(_route("/v1/models"), _models)
            app.router.add_get(_route("/v1/models/{name:.+}"), _model)
            # handlers of clients that hang up are cancelled
            runner = web.AppRunner(
                app, access_log=None, handle_signals=False, handler_cancellation=True, logger=_LOGGER
            )
            await runner.setup()
            self._server = await asyncio.get_running_loop().create_server(runner.server, sock=self._socket)

    def open(self, session: ChatSession) -> Keys:
        """Returns the keys of a new session. They are valid until `close_session`."""
        keys = Keys(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        self._sessions[_digest(keys.chat)] = (session, False)
        self._sessions[_digest(keys.reward)] = (session, True)
        return keys

    def close_session(self, keys: Keys) -> None:
        """Makes the keys invalid."""
        for key in keys:
            self._sessions.pop(_digest(key), None)

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuses foreign requests, and writes errors in the format of the request's path."""
        try:
            if request.host not in (f"{HOST}:{self.port}", f"localhost:{self.port}"):
                return _refused(request, 403, f"this is {HOST}:{self.port}, and no other host")
            if request.method == "HEAD":
                return web.Response()
            session, is_of_reward = self._sessions.get(_digest(_key_of(request)), (None, False))
            if session is None:
                return _refused(request, 401, "the key is of no session that is under way")
            if is_of_reward != bool(_REWARD.fullmatch(request.path)):
                return _refused(request, 403, WRONG_KEY[is_of_reward])
            if (request.content_length or 0) > self._body_bytes:  # before any of it is waited for
                refused = _refused(request, 413, f"a body has at most {self._body_bytes} bytes")
                refused.force_close()
                return refused
            request[_SESSION] = session
            return await handler(request)
        except BadRequest as error:
            return _refused(request, 400, str(error))
        except web.HTTPException as error:
            return _refused(request, error.status, error.reason)

    def close(self) -> None:
        """Stops accepting connections. Safe to call twice."""
        self._sessions.clear()
        if self._server is not None and not self._server.get_loop().is_closed():
            self._server.close()
        self._socket.close()


def _digest(key: str) -> bytes:
    """Hashes a key for the lookup, so that the time of the lookup reveals nothing about the key."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _key_of(request: web.Request) -> str:
    bearer = request.headers.get("Authorization", "")
    return request.headers.get("x-api-key") or bearer.removeprefix("Bearer ")


def _refused(request: web.Request, status: int, why: str) -> web.Response:
    return web.json_response(_form_of(request).error(status, why), status=status)


def _form_of(request: web.Request) -> Api:
    """Returns the form of a request's errors, also where its path is none of ours."""
    openai, anthropic = APIS["/v1/chat/completions"], APIS["/v1/messages"]
    is_anthropic = "anthropic-version" in request.headers or "messages" in request.path.split("/")
    return anthropic if is_anthropic else openai


async def _body(request: web.Request) -> Any:
    try:
        text = await request.read()
    except web.RequestPayloadError as error:  # a body that is not in the encoding that its head names
        raise BadRequest(f"the body cannot be read: {error}") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error


def _route(path: str) -> str:
    """Returns the route of a path with any number of /v1 before it."""
    return "/{versions:(v1/)*}" + path.removeprefix("/v1/")


def _handler(api: Api) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        # in a thread: a body may have a hundred thousand messages
        asked = await asyncio.to_thread(api.parse, await _body(request))
        if not asked.stream:
            return web.json_response(api.whole(await request[_SESSION].ask(asked), asked))
        asking = asyncio.ensure_future(request[_SESSION].ask(asked))
        try:
            return await _streamed(request, api, asked, asking)
        finally:
            if asking.cancel():  # nobody waits any more
                await asyncio.wait([asking])
                if not asking.cancelled():
                    asking.exception()  # asyncio would print it

    return handle


async def _streamed(
    request: web.Request, api: Api, asked: ChatRequest, asking: "asyncio.Task[ChatAnswer]"
) -> web.StreamResponse:
    """Writes an answer as a stream once it is there. Raises BadRequest where nothing has been written by then."""
    response = web.StreamResponse()
    response.content_type = "text/event-stream"
    while not (await asyncio.wait([asking], timeout=QUIET_S))[0]:
        if not response.prepared:
            await response.prepare(request)
        await response.write(b":\n\n")
    try:
        events = list(api.events(asking.result(), asked))
    except BadRequest as error:
        if not response.prepared:
            raise
        # as an event of OpenAI's Responses, too
        told = {"type": "error", "code": "invalid_prompt", "message": str(error), "param": None, "sequence_number": 0}
        events = [("error", told | api.error(400, str(error)))]
    text = "".join(_event(name, data) for name, data in events)
    if not response.prepared:
        return web.Response(text=text, content_type="text/event-stream")
    await response.write(text.encode())
    await response.write_eof()
    return response


def _event(name: str, data: Any) -> str:
    """Formats one event of a stream."""
    text = data
    if not isinstance(data, str):
        text = json.dumps(data)
    named = ""
    if name:
        named = f"event: {name}\n"
    return f"{named}data: {text}\n\n"


async def _rewarded(request: web.Request) -> web.Response:
    body = await _body(request)
    if not isinstance(body, Mapping) or "reward" not in body:
        raise BadRequest(
            f'a reward is posted as {{"reward": NUMBER, "parts": {{NAME: NUMBER}}}}, at most {LARGEST_REWARD:g}'
        )
    try:
        reply = reply_of(Reply("", body["reward"], body.get("parts") or {}))
    except (TypeError, ValueError) as error:
        raise BadRequest(str(error)) from error
    answer = body.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise BadRequest("`answer` is the id of an answer, as a text")
    request[_SESSION].reward(reply, answer)
    return web.json_response({})


async def _counted(request: web.Request) -> web.Response:
    asked = await asyncio.to_thread(parse_anthropic, await _body(request))
    return web.json_response({"input_tokens": await request[_SESSION].count(asked)})


async def _models(request: web.Request) -> web.Response:
    page = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
    return web.json_response({"object": "list", "data": [described(MODEL)], **page})


async def _model(request: web.Request) -> web.Response:
    return web.json_response(described(request.match_info["name"]))


def described(name: str) -> dict[str, Any]:
    """Describes the model in the terms of both forms."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "mrl"}
    anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    return openai | anthropic
