"""Sandboxes of an image by the daemon of Docker, or of Podman, which speaks the same language.

`pip install 'mrl[docker]'` brings the client.

The image's root is read-only, without capabilities and without a network, unless one is named. What is written lies in
file systems in memory, which are part of the container's memory. Its first process reads what this process would write,
and ends when the connection does: so a container ends with the run, and the daemon removes it. One that is not yet
started would stay; its name is told to the keeper of this process, which removes it at the end. Where the keeper was
killed too, the next sandbox of this host removes it.
"""

import json
import os
import secrets
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mrl.acting.kept_output import KeptOutput
from mrl.acting.sandboxes.forwarder import start_forwarder
from mrl.acting.sandboxes.namespaces import BYTES_PER_FILE, listener_of
from mrl.acting.sandboxes.sandbox import (
    KEY,
    SECONDS,
    STOPPED,
    VARIABLES,
    Command,
    Ran,
    Sandbox,
    SandboxError,
    SandboxSpec,
)
from mrl.errors import ConfigError
from mrl.reward.keeper import FAREWELL

LABEL = "mrl.sandbox"
_WAIT_S = 120.0  # for one answer of the daemon
_LOOK_S = 0.5  # between two looks for what stops a command
_READ_BYTES = 65536
_HEAD = 8  # bytes before each part of an output: its kind, and its length
# The first process. It ends when nobody holds the container's input any more, and collects processes without a parent.
_FIRST = "until cat > /dev/null; do :; done; exit"
# runs a command, and ends whatever it left running
_WRAPPED = '"$@"; status=$?; kill -9 -1 2>/dev/null; exit $status'


def connected(address: str | None) -> Any:
    """Returns a client of the daemon. Raises ConfigError without the package, SandboxError where no daemon answers."""
    try:
        import docker
    except ImportError as error:
        raise ConfigError(
            f"{KEY}.backend: docker needs the package docker, which cannot be imported ({error}): "
            "pip install 'mrl[docker]'"
        ) from error
    try:
        if address is None:
            client = docker.APIClient(**docker.utils.kwargs_from_env(), timeout=_WAIT_S)
        else:
            client = docker.APIClient(base_url=address, timeout=_WAIT_S)
        client.ping()
    except docker.errors.DockerException as error:
        where = address or os.environ.get("DOCKER_HOST") or "the default address"
        raise SandboxError(f"no daemon of Docker or Podman answers at {where}: {error}; see {KEY}.address") from error
    return client


