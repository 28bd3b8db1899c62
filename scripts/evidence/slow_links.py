"""Weight syncs between nodes whose links are slow: seconds and bytes on the wire against what the plan says of them.

python scripts/evidence/slow_links.py [CASE ...] [--rate-mbit 400] [--repeat 3] [--json FILE]

Ranks and engine workers are plain processes with tensors of their size, over the wire that runs use (mrl/reshard), on
namespaces joined by links of `--rate-mbit`: inside a node nothing is limited. What is sent is digested on both sides in
every sync.

seconds    from the first process's beginning to the last one's end, packing and unpacking among it; median of
           `--repeat`
bound      the least for these bytes, each crossing a link once: for each node what it must receive, for each set of
           nodes what only they have and must send, over the link's rate
bytes      that left each node, by its interface's counter, and by the plan
simple     the same with scripts/evidence/simple_schedule.py in place of the plan's schedule
"""

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mrl.plan.sync_times import Link, remote_demand, wire_seconds
from mrl.reshard.plan import ReshardPlan
from mrl.reshard.setup import SyncSetup
from mrl.reshard.streams import REMOTE

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts" / "nodes"))
sys.path.append(str(ROOT / "scripts" / "evidence"))
sys.path.append(str(ROOT / "scripts" / "bench"))
from network import Network, Node, network  # noqa: E402
from reshard import hf_config  # noqa: E402
from simple_schedule import with_simple_schedule  # noqa: E402
from stamp import facts  # noqa: E402

GOAL_SECONDS, GOAL_BYTES = 1.15, 0.02
LAYERS = 4
BUDGET = 16 << 20
_DEADLINE_S = 120.0
_PORT = 5005


@dataclass(frozen=True)
class Case:
    """A pair of layouts, and the node of each rank and worker."""

    what: str
    train: dict[str, int]
    rollout: dict[str, int]
    ranks: tuple[int, ...]
    workers: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return max(*self.ranks, *self.workers) + 1


def _train(tensor: int = 1, pipeline: int = 1, expert: int = 1) -> dict[str, int]:
    sizes = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "expert_model_parallel_size": expert,
    }
    return {"world_size": 4} | sizes


def _rollout(engines: int, tensor: int = 1, data: int = 1, expert: int = 1) -> dict[str, int]:
    return {"num_engines": engines, "tensor": tensor, "data": data, "expert": expert}


CASES = {
    "experts": Case(
        "expert-parallel over two nodes, an engine beside each half",
        _train(expert=4),
        _rollout(2),
        (0, 0, 1, 1),
        (0, 1),
    ),
    "pipeline": Case(
        "pipeline over two nodes, an engine beside each stage", _train(2, 2, 2), _rollout(2), (0, 0, 1, 1), (0, 1)
    ),
    "replicas": Case(
        "replicas of the experts on two nodes, an engine of two data-parallel ranks over two others",
        _train(expert=2),
        _rollout(1, data=2, expert=2),
        (0, 0, 1, 1),
        (2, 3),
    ),
    "apart": Case(
        "TP2 PP2 EP2 on two nodes, two engines of TP2 on two others",
        _train(2, 2, 2),
        _rollout(2, tensor=2),
        (0, 0, 1, 1),
        (2, 2, 3, 3),
    ),
    "one_to_three": Case(
        "four ranks on one node, three engines on three others", _train(2, 2, 2), _rollout(3), (0, 0, 0, 0), (1, 2, 3)
    ),
}


def setup_of(case: Case, meeting: str) -> SyncSetup:
    """`meeting`: host:port of the point-to-point group."""
    topology = {
        "ranks": [[node, r] for r, node in enumerate(case.ranks)],
        "workers": [[node, 100 + w] for w, node in enumerate(case.workers)],
    }
    return SyncSetup(
        hf_config=hf_config(LAYERS),
        train=case.train,
        rollout=case.rollout,
        dialect="cpu",
        dtype="float32",
        topology=topology,
        budget_bytes=BUDGET,
        timeout_s=60.0,
        transport={"kind": "auto", "name": f"slow-{os.getpid()}", "address": meeting},
    )


