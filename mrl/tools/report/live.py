"""Serves a run's page during the run, on this machine alone, to clients with the token.

The page asks again every few seconds and gets 304 until the run directory has changed. The server makes it on request,
using at most a tenth of the time: a run with many steps takes seconds to read, and the machine belongs to the run.
"""

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from mrl.errors import EnvironmentFault, MrlError
from mrl.record.attempts import ATTEMPTS
from mrl.record.run_dir import RunDir
from mrl.record.run_lock import in_use
from mrl.tools.report.html import page_html
from mrl.tools.report.page import Page, PageSection, Paragraph
from mrl.tools.report.run_record import NoStepYet, read_run
from mrl.tools.report.sections import run_page

LOOPBACK = "127.0.0.1"
IDLE_S = 30.0  # seconds without a request, or its rest, after which a connection ends
SHARE = 0.1  # largest share of the time for making pages


@dataclass(frozen=True)
class ServedPage:
    """A page as it is sent. `tag` changes with the run directory."""

    tag: str
    body: bytes


class LivePage:
    """The newest page of a run directory."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: ServedPage | None = None
        self._rest_until = 0.0

    def page(self) -> ServedPage:
        """Returns the page. Makes a new one if the directory has changed and enough time has passed."""
        with self._lock:
            tag = state_tag(self._folder)
            stale = self._newest is None or (tag != self._newest.tag and self._clock() >= self._rest_until)
            if stale:
                began = self._clock()
                self._newest = ServedPage(tag, page_html(self._made(), live=tag).encode())
                now = self._clock()
                self._rest_until = now + (now - began) * (1 - SHARE) / SHARE
            return self._newest

    def _made(self) -> Page:
        """Returns the run's page, or one that says why there is none yet."""
        try:
            return run_page(read_run(self._folder))
        except NoStepYet as error:
            words = Paragraph(f"{error}. This page shows the first step as soon as it is written.")
        except MrlError as error:
            words = Paragraph(str(error), "bad")
        return Page(self._folder.resolve().name, str(self._folder), (PageSection("verdict", "Verdict", (words,)),))


def state_tag(folder: Path) -> str:
    """Returns a tag that changes when a run writes a step, a sample, a validation, or its end."""
    run = RunDir(folder)
    parts = [str(in_use(folder))]
    for path in (
        run.metrics,
        folder / ATTEMPTS,
        run.config,
        run.samples,
        run.validation,
        run.checkpoints,
        run.lost_engines,
    ):
        try:
            stat = path.stat()
            parts.append(f"{stat.st_mtime_ns} {stat.st_size}")
        except OSError:
            parts.append("none")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


class LiveServer:
    """Serves one run's page at `url` until it is closed. Raises EnvironmentFault for a port that is in use."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), _handler(LivePage(folder), self.token))
        except OSError as error:
            raise EnvironmentFault(
                f"--port {port}: cannot be listened on ({error.strerror}); 0 takes a free one"
            ) from error
        self._server.daemon_threads = True

    @property
    def port(self) -> int:
        """The port in use."""
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        """The page's address with the token. Whoever has it can see the page."""
        return f"http://{LOOPBACK}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        """Answers until `close` is called, or until an exception such as Ctrl-C."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stops answering. Call it from another thread than that of `serve`."""
        self._server.shutdown()
        self._server.server_close()


# for every answer: nothing is cached, the token is not passed on, and no other page can embed it
_SAFE_HEADERS = (
    ("Cache-Control", "no-store"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "frame-ancestors 'none'"),
)


def _handler(page: LivePage, token: str) -> type[BaseHTTPRequestHandler]:
    """Makes the handler of one request: GET of `/` with the token, and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        server_version = "mrl"
        sys_version = ""
        timeout = IDLE_S

        def do_GET(self) -> None:
            try:
                asked = urlsplit(self.path)
            except ValueError:  # half an IPv6 address
                return self._answer(404, b"There is one page, at /.\n", "text/plain")
            given = parse_qs(asked.query).get("token", [""])[0]
            if not self._for_us() or not hmac.compare_digest(given.encode(), token.encode()):
                return self._answer(403, b"The address needs the token that mrl watch printed.\n", "text/plain")
            if asked.path != "/":
                return self._answer(404, b"There is one page, at /.\n", "text/plain")
            served = page.page()
            if self.headers.get("If-None-Match") == f'"{served.tag}"':
                return self._answer(304, b"", "text/html", served.tag)
            return self._answer(200, served.body, "text/html", served.tag)

        def _for_us(self) -> bool:
            """Tells whether the request names this address. Another host's name may resolve to it (DNS rebinding)."""
            port = self.server.server_address[1]
            return self.headers.get("Host") in (f"{LOOPBACK}:{port}", f"localhost:{port}")

        def _answer(self, status: int, body: bytes, kind: str, tag: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            for name, value in _SAFE_HEADERS:
                self.send_header(name, value)
            if tag:
                self.send_header("ETag", f'"{tag}"')
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_) -> None:
            """Does nothing, because every line would contain the token."""

    return Handler
