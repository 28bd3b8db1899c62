"""Whole runs over several nodes, which are namespaces of this machine, have the bits of the same run on one; what goes
wrong between nodes is said. Needs root.

The run is three steps of the tiny MoE with two ranks (TP2, EP2) and two engines: on two nodes ranks are on one and
engines on the other, on four each process has a node.
"""

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from network import SUBNET, Node, network, refusal
from ray_nodes import DASHBOARD, RayNodes, wait_for
from world import PRESET, ROOT, make_world, overrides

from mrl.checkpoint.step_folders import checkpoint_steps
from mrl.cluster.process_logs import log_file
from mrl.errors import EnvironmentFault, Interrupted
from mrl.record.run_dir import METRICS, read_metrics
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

pytestmark = [
    pytest.mark.real, pytest.mark.long, pytest.mark.timeout(3600),
    pytest.mark.skipif(refusal() is not None, reason=str(refusal())),
]  # fmt: skip

STEPS = 3
CPUS = {1: [4], 2: [2, 2], 4: [1, 1, 1, 1]}  # of each node; Ray says which node gets ranks and which engines
RUN_S = 900.0  # of one run, on a machine that others use
NOTICED_S = 10.0
REMOTE = "reshard/bytes_remote"  # with one node there are none
GOES_ON = re.compile(r"the ranks are started again|engines? .*lost: |supervisor: .*; start \d")
SOON_MISSED = {"trainer__save_freq": 1, "cluster__step_timeout_s": 120, "rollout__generate_timeout_s": 120}
RAY_PORTS = (
    "--node-manager-port=6380",
    "--object-manager-port=6381",
    "--dashboard-agent-grpc-port=6382",
    "--runtime-env-agent-port=6383",
    "--metrics-export-port=6384",
    "--min-worker-port=10002",
    "--max-worker-port=10199",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world") / "world")


@pytest.fixture(scope="module")
def on_one_node(world, tmp_path_factory) -> Callable[[str], Path]:
    """The directory of the run on one node, by the path of its weight sync; made once."""

    @cache
    def made(path: str) -> Path:
        run = tmp_path_factory.mktemp("one") / path
        with cluster(1) as rays:
            train(rays, run, settings(world, 1, reshard__path=path))
        return run

    return made


def settings(world: Path, nodes: int, steps: int = STEPS, **more: Any) -> list[str]:
    """Arguments of the run."""
    own = {
        "trainer__total_training_steps": steps,
        "trainer__save_freq": STEPS,
        "trainer__test_freq": -1,
        "trainer__val_before_train": False,
        "cluster__nnodes": nodes,
        "cluster__n_gpus_per_node": 4 // nodes,
        "cluster__cpus_per_actor": 1,
        "rollout__num_engines": 2,
        "trainer__logger": ["console"],
    }
    return overrides(world, **(own | more))


@contextmanager
def cluster(nodes: int, spare: int = 0, **options: Any) -> Iterator[RayNodes]:
    """A Ray cluster on so many nodes, and `spare` ones without Ray. Ray's sockets need a short folder."""
    folder = Path(tempfile.mkdtemp(prefix="mrl-nodes-", dir="/tmp"))
    try:
        with network(nodes + spare, folder) as net:
            rays = RayNodes(net, CPUS[nodes], **options)
            rays.start()
            yield rays
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end_of(process: subprocess.Popen) -> tuple[int, str]:
    """Exit code and output of a command of the head."""
    said, _ = process.communicate(timeout=RUN_S)
    return process.returncode, said


def train(rays: RayNodes, run: Path, arguments: list[str]) -> None:
    """Runs to a good end."""
    code, said = end_of(rays.mrl("train", str(PRESET), "--run-dir", str(run), *arguments))
    assert code == 0, said[-4000:]


def difference(one: Path, other: Path) -> str | None:
    """The first difference of two runs, clocks aside; None: no bit."""
    rows = [
        [{name: value for name, value in row.items() if name != REMOTE} for row in read_metrics(run / METRICS)]
        for run in (one, other)
    ]
    checkpoints = [run / "checkpoints" / f"step-{STEPS}" for run in (one, other)]
    return metrics_difference(*rows) or checkpoint_difference(*checkpoints)


@pytest.mark.parametrize("path", ["fast", "slow"])
@pytest.mark.parametrize("nodes", [2, 4])
def test_a_run_over_several_nodes_has_the_bits_of_the_one_on_one(on_one_node, world, tmp_path, nodes, path):
    with cluster(nodes) as rays:
        train(rays, tmp_path / "run", settings(world, nodes, reshard__path=path))
        sent = [node.sent_bytes for node in rays.net.nodes]
    remote = [row[REMOTE] for row in read_metrics(tmp_path / "run" / METRICS) if REMOTE in row]
    print(f"bytes that each node sent: {sent}; of weight syncs, as the run counts them: {remote}")
    assert difference(on_one_node(path), tmp_path / "run") is None
    if path == "fast":
        assert len(remote) == STEPS and min(remote) > 0


def test_a_job_that_is_handed_in_from_another_node_is_the_same_run(on_one_node, world, tmp_path):
    run = tmp_path / "run"
    with cluster(2) as rays:
        api = f"http://{rays.head.address}:{DASHBOARD}"
        words = ["submit", "--address", api, str(PRESET), "--run-dir", str(run), *settings(world, 2)]
        code, said = end_of(rays.mrl(*words, node=rays.net.nodes[1], cwd=ROOT))
    assert code == 0, said[-4000:]
    assert difference(on_one_node("fast"), run) is None


def test_a_run_directory_that_is_another_folder_on_each_node_is_refused_before_a_model_is_loaded(world):
    with cluster(4) as rays:
        run = rays.net.own / "run"
        code, said = end_of(rays.mrl("train", str(PRESET), "--run-dir", str(run), *settings(world, 4)))
        for node in rays.net.nodes:
            held = node.run("find", str(run), "-name", "*.safetensors", "-o", "-name", "manifest.json", check=False)
            assert not held.stdout
    assert code == EnvironmentFault.exit_code and f"{run} is not the same folder on every node" in said


def test_another_version_of_mrl_on_a_node_is_refused_by_address_before_anything_is_trained(world, tmp_path):
    shutil.copytree(ROOT / "mrl", tmp_path / "other" / "mrl")
    with (tmp_path / "other" / "mrl" / "units.py").open("a") as file:
        file.write("OTHER = True\n")
    with cluster(2, environments={1: {"PYTHONPATH": str(tmp_path / "other")}}) as rays:
        run = tmp_path / "run"
        code, said = end_of(rays.mrl("train", str(PRESET), "--run-dir", str(run), *settings(world, 2)))
    assert code == EnvironmentFault.exit_code
    assert "the nodes do not run the same software" in said and f" on {SUBNET}." in said
    assert not (run / METRICS).exists() or not read_metrics(run / METRICS)


def test_a_node_that_dies_ends_the_run_with_the_name_of_a_process_that_was_on_it(world, tmp_path):
    run = tmp_path / "run"
    arguments = settings(world, 2, steps=500, **SOON_MISSED, trainer__restart_limit=0)  # else the node is waited for
    with cluster(2) as rays:
        process = rays.mrl("train", str(PRESET), "--run-dir", str(run), *arguments)
        wait_for(lambda: checkpoint_steps(run / "checkpoints") or process.poll() is not None, RUN_S, "a first step")
        lost = logs_of(rays.net.nodes[1], run)
        died = time.monotonic()
        rays.net.nodes[1].end()
        code, said = end_of(process)
    seconds = time.monotonic() - died
    print(f"ended after {seconds:.1f} s: {said.splitlines()[-1]}; the node had {sorted(lost)}")
    named = re.search(r"mrl train: .*?((?:rank|engine|scorer) \d) died", said)
    assert code == Interrupted.exit_code and named, said[-4000:]
    assert log_file(named[1]) in lost
    assert seconds < NOTICED_S


def logs_of(node: Node, run: Path) -> set[str]:
    """The files in logs/ that processes of a node write to: which ranks, engines and scorers it has."""
    found = set()
    for process in psutil.Process(node.pid).children(recursive=True):
        with suppress(psutil.Error):  # one that has just ended
            found |= {Path(file.path).name for file in process.open_files() if Path(file.path).parent == run / "logs"}
    return found


def test_a_node_that_dies_and_is_replaced_costs_no_bit(on_one_node, world, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    with cluster(2, spare=1) as rays, log.open("w") as said, ThreadPoolExecutor() as beside:
        arguments = ["--restarts", "2", "--run-dir", str(run), *settings(world, 2, **SOON_MISSED)]
        process = rays.mrl("train", str(PRESET), *arguments, stdout=said)

        def over() -> bool:
            return process.poll() is not None

        wait_for(lambda: checkpoint_steps(run / "checkpoints") or over(), RUN_S, "a first step")
        died = time.monotonic()
        rays.net.nodes[1].end()
        joins = beside.submit(rays.start_node, rays.net.nodes[2], rays.cpus[1])
        wait_for(lambda: GOES_ON.search(log.read_text()) or over(), RUN_S, "a word of it")
        noticed = time.monotonic() - died
        joins.result()
        assert process.wait(RUN_S) == 0, log.read_text()[-4000:]
    print(f"noticed after {noticed:.1f} s")
    assert GOES_ON.search(log.read_text()) and noticed < NOTICED_S
    assert difference(on_one_node("fast"), run) is None


def test_ports_that_are_closed_between_nodes_end_the_start_with_the_address_and_port(world, tmp_path):
    """Between nodes only ports below 32768 are open, to which Ray is confined: gloo listens on the kernel's ephemeral
    ones.
    """
    rules = (("sport", "1-32767", "lookup", "main"), ("dport", "32768-65534", "unreachable"))
    more = {"reshard__timeout_s": 20, "cluster__start_timeout_s": 60}
    with cluster(2, arguments=RAY_PORTS) as rays:
        for node in rays.net.nodes:
            for number, rule in enumerate(rules):
                of_nodes = ("to", f"{SUBNET}.0/24", "ipproto", "tcp")
                node.run("ip", "rule", "add", "pref", str(100 + number), *of_nodes, *rule)
        run = str(tmp_path / "run")
        code, said = end_of(rays.mrl("train", str(PRESET), "--run-dir", run, *settings(world, 2, **more)))
    assert code == Interrupted.exit_code and re.search(rf"did not meet the other \d at {SUBNET}\.\d:\d+", said)