def bound_seconds(plan: ReshardPlan, case: Case, rate: float) -> float:
    """See `bound` above; `rate`: bytes per second of a node's link, in each direction."""
    remote = plan.loads.received[REMOTE].sum(axis=0)
    enters = [
        sum(int(n) for n, node in zip(remote, case.workers, strict=True) if node == where)
        for where in range(case.nodes)
    ]
    homes: dict[frozenset[int], int] = {}
    for ranks, nbytes in remote_demand(plan).items():
        nodes = frozenset(case.ranks[rank] for rank in ranks)
        homes[nodes] = homes.get(nodes, 0) + nbytes
    senders = sorted(set(case.ranks))
    sets = [frozenset(some) for size in range(1, len(senders) + 1) for some in combinations(senders, size)]
    leaves = [sum(n for nodes, n in homes.items() if nodes <= some) / len(some) for some in sets]
    return max(*enters, *leaves) / rate


def leaving(plan: ReshardPlan, case: Case) -> list[int]:
    """Bytes of messages that leave each node."""
    sent = [0] * case.nodes
    for rank, node in enumerate(case.ranks):
        sent[node] += int(plan.loads.sent[REMOTE, :, rank].sum())
    return sent


def adapter_seconds(plan: ReshardPlan, case: Case, rate: float) -> float:
    """The plan's own prediction, round after round, of nodes that have one adapter."""
    shared = replace(plan.devices, rank_device=np.array(case.ranks), worker_device=np.array(case.workers))
    return wire_seconds(replace(plan, devices=shared), Link(between_nodes=rate, inside_node=1e15, inside_device=1e15))


# --- one process of a sync


def serve(side: str, number: int, setup: SyncSetup, simple: bool) -> None:
    """A rank or a worker: a line of stdin is a sync; answers when it began and ended, and digests."""
    import torch

    from mrl.reshard.connect import connect_receiver, connect_sender

    torch.set_num_threads(1)
    if simple:
        other = with_simple_schedule(setup.plan())
        SyncSetup.plan = lambda self: other
    part = Rank(setup, number, connect_sender) if side == "rank" else Worker(setup, number, connect_receiver)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        began = time.monotonic()
        part.sync(int(line))
        print(json.dumps([began, time.monotonic(), part.digests()]), flush=True)


class Rank:
    """Tensors of a Megatron rank, cut out of the same random model everywhere."""

    def __init__(self, setup: SyncSetup, number: int, connect: Any):
        from reshard_world import hf_weights, shards_of

        self._held = shards_of(setup, number, hf_weights(setup))
        self._sender = connect(setup, number, lambda name, chunk: self._held[name, chunk])
        self._workers = range(setup.rollout_layout.world_size)
        self._messages: list[Any] = []

    def sync(self, update: int) -> None:
        self._messages, _ = self._sender.transfer(update, self._workers)

    def digests(self) -> dict[int, dict[str, int]]:
        return self._sender._digests.sent(self._messages)


class Worker:
    """Parameters of an engine's worker as plain tensors, in load layout."""

    def __init__(self, setup: SyncSetup, number: int, connect: Any):
        from reshard_world import DictWriter

        self._number, self._writer = number, DictWriter(setup, number)
        self._receiver = connect(setup, number)
        self._update = 0

    def sync(self, update: int) -> None:
        self._update = update
        self._receiver.receive(Undigested(self._writer), update)

    def digests(self) -> dict[int, dict[str, int]]:
        return {self._number: {name: self._writer.digest(spec) for name, spec in self._writer.parameters.items()}}


class Undigested:
    """A Writer that leaves digests for afterwards."""

    def __init__(self, writer: Any):
        self.tensor, self.complete = writer.tensor, lambda module: None


# --- the driver


