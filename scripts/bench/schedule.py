"""What each schedule is worth in trained tokens a second: the same work, one core to generate and one to train.

python scripts/bench/schedule.py --work runs/schedule --out docs/results/schedule.json [--for SECONDS] [--steps 30]

The tiny model on answers with a heavy tail (scripts/make_long_world.py --heavy-tailed, made in the work folder). Each
row is a run of its own, engine and trainer on a core each; `sync, cores shared` has both cores for both in turn. Sized
by --seats so that generation and training of a synchronous step take about the same time. Steps count in which engines
and trainer are both at work: not the first, nor the last, ahead of which nothing is generated.

G and T are seconds of generation and of the rest of a synchronous step. Overlap alone gains at most
(G + T) / max(G, T); what responses that go on over several steps gain beside it is the tail's. `simulated` are the
machines of mrl.schedule on a simulated fleet with the lengths and seconds measured here; `planned` the same with the
plan's rates of large presets, beside what others published of theirs.

What is done stands in the work folder; with --for no further run is begun after so many seconds, and the next call goes
on. A run of 30 steps takes some ten minutes.
"""

import argparse
import heapq
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "unit"), str(ROOT / "scripts" / "evidence")]
from fleet import EngineKind, World  # noqa: E402
from fleet_speed import speed_of  # noqa: E402
from stamp import facts  # noqa: E402

from mrl.record.run_dir import METRICS, read_metrics  # noqa: E402
from mrl.record.sample_files import read_samples  # noqa: E402
from mrl.schedule.staleness import Schedule  # noqa: E402

PRESET = ROOT / "parallel_configs" / "long-moe" / "cpu.yaml"
RUN = Path(__file__).with_name("schedule_run.py")
BATCH, N, LONGEST = 24, 8, 384
SHARED = "sync, cores shared"
SCORE = "tiny/counting/acc/mean@4"  # of the held-out starts
PARTIAL = {"trainer.schedule": "bounded", "trainer.partial_rollouts": "true"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "one_step_off": {"trainer.schedule": "one_step_off"},
    "bounded, 2": PARTIAL | {"trainer.max_staleness": 2},
    "bounded, 4": PARTIAL | {"trainer.max_staleness": 4},
    SHARED: {},
}
STALENESS = {"sync": 0, "one_step_off": 1, "bounded, 2": 2, "bounded, 4": 4}
FIRST, LAST = 6, 5  # steps at either end that do not count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seats", type=int, default=192, help="responses that the engine computes at once")
    parser.add_argument("--only", nargs="*", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--for", type=float, default=float("inf"), dest="seconds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    work, begun = options.work.resolve(), time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    for piece in (make_world, *(partial(run, name, options.steps, options.seats) for name in options.only)):
        if not piece(work, begun + options.seconds):
            print("to be continued", flush=True)
            return
    result = results(work, options)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


# ---------------------------------------------------------------- pieces: each says whether it is done


def make_world(work: Path, until: float) -> bool:
    """The task, its prompts and the model that begins with it."""
    command = [
        sys.executable,
        str(ROOT / "scripts" / "make_long_world.py"),
        "--heavy-tailed",
        "--out",
        str(work / "world"),
    ]
    if not (work / "world").exists():
        if time.monotonic() > until:
            return False
        subprocess.run(command, check=True)
    return True


def run(name: str, steps: int, seats: int, work: Path, until: float) -> bool:
    """Trains by one schedule; one that was cut short begins anew."""
    folder, done = work / name.replace(", ", "-"), work / f"{name.replace(', ', '-')}.done"
    if done.exists():
        return True
    if time.monotonic() > until:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    engines, ranks = sorted(os.sched_getaffinity(0))[:2]
    apart = ["taskset", "-c", str(engines)] if name != SHARED else []
    own = [f"{key}={value}" for key, value in settings(name, steps, seats, work / "world", folder).items()]
    command = [*apart, sys.executable, str(RUN), str(PRESET), str(ranks) if apart else "-", *own]
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)
    done.touch()
    print(f"{name}: {speed(read_metrics(folder / METRICS)):,.0f} tokens/s", flush=True)
    return True


