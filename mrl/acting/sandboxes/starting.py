"""Starts sandboxes: finds the backend that the run names."""

import posixpath
from collections.abc import Sequence

from mrl.acting.sandboxes.sandbox import KEY, Sandbox, SandboxError, SandboxSpec
from mrl.errors import ConfigError


def start(
    spec: SandboxSpec,
    image: str | None = None,
    folder: str | None = None,
    endpoint: int | None = None,
    places: Sequence[str] = (),
) -> Sandbox:
    """Starts a sandbox of an image, or of the root folder where the backend is bubblewrap.

    `endpoint` is a port of this host's loopback, which is reached inside at the same address. `places`
    are further folders that are written, and begin empty. Raises SandboxError
    for an image that is not there and for a backend that does not work here, ConfigError for a package that is missing.
    """
    image = image or spec.image
    if image is None:
        raise SandboxError(f"the row names no image, and {KEY}.image is not set")
    folder, *places = (_checked(path) for path in (folder or spec.folder, *places))
    if spec.backend == "bubblewrap":
        from mrl.acting.sandboxes.bubblewrap import Bubblewrap

        return Bubblewrap(spec, image, folder, endpoint, places)
    if spec.backend == "docker":
        from mrl.acting.sandboxes.containers import ContainerSandbox

        return ContainerSandbox(spec, image, folder, endpoint, places)
    from mrl.acting.sandboxes.remote import REMOTE

    if spec.backend not in REMOTE:
        raise ConfigError(f"{KEY}.backend: {spec.backend!r}; known: bubblewrap, docker, {', '.join(REMOTE)}")
    if endpoint is not None:
        raise SandboxError(f"a sandbox of {spec.backend} runs elsewhere and cannot reach the endpoint of this host")
    return REMOTE[spec.backend](spec, image, folder, places)


def _checked(path: str) -> str:
    if not path.startswith("/") or posixpath.normpath(path) in ("/", "/proc", "/dev", "/tmp", "/sys"):
        raise SandboxError(f"the folder of a sandbox is {path!r}; it has to be an absolute path of its own")
    return posixpath.normpath(path)
