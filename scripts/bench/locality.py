"""What a weight sync sends between nodes and devices, with and without knowing who stands where.

python scripts/bench/locality.py [PRESET ...] [--json]        no device, no weights; seconds

Four ways to choose who sends, for each colocated preset. `even`: every replica as often, on average. `blind`: our plan
where it knows no places; it deals replicas out in worker order, which by luck is the order of the nodes where both are
as many. `near`: the nearest replica, engines in the usual order. `ordered`, which `mrl plan` and a run use: also, the
workers of each engine are laid over the devices of its node so that more is there already. Seconds are predictions for
the preset's device and reshard.transport, which is auto: through the host's memory inside a node, and by device memory
on one device. Those of `even` are what its busiest worker needs for what it receives.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from mrl.config.load import load_config
from mrl.config.places import Deployment, cluster_shape, rank_places
from mrl.config.schema import RunConfig
from mrl.model import planning_model_spec
from mrl.model.device_grid import engine_places
from mrl.plan.plan_inputs import PlanInputs, device_for, sync_budget
from mrl.plan.run_plan import link_of
from mrl.plan.sync_times import step_seconds, wire_seconds
from mrl.reshard.messages import Topology
from mrl.reshard.plan import ReshardPlan, plan_reshard
from mrl.reshard.schedule import Loads
from mrl.reshard.streams import REMOTE, SAME_DEVICE, SAME_NODE, TIERS

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ("qwen3-30b-a3b/h100-4x8", "qwen3-30b-a3b/h200-4x8", "qwen3-235b-a22b/h100-16x8")


def measure(preset: str) -> dict:
    """One preset: bytes and predicted seconds of the three plans."""
    config = load_config(ROOT / "parallel_configs" / f"{preset}.yaml").config
    model, _ = planning_model_spec(config.model.path)
    inputs = PlanInputs.of(config, model, device_for(config))
    ranks, ordered = rank_places(Deployment.of(config))
    usual = engine_places(inputs.rollout, cluster_shape(config.cluster))
    link = link_of(inputs)

    def planned(topology: Topology | None) -> ReshardPlan:
        return plan_reshard(
            model, inputs.train, inputs.rollout, dialect=config.cluster.device, dtype=config.rollout_dtype,
            topology=topology,
            budget_bytes=sync_budget(config),
        )  # fmt: skip

    near = planned(Topology(ranks, usual))
    plans = {"blind": standing(planned(None), near), "near": near, "ordered": planned(Topology(ranks, ordered))}
    facts = {"preset": preset, "device": inputs.device.name, "placement": config.cluster.placement}
    even = evenly(near)
    found = {name: _row(plan.loads.received.sum(axis=(1, 2)), wire_seconds(plan, link)) for name, plan in plans.items()}
    through_devices = link_of(replace(inputs, config=with_transport(config, "ipc")))
    found["ordered"]["wire_over_ipc_s"] = round(wire_seconds(plans["ordered"], through_devices), 4)
    steps = {name: round(seconds, 4) for name, seconds in step_seconds(plans["ordered"], inputs.device.sync).items()}
    return (
        facts | {"even": _row(even.sum(axis=1), float((even / link.rates[:, None]).max()))} | found | {"steps_s": steps}
    )


def with_transport(config: RunConfig, kind: str) -> RunConfig:
    """The same with another reshard.transport."""
    return config.model_copy(update={"reshard": config.reshard.model_copy(update={"transport": kind})})


def _row(by_tier: np.ndarray, seconds: float) -> dict:
    names = {"bytes_local": SAME_DEVICE, "bytes_in_node": SAME_NODE, "bytes_remote": REMOTE}
    return {name: round(float(by_tier[tier])) for name, tier in names.items()} | {"wire_s": round(seconds, 4)}


def evenly(plan: ReshardPlan) -> np.ndarray:
    """[tier, worker]: bytes that each worker receives when every replica sends as often as the others."""
    found = np.zeros((len(TIERS), plan.rollout.world_size))
    for worker in range(plan.rollout.world_size):
        stream = plan.schedule.streams[worker % len(plan.schedule.streams)]
        set_bytes = np.bincount(stream.holder_set, stream.nbytes, len(stream.holders))
        for nbytes, holders in zip(set_bytes, stream.holders, strict=True):
            for rank in holders:
                found[_tier(plan, rank, worker), worker] += nbytes / len(holders)
    return found


def _tier(plan: ReshardPlan, rank: int, worker: int) -> int:
    if plan.devices.rank_device[rank] == plan.devices.worker_device[worker]:
        return SAME_DEVICE
    return SAME_NODE if plan.devices.rank_node[rank] == plan.devices.worker_node[worker] else REMOTE


def standing(plan: ReshardPlan, other: ReshardPlan) -> ReshardPlan:
    """The choices of a plan that knew no places, its processes standing where those of `other` stand."""
    devices, shape = other.devices, (len(TIERS), plan.num_rounds)
    sent = np.zeros((*shape, plan.train.world_size), dtype=np.int64)
    received = np.zeros((*shape, plan.rollout.world_size), dtype=np.int64)
    for worker in range(plan.rollout.world_size):
        flow = plan.schedule.flow(worker)
        tier = np.full(len(flow.source), REMOTE)
        tier[devices.rank_node[flow.source] == devices.worker_node[worker]] = SAME_NODE
        tier[devices.rank_device[flow.source] == devices.worker_device[worker]] = SAME_DEVICE
        np.add.at(sent, (tier, flow.round, flow.source), flow.nbytes)
        np.add.at(received[:, :, worker], (tier, flow.round), flow.nbytes)
    return replace(plan, devices=devices, loads=Loads(sent, received))


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "presets", nargs="*", default=PRESETS, metavar="PRESET", help="folder and name below parallel_configs"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(preset) for preset in args.presets]
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'preset':28} {'plan':8} {'on devices':>11} {'in nodes':>11} {'between':>11} {'wire s':>9}")
    for row in rows:
        for name in ("even", "blind", "near", "ordered"):
            plan = row[name]
            sizes = (f"{plan[key] / 1e9:8.1f} GB" for key in ("bytes_local", "bytes_in_node", "bytes_remote"))
            print(f"{row['preset']:28} {name:8} {' '.join(sizes)} {plan['wire_s']:9.4f}")
        steps = ", ".join(f"{name.replace('_', ' ')} {seconds:.3f} s" for name, seconds in row["steps_s"].items())
        ipc = row["ordered"]["wire_over_ipc_s"]
        print(f"{row['preset']:28} beside the wire: {steps}; ordered with reshard.transport ipc: wire {ipc:.4f} s")


if __name__ == "__main__":
    main()
