"""The chat endpoint of an engine: HTTP on loopback, with a key a session.

    POST /v1/chat/completions, /v1/messages   --> the session's conversation is asked, and its answer written
    POST /v1/reward {"reward", "parts"}       --> the session's reward, once
    GET  /v1/models                           --> one name, for clients that look

Who comes by another name than this host's is turned away (403), and so is who has no key of a session that is there
(401); a body may be BODY_BYTES long (413). What a session cannot answer is a 400, which clients do not repeat. A stream
is written whole. It serves in the event loop of its engine.
"""

import asyncio
import hashlib
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from aiohttp import web

from mrl.data.chat_api import APIS, Api, BadRequest, ChatAnswer, ChatRequest
from mrl.environments.environment import LARGEST_REWARD, Reply, reply_of
from mrl.errors import EnvironmentFault

HOST = "127.0.0.1"
MODEL = "policy"
BODY_BYTES = 8 * 2**20
REWARD_PATH = "/v1/reward"


class ChatSession(Protocol):
    """Whose conversation a key stands for."""

    async def ask(self, asked: ChatRequest) -> ChatAnswer:
        """The model's answer. Cancelled where nobody waits for it any more. Raises BadRequest."""

    def reward(self, reply: Reply) -> None:
        """Takes the response's reward. Raises BadRequest where it has one."""


_SESSION = web.RequestKey("session", ChatSession)


class Endpoint:
    """One address, and the sessions behind it."""

    def __init__(self, port: int = 0):
        """Takes a port of loopback, by default one that is free. Raises EnvironmentFault where it is taken."""
        self._socket = socket.socket()
        try:
            self._socket.bind((HOST, port))
        except OSError as error:
            self._socket.close()
            raise EnvironmentFault(f"the chat endpoint finds no port: {HOST}:{port}: {error}") from error
        self.port = self._socket.getsockname()[1]
        self._sessions: dict[bytes, ChatSession] = {}  # by the digest of a key
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    @property
    def url(self) -> str:
        """Its address, without /v1."""
        return f"http://{HOST}:{self.port}"

    async def serve(self) -> None:
        """Begins to listen, in this event loop. Safe to call twice."""
        async with self._starting:
            if self._server is not None:
                return
            app = web.Application(middlewares=[self._guarded], client_max_size=BODY_BYTES)
            for path, api in APIS.items():
                app.router.add_post(path, _handler(api))
            app.router.add_post(REWARD_PATH, _rewarded)
            app.router.add_get("/v1/models", _models)
            # who hangs up is waited for no longer
            runner = web.AppRunner(app, access_log=None, handle_signals=False, handler_cancellation=True)
            await runner.setup()
            self._server = await asyncio.get_running_loop().create_server(runner.server, sock=self._socket)

    def open(self, session: ChatSession) -> str:
        """The key of a session, which holds until it is closed."""
        key = secrets.token_urlsafe(32)
        self._sessions[_digest(key)] = session
        return key

    def close_session(self, key: str) -> None:
        """The key is of nobody from here on."""
        self._sessions.pop(_digest(key), None)

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Turns strangers away, and writes what goes wrong in the form of the path."""
        try:
            if request.host not in (f"{HOST}:{self.port}", f"localhost:{self.port}"):
                return _refused(request, 403, f"this is {HOST}:{self.port}, and no other host")
            session = self._sessions.get(_digest(_key_of(request)))
            if session is None:
                return _refused(request, 401, "the key is of no session that is under way")
            request[_SESSION] = session
            return await handler(request)
        except BadRequest as error:
            return _refused(request, 400, str(error))
        except web.HTTPException as error:
            return _refused(request, error.status, error.reason)

    def close(self) -> None:
        """Takes no more connections. Safe to call twice."""
        self._sessions.clear()
        if self._server is not None and not self._server.get_loop().is_closed():
            self._server.close()
        self._socket.close()


def _digest(key: str) -> bytes:
    """What is looked up of a key, so that how long it takes says nothing of it."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _key_of(request: web.Request) -> str:
    bearer = request.headers.get("Authorization", "")
    return request.headers.get("x-api-key") or bearer.removeprefix("Bearer ")


def _refused(request: web.Request, status: int, why: str) -> web.Response:
    api = APIS.get(request.path, next(iter(APIS.values())))
    return web.json_response(api.error(status, why), status=status)


async def _body(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error


def _handler(api: Api) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        asked = api.parse(await _body(request))
        answer = await request[_SESSION].ask(asked)
        if not asked.stream:
            return web.json_response(api.whole(answer, asked))
        events = "".join(_event(name, data) for name, data in api.events(answer, asked))
        return web.Response(text=events, content_type="text/event-stream")

    return handle


def _event(name: str, data: Any) -> str:
    """One event of a stream."""
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
    request[_SESSION].reward(reply)
    return web.json_response({})


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "mrl"}]})
