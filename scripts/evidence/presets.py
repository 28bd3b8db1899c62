"""Every preset for a cluster beside the fastest run that the planner finds for its devices, batch and limits.

    python scripts/evidence/presets.py [--out FILE] [PRESET ...]

Seconds are predictions of a step without its sync.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from stamp import facts, with_rows

from mrl.config.load import load_config
from mrl.model import planning_model_spec
from mrl.plan.plan_inputs import device_for
from mrl.platforms.versions import MEGATRON
from mrl.tools.run_search import fastest_run, step_of
from mrl.tools.search import search
from mrl.tools.search_report import search_problem

ROOT = Path(__file__).resolve().parents[2]
FOLDER, OUT = ROOT / "parallel_configs", ROOT / "docs" / "results" / "presets.json"
SLOWER = "# Slower than the planner's best: "


def names() -> list[str]:
    """Of all presets for clusters."""
    return [f"{p.parent.name}/{p.stem}" for p in sorted(FOLDER.glob("*/*.yaml")) if not p.stem.startswith("cpu")]


def reason_of(name: str) -> str:
    """Why a preset is slower than what the planner finds; empty where its header says nothing."""
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix(SLOWER) for line in lines if line.startswith(SLOWER)), "")


def row_of(name: str) -> dict[str, Any]:
    """One preset: its seconds, those of the planner's best, and what that would set."""
    config = load_config(FOLDER / f"{name}.yaml").config
    model, device = planning_model_spec(config.model.path)[0], device_for(config)
    problem = search_problem(
        config, model, device, config.actor.layout.world_size, config.cluster.n_gpus_per_node, MEGATRON
    )
    best, now = fastest_run(config, problem, search(problem)), step_of(config, model, device)
    seconds = sum(now.values())
    return {
        "preset": name,
        "device": device.name,
        "seconds": round(seconds, 1),
        "phases": {phase: round(value, 1) for phase, value in now.items()},
        "best_seconds": round(best.seconds, 1),
        "over_best": round(seconds / best.seconds, 3),
        "best": best.settings,
        "reason": reason_of(name),
    }


def main() -> None:
    """Writes the rows as they come, worst first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=names())
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--keep", action="store_true", help="rows of presets that are not named stay as stored")
    options = parser.parse_args()
    found = facts("python scripts/evidence/presets.py")
    rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.keep else []
    for name in options.presets:
        row = row_of(name)
        rows = sorted([*(r for r in rows if r["preset"] != name), row], key=lambda r: -r["over_best"])
        options.out.write_text(with_rows(found, "rows", rows), encoding="utf-8")
        print(name, row["seconds"], row["best_seconds"], flush=True)


if __name__ == "__main__":
    main()
