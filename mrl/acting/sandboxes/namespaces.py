"""Mounts and a network of a sandbox's own, made by a process that holds them until the sandbox ends.

    holder:  /tmp         a file system in memory of limited size, seen by nobody else
             /tmp/image   the image's root folder
             /tmp/work, /tmp/tmp, /tmp/shm, /tmp/0 ...    what is written
             a loopback of its own, without any other network

Every command of the sandbox enters there, and bubblewrap then confines it. When the holder ends, all of it is gone,
and nothing was ever written to a disk. With rights of root (CAP_SYS_ADMIN) commands run as the user NOBODY; without, in
a user namespace of the holder's.
"""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from mrl.acting.sandboxes.sandbox import SandboxError

NOBODY = 65534
BASE = "/tmp"
IMAGE = f"{BASE}/image"
WRITTEN = ("work", "tmp", "shm")
_NEW_MOUNTS = 0x20000
_NEW_USER = 0x10000000
_NEW_NETWORK = 0x40000000
_BIND = 0x1000
_RECURSIVE = 0x4000
_PRIVATE = 1 << 18
_NO_SUID_NO_DEVICES = 2 | 4
_SYS_ADMIN = 21
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_FLAGS_OF_INTERFACE = 0x8914  # SIOCSIFFLAGS
_UP = 1
BYTES_PER_FILE = 4096  # one file for each of these bytes of the disk limit


class NamespaceHolder:
    """A child process with the namespaces of one sandbox."""

    def __init__(self, root: str, disk_bytes: int, own_network: bool, port: int | None, places: int = 0):
        """`root`: the image's root folder. `port`: of loopback inside, where a socket listens then
        (`listener`). `places`: further folders that are written, under their numbers.

        Raises SandboxError where the kernel refuses.
        """
        self.is_root = _may_mount()
        self.listener: socket.socket | None = None
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        self.process = os.fork()
        if self.process == 0:
            _hold(theirs.fileno(), parent, root, disk_bytes, self.is_root, own_network, port, places)
        theirs.close()
        self._channel = ours
        message, descriptors, _, _ = socket.recv_fds(ours, 4096, 1)
        if message[:3] != b"ok\n":
            self.end()
            raise SandboxError(f"namespaces of a sandbox cannot be made: {message.decode() or 'its holder died'}")
        if descriptors:
            self.listener = socket.socket(fileno=descriptors[0])
        names = ["mnt", "net"] if self.is_root else ["user", "mnt", "net"]
        self._namespaces = [os.open(f"/proc/{self.process}/ns/{name}", os.O_RDONLY) for name in names]

    def entering(self) -> Callable[[], None]:
        """Returns what a forked child calls to be inside. It has no rights of root then."""
        libc = ctypes.CDLL(None, use_errno=True)
        descriptors = tuple(self._namespaces)
        drops = self.is_root

        def enter() -> None:
            for descriptor in descriptors:
                if libc.setns(descriptor, 0):
                    raise OSError(ctypes.get_errno(), "setns")
            if drops:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else the files below are root's
                # The kernel counts processes by user and namespace: without one of its own, commands of all sandboxes
                # would share one limit.
                if libc.unshare(_NEW_USER):
                    raise OSError(ctypes.get_errno(), "unshare")
                _map_own(NOBODY, NOBODY)

        return enter

    def end(self) -> None:
        """Ends the holder, and with it what it holds. Safe to call twice."""
        if self.process is None:
            return
        self._channel.close()
        os.kill(self.process, 9)
        os.waitpid(self.process, 0)
        self.process = None
        for descriptor in getattr(self, "_namespaces", ()):
            os.close(descriptor)
        if self.listener is not None:
            self.listener.close()


def _may_mount() -> bool:
    """Tells whether this process has CAP_SYS_ADMIN."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _SYS_ADMIN & 1) and os.geteuid() == 0
    return False


def _hold(
    channel: int,
    parent: int,
    root: str,
    disk_bytes: int,
    is_root: bool,
    own_network: bool,
    port: int | None,
    places: int,
) -> None:
    """The holder's life. It tells `ok`, or what failed, and waits for its end."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        os.dup2(channel, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") > 0 else 65536)
        own = socket.socket(fileno=3)
        try:
            listener = _made(root, disk_bytes, is_root, own_network, port, places)
        except OSError as error:
            own.send(str(error).encode()[:4000])
            os._exit(1)
        descriptors = []
        if listener is not None:
            descriptors = [listener.fileno()]
        socket.send_fds(own, [b"ok\n"], descriptors)
        own.recv(1)
    finally:
        os._exit(0)


def _made(
    root: str, disk_bytes: int, is_root: bool, own_network: bool, port: int | None, places: int
) -> socket.socket | None:
    user = (os.getuid(), os.getgid())
    kinds = _NEW_MOUNTS
    if own_network:
        kinds |= _NEW_NETWORK
    if not is_root:
        kinds |= _NEW_USER
    _call("unshare", kinds)
    if not is_root:
        _map_own(*user)
    _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    image = os.open(root, os.O_PATH | os.O_DIRECTORY)
    options = f"size={disk_bytes},nr_inodes={max(1024, disk_bytes // BYTES_PER_FILE)},mode=755"
    _call("mount", b"mrl", BASE.encode(), b"tmpfs", _NO_SUID_NO_DEVICES, options.encode())
    os.mkdir(IMAGE)
    _call("mount", f"/proc/self/fd/{image}".encode(), IMAGE.encode(), None, _BIND | _RECURSIVE, None)
    os.close(image)
    for name in (*WRITTEN, *map(str, range(places))):
        os.mkdir(f"{BASE}/{name}", 0o755)
        if is_root:
            os.chown(f"{BASE}/{name}", NOBODY, NOBODY)
    if own_network:
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, _FLAGS_OF_INTERFACE, struct.pack("16sh", b"lo", _UP))
    if port is None:
        return None
    return _listening(port)


def _map_own(user: int, group: int) -> None:
    """Gives a new user namespace of this process the one user that it may have without rights: its own."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def listener_of(process: int, port: int) -> socket.socket:
    """Returns a socket that listens on loopback in the network of a process. Raises SandboxError where that is not
    allowed, or the process is not one of this host's.
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            network = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
            _call("setns", network, _NEW_NETWORK)
            listener = _listening(port)
            socket.send_fds(theirs, [b"ok\n"], [listener.fileno()])
        except OSError as error:
            theirs.send(str(error).encode()[:4000])
        finally:
            os._exit(0)
    with ours, theirs:
        message, descriptors, _, _ = socket.recv_fds(ours, 4096, 1)
        os.waitpid(child, 0)
    if not descriptors:
        raise SandboxError(
            f"the container's network cannot be entered, so the endpoint cannot be reached from it: "
            f"{message.decode()}; this needs the daemon on this host, and its rights"
        )
    return socket.socket(fileno=descriptors[0])


def _listening(port: int) -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def _call(name: str, *arguments: object) -> None:
    """Calls a function of the C library. Raises OSError where it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
