"""How far a step's updates move tokens to other experts, with router replay (R2) and without, by learning rate.

    python scripts/evidence/routing.py --world tiny-world --out docs/results/routing.json

Real Megatron ranks (two: TP 2, EP 2) train the world's model on its prompts: old log-probs of a batch, then several
updates on it, each on other rows, as in a step of `mrl train`. Answers are digits at random, advantages +1 or -1: what
is measured is the routers, not learning.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from stamp import facts

from mrl.algo.aggregate import merge
from mrl.algo.plain import FloatParts
from mrl.algo.rows import on_tokens
from mrl.config.schema import RunConfig
from mrl.data.batch import TrainBatch
from mrl.data.row_columns import positions
from mrl.data.samples import Sample, packed
from mrl.platforms.hosting import get_hosting
from mrl.process.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
RATES = (1e-5, 1e-4, 1e-3, 1e-2)
SAMPLES, UPDATES = 128, 8
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Row:
    """One step of updates."""

    lr: float
    replay: str
    drift: float  # share of (token, layer) pairs with another set of experts than at the old log-probs
    differing: int
    compared: int
    grad_norm: float  # mean over the updates
    router_grad_norm: float  # smallest of all layers, after the last update


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # this process is a rank
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        run_rank(given.world, given.rank, given.ranks, given.work)
        return 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        run_ranks(given.world, given.ranks, Path(work))
        rows = read_rows(given.ranks, Path(work))
    command = "scripts/evidence/routing.sh" + (" --ranks 1" if given.ranks == 1 else "")
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    found = facts(command) | {
        "ok": holds(rows), "machine": machine,
        "ranks": given.ranks, "samples": SAMPLES, "updates": UPDATES, "seconds": round(time.monotonic() - begun, 1),
        "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    print(table(rows))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["ok"] else 1


def holds(rows: Sequence[Row]) -> bool:
    """The claim: no drift under replay, growing drift without, and routers with a gradient in both."""
    free = [row.drift for row in rows if row.replay == "disabled"]
    replayed = [row for row in rows if row.replay == "R2"]
    return (
        all(row.differing == 0 for row in replayed)
        and free == sorted(set(free))
        and all(row.router_grad_norm > 0 for row in rows)
    )


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'lr':>8} {'replay':>9} {'drift':>9} {'of pairs':>9} {'grad norm':>10} {'router, least':>13}"]
    lines += [
        f"{r.lr:8.0e} {r.replay:>9} {r.drift:9.5f} {r.compared:9d} {r.grad_norm:10.3g} {r.router_grad_norm:13.3g}"
        for r in rows
    ]
    return "\n".join(lines)


def run_ranks(world: Path, ranks: int, work: Path) -> None:
    """Every rank as a process of its own, which is ended whatever happens."""
    environment = os.environ | get_hosting("cpu").actor_environment() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--world", str(world), "--work", str(work), "--ranks", str(ranks), "--rank"]
    processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(ranks)]
    try:
        for process in processes:
            if process.wait(timeout=DEADLINE_S):
                raise SystemExit("a rank failed; its error stands above")
    finally:
        for process in processes:
            process.kill()


def run_rank(world: Path, rank: int, ranks: int, work: Path) -> None:
    """Every case in turn."""
    from mrl.rank.actor import MegatronActor

    batch = batch_of(world)
    for number, (lr, replay) in enumerate((lr, replay) for lr in RATES for replay in ("disabled", "R2")):
        actor = MegatronActor(
            config_of(world, ranks, lr, replay), rank, ranks, "127.0.0.1", meeting_port(work, rank, number)
        )
        with_old = replace(batch, old_log_probs=old_log_probs(actor, batch))
        metrics = merge(actor.update(with_old).parts)
        routers = [
            float(p.main_grad.norm())
            for chunk in actor.chunks
            for n, p in chunk.named_parameters()
            if n.endswith("router.weight")
        ]
        (work / f"{number}-{rank}.json").write_text(json.dumps([lr, replay, metrics, min(routers)]))
        actor.close()


def old_log_probs(actor, batch: TrainBatch) -> np.ndarray:
    """[response tokens] on every rank."""
    import torch

    found, result = torch.zeros(batch.rollout_log_probs.shape), actor.log_probs(batch)
    if result is not None:
        found[torch.from_numpy(positions(batch.response_lengths, result.rows))] = torch.from_numpy(result.log_probs)
    torch.distributed.all_reduce(found)
    return found.numpy()


def read_rows(ranks: int, work: Path) -> list[Row]:
    """What the ranks wrote, counts added up."""
    rows = []
    for number in range(2 * len(RATES)):
        cases = [json.loads((work / f"{number}-{rank}.json").read_text()) for rank in range(ranks)]
        metrics: FloatParts = merge(case[2] for case in cases)
        (lr, replay, last, _), (differing, compared) = cases[0], metrics["router/drift"]
        norm, updates = last["actor/grad_norm"]
        least = min(case[3] for case in cases)
        rows.append(Row(lr, replay, differing / compared, int(differing), int(compared), norm / updates, least))
    return rows


def config_of(world: Path, ranks: int, lr: float, replay: str) -> RunConfig:
    layout = {"world_size": ranks, "tensor_model_parallel_size": ranks, "expert_model_parallel_size": ranks}
    return RunConfig.model_validate({
        "model": {"path": str(world / "model"), "dtype": "float32"},
        "actor": {
            "layout": layout, "optim": {"lr": lr, "weight_decay": 0.0}, "ppo_mini_batch_size": SAMPLES // UPDATES,
            "ppo_micro_batch_size_per_gpu": 8, "router_replay": replay,
        },
        "rollout": {"n": 1},
        "data": {"train_batch_size": SAMPLES},
        "cluster": {"device": "cpu", "step_timeout_s": 60},
    })  # fmt: skip


def batch_of(world: Path) -> TrainBatch:
    """Prompts of the world, each with three digits for an answer."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    prompts = pq.read_table(world / "data" / "train.parquet").column("prompt").to_pylist()[:SAMPLES]
    rng, digits, samples = np.random.default_rng(0), tokenizer.convert_tokens_to_ids(list("0123456789")), []
    for i, prompt in enumerate(prompts):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        samples.append(Sample(i, i, i, 0, tuple(ids), tuple(rng.choice(digits, 3).tolist()), (0.0,) * 3, "stop", 0))
    batch = TrainBatch.of(packed(samples), 1.0)
    return replace(
        batch, advantages=on_tokens(rng.choice([-1.0, 1.0], SAMPLES), batch.response_lengths).astype(np.float32)
    )


def meeting_port(work: Path, rank: int, number: int) -> int:
    """A port that rank 0 found free right before it is used."""
    file = work / f"port-{number}"
    if rank == 0:
        file.with_suffix(".part").write_text(str(free_port()))
        file.with_suffix(".part").rename(file)
    while not file.exists():
        time.sleep(0.01)  # whoever started the ranks ends them when it never comes
    return int(file.read_text())


if __name__ == "__main__":
    sys.exit(main())
