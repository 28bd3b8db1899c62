"""Leads connections to a port inside of a sandbox to the chat endpoint outside, in a process of its own.

The listening socket was made in the network of the sandbox, at the endpoint's own port; connections to the endpoint are
made in the network of this host. So the sandbox needs no network beside its own loopback, clients use the address that
they are given, and the endpoint checks the `Host` that it always checks. Bytes are passed on as they are.
"""

import ctypes
import os
import signal
import socket
import threading
from contextlib import suppress

_READ_BYTES = 65536
_PR_SET_PDEATHSIG = 1


def start_forwarder(listener: socket.socket, port: int) -> int:
    """Starts the process for a listening socket, and returns its number. It ends with this process."""
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            os.dup2(listener.fileno(), 3)
            os.closerange(4, 65536)
            _forward(socket.socket(fileno=3), port)
    finally:
        os._exit(0)


def _forward(listener: socket.socket, port: int) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_serve, args=(client, port), daemon=True).start()


def _serve(client: socket.socket, port: int) -> None:
    with client, suppress(OSError), socket.create_connection(("127.0.0.1", port)) as endpoint:
        back = threading.Thread(target=_copy, args=(endpoint, client), daemon=True)
        back.start()
        _copy(client, endpoint)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copies until the source has ended, and says so to the target."""
    with suppress(OSError):
        while data := source.recv(_READ_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