class ContainerSandbox(Sandbox):
    """A sandbox of an image."""

    def __init__(
        self, spec: SandboxSpec, image: str, folder: str, endpoint: int | None = None, places: Sequence[str] = ()
    ):
        """Raises SandboxError for an image that is not at the daemon's host, and where the daemon refuses."""
        self.folder = folder
        self._spec = spec
        self._places = places
        self._client = connected(spec.address)
        self._name = _new_name()
        self._forwarder: int | None = None
        self._input: Any = None
        self._has_ended = False
        try:
            with _daemon_errors():
                self._start(image, endpoint)
        except BaseException:
            self.end()
            raise

    def _start(self, image: str, endpoint: int | None) -> None:
        client = self._client
        _remove_unstarted(client)
        _note(self._name, client, is_made=False)
        client.create_container(
            image,
            ["-c", _FIRST],
            entrypoint=["sh"],
            name=self._name,
            labels={LABEL: _owner(os.getpid())},
            stdin_open=True,
            working_dir=self.folder,
            environment={name: value for name, value in VARIABLES.items() if name != "PATH"},
            host_config=self._limits(),
        )
        _note(self._name, client, is_made=True)
        content = self._content()
        self._input = client.attach_socket(self._name, {"stdin": 1, "stream": 1})
        client.start(self._name)
        if content:
            self.unpack(content)
        if endpoint is not None and self._spec.network is None:
            listener = listener_of(client.inspect_container(self._name)["State"]["Pid"], endpoint)
            with listener:
                self._forwarder = start_forwarder(listener, endpoint)

    def _content(self) -> bytes:
        """Returns what the image has in the folder, packed by the daemon before anything is mounted there."""
        import docker

        try:
            parts, _ = self._client.get_archive(self._name, f"{self.folder}/.")
            return b"".join(parts)
        except docker.errors.NotFound:
            return b""

    def _limits(self) -> Any:
        spec = self._spec
        client = self._client
        memory = spec.memory_bytes + spec.disk_bytes
        part = spec.disk_bytes // (4 + len(self._places))
        files = f"rw,exec,nosuid,nodev,mode=1777,nr_inodes={spec.disk_bytes // BYTES_PER_FILE},size={{}}"
        return client.create_host_config(
            network_mode=spec.network or "none",
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=spec.max_processes,
            read_only=True,
            tmpfs={self.folder: files.format(2 * part)} | dict.fromkeys(("/tmp", *self._places), files.format(part)),
            shm_size=part,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            auto_remove=True,
            ipc_mode="private",
            log_config={"Type": "none", "Config": {}},
        )

    def _run(self, command: Command) -> Ran:
        if self._has_ended:
            raise SandboxError("the sandbox has ended")
        with _daemon_errors():
            started = self._client.exec_create(
                self._name,
                ["sh", "-c", _WRAPPED, "sh", *command.words],
                stdin=bool(command.input),
                environment=command.environment,
                workdir=self.folder,
            )
            stream = self._client.exec_start(started["Id"], socket=True)
            try:
                output, reason = _talked(_plain(stream), command)
            finally:
                stream.close()
            if reason:
                self._end_commands()
                return Ran(None, output.content, reason, output.left_out)
            status = self._client.exec_inspect(started["Id"])["ExitCode"]
        return Ran(status, output.content, left_out=output.left_out)

    def _end_commands(self) -> None:
        """Ends all processes but the first. Where not even that can be started, the sandbox ends."""
        client = self._client
        try:
            client.exec_start(client.exec_create(self._name, ["sh", "-c", "kill -9 -1"])["Id"])
        except Exception as error:  # of any kind: no process is left for it
            self.end()
            raise SandboxError(f"the sandbox was ended with a command that could not be: {error}") from error

    def end(self) -> None:
        """As Sandbox.end."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._forwarder is not None:
            os.kill(self._forwarder, 9)
            os.waitpid(self._forwarder, 0)
        with suppress(Exception):  # it may be gone, or going
            self._client.remove_container(self._name, force=True)
        if self._input is not None:
            self._input.close()
        self._client.close()


@contextmanager
def _daemon_errors() -> Iterator[None]:
    """Turns errors of the daemon into SandboxError."""
    import docker
    import requests

    try:
        yield
    except docker.errors.ImageNotFound as error:
        raise SandboxError(f"the daemon has no such image: {error.explanation}; pull or build it before") from error
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise SandboxError(f"the daemon refused: {error}") from error


def _new_name() -> str:
    return f"mrl-{secrets.token_hex(8)}"


def _note(name: str, client: Any, is_made: bool) -> None:
    """Writes down a container that is made, or about to be, for the keeper of this process."""
    farewell = os.environ.get(FAREWELL)
    address = client.base_url
    if farewell is None:
        return
    if address.startswith("http+docker"):  # a local socket, whose path the adapter has
        address = client.get_adapter(address).socket_path
    os.write(int(farewell), json.dumps([address, f"/containers/{name}?force=1", is_made]).encode() + b"\n")


def _owner(process: int) -> str:
    """Names a process of this host, so that no other ever has its name; empty where there is none."""
    try:
        namespace = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
        began = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
    return " ".join((*namespace, str(process), began))


def _remove_unstarted(client: Any) -> None:
    """Removes containers that were never started, of processes of this host that are no more."""
    here = _owner(os.getpid()).split()[:2]
    for found in client.containers(all=True, filters={"label": LABEL, "status": "created"}):
        words = found["Labels"][LABEL].split()
        if words[:2] == here and _owner(int(words[2])).split() != words:
            with suppress(Exception):  # another one removes it too
                client.remove_container(found["Id"], force=True)


def _plain(stream: Any) -> socket.socket:
    """Returns the socket below what the client gives."""
    return getattr(stream, "_sock", stream)


def _talked(stream: socket.socket, command: Command) -> tuple[KeptOutput, str]:
    """Sends the input, and reads the output until it ends. Returns why it has to be ended; empty where it has ended."""
    output = KeptOutput(command.most // 2)
    end = time.monotonic() + command.seconds
    pending = bytearray()
    unsent = memoryview(command.input)
    stream.setblocking(False)
    poll = select.poll()
    poll.register(stream, select.POLLIN | (select.POLLOUT if command.input else 0))
    while (left := end - time.monotonic()) > 0:
        if command.stop is not None and os.path.exists(command.stop):
            return output, STOPPED
        for _, events in poll.poll(min(left, _LOOK_S) * 1000):
            if events & select.POLLOUT:
                with suppress(BlockingIOError):
                    unsent = unsent[stream.send(unsent[:_READ_BYTES]) :]
                if not unsent:
                    stream.shutdown(socket.SHUT_WR)
                    poll.modify(stream, select.POLLIN)
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                data = stream.recv(_READ_BYTES)
                if not data:
                    return output, ""
                pending += data
                _take(pending, output)
    return output, SECONDS


def _take(pending: bytearray, output: KeptOutput) -> None:
    """Moves whole parts of an output. Each has a head of eight bytes, the last four of which are its length."""
    while len(pending) >= _HEAD:
        end = _HEAD + int.from_bytes(pending[4:_HEAD], "big")
        if len(pending) < end:
            return
        output.add(bytes(pending[_HEAD:end]))
        del pending[:end]


def left_behind(address: str | None) -> list[str]:
    """Returns names of containers of any run at this daemon, started or not."""
    client = connected(address)
    with _daemon_errors():
        found = client.containers(all=True, filters={"label": LABEL})
    return [each["Names"][0].lstrip("/") for each in found]
