"""Ray's temporary folders: a run removes its own however it ends, and those of killed ones at the next start."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.cluster import ray_cluster, ray_folder
from mrl.config.deployment import Deployment
from mrl.config.load import load_config
from mrl.errors import EnvironmentFault
from mrl.record.process_mark import ProcessMark


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_folder, "PLACE", tmp_path)
    return tmp_path


def folder_of(place, name: str, **changes):
    folder = place / f"mrl-ray-{name}"
    (folder / "session_1" / "spilled").mkdir(parents=True)
    (folder / "owner.json").write_text(json.dumps(ProcessMark.own().to_json() | changes))
    return folder


def test_what_a_killed_run_left_goes_at_the_next_start_and_what_a_living_one_has_stays(place):
    program = (
        "import time; from pathlib import Path; from mrl.cluster import ray_folder\n"
        f"ray_folder.PLACE = Path({str(place)!r})\n"
        "with ray_folder.ray_folder() as folder: print(folder.name, flush=True); time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    folder = place / run.stdout.readline().strip()
    with ray_folder.ray_folder() as own:
        ray_folder.remove_folders_of_the_dead()
        assert folder.is_dir() and own.is_dir()
        run.send_signal(signal.SIGKILL)
        run.wait()
        ray_folder.remove_folders_of_the_dead()
        assert own.is_dir() and not folder.exists()
    assert not list(place.iterdir())


def test_only_folders_of_dead_processes_of_this_user_and_host_go(place, monkeypatch):
    dead = {"started": "1"}  # of another process that had this number
    gone = folder_of(place, "dead", **dead)
    kept = [
        folder_of(place, "of-another-kernel", **dead, boot="other"),
        folder_of(place, "of-another-container", **dead, pid_space=1),
        folder_of(place, "of-another-host", **dead, host="other"),
        folder_of(place, "alive"),
    ]
    (folder_of(place, "nobody's") / "owner.json").unlink()
    (folder_of(place, "torn") / "owner.json").write_text('{"host": ')
    (place / "mrl-ray-link").symlink_to(folder_of(place, "target", **dead) / "session_1")
    other = place / "other-folder"
    folder_of(place, "x", **dead).rename(other)
    kept += [place / "mrl-ray-nobody's", place / "mrl-ray-torn", place / "mrl-ray-link", other]
    ray_folder.remove_folders_of_the_dead()
    assert not gone.exists() and not (place / "mrl-ray-target").exists()
    assert all(folder.is_symlink() or folder.is_dir() for folder in kept)
    monkeypatch.setattr(ray_folder.os, "getuid", lambda: os.geteuid() + 1)
    strangers = folder_of(place, "strangers", **dead)
    ray_folder.remove_folders_of_the_dead()
    assert strangers.is_dir()


@pytest.mark.parametrize("fails", [False, True])
def test_a_cluster_of_its_own_has_a_folder_for_as_long_as_ray_runs(place, monkeypatch, fails):
    """Ray is stopped before its folder goes, also where it never started; dead runs' folders are gone before."""
    events, left = [], folder_of(place, "dead", started="1")

    def init(**options):
        assert os.listdir(options["_temp_dir"]) == ["owner.json"] and not left.exists()
        if fails:
            raise RuntimeError("no port")

    def shutdown():
        events.append(len(list(place.iterdir())))

    monkeypatch.setattr(
        ray_cluster, "ray",
        SimpleNamespace(init=init, shutdown=shutdown, cluster_resources=dict, exceptions=ray_cluster.ray.exceptions),
    )  # fmt: skip
    monkeypatch.setattr(ray_cluster, "ray_address", lambda cluster: None)
    monkeypatch.setattr(ray_cluster, "check_size", lambda *_, **__: None)
    joined = ray_cluster.ray_cluster(Deployment.of(load_config("parallel_configs/tiny-moe/cpu.yaml").config))
    with pytest.raises(EnvironmentFault, match="no port") if fails else nullcontext(), joined:
        assert len(list(place.iterdir())) == 1
    assert events == [1] and not list(place.iterdir())


def test_a_folder_in_which_something_still_writes_says_whose_it_is(place, monkeypatch):
    """A process of Ray that outlives its head: what it leaves is removed by a later start."""
    remove, busy = ray_folder._remove_entry, [True]

    def still_written(entry):
        remove(entry)
        if busy[0]:
            (entry.parent / "session_latest").mkdir()

    monkeypatch.setattr(ray_folder, "_remove_entry", still_written)
    with ray_folder.ray_folder() as folder:
        (folder / "session_1").mkdir()
    assert json.loads((folder / "owner.json").read_text())["pid"] == os.getpid()
    busy[0] = False
    monkeypatch.setattr(ProcessMark, "lives", lambda mark: False)
    ray_folder.remove_folders_of_the_dead()
    assert not folder.exists()


def test_a_process_that_ends_at_once_removes_its_own_folder_and_no_other(place):
    own, others = folder_of(place, "own"), folder_of(place, "others", pid=1)
    silent = place / "mrl-ray-silent"
    silent.mkdir()
    ray_folder.remove_own_folders()
    assert not own.exists() and others.exists() and silent.exists()


@pytest.mark.parametrize("user", ["somebody", "DOMAIN\\\\some:body"])
def test_the_folder_of_torchs_compiler_goes_where_it_is_empty_and_stays_where_it_is_a_cache(
    tmp_path, monkeypatch, user
):
    """By the name that torch itself gives it."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setattr(ray_folder, "PLACE", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", user)
    cache = Path(default_cache_dir())
    assert cache.parent == tmp_path
    cache.mkdir()
    with ray_folder.ray_folder():
        assert cache.is_dir()
    assert not cache.exists()
    (cache / "kernel").mkdir(parents=True)
    with ray_folder.ray_folder():
        pass
    assert (cache / "kernel").is_dir()
