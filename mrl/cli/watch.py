"""Implements `mrl watch`."""

import argparse
from pathlib import Path


def add(commands) -> None:
    """Registers the command."""
    watch = commands.add_parser(
        "watch",
        help="show the report of a running run, live in a browser on this machine",
        description="Serves the page of `mrl report` on the loopback address. The printed address contains a token, "
        "without which the page cannot be read. New steps appear automatically. From another host: ssh -L "
        "PORT:127.0.0.1:PORT HOST. Ctrl-C ends the watch, not the run.",
    )
    watch.add_argument("run_dir", metavar="RUN", help="a run directory, such as runs/first")
    watch.add_argument("--port", type=_port, default=0, help="port to listen on; default: 0, a free one")
    watch.set_defaults(run=_watch)


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no port: 0 to 65535")
    return int(text)


def _watch(options: argparse.Namespace) -> None:
    from mrl.tools.report.live import LiveServer
    from mrl.tools.report.run_record import NoStepYet, read_run

    folder = Path(options.run_dir)
    try:
        read_run(folder)  # a folder without a run is refused at once
    except NoStepYet as waiting:
        print(f"{waiting}; the page waits for it")
    server = LiveServer(folder, options.port)
    print(f"{server.url}\nCtrl-C ends the watch, not the run", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        print()
