"""Whole runs over several nodes, which are namespaces of this machine, against the same run on one: see
scripts/evidence/nodes.sh.

python scripts/evidence/nodes.py PART --work FOLDER --json FILE

one, two, four    three steps of the tiny MoE (two ranks, two engines), by the fast and the slow path, on so many nodes:
                  ranks on one and engines on the other, or one process a node. `one` comes first: the others are
                  held against it, every metric but clocks, and every byte of the last checkpoint
submit            the run as a job, handed in from the second node
before            the run on two nodes by the code of an earlier commit, held against `two`, which comes first
own               a run directory that every node has for itself
lost              the second node dies in the middle of a run
replaced          it does so below `mrl train --restarts`, and a third one joins; held against `one`
version           another mrl on the second node
closed            a firewall between the nodes that lets Ray's ports through, and not those of gloo
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mrl.checkpoint.step_folders import checkpoint_steps
from mrl.record.run_dir import METRICS, read_metrics
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
sys.path.append(str(ROOT / "scripts" / "nodes"))
sys.path.append(str(ROOT / "scripts" / "evidence"))
sys.path.append(str(ROOT / "tests" / "real"))
from compare_commits import Tree, checked_out, commit_of, metric_differences, tensor_differences  # noqa: E402
from network import SUBNET, network  # noqa: E402
from ray_nodes import DASHBOARD, RayNodes, wait_for  # noqa: E402
from stamp import facts  # noqa: E402
from world import PRESET, make_world, overrides  # noqa: E402

STEPS = 3
BEFORE = "8480244"  # before the house was said plainly
REMOTE = "reshard/bytes_remote"
CPUS = {1: [4], 2: [2, 2], 4: [1, 1, 1, 1]}  # of each node; Ray says which node gets ranks and which engines
RUN_S = 240.0
GOES_ON = re.compile(r"the ranks are started again|engines? .*lost: |supervisor: .*; start \d")
RAY_PORTS = (
    "--node-manager-port=6380",
    "--object-manager-port=6381",
    "--dashboard-agent-grpc-port=6382",
    "--runtime-env-agent-port=6383",
    "--metrics-export-port=6384",
    "--min-worker-port=10002",
    "--max-worker-port=10199",
)


def settings(world: Path, nodes: int, steps: int = STEPS, **more: Any) -> list[str]:
    """Arguments of the run: two ranks (TP2, EP2) and two engines."""
    own = {
        "trainer.total_training_steps": steps,
        "trainer.save_freq": STEPS,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "cluster.nnodes": nodes,
        "cluster.n_gpus_per_node": 4 // nodes,
        "cluster.cpus_per_actor": 1,
        "rollout.num_engines": 2,
        "trainer.logger": ["console"],
    }
    return overrides(world, **({key.replace(".", "__"): value for key, value in own.items()} | more))


@contextmanager
def cluster(nodes: int, spare: int = 0, **options: Any):
    """A Ray cluster on so many nodes, and `spare` ones without Ray. What it writes below its folder goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="mrl-nodes-", dir="/tmp"))
    try:
        with network(nodes + spare, folder) as net:
            rays = RayNodes(net, CPUS[nodes], **options)
            rays.start()
            yield rays
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end_of(process: subprocess.Popen) -> tuple[int, str]:
    """Exit status and output of a command of the head; its node goes with the network when it does not end in time."""
    said, _ = process.communicate(timeout=RUN_S)
    return process.returncode, said


def train(rays: RayNodes, run: Path, arguments: list[str], preset: Path = PRESET) -> str:
    """Output of a run that ends well."""
    code, said = end_of(rays.mrl("train", str(preset), "--run-dir", str(run), *arguments))
    if code:
        raise SystemExit(f"the run ended with {code}:\n{said[-4000:]}\n{logs_of(run)}")
    return said


def logs_of(run: Path) -> str:
    """The ends of what the processes of a run wrote."""
    return "\n".join(
        f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in sorted((run / "logs").glob("*.log"))
    )


def whole_runs(work: Path, nodes: int) -> dict[str, Any]:
    """Runs by both paths, each against that of one node."""
    world, found = world_of(work), {}
    for path in ("fast", "slow"):
        run = emptied(work / f"{nodes}-{path}")
        with cluster(nodes) as rays:
            before = [node.sent_bytes for node in rays.net.nodes]
            began = time.monotonic()
            said = train(rays, run, settings(world, nodes, reshard__path=path))
            seconds = time.monotonic() - began
            sent = [node.sent_bytes - count for node, count in zip(rays.net.nodes, before, strict=True)]
        found[path] = {
            "seconds": round(seconds, 1),
            "sent_bytes": sent,
            "pairs": pairs_of(said),
            "lines": len(read_metrics(run / METRICS)),
        }
        if nodes > 1:
            found[path]["bytes_remote"] = remote_bytes(run)
            found[path]["difference"] = difference(work / f"1-{path}", run)
    return found


