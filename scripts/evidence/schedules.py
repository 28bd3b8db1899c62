"""What the search for a schedule of a weight sync is worth on large pairs of layouts: predictions alone.

python scripts/evidence/schedules.py --json docs/results/slow_links.json

Of each pair the predicted seconds on the wire over the least that its bytes take, on devices with an adapter each:
with the schedule of mrl/reshard/schedule.py, and with workers that stand evenly over the model in their order and walk
it freely (no strides, no lockstep), replicas sharing as in the former. Kept under `large` beside what was measured.
"""

import argparse
import json
import sys
from pathlib import Path
from unittest.mock import patch

from mrl.model import ModelSpec
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.model.registry import known_spec
from mrl.plan.sync_times import Link, bound_seconds, wire_seconds
from mrl.reshard import schedule
from mrl.reshard.plan import plan_reshard

sys.path.append(str(Path(__file__).resolve().parent))
from stamp import facts

ROOT = Path(__file__).resolve().parents[2]
LARGE = (  # model, ranks, TP, PP, EP, and tensor and data sizes of engines
    ("Qwen3-235B-A22B", 128, 4, 8, 16, ((8, 1), (16, 1), (4, 2), (8, 2), (4, 32))),
    ("Qwen3-30B-A3B", 32, 2, 2, 8, ((4, 1), (4, 2), (8, 4))),
    ("Qwen3-30B-A3B", 32, 4, 1, 8, ((4, 1), (4, 2))),
)
UNEVEN = {  # stages of models whose layers do not divide
    ("Qwen3-235B-A22B", 8): {"num_layers_in_first_pipeline_stage": 11, "num_layers_in_last_pipeline_stage": 11}
}


def over_bound(model: ModelSpec, train: TrainLayout, rollout: RolloutLayout, search: bool) -> float:
    """Predicted seconds on the wire over their bound."""
    with patch.object(schedule, "best_walk", schedule.best_walk if search else lambda *_: (False, 1)):
        plan = plan_reshard(model, train, rollout, dialect="cuda", dtype="bfloat16")
    return round(wire_seconds(plan, Link()) / bound_seconds(plan, Link()), 4)


def predicted() -> dict[str, dict[str, float]]:
    """Of each pair, with and without the search."""
    found = {}
    for name, ranks, tp, pp, ep, engines in LARGE:
        model = known_spec(name)
        sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
        train = TrainLayout.build({"world_size": ranks} | sizes | UNEVEN.get((name, pp), {}), model)
        for tensor, data in engines:
            workers = tensor * data
            rollout = RolloutLayout(ranks // workers, tensor, data, workers if data > 1 else 1)
            pair = f"{name}, {ranks} ranks of TP{tp} PP{pp} EP{ep}, engines of TP{tensor} DP{data}"
            ratios = {kind: over_bound(model, train, rollout, kind == "search") for kind in ("search", "none")}
            found[pair] = ratios
            print(pair, ratios, flush=True)
    return found


def main() -> None:
    """Keeps what the file holds of other things."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    held = json.loads(args.json.read_text()) if args.json.exists() else {}
    made = facts("scripts/evidence/slow_links.sh")
    args.json.write_text(json.dumps(held | {"large": made | {"over_bound": predicted()}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
