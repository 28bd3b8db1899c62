"""A root folder of busybox, and a daemon of Docker with an image of it, where this machine has what they need."""

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from mrl.acting.sandboxes.sandbox import SandboxError
from mrl.acting.sandboxes.trial import faults

BUSYBOX = shutil.which("busybox")
IMAGE = "mrl-test:busybox"
START_S = 60.0


def root_folder(folder: Path) -> Path:
    """Writes a root folder with busybox in it, and a repository at /repo."""
    (folder / "bin").mkdir(parents=True)
    (folder / "etc").mkdir()
    shutil.copy(BUSYBOX, folder / "bin" / "busybox")
    names = subprocess.run([BUSYBOX, "--list"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    for name in names:
        if name != "busybox":
            (folder / "bin" / name).symlink_to("busybox")
    (folder / "repo").mkdir()
    (folder / "repo" / "f").write_text("expr $1 - $2\n")
    (folder / "repo" / "tests").mkdir()
    (folder / "repo" / "tests" / "check").write_text('[ "$(sh f 5 3)" = 8 ]\n')
    return folder


@cache
def bubblewrap_fault() -> str:
    """Says why bubblewrap starts no sandbox here; empty where it does."""
    if BUSYBOX is None or not is_static(BUSYBOX):
        return "there is no static busybox (Debian's busybox-static)"
    return faults()["bubblewrap"]


def is_static(program: str) -> bool:
    """Whether a program needs no libraries."""
    return b"/ld-linux" not in Path(program).read_bytes()[:4096]


def docker_fault() -> str:
    """Says why no daemon can be started here; empty where it can."""
    if importlib.util.find_spec("docker") is None:
        return "the package docker is not installed"
    if os.geteuid() != 0:
        return "a daemon is started by root alone"
    missing = [name for name in ("dockerd", "containerd", "runc", "busybox") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


BWRAP = pytest.mark.skipif(bool(bubblewrap_fault()), reason=f"bubblewrap: {bubblewrap_fault()}")
DOCKERD = pytest.mark.skipif(bool(docker_fault()), reason=f"docker: {docker_fault()}")


@contextmanager
def daemon(folder: Path, root: Path) -> Iterator[str]:
    """A daemon of its own without a network, which has IMAGE. Yields its address."""
    address = f"unix://{folder}/docker.sock"
    options = ["--iptables=false", "--bridge=none", "--storage-driver", "vfs"]
    options += ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    with (folder / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(["dockerd", *options, "-H", address], stdout=log, stderr=log)
    try:
        from mrl.acting.sandboxes.containers import connected

        end = time.monotonic() + START_S
        while True:
            try:
                client = connected(address)
                break
            except SandboxError:
                if process.poll() is not None or time.monotonic() > end:
                    pytest.skip(f"dockerd does not start: {(folder / 'dockerd.log').read_text()[-300:]}")
                time.sleep(0.2)
        archive = folder / "image.tar"
        subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
        client.import_image_from_file(str(archive), *IMAGE.split(":"))
        client.close()
        yield address
    finally:
        process.terminate()
        process.wait(START_S)