def pairs_of(said: str) -> str | None:
    """Which transports the run says that it uses."""
    match = re.search(r"weight sync: (.*)", said)
    return match[1] if match else None


def difference(one: Path, other: Path) -> str | None:
    """The first difference of two runs; None: no bit. What leaves a node is none: with one node nothing does."""
    rows = [
        [{k: v for k, v in row.items() if k != REMOTE} for row in read_metrics(run / METRICS)] for run in (one, other)
    ]
    checkpoints = [run / "checkpoints" / f"step-{STEPS}" for run in (one, other)]
    return metrics_difference(*rows) or checkpoint_difference(*checkpoints)


def remote_bytes(run: Path) -> list[float]:
    """Bytes of each weight sync that left a node, as the run counts them."""
    return [row[REMOTE] for row in read_metrics(run / METRICS) if REMOTE in row]


def world_of(work: Path) -> Path:
    """Model, tokenizer and data, made once."""
    world = work / "world"
    return world if world.exists() else make_world(world)


def submitted(work: Path) -> dict[str, Any]:
    """The run as a job, handed in from the second node; it is one node's run again."""
    run = emptied(work / "submitted")
    with cluster(2) as rays:
        api = f"http://{rays.head.address}:{DASHBOARD}"
        words = ["submit", "--address", api, str(PRESET), "--run-dir", str(run), *settings(world_of(work), 2)]
        began = time.monotonic()
        code, said = end_of(rays.mrl(*words, node=rays.net.nodes[1], cwd=ROOT))
    return {
        "exit_code": code,
        "seconds": round(time.monotonic() - began, 1),
        "pairs": pairs_of(said),
        "said": last_lines(said),
        "difference": difference(work / "1-fast", run) if code == 0 else "no run",
    }


def earlier_code(work: Path) -> dict[str, Any]:
    """The run on two nodes by the code of an earlier commit: what it has otherwise, of metrics that both write."""
    run = emptied(work / "before")
    with tempfile.TemporaryDirectory() as folder, checked_out(BEFORE, Path(folder, "code")) as code:
        Tree(code, Path(folder, "out")).prepare()
        with cluster(2, code=code) as rays:
            train(rays, run, settings(world_of(work), 2), code / PRESET.relative_to(ROOT))
    runs = run, work / "2-fast"
    differences = [*metric_differences(*(read_metrics(each / METRICS) for each in runs), tolerance=0.0)]
    return {
        "before": commit_of(BEFORE),
        "lines": len(read_metrics(run / METRICS)),
        "bytes_remote": remote_bytes(run),
        "differences": [*differences, *tensor_differences(*runs, tolerance=0.0)],
    }


def own_folders(work: Path) -> dict[str, Any]:
    """A run directory that is another one on each node: told before a model is loaded."""
    with cluster(4) as rays:
        run = rays.net.own / "run"
        code, said = end_of(rays.mrl("train", str(PRESET), "--run-dir", str(run), *settings(world_of(work), 4)))
        held = [
            node.run("find", str(run), "-name", "*.safetensors", "-o", "-name", "manifest.json", check=False)
            for node in rays.net.nodes
        ]
    return {
        "exit_code": code,
        "said": last_lines(said.replace(str(run), "RUN")),
        "files": [sorted(Path(f).name for f in found.stdout.split()) for found in held],
    }


def lost(work: Path) -> dict[str, Any]:
    """The second node dies after a step; what the run says, and how soon."""
    run, world = emptied(work / "lost"), world_of(work)
    more = {"trainer__save_freq": 1, "cluster__step_timeout_s": 120, "rollout__generate_timeout_s": 120}
    more["trainer__restart_limit"] = 0  # else the node is waited for
    with cluster(2) as rays:
        process = rays.mrl("train", str(PRESET), "--run-dir", str(run), *settings(world, 2, steps=500, **more))
        wait_for(
            lambda: len(checkpoint_steps(run / "checkpoints")) > 0 or process.poll() is not None, RUN_S, "a first step"
        )
        died = time.monotonic()
        rays.net.nodes[1].end()
        code, said = end_of(process)
    return {"exit_code": code, "seconds": round(time.monotonic() - died, 1), "said": last_lines(said)}


