"""Sandboxes elsewhere, by their providers' own clients: E2B, Modal, Daytona. Each client is an extra (`mrl[e2b]`, ...).

They were written against the packages (e2b 2.56.0, modal 1.6.4, daytona 0.226.1) and **never tried against a service**,
which wants an account. Keys are read by the clients from their own variables, named in `rollout.turns.environment`.
Their limits are the providers': of memory and disk what the client lets one ask for, of processes none. A sandbox that
nobody ends is ended by its provider after LIFE_S.
"""

import posixpath
import secrets
import shlex
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from mrl.acting.kept_output import KeptOutput
from mrl.acting.sandboxes.sandbox import (
    KEY,
    MIB,
    PLAIN_S,
    SECONDS,
    VARIABLES,
    Command,
    Ran,
    Sandbox,
    SandboxError,
    SandboxSpec,
)
from mrl.errors import ConfigError

LIFE_S = 3600


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{KEY}.backend: {name} needs its package, which cannot be imported ({error}): pip install 'mrl[{name}]'"
        ) from error


class _Remote(Sandbox):
    """What they have in common: commands are scripts with a text as output, and files have calls of their own."""

    def __init__(self, spec: SandboxSpec, image: str, folder: str, places: Sequence[str] = ()):
        """Starts it. Raises SandboxError with what its provider says."""
        self.folder = folder
        self._spec = spec
        try:
            self._start(image)
            self._script(f"mkdir -p {shlex.join((folder, *places))}", "/", PLAIN_S, {})
        except ConfigError:
            raise
        except Exception as error:  # a client's own kinds
            raise SandboxError(f"the provider refused: {type(error).__name__}: {error}") from error

    @abstractmethod
    def _start(self, image: str) -> None:
        """Starts it."""

    @abstractmethod
    def _script(
        self, script: str, folder: str, seconds: float, environment: Mapping[str, str]
    ) -> tuple[int | None, str | bytes]:
        """Runs a script and returns its status (None: it was out of time) and its output."""

    @abstractmethod
    def _stored(self, path: str) -> bytes:
        """Returns a file."""

    @abstractmethod
    def _store(self, path: str, content: bytes) -> None:
        """Writes a file."""

    def _run(self, command: Command) -> Ran:
        if command.stop is not None:
            raise SandboxError("a command elsewhere is not ended by a file of this host")
        script = shlex.join(command.words)
        if command.input:
            name = f"/tmp/mrl-{secrets.token_hex(8)}"
            self._store(name, command.input)
            script = f"{script} < {name}"
        variables = {"HOME": VARIABLES["HOME"], "LANG": VARIABLES["LANG"], **command.environment}
        status, output = self._script(script, self.folder, command.seconds, variables)
        kept = KeptOutput(command.most // 2)
        kept.add(output.encode() if isinstance(output, str) else output)
        return Ran(status, kept.content, SECONDS if status is None else "", kept.left_out)

    def read(self, path: str) -> bytes:
        """As Sandbox.read."""
        return self._stored(posixpath.join(self.folder, path))

    def write(self, path: str, content: bytes) -> None:
        """As Sandbox.write."""
        full_path = posixpath.join(self.folder, path)
        self.run(["mkdir", "-p", posixpath.dirname(full_path)])
        self._store(full_path, content)

    def packed(self) -> bytes:
        """As Sandbox.packed."""
        name = f"/tmp/mrl-{secrets.token_hex(8)}.tar"
        ran = self.run(["tar", "cf", name, "."])
        if not ran.is_well:
            raise SandboxError(f"the folder {self.folder} cannot be packed: {ran.text[:200]}")
        return self._stored(name)


class E2B(_Remote):
    """A sandbox of a template of E2B's. Its memory and disk are the template's."""

    def _start(self, image: str) -> None:
        client = _package("e2b")
        self._box = client.Sandbox.create(
            template=image, timeout=LIFE_S, allow_internet_access=self._spec.network is not None
        )

    def _script(
        self, script: str, folder: str, seconds: float, environment: Mapping[str, str]
    ) -> tuple[int | None, str | bytes]:
        client = _package("e2b")
        try:
            ended = self._box.commands.run(script, cwd=folder, envs=dict(environment), timeout=seconds)
        except client.CommandExitException as failed:
            ended = failed
        except client.TimeoutException:
            return None, ""
        return ended.exit_code, ended.stdout + ended.stderr

    def _stored(self, path: str) -> bytes:
        return bytes(self._box.files.read(path, format="bytes"))

    def _store(self, path: str, content: bytes) -> None:
        self._box.files.write(path, content)

    def end(self) -> None:
        """As Sandbox.end."""
        self._box.kill()


class Modal(_Remote):
    """A sandbox of an image of a registry, at Modal."""

    def _start(self, image: str) -> None:
        client = _package("modal")
        self._box = client.Sandbox.create(
            "sleep",
            str(LIFE_S),
            app=client.App.lookup("mrl", create_if_missing=True),
            image=client.Image.from_registry(image),
            timeout=LIFE_S,
            memory=int(self._spec.memory_bytes / MIB),
            block_network=self._spec.network is None,
        )

    def _script(
        self, script: str, folder: str, seconds: float, environment: Mapping[str, str]
    ) -> tuple[int | None, str | bytes]:
        process = self._box.exec(
            "sh",
            "-c",
            f"exec 2>&1; {script}",
            timeout=int(seconds) + 1,
            workdir=folder,
            env=dict(environment),
            text=False,
        )
        output = process.stdout.read()
        status = process.wait()
        if status == -1:  # what the client says of a command that was out of time
            return None, output
        return status, output

    def _stored(self, path: str) -> bytes:
        return self._box.filesystem.read_bytes(path)

    def _store(self, path: str, content: bytes) -> None:
        self._box.filesystem.write_bytes(content, path)

    def end(self) -> None:
        """As Sandbox.end."""
        self._box.terminate()


class DaytonaBox(_Remote):
    """A sandbox of an image, at Daytona."""

    def _start(self, image: str) -> None:
        client = _package("daytona")
        wanted = client.CreateSandboxFromImageParams(
            image=image,
            network_block_all=self._spec.network is None,
            resources=client.Resources(
                memory=max(1, round(self._spec.max_memory_gib)), disk=max(1, round(self._spec.max_disk_mib / 1024))
            ),
            auto_stop_interval=LIFE_S // 60,
            ephemeral=True,
        )
        self._box = client.Daytona().create(wanted, timeout=600)

    def _script(
        self, script: str, folder: str, seconds: float, environment: Mapping[str, str]
    ) -> tuple[int | None, str | bytes]:
        client = _package("daytona")
        try:
            ended = self._box.process.exec(script, cwd=folder, env=dict(environment), timeout=int(seconds) + 1)
        except client.DaytonaTimeoutError:
            return None, ""
        return ended.exit_code, ended.result

    def _stored(self, path: str) -> bytes:
        return self._box.fs.download_file(path)

    def _store(self, path: str, content: bytes) -> None:
        self._box.fs.upload_file(content, path)

    def end(self) -> None:
        """As Sandbox.end."""
        self._box.delete()


REMOTE: dict[str, type[_Remote]] = {"e2b": E2B, "modal": Modal, "daytona": DaytonaBox}
