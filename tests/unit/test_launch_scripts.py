"""The start scripts on a node made of stand-ins: `ray`,
`nvidia-smi` and a folder for /dev that are what the test says.
"""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


class Node:
    """A node's PATH and devices; what `ray` was called with is in `calls`."""

    def __init__(self, folder: Path):
        self.bin, self.dev, self.log = folder / "bin", folder / "dev", folder / "calls"
        self.bin.mkdir()
        self.dev.mkdir()
        self.status = folder / "status"
        self.script("ray", f'echo "$@" >>{self.log}\n[ "$1" != status ] || cat {self.status}')

    def script(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def gpus(self, count: int) -> None:
        self.script("nvidia-smi", "\n".join(f"echo 'GPU {i}: NVIDIA H100 (UUID: GPU-{i})'" for i in range(count)))

    def npus(self, count: int) -> None:
        for i in range(count):
            (self.dev / f"davinci{i}").touch()

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        own = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.bin),
            "MRL_DEV": str(self.dev),
            "POLL_S": "0.1",
            "CPUS": "4",
        }
        return subprocess.run(
            [str(LAUNCH / script), *arguments], env=own | {"PORT": "1", "DASHBOARD_PORT": "2"} | environment,
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_npus_are_announced_under_the_name_that_runs_ask_for(node):
    node.npus(16)
    (node.dev / "davinci_manager").touch()  # no device
    done = node.run("start_head.sh")
    assert done.returncode == 0, done.stderr
    assert '--resources {"NPU":16}' in node.calls[0] and "--head" in node.calls[0]


def test_gpus_are_announced_and_arguments_passed_on(node):
    node.gpus(8)
    node.run("start_head.sh", "--block", DEVICES="4")
    assert "--num-gpus 4" in node.calls[0] and node.calls[0].endswith("--block")


def test_a_node_without_accelerators_is_a_cpu_node(node):
    node.run("start_head.sh")
    assert "--num-gpus 0" in node.calls[0] and "--num-cpus 4" in node.calls[0]


def test_a_lost_node_is_missed_within_ten_seconds_unless_the_environment_says_otherwise(node):
    """As GcsHealthCheckManager counts: so many looks in a row without an answer, each with its deadline and a pause."""
    node.script("ray", f"env | grep ^RAY_health_check >>{node.log}")
    node.run("start_head.sh")
    said = dict(line.split("=") for line in node.calls)
    of = {name.removeprefix("RAY_health_check_"): int(value) for name, value in said.items()}
    longest_ms = of["period_ms"] + of["failure_threshold"] * (of["timeout_ms"] + of["period_ms"])
    assert of["failure_threshold"] > 1 and longest_ms < 10_000
    node.log.unlink()
    node.run("start_head.sh", **dict.fromkeys(said, "7"))
    assert dict(line.split("=") for line in node.calls) == dict.fromkeys(said, "7")


def test_a_thread_limit_for_ranks_does_not_shrink_the_node(node):
    # nproc answers OMP_NUM_THREADS where that is set
    done = node.run("start_head.sh", CPUS="", OMP_NUM_THREADS="1")
    assert f"--num-cpus {len(os.sched_getaffinity(0))} " in node.calls[0], done.stderr


def test_devices_that_come_up_late_are_waited_for(node):
    late = node.bin / "late"
    node.script("nvidia-smi", f"[ -e {late} ] || {{ touch {late}; exit 9; }}\necho 'GPU 0: x'; echo 'GPU 1: x'")
    done = node.run(
        "start_worker.sh",
        HEAD="127.0.0.1:1",
        RAY_AUTH_TOKEN="t" * 32,
        DEVICES="2",
        DEVICE_TIMEOUT_S="20",
        HEAD_TIMEOUT_S="0",
    )
    assert late.exists() and "no head answers" in done.stderr  # it got past its devices


@pytest.mark.parametrize("script", ["start_head.sh", "start_worker.sh"])
def test_missing_devices_are_named_with_both_numbers(node, script):
    node.gpus(7)
    done = node.run(script, HEAD="127.0.0.1:1", RAY_AUTH_TOKEN="t" * 32, DEVICES="8", DEVICE_TIMEOUT_S="0")
    assert done.returncode == 4 and "this node shows 7 of 8 cuda devices" in done.stderr and not node.calls


def test_an_unknown_device_is_refused_with_the_list(node):
    done = node.run("start_head.sh", DEVICE="tpu")
    assert done.returncode != 0 and "allowed: cpu, cuda, npu" in done.stderr and not node.calls


def test_the_head_returns_once_every_nodes_devices_have_joined(node):
    node.npus(8)
    node.status.write_text("Usage:\n 0.0/64.0 CPU\n 0.0/16.0 NPU\n")
    done = node.run("start_head.sh", NNODES="2", CLUSTER_TIMEOUT_S="5")
    assert done.returncode == 0 and "has 16 NPU" in done.stdout


def test_a_cluster_that_stays_too_small_is_named(node):
    node.npus(8)
    node.status.write_text(" 0.0/64.0 CPU\n 0.0/8.0 NPU\n")
    done = node.run("start_head.sh", NNODES="2", CLUSTER_TIMEOUT_S="0")
    assert done.returncode == 4 and "has 8 of 16 NPU" in done.stderr


def test_a_worker_wants_a_head_and_a_token(node):
    assert "HEAD=HOST:PORT" in node.run("start_worker.sh").stderr
    done = node.run("start_worker.sh", HEAD="127.0.0.1:1")
    assert done.returncode == 4 and "no token here" in done.stderr


def test_a_worker_joins_with_its_devices(node):
    import socket

    node.gpus(2)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        done = node.run("start_worker.sh", "--block", HEAD=address, RAY_AUTH_TOKEN="t" * 32)
    assert done.returncode == 0, done.stderr
    assert (
        f"start --address {address}" in node.calls[0]
        and "--num-gpus 2" in node.calls[0]
        and node.calls[0].endswith("--block")
    )


def test_a_port_in_use_is_told_before_anything_starts(node):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        done = node.run("start_head.sh", PORT=str(other.getsockname()[1]))
    assert done.returncode == 4 and "is in use" in done.stderr and not node.calls


def test_submitting_is_a_call_of_mrl_submit(node):
    node.script("mrl", f'printf "%s\\n" "$@" >{node.log}')
    node.run(
        "submit.sh", "preset.yaml", "--set", "a=b c", RAY_API="http://h:1", RUNTIME_ENV="env.yaml", AGENT_TIMEOUT_S="5"
    )
    assert node.calls == [
        "submit", "--address", "http://h:1", "--agent-timeout-s", "5", "--runtime-env", "env.yaml", "preset.yaml",
        "--set", "a=b c",
    ]  # fmt: skip
    assert node.run("submit.sh").returncode == 2


def test_the_scripts_are_valid_bash():
    for script in LAUNCH.glob("*.sh"):
        assert subprocess.run(["bash", "-n", str(script)], env=os.environ).returncode == 0


def test_a_head_makes_its_token_in_an_empty_home(node, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    done = node.run("start_head.sh", HOME=str(home))
    token = home / ".ray" / "auth_token"
    assert done.returncode == 0 and len(token.read_text()) == 64 and token.stat().st_mode & 0o077 == 0, done.stderr
    before = token.read_text()
    node.run("start_head.sh", HOME=str(home))
    assert token.read_text() == before


@pytest.mark.parametrize("home", ["", "/proc/none"])
@pytest.mark.parametrize("script", ["start_head.sh", "start_worker.sh"])
def test_without_a_place_for_the_token_one_message_says_so(node, script, home):
    done = node.run(script, HOME=home, HEAD="127.0.0.1:1")
    assert done.returncode == 4 and done.stderr.count("\n") == 1 and "RAY_AUTH_TOKEN" in done.stderr
    assert not node.calls
    assert node.run("start_head.sh", HOME=home, RAY_AUTH_TOKEN="t" * 32).returncode == 0


@pytest.mark.parametrize("name", ["PORT", "DASHBOARD_PORT"])
def test_a_port_among_those_of_rays_workers_is_refused_unless_these_are_named(node, name):
    done = node.run("start_head.sh", **{name: "10500"})
    assert done.returncode == 4 and f"{name}=10500 is among the ports of Ray's workers" in done.stderr
    assert node.run("start_head.sh", "--min-worker-port", "30000", **{name: "10500"}).returncode == 0


def test_a_port_in_use_is_told_under_its_name(node):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = node.run("start_head.sh", DASHBOARD_PORT=str(taken.getsockname()[1]))
    assert done.returncode == 4 and "another user" in done.stderr and "set DASHBOARD_PORT" in done.stderr


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"PORT": "abc"}, "PORT=abc: a whole number from 1 to 65535 is wanted"),
        ({"DASHBOARD_PORT": "70000"}, "DASHBOARD_PORT=70000: a whole number from 1 to 65535 is wanted"),
        ({"PORT": "8266", "DASHBOARD_PORT": "8266"}, "PORT and DASHBOARD_PORT are both 8266: two are wanted"),
        ({"CPUS": "x"}, "CPUS=x: a whole number from 0 to 100000 is wanted"),
        ({"DEVICES": "two"}, "DEVICES=two: a whole number from 0 to 100000 is wanted"),
        ({"TEMP": "here"}, "TEMP=here: an absolute path is wanted"),
        ({"TEMP": "/proc/none"}, "TEMP=/proc/none cannot be written: another user's, perhaps; set TEMP to a folder"),
        ({"TEMP": "/tmp/" + "a" * 60}, "of 65 characters, and Ray's sockets below it allow 40"),
    ],
)
def test_a_setting_that_cannot_be_is_one_message(node, settings, said):
    done = node.run("start_head.sh", **settings)
    assert done.returncode == 4 and done.stderr.count("\n") == 1 and said in done.stderr, done.stderr
    assert not node.calls


