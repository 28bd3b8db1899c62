"""Adapters beside full training: held-out scores of their runs, bytes that ranks and checkpoints hold beside those of a
plan, log-probs of engines beside those of ranks, a resume's bits, and seconds of a weight sync that merges beside one
that does not.

    python scripts/evidence/lora.py runs/lora --out docs/results

scripts/evidence/lora.sh makes the runs. Writes lora.json and lora.png.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "bench"), str(ROOT / "scripts" / "evidence")]

import reshard  # noqa: E402
from learning_curves import Curve, draw, read  # noqa: E402
from stamp import facts  # noqa: E402

from mrl.checkpoint.disk_space import BESIDE_TENSORS, checkpoint_bytes  # noqa: E402
from mrl.checkpoint.step_folders import newest_checkpoint  # noqa: E402
from mrl.config.load import load_config  # noqa: E402
from mrl.model import load_model_spec  # noqa: E402
from mrl.model.hf_files import read_safetensors_header  # noqa: E402
from mrl.model.layout import TrainLayout  # noqa: E402
from mrl.model.precision import FLOAT32  # noqa: E402
from mrl.plan.model_state import stage_state  # noqa: E402
from mrl.record.run_dir import RunDir, read_metrics  # noqa: E402
from mrl.units import MIB  # noqa: E402

KINDS = ("full", "lora")
GAIN_POINTS = 50.0
MEMORY_BOUND = 0.02
SYNC_BOUND = 1.3
LOG_PROB_BOUND = 1e-4
LOG_PROBS = "training/rollout_log_probs_abs_diff_max"
RANK = 8
STATE = ("parameters", "gradients", "optimizer")


def learning(runs: Path) -> dict[str, list[Curve]]:
    """The curves of each kind, by seed."""
    return {kind: [read(folder) for folder in sorted(runs.glob(f"{kind}-*"))] for kind in KINDS}


def memory(run: Path) -> dict[str, dict[str, float]]:
    """Bytes that a rank of a colocated run held, and its checkpoint, each measured and planned."""
    config = load_config(RunDir(run).config).config
    model = load_model_spec(config.model.path)
    lora = config.actor.lora.adapters
    last = read_metrics(RunDir(run).metrics)[-1]
    state = stage_state(model, TrainLayout.build(config.actor.layout.model_dump(), model), 0, FLOAT32, lora=lora)
    held = {name: last[f"offload/{name}_bytes"] for name in STATE}
    planned = {name: getattr(state, name) for name in STATE}
    held["checkpoint"] = stored_bytes(newest_checkpoint(RunDir(run).checkpoints).path)
    planned["checkpoint"] = checkpoint_bytes(model, config.model.dtype, lora) - BESIDE_TENSORS
    return {"held": held, "planned": planned}


def stored_bytes(step: Path) -> int:
    """Bytes of a checkpoint's tensors, without the states of random generators, which are not the model's."""
    headers = (read_safetensors_header(file) for file in step.glob("*.safetensors"))
    found = (place for header in headers for name, place in header.items() if not name.startswith("rng/"))
    return sum(place.stop - place.start for place in found)


def engines_off(runs: list[Path]) -> dict[str, float | None]:
    """The most by which an engine's log-prob of a token differed from the ranks', over all steps of the runs; how many
    steps are beyond the bound, as where two experts of a token tie to float32's last digits; the most in the others.
    """
    rows = [row for run in runs for row in read_metrics(RunDir(run).metrics)]
    off = sorted(row[LOG_PROBS] for row in rows if LOG_PROBS in row)
    others = [value for value in off if value <= LOG_PROB_BOUND]
    return {
        "most": off[-1],
        "steps": len(off),
        "beyond": len(off) - len(others),
        "most_of_others": max(others, default=None),
    }


def syncs(repeat: int) -> dict[str, list[float]]:
    """Seconds of verified syncs of one model, whose ranks have adapters or none, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        worlds: dict[str, reshard.World] = {}
        try:
            for kind, rank in zip(KINDS, (0, RANK), strict=True):
                own = Path(folder) / kind
                own.mkdir()
                worlds[kind] = reshard.World(own, reshard.LAYERS[0], rank)
                worlds[kind].connect("shm", 16 * MIB)
                worlds[kind].transfer("sync")  # a warm-up
            seconds = {kind: [] for kind in KINDS}
            for _ in range(repeat):
                for kind, world in worlds.items():
                    seconds[kind].append(round(world.transfer("sync")[0], 4))
        finally:
            for world in worlds.values():
                world.end()
    return seconds


def result(runs: Path, repeat: int, out: Path) -> dict[str, Any]:
    """All of it, and which goals are met."""
    curves = learning(runs / "learning")
    draw(curves, "Tiny Qwen3-MoE: adapters of rank 8 beside full training", out / "lora.png")
    bytes_of = {kind: memory(runs / "memory" / kind) for kind in KINDS}
    seconds = syncs(repeat)
    ratio = median(seconds["lora"]) / median(seconds["full"])
    gains = {kind: [round(curve.gain, 1) for curve in of_kind] for kind, of_kind in curves.items()}
    off = {
        kind: {name: round(found["held"][name] / found["planned"][name] - 1, 4) for name in found["planned"]}
        for kind, found in bytes_of.items()
    }
    resumed = json.loads((runs / "resumed.json").read_text())
    log_probs = {kind: engines_off(sorted((runs / "learning").glob(f"{kind}-*"))) for kind in KINDS}
    made = facts("scripts/evidence/lora.sh") | {
        "rank": RANK,
        "seeds": [curve.seed for curve in curves["lora"]],
        "steps": max(step for of_kind in curves.values() for curve in of_kind for step, _ in curve.points),
        "gain_points": gains,
        "step_seconds": {kind: [round(curve.seconds, 1) for curve in of_kind] for kind, of_kind in curves.items()},
        "bytes": bytes_of,
        "off_plan": off,
        "part_of_full": {
            name: round(bytes_of["lora"]["held"][name] / bytes_of["full"]["held"][name], 4)
            for name in bytes_of["full"]["held"]
        },
        "log_probs_off": log_probs,
        "resumed": resumed,
        "sync_seconds": seconds,
        "sync_ratio": round(ratio, 3),
    }
    return made | {"goals": goals(made)}


def goals(made: dict[str, Any]) -> dict[str, bool]:
    """Which goals are met."""
    worst = max(abs(value) for found in made["off_plan"].values() for value in found.values())
    return {
        f"at least {GAIN_POINTS:g} points in every seed": min(made["gain_points"]["lora"]) >= GAIN_POINTS,
        f"bytes within {MEMORY_BOUND:.0%} of the plan": worst <= MEMORY_BOUND,
        f"a sync at most {SYNC_BOUND} times a plain one": made["sync_ratio"] <= SYNC_BOUND,
        f"log-probs of engines within {LOG_PROB_BOUND:g} of the ranks'": made["log_probs_off"]["lora"]["most"]
        <= LOG_PROB_BOUND,
        "a resumed run has the bits of one that was not stopped": made["resumed"]["ok"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--repeat", type=int, default=9, help="syncs of each kind")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    given = parser.parse_args()
    found = result(given.runs, given.repeat, given.out)
    (given.out / "lora.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    if missed := [goal for goal, met in found["goals"].items() if not met]:
        raise SystemExit(f"goals missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
