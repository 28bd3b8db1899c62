"""What is installed without a clone: presets and the commit are in the wheel."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools.build_meta import build_{0}; print(build_{0}({1!r}))"
MRL = (sys.executable, "-P", "-c", "from mrl.cli.main import main; main()")


def ran(*command: str, cwd: Path, **environment: str) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | environment
    done = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> tuple[Path, str]:
    """The folder of an unpacked wheel, and the commit of the clone that it was built from."""
    clone, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("installed")
    for name in ("mrl", "parallel_configs", "setup.py", "pyproject.toml", "MANIFEST.in"):
        (clone / name).symlink_to(ROOT / name)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")
    ran("git", "init", "-q", cwd=clone)
    (clone / "file").touch()
    ran("git", "add", "file", cwd=clone)
    ran(*git, "commit", "-q", "-m", "first", cwd=clone)
    (wheel,) = ran(sys.executable, "-c", BUILD.format("wheel", str(out)), cwd=clone).splitlines()[-1:]
    with zipfile.ZipFile(out / wheel) as file:
        file.extractall(out)
    return out, ran("git", "rev-parse", "--short=12", "HEAD", cwd=clone).strip()


def test_an_installed_mrl_says_its_commit(installed, tmp_path):
    folder, commit = installed
    assert ran(*MRL, "--version", cwd=tmp_path, PYTHONPATH=str(folder)).startswith(f"mrl 0.1.0+g{commit}, Python")


def test_every_preset_is_in_the_wheel_and_found_by_its_name(installed, tmp_path):
    folder, _ = installed
    presets = {path.relative_to(ROOT) for path in (ROOT / "parallel_configs").rglob("*.yaml")}
    assert presets and {path.relative_to(folder / "mrl") for path in (folder / "mrl").rglob("*-*/*.yaml")} <= presets
    assert all((folder / "mrl" / path).read_bytes() == (ROOT / path).read_bytes() for path in presets)
    out = ran(*MRL, "plan", "parallel_configs/qwen3-30b-a3b/h100-1x8.yaml", cwd=tmp_path, PYTHONPATH=str(folder))
    assert "fits" in out


def test_a_wheel_can_be_made_of_a_source_distribution(installed, tmp_path):
    clone = installed[0].parent / "clone0"
    (made,) = ran(sys.executable, "-c", BUILD.format("sdist", str(tmp_path)), cwd=clone).splitlines()[-1:]
    with tarfile.open(tmp_path / made) as file:
        file.extractall(tmp_path)
    source = tmp_path / made.removesuffix(".tar.gz")
    (wheel,) = ran(sys.executable, "-c", BUILD.format("wheel", str(tmp_path)), cwd=source).splitlines()[-1:]
    with zipfile.ZipFile(tmp_path / wheel) as file:
        names = file.namelist()
    assert "mrl/parallel_configs/tiny-moe/cpu.yaml" in names and "mrl/config/recipes/gspo.yaml" in names


def test_a_folder_that_is_no_clone_has_no_commit(monkeypatch, tmp_path):
    """Such as site-packages of a virtual environment within somebody else's repository."""
    from mrl.platforms import source

    ran("git", "init", "-q", cwd=tmp_path)
    monkeypatch.setattr(source, "PACKAGE", tmp_path / "lib" / "site-packages" / "mrl")
    source._commit.cache_clear()
    try:
        assert source.own_version() == "0.1.0"
    finally:
        source._commit.cache_clear()
