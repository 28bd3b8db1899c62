"""`mrl verify`."""

import argparse
import json
from dataclasses import asdict
from time import perf_counter
from typing import Any

from mrl.commands.config_arguments import add_config, resolved_config


def add(commands) -> None:
    """Registers the command."""
    parser = commands.add_parser("verify", help="prove that the weight sync of a configuration puts every element in its place; no device")
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> None:
    found = _verdict(options)
    print(json.dumps(found) if options.json else "\n".join(_lines(found)))
    if not found["ok"]:
        raise SystemExit(1)


def _verdict(options: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError for a configuration or a layout that is not legal."""
    from mrl.config.rules import check
    from mrl.layout import TrainLayout
    from mrl.models import planning_model_spec
    from mrl.reshard.plan import MIB, Topology, plan_reshard
    from mrl.reshard.verify import verify
    from mrl.rollout.launch import rank_places, rollout_layout

    begun = perf_counter()
    resolved = resolved_config(options)
    config = resolved.config
    model, stand_in = planning_model_spec(config.model.path)
    check(resolved, model)
    plan = plan_reshard(
        model,
        TrainLayout.build(config.actor.layout.model_dump(), model),
        rollout_layout(config),
        dialect=config.cluster.device,
        dtype=config.rollout.dtype or config.model.dtype,
        topology=Topology(*rank_places(config)),
        budget_bytes=config.reshard.budget_mb * MIB,
    )
    planned = perf_counter() - begun
    verdict = verify(plan)
    return {
        "ok": verdict.fault is None,
        "fault": verdict.fault,
        "model": config.model.path,
        "note": stand_in,
        "ranks": plan.train.world_size,
        "workers": plan.rollout.world_size,
        "hash": plan.hash,
        "plan_seconds": planned,
        "proof": asdict(verdict.proof),
        "rehearsal": asdict(verdict.rehearsal),
        "seconds": perf_counter() - begun,
    }


def _lines(found: dict[str, Any]) -> list[str]:
    proof, rehearsal = found["proof"], found["rehearsal"]
    note = [f"note: {found['note']}"] if found["note"] else []
    return [
        *note,
        f"plan       {found['ranks']} ranks -> {found['workers']} workers, {found['plan_seconds']:.2f} s, hash {found['hash'][:16]}",
        f"proof      {proof['copies']} copies of {proof['workers']} workers at real shapes, {proof['seconds']:.2f} s",
        f"rehearsal  {rehearsal['elements']} elements in {rehearsal['rounds']} rounds, {rehearsal['layers']} layers, "
        f"{rehearsal['experts']} experts, {rehearsal['seconds']:.2f} s",
        "ok: every element arrives exactly once, from a shard that holds it" if found["ok"] else f"FAULT: {found['fault']}",
    ]