class Process:
    """One of them, on its node."""

    def __init__(self, node: Node, arguments: list[str]):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, str(Path(__file__).resolve()), "--serve", *arguments]
        self._process = node.start(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def ask(self, update: int) -> None:
        self._process.stdin.write(f"{update}\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        ready, _, _ = select.select([self._process.stdout], [], [], _DEADLINE_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise SystemExit("a process gave no answer")
        return json.loads(line)


def measure(case: Case, simple: bool, rate_mbit: int, repeat: int) -> dict[str, Any]:
    """A case under one of the two schedules."""
    folder = Path(tempfile.mkdtemp(prefix="mrl-slow-", dir="/tmp"))
    try:
        with network(case.nodes, folder) as net:
            net.shape(f"{rate_mbit}mbit")
            return _measured(net, case, simple, rate_mbit, repeat)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measured(net: Network, case: Case, simple: bool, rate_mbit: int, repeat: int) -> dict[str, Any]:
    setup = setup_of(case, f"{net.nodes[case.ranks[0]].address}:{_PORT}")
    plan = with_simple_schedule(setup.plan()) if simple else setup.plan()
    data, rate = json.dumps(setup.to_json()), rate_mbit * 1e6 / 8
    placed = [("rank", r, node) for r, node in enumerate(case.ranks)] + [
        ("worker", w, node) for w, node in enumerate(case.workers)
    ]
    parts = [Process(net.nodes[node], [side, str(number), data, str(int(simple))]) for side, number, node in placed]
    for part in parts:
        part.answer()
    seconds, crossed = [], []
    for update in range(1, repeat + 2):  # the first connects and is not counted
        before = [node.sent_bytes for node in net.nodes]
        for part in parts:
            part.ask(update)
        answers = [part.answer() for part in parts]
        crossed.append([node.sent_bytes - n for node, n in zip(net.nodes, before, strict=True)])
        seconds.append(max(ended for _, ended, _ in answers) - min(began for began, _, _ in answers))
        check_digests([digests for _, _, digests in answers], len(case.ranks))
    return {
        "seconds": round(median(seconds[1:]), 3),
        "all_seconds": [round(s, 3) for s in seconds[1:]],
        "bound_s": round(bound_seconds(plan, case, rate), 3),
        "predicted_s": round(adapter_seconds(plan, case, rate), 3),
        "planned_bytes": leaving(plan, case),
        "sent_bytes": crossed[-1],
        "rounds": plan.num_rounds,
        "lockstep": plan.schedule.lockstep,
    }


def check_digests(answers: Sequence[dict[str, dict[str, int]]], ranks: int) -> None:
    """Everything that was sent arrived. Raises SystemExit."""
    from mrl.reshard.sync_report import add

    sent: dict[tuple[str, str], int] = {}
    for of_workers in answers[:ranks]:
        for worker, digests in of_workers.items():
            for name, digest in digests.items():
                sent[worker, name] = add([sent.get((worker, name), 0), digest])
    arrived = {
        (worker, name): d
        for of_workers in answers[ranks:]
        for worker, digests in of_workers.items()
        for name, d in digests.items()
    }
    if wrong := [key for key in sent.keys() | arrived.keys() if sent.get(key) != arrived.get(key)]:
        raise SystemExit(f"sent and arrived differ in {sorted(wrong)[:3]}")


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """Of one case under the plan's schedule."""
    planned, sent = found["planned_bytes"], found["sent_bytes"]
    return {
        f"seconds <= {GOAL_SECONDS} x bound": found["seconds"] <= GOAL_SECONDS * found["bound_s"],
        f"bytes of each sending node within {GOAL_BYTES:.0%} of the plan": all(
            abs(n - wanted) <= GOAL_BYTES * wanted for n, wanted in zip(sent, planned, strict=True) if wanted
        ),
    }


def main() -> None:
    """Measures the cases that are named, all without names; keeps what the file holds of others."""
    if sys.argv[1:2] == ["--serve"]:
        side, number, data, simple = sys.argv[2:]
        sys.path.append(str(ROOT / "tests" / "unit"))
        return serve(side, int(number), SyncSetup.from_json(json.loads(data)), simple == "1")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rate-mbit", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    made = facts("scripts/evidence/slow_links.sh") | {
        "rate_mbit": args.rate_mbit,
        "budget_bytes": BUDGET,
    }
    held = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for name in args.cases or CASES:
        case = CASES[name]
        found = {kind: measure(case, kind == "simple", args.rate_mbit, args.repeat) for kind in ("plan", "simple")}
        held |= {name: made | {"what": case.what} | found | {"goals": verdicts(found["plan"])}}
        print(json.dumps({name: held[name]}), flush=True)
        if args.json:
            args.json.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