def settings(name: str, steps: int, seats: int, world: Path, folder: Path) -> dict[str, Any]:
    """Of one run, over the preset's."""
    ranks = 2 if name == SHARED else 1
    return {
        "model.path": world / "model", "data.train_files": world / "data" / "train.parquet",
        "data.val_files": world / "data" / "val.parquet", "data.train_batch_size": BATCH, "rollout.n": N,
        "data.max_response_length": LONGEST, "rollout.max_num_seqs": seats,
        "actor.layout": f"{{world_size: {ranks}, tensor_model_parallel_size: 1, expert_model_parallel_size: 1, "
        "sequence_parallel: false}",
        "cluster.n_gpus_per_node": ranks + 1, "cluster.cpus_per_actor": 0.4, "cluster.cpus_per_engine": 0.5,
        "algorithm.rollout_correction": "{level: token, mode: truncate, high: 2}",
        "trainer.total_training_steps": steps, "trainer.test_freq": steps, "trainer.val_before_train": "false",
        "trainer.save_freq": -1, "trainer.logger": "[console]", "trainer.run_dir": folder,
    } | SCHEDULES[name]  # fmt: skip


# ---------------------------------------------------------------- what was measured


def counted(rows: Sequence[dict]) -> list[dict]:
    """Steps in which engines and trainer are both at work."""
    return [row for row in rows if row["training/global_step"] > 0][FIRST:-LAST] or list(rows)[-1:]


def speed(rows: Sequence[dict]) -> float:
    """Prompt and response tokens that were trained on, a second."""
    steps = counted(rows)
    return sum(row["perf/total_num_tokens"] for row in steps) / sum(row["timing_s/step"] for row in steps)


def phases(rows: Sequence[dict]) -> tuple[float, float]:
    """(G, T): seconds of generation with its rewards, and of the rest of a synchronous step."""
    steps = counted(rows)
    generation = [row["timing_s/gen"] + row.get("timing_s/reward", 0.0) for row in steps]
    return float(np.mean(generation)), float(np.mean([row["timing_s/step"] for row in steps]) - np.mean(generation))


