"""Reshard plans of the published Qwen3-MoE models: time to plan, size, and predicted seconds beside their lower bound.

python scripts/bench/plan.py [--json] [--gbps 400]        no device, no weights; about a minute

Seconds of the wire are predictions: round after round as long as its busiest adapter needs, one adapter a device, 92 %
of its rate usable.
`ingress` is what one worker must receive over its adapter; `bound` also counts what the ranks of a pipeline stage must
send.
"""

import argparse
import json
import time
from dataclasses import dataclass

from mrl.model import ModelSpec, known_spec
from mrl.model.layout import RolloutLayout, TrainLayout
from mrl.plan.sync_times import Link, reshard_summary
from mrl.reshard.plan import plan_reshard

USABLE = 0.92
BITS = 8
# tensor, data inside an engine, spread experts; as in the table of lower bounds
ROLLOUTS = ((4, 1, 1), (8, 1, 1), (16, 1, 1), (4, 2, 8), (4, 4, 16), (4, 8, 32), (8, 2, 16), (8, 4, 32), (4, 32, 128))
HBM_BYTES = 80e9


@dataclass(frozen=True)
class Trainer:
    """A model and how it is trained."""

    name: str  # of the model
    world_size: int
    tensor: int
    pipeline: int
    expert: int
    uneven: int | None = None  # layers of the first and of the last stage

    def layout(self, model: ModelSpec) -> TrainLayout:
        degrees = {
            "world_size": self.world_size,
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "expert_model_parallel_size": self.expert,
            "num_layers_in_first_pipeline_stage": self.uneven,
            "num_layers_in_last_pipeline_stage": self.uneven,
        }
        return TrainLayout.build(degrees, model)

    def __str__(self) -> str:
        return f"{self.name} TP{self.tensor}-PP{self.pipeline}-EP{self.expert} on {self.world_size}"


TRAINERS = (
    Trainer("Qwen3-235B-A22B", 128, 4, 8, 16, uneven=11),
    Trainer("Qwen3-30B-A3B", 128, 4, 8, 16),
    Trainer("Qwen3-30B-A3B", 32, 2, 2, 8),
    Trainer("Qwen3-30B-A3B", 128, 4, 1, 8),
)


def measure(trainer: Trainer, tensor: int, data: int, expert: int, link: Link) -> dict | None:
    """One row; None for engines that do not divide the trainer's devices or whose weights do not fit into 80 GB."""
    engines = trainer.world_size // (tensor * data)
    if not engines:
        return None
    model, rollout = known_spec(trainer.name), RolloutLayout(engines, tensor, data, expert)
    begun, used = time.perf_counter(), time.process_time()
    plan = plan_reshard(model, trainer.layout(model), rollout, dialect="cuda", dtype="bfloat16")
    text = json.dumps(plan.to_json())
    summary = reshard_summary(plan, link, plan_seconds=time.perf_counter() - begun)
    used = time.process_time() - used
    received = max(summary.pop("received_bytes"))
    del summary["sent_bytes"]
    if received > HBM_BYTES:
        return None
    names = {
        "trainer": str(trainer),
        "rollout": f"{engines} x TP{tensor}" + (f"-DP{data}-EP{expert}" if expert > 1 else ""),
    }
    return names | summary | {
        "plan_cpu_seconds": used,
        "json_bytes": len(text),
        "bytes_of_a_worker": received,
        "ingress_seconds": received / link.between_nodes,
        "predicted_over_bound": summary["seconds_of"]["wire"] / summary["bound_seconds"],
    }  # fmt: skip


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gbps", type=float, default=400.0, help="rate of one adapter, Gb/s")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    link = Link(between_nodes=USABLE * args.gbps * 1e9 / BITS)
    found = [measure(trainer, *rollout, link) for trainer in TRAINERS for rollout in ROLLOUTS]
    rows = [row for row in found if row is not None]
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    print(
        f"{'trainer':38} {'engines':20} {'R GB':>6} {'ingress':>8} {'bound':>8} {'predicted':>9} "
        f"{'ratio':>6} {'rounds':>6} {'plan s':>7} {'JSON MB':>8}"
    )
    for row in rows:
        print(
            f"{row['trainer']:38} {row['rollout']:20} {row['bytes_of_a_worker'] / 1e9:6.2f} "
            f"{row['ingress_seconds']:8.4f} {row['bound_seconds']:8.4f} {row['seconds_of']['wire']:9.4f} "
            f"{row['predicted_over_bound']:6.3f} {row['rounds']:6d} {row['plan_seconds']:7.2f} "
            f"{row['json_bytes'] / 1e6:8.2f}"
        )
    print(
        f"predicted, not measured: {args.gbps:g} Gb/s a device, {100 * USABLE:g} % usable; "
        "goals: ratio at most 1.15, plan under 2 s, JSON under 20 MB"
    )


if __name__ == "__main__":
    main()
