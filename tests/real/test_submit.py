"""`mrl submit` with a real head: the driver's exit status comes back, and a stopped job has saved."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from deadlines import END_S, RUN_S
from test_runs import ray_head
from world import PRESET, ROOT, make_world, metrics, overrides

pytestmark = [pytest.mark.real, pytest.mark.long]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    with ray_head(tmp_path_factory.mktemp("ray")) as environment:
        yield environment | {"RAY_AUTH_MODE": "token"}


def submit(head: dict[str, str], world: Path, run_dir: Path, **settings) -> subprocess.Popen:
    words = [
        "mrl",
        "submit",
        "--address",
        head["RAY_API"],
        str(PRESET),
        "--run-dir",
        str(run_dir),
        *overrides(world, **settings),
    ]
    return subprocess.Popen(words, cwd=ROOT, env=head, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_doctor_reaches_a_head_with_the_token_and_not_without(head):
    def probe(**environment: str) -> tuple[int, dict]:
        words = ["mrl", "doctor", "--json", "--address", f"127.0.0.1:{head['PORT']}"]
        done = subprocess.run(words, cwd=ROOT, env=head | environment, capture_output=True, text=True, timeout=END_S)
        (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "ray cluster"]
        return done.returncode, check

    _, reached = probe()
    assert reached["status"] == "ok" and "'CPU': 2.0" in reached["found"], reached
    code, refused = probe(RAY_AUTH_TOKEN="0" * 64)
    assert code == 4 and refused["status"] == "failure" and "token" in refused["cure"], refused


def test_nodes_of_a_cluster_are_looked_at_by_the_doctor_and_by_the_ladder(head):
    """One node here; what two may have against each other: tests/unit/test_node_checks.py."""
    address, found = f"127.0.0.1:{head['PORT']}", "1 nodes: of one kind"
    words = ["mrl", "doctor", "--json", "--device", "cpu", "--address", address, "--nnodes", "2"]
    done = subprocess.run(words, cwd=ROOT, env=head, capture_output=True, text=True, timeout=RUN_S)
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "between nodes"]
    assert check["status"] == "ok" and check["found"].startswith(found), check
    words = ["bash", "scripts/hardware/run.sh", "cpu", "nodes"]
    done = subprocess.run(
        words, cwd=ROOT, env=head | {"RAY_ADDRESS": address}, capture_output=True, text=True, timeout=RUN_S
    )
    line = json.loads(done.stdout)
    assert (line["check"], line["status"], line.get("nodes")) == ("nodes", "ok", 1), line


def test_the_drivers_exit_status_comes_back(head, tmp_path):
    world = make_world(tmp_path / "world")
    (world / "data" / "train.parquet").write_bytes(b"no parquet")
    job = submit(head, world, tmp_path / "run")
    said, _ = job.communicate(timeout=RUN_S)
    assert job.returncode == 3, said  # data
    assert "train.parquet" in said and not (tmp_path / "run").exists()


def test_a_signal_stops_the_job_where_it_can_be_resumed(head, tmp_path):
    world, run_dir = make_world(tmp_path / "world"), tmp_path / "run"
    job = submit(head, world, run_dir, trainer__total_training_steps=500)
    deadline = time.monotonic() + RUN_S
    # the first row is that of the untrained model
    while not any(row["training/global_step"] >= 1 for row in metrics(run_dir)):
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()[0][-3000:]
        time.sleep(0.5)
    job.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=RUN_S)
    assert job.returncode == 5, said[-3000:]
    assert "stopping job" in said
    newest = metrics(run_dir)[-1]["training/global_step"]
    assert (run_dir / "checkpoints" / f"step-{newest}").is_dir(), os.listdir(run_dir / "checkpoints")