def test_a_token_that_cannot_be_read_is_told_where_it_is(node, tmp_path):
    (tmp_path / ".ray" / "auth_token").mkdir(parents=True)
    for script in ("start_head.sh", "start_worker.sh"):
        done = node.run(script, HOME=str(tmp_path), HEAD="127.0.0.1:1")
        assert done.returncode == 4 and done.stderr.count("\n") == 1 and not node.calls
        assert f"{tmp_path}/.ray/auth_token cannot be read" in done.stderr


def test_a_head_is_stopped_and_nothing_else(node, tmp_path):
    session = tmp_path / "ray" / "session_1" / "logs"
    command = ["bash", "-c", "sleep 60; exit", f"--log_dir={session}"]
    head = subprocess.Popen(command)
    other = subprocess.Popen([*command[:3], f"--log_dir={tmp_path}/ray-other/session_1"])
    done = node.run("stop_head.sh", TEMP=str(tmp_path / "ray"))
    try:
        assert done.returncode == 0 and head.wait(10) != 0 and other.poll() is None, done.stderr
        assert node.run("stop_head.sh", TEMP=str(tmp_path / "ray")).returncode == 4
    finally:
        for process in (head, other):
            process.kill()
            process.wait()


def test_a_raylet_is_stopped_first_and_its_head_last(node, tmp_path):
    """What takes leave of a head that has gone waits until it is killed."""
    session, order = f"--log_dir={tmp_path}/ray/session_1/logs", tmp_path / "order"
    names = ("/lib/python3.11/ray/gcs_server", "/bin/python monitor.py", "/lib/python3.11/ray/raylet/raylet")
    script = "trap 'echo $0 >>{}; exit' TERM; touch {}; sleep 60 & wait"
    processes = []
    for number, name in enumerate(names):
        ready = tmp_path / f"ready{number}"
        processes.append(subprocess.Popen(["bash", "-c", script.format(order, ready), name, session]))
        while not ready.exists():
            time.sleep(0.01)
    try:
        done = node.run("stop_head.sh", TEMP=str(tmp_path / "ray"))
        assert done.returncode == 0 and order.read_text().split("\n")[:-1] == list(reversed(names)), done.stderr
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_what_does_not_end_is_killed(node, tmp_path):
    session, ready = f"--log_dir={tmp_path}/ray/session_1/logs", tmp_path / "ready"
    deaf = subprocess.Popen(["bash", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done", "x", session])
    while not ready.exists():
        time.sleep(0.01)
    done = node.run("stop_head.sh", TEMP=str(tmp_path / "ray"), STOP_TIMEOUT_S="1")
    assert done.returncode == 0 and deaf.wait(10) == -signal.SIGKILL