def replaced(work: Path) -> dict[str, Any]:
    """The second node dies after a step and another one joins: seconds until the run says so, and until its next step.

    The run goes on inside itself, or as its next start; whichever, it ends as the one of one node.
    """
    run, world = emptied(work / "replaced"), world_of(work)
    more = {"trainer__save_freq": 1, "cluster__step_timeout_s": 120, "rollout__generate_timeout_s": 120}
    log = work / "replaced.log"
    with cluster(2, spare=1) as rays, log.open("w") as said, ThreadPoolExecutor() as beside:
        arguments = ["--restarts", "2", "--run-dir", str(run), *settings(world, 2, **more)]
        process = rays.mrl("train", str(PRESET), *arguments, stdout=said)

        def over() -> bool:
            return process.poll() is not None

        wait_for(lambda: checkpoint_steps(run / "checkpoints") or over(), RUN_S, "a first step")
        steps = len(read_metrics(run / METRICS))
        died = time.monotonic()
        rays.net.nodes[1].end()
        joins = beside.submit(rays.start_node, rays.net.nodes[2], rays.cpus[1])
        wait_for(lambda: GOES_ON.search(log.read_text()) or over(), RUN_S, "a word of it")
        noticed = time.monotonic()
        wait_for(lambda: len(read_metrics(run / METRICS)) > steps or over(), RUN_S, "the next step")
        stood = time.monotonic()
        joins.result()
        code = process.wait(RUN_S)
    return {
        "exit_code": code,
        "noticed_s": round(noticed - died, 1),
        "next_step_s": round(stood - died, 1),
        "said": [line for line in log.read_text().splitlines() if GOES_ON.search(line)],
        "difference": difference(work / "1-fast", run),
    }


def other_version(work: Path) -> dict[str, Any]:
    """One line of mrl is another one on the second node."""
    run = emptied(work / "version")
    folder = work / "other"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "mrl", folder / "mrl")
    (folder / "mrl" / "units.py").open("a").write("OTHER = True\n")
    with cluster(2, environments={1: {"PYTHONPATH": str(folder)}}) as rays:
        code, said = end_of(rays.mrl("train", str(PRESET), "--run-dir", str(run), *settings(world_of(work), 2)))
    return {
        "exit_code": code,
        "said": last_lines(said),
        "trained": len(read_metrics(run / METRICS)) if (run / METRICS).exists() else 0,
    }


def closed_ports(work: Path) -> dict[str, Any]:
    """Between nodes only ports below 32768 are open, to which Ray is confined: gloo listens on the kernel's ephemeral
    ones.
    """
    run = emptied(work / "closed")
    with cluster(2, arguments=RAY_PORTS) as rays:
        for node in rays.net.nodes:
            for number, rule in enumerate(
                (("sport", "1-32767", "lookup", "main"), ("dport", "32768-65534", "unreachable"))
            ):
                node.run(
                    "ip", "rule", "add", "pref", str(100 + number), "to", f"{SUBNET}.0/24", "ipproto", "tcp", *rule
                )
        more = {"reshard__timeout_s": 20, "cluster__start_timeout_s": 60}
        began = time.monotonic()
        code, said = end_of(rays.mrl("train", str(PRESET), "--run-dir", str(run), *settings(world_of(work), 2, **more)))
    return {"exit_code": code, "seconds": round(time.monotonic() - began, 1), "said": last_lines(said)}


def emptied(folder: Path) -> Path:
    """The folder, which is not there."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def last_lines(said: str, lines: int = 3) -> list[str]:
    """What mrl itself says in the end; without such a line the last ones."""
    own = [line for line in said.splitlines() if re.match(r"mrl \w+: |weight sync", line)]
    return (own or [line for line in said.splitlines() if line.strip()])[-lines:]


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "one": lambda work: whole_runs(work, 1),
    "two": lambda work: whole_runs(work, 2),
    "four": lambda work: whole_runs(work, 4),
    "before": earlier_code,
    "submit": submitted,
    "own": own_folders,
    "lost": lost,
    "replaced": replaced,
    "version": other_version,
    "closed": closed_ports,
}


def main() -> None:
    """Runs one part and keeps what it found beside what the file holds of the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    found = facts(f"scripts/evidence/nodes.sh {args.part}") | PARTS[args.part](args.work.resolve())
    held = json.loads(args.json.read_text()) if args.json.exists() else {}
    args.json.write_text(json.dumps(held | {args.part: found}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