def results(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All rows, bounds and predictions."""
    metrics = {name: read_metrics(work / name.replace(", ", "-") / METRICS) for name in options.only}
    sync = metrics["sync"]
    generation, training = phases(sync)
    rows = [row_of(name, rows, speed(sync)) for name, rows in metrics.items()]
    rates = {row["schedule"]: row["tokens_per_s"] for row in rows}
    partials = max((rate for name, rate in rates.items() if name.startswith("bounded")), default=None)
    return facts(f"scripts/bench/schedule.py --work WORK --steps {options.steps} --seats {options.seats}") | {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "generation_s": generation,
        "training_s": training,
        "unlike": abs(generation - training) / max(generation, training),
        "bound_of_overlap": (generation + training) / max(generation, training),
        "gain_of_tail": partials / rates["one_step_off"] if partials and "one_step_off" in rates else None,
        "rows": rows,
        "simulated": simulated(work / "sync", sync, options.seats),
        "planned": planned(work),
    }


def row_of(name: str, rows: Sequence[dict], base: float) -> dict[str, Any]:
    """One schedule."""
    last = rows[-1]
    steps = counted(rows)
    return {
        "schedule": name,
        "tokens_per_s": speed(rows),
        "over_sync": speed(rows) / base,
        "score": last[f"val-core/{SCORE}"],
        "score_ci95": [last.get(f"val-aux/{SCORE}/ci95_{end}") for end in ("low", "high")],
        "length_mean": float(np.mean([row["response_length/mean"] for row in steps])),
        "length_max": float(np.mean([row["response_length/max"] for row in steps])),
        "step_s": float(np.mean([row["timing_s/step"] for row in steps])),
        "waits_for_generation_s": float(np.mean([row["timing_s/gen"] for row in steps])),
        "settle_s": float(np.mean([row.get("timing_s/settle", 0.0) for row in steps])),
        "versions_per_sample": float(np.mean([row.get("async/versions_per_sample", 1.0) for row in steps])),
    }


# ---------------------------------------------------------------- what the simulator says of it


def simulated(folder: Path, rows: Sequence[dict], seats: int) -> dict[str, Any]:
    """Each schedule on one simulated engine as fast as the measured one, over the lengths that it made."""
    steps = counted(rows)
    lengths = {int(row["training/global_step"]): lengths_of(folder, int(row["training/global_step"])) for row in steps}
    generation = [row["timing_s/gen"] + row.get("timing_s/reward", 0.0) for row in steps]
    kind = fitted_engine(list(lengths.values()), generation, seats)
    tokens = np.mean([sum(each) for each in lengths.values()])
    sync_s = float(np.mean([row["timing_s/reshard"] for row in steps]))
    training = phases(rows)[1] - sync_s
    flat = [length for each in lengths.values() for length in each]

    def length(number: int, index: int) -> int:
        return flat[(number * N + index) % len(flat)]

    world = World((kind,), length, 0, lambda made: training * made / tokens, sync_s, lambda number: 0.0)
    make = partial(Schedule, BATCH, N, LONGEST)
    found = {
        name: speed_of(make(max_staleness=s, partial_rollouts=s > 1), world, 20, 6) for name, s in STALENESS.items()
    }
    return {
        "step_s": kind.step_s,
        "each_s": kind.each_s,
        "rows": [
            {"schedule": name, "over_sync": each.tokens_per_s / found["sync"].tokens_per_s, "versions": each.versions}
            for name, each in found.items()
        ],
    }


def lengths_of(folder: Path, step: int) -> list[int]:
    """Tokens of each response of a step, group by group."""
    return [len(row["response_ids"]) for row in read_samples(folder / "samples", step)]


def fitted_engine(lengths: Sequence[Sequence[int]], seconds: Sequence[float], seats: int) -> EngineKind:
    """Seconds of an engine's step, and more for each response in it, by least squares over synchronous steps."""
    work = np.array([[engine_steps(each, seats), sum(each)] for each in lengths], float)
    step_s, each_s = np.linalg.lstsq(work, np.array(seconds), rcond=None)[0]
    if step_s < 0 or each_s < 0:  # steps too much alike to tell the two apart
        step_s, each_s = 0.0, float(np.sum(seconds) / work[:, 1].sum())
    return EngineKind(float(step_s), float(each_s), 0.0, seats)


def engine_steps(lengths: Sequence[int], seats: int) -> int:
    """Until the last of them is done, so many at once."""
    ends: list[int] = []
    for length in lengths:
        begins = heapq.heappop(ends) if len(ends) == seats else 0
        heapq.heappush(ends, begins + length)
    return max(ends)


def planned(work: Path) -> dict[str, Any]:
    """Of the large presets, beside what others published; computed once."""
    file = work / "planned.json"
    if not file.exists():
        spec = importlib.util.spec_from_file_location("planned_fleet", ROOT / "scripts" / "evidence" / "fleet.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        worlds = [module.planned(preset, share) for preset in module.PRESETS for share in module.GENERATE]
        file.write_text(json.dumps({"worlds": worlds, "published": module.PUBLISHED}))
    return json.loads(file.read_text())


def show(result: dict[str, Any]) -> None:
    """A table."""
    generation, training = result["generation_s"], result["training_s"]
    print(f"G {generation:.1f} s, T {training:.1f} s; overlap alone gains at most {result['bound_of_overlap']:.2f}")
    if result["unlike"] > 0.2:
        print(f"G and T differ by {result['unlike']:.0%}: change --seats")
    if result["gain_of_tail"]:
        print(f"the tail's gain beside it: {result['gain_of_tail']:.2f}")
    simulated = {row["schedule"]: row["over_sync"] for row in result["simulated"]["rows"]}
    print(f"{'schedule':20} {'tokens/s':>9} {'over sync':>9} {'simulated':>9} {'score':>7}")
    for row in result["rows"]:
        said = f"{simulated[row['schedule']]:9.2f}" if row["schedule"] in simulated else " " * 9
        print(f"{row['schedule']:20} {row['tokens_per_s']:9,.0f} {row['over_sync']:9.2f} {said} {row['score']:7.3f}")
    for world in result["planned"]["worlds"]:
        rates = ", ".join(f"{row['schedule']} {row['over_sync']:.2f}" for row in world["rows"])
        print(f"planned, {world['preset']}, {world['generate']:.0%} generate: {rates}")
    print(f"published: {result['planned']['published']}")


if __name__ == "__main__":
    main()
