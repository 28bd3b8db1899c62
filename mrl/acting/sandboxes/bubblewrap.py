"""Sandboxes of a root folder by bubblewrap, a program of Debian's and others' (`bwrap`).

Each command is a process tree of its own: new user, process, mount, IPC and host-name namespaces, no capability, no
further user namespaces, system calls of kernel administration refused, the image read-only. It ends with its first
process, and that with this one. Namespaces of mounts and network outlive commands (namespaces.py).
"""

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mrl.acting.sandboxes.forwarder import start_forwarder
from mrl.acting.sandboxes.namespaces import BASE, IMAGE, NamespaceHolder
from mrl.acting.sandboxes.sandbox import PLAIN_S, VARIABLES, Command, Ran, Sandbox, SandboxError, SandboxSpec
from mrl.acting.sandboxes.watching import watched
from mrl.acting.system_calls import without_administration

PROGRAM = "bwrap"
HOST = "host"  # the only network that can be named
_OWN = ("proc", "dev", "sys", "tmp")  # folders of a root that are not the image's
_OPEN_FILES = 1024


class Bubblewrap(Sandbox):
    """A sandbox of a root folder."""

    def __init__(
        self, spec: SandboxSpec, image: str, folder: str, endpoint: int | None = None, places: Sequence[str] = ()
    ):
        """Raises SandboxError for a folder that is no root, and where the kernel refuses."""
        self.folder = folder
        self._spec = spec
        if shutil.which(PROGRAM) is None:
            raise SandboxError(f"the program {PROGRAM} is not installed; its package is bubblewrap")
        if spec.network not in (None, HOST):
            raise SandboxError(f"bubblewrap knows the network {HOST!r} alone, and {spec.network!r} was named")
        root = Path(image)
        if not root.is_absolute() or not root.is_dir():
            raise SandboxError(f"there is no root folder {image!r}; bubblewrap needs the absolute path of one")
        self._layout = _layout(root, (folder, *places))
        self._places = places
        port = endpoint if spec.network is None else None
        self._holder: NamespaceHolder | None = NamespaceHolder(
            image, spec.disk_bytes, spec.network is None, port, len(places)
        )
        self._forwarder: int | None = None
        try:
            if port is not None:
                self._forwarder = start_forwarder(self._holder.listener, port)
            self._fill(root / folder.lstrip("/"))
        except BaseException:
            self.end()
            raise

    def _fill(self, original: Path) -> None:
        """Copies the image's content of the folder. Commands of the image do so."""
        if original.is_symlink() or not original.is_dir() or not any(original.iterdir()):
            return
        source = f"/{original.relative_to(original.anchor)}"
        copy = ["sh", "-c", 'cp -a "$0"/. "$1"', "/tmp/image", self.folder]
        ran = self._run(Command(copy, b"", PLAIN_S, 1000, {}), source)
        if not ran.is_well:
            raise SandboxError(f"the image's {self.folder} cannot be copied: {ran.reason or ran.text[:300]}")

    def _run(self, command: Command, original: str | None = None) -> Ran:
        if self._holder is None:
            raise SandboxError("the sandbox has ended")
        filtering, writer = os.pipe()
        os.write(writer, without_administration(platform.machine()))
        os.close(writer)
        process = subprocess.Popen(
            [PROGRAM, *self._options(command.environment, original), "--seccomp", str(filtering), "--", *command.words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            pass_fds=(filtering,),
            preexec_fn=_entering(self._holder, self._spec),
        )
        os.close(filtering)
        return watched(process, command, self._spec)

    def _options(self, environment: Mapping[str, str], original: str | None) -> Iterator[str]:
        yield from ("--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts")
        yield from ("--unshare-cgroup-try", "--hostname", "sandbox", "--uid", "0", "--gid", "0", "--cap-drop", "ALL")
        yield from ("--die-with-parent", "--new-session", "--clearenv")
        for name, value in {**VARIABLES, **environment}.items():
            yield from ("--setenv", name, value)
        yield from self._layout
        yield from ("--proc", "/proc", "--dev", "/dev", "--bind", f"{BASE}/shm", "/dev/shm", "--remount-ro", "/dev")
        yield from ("--bind", f"{BASE}/tmp", "/tmp", "--bind", f"{BASE}/work", self.folder)
        for number, place in enumerate(self._places):
            yield from ("--bind", f"{BASE}/{number}", place)
        if original is not None:
            yield from ("--ro-bind", f"{IMAGE}{self.folder}", "/tmp/image")
        yield from ("--remount-ro", "/", "--chdir", self.folder)

    def end(self) -> None:
        """As Sandbox.end."""
        holder = self._holder
        self._holder = None
        if self._forwarder is not None:
            os.kill(self._forwarder, 9)
            os.waitpid(self._forwarder, 0)
            self._forwarder = None
        if holder is not None:
            holder.end()


def _layout(root: Path, written: Sequence[str]) -> list[str]:
    """Returns options that put the image's files at their places, read-only."""
    options = []
    for entry in sorted(root.iterdir()):
        if entry.name in _OWN:
            continue
        if entry.is_symlink():
            options += ["--symlink", os.readlink(entry), f"/{entry.name}"]
        elif entry.is_dir() or entry.is_file():
            options += ["--ro-bind", f"{IMAGE}/{entry.name}", f"/{entry.name}"]
    for folder in written:
        above = folder.split("/")[1]
        if not (root / folder.lstrip("/")).is_dir() and (root / above).exists():
            raise SandboxError(
                f"the image has /{above}, and in it no {folder}; what is written is a folder of the image's, or has "
                "another one above it"
            )
    return options


def _entering(holder: NamespaceHolder, spec: SandboxSpec):
    """Returns what the forked child does before it becomes bubblewrap."""
    enter = holder.entering()
    limits = (
        (resource.RLIMIT_NPROC, spec.max_processes),
        (resource.RLIMIT_DATA, spec.memory_bytes),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    )

    def begin() -> None:
        enter()
        for kind, most in limits:
            own = resource.getrlimit(kind)[1]
            if own != resource.RLIM_INFINITY:
                most = min(most, own)
            resource.setrlimit(kind, (most, most))

    return begin
